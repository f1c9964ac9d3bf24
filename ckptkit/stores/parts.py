"""One folder written by several processes: each has its share of the files, the last one puts it in place.

There is no coordinator. What is known lies in the unfinished folder: a log for each part, and a mark for each part that is done. Processes
need nothing but that folder and its locks, so they may run on any machines that share it, start at any time, and die: whoever is
started again with the same part goes on from its log. Putting in place is guarded by a lock in the folder and changes nothing when it
is done twice, since everything that is written is the same for all.
"""

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from ckptkit.errors import StoreError, UsageError
from ckptkit.stores.durable import UnfinishedFolder, sync_folder, tidy, write_fault
from ckptkit.stores.folder import LOG

_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_LOGS = re.compile(rf"{re.escape(LOG)}(\.[0-9]+-of-[0-9]+)?")


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, numbered from 1."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise UsageError(f"--part {self}: parts are numbered from 1 to their count")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2/4`, or `slurm` for the task of a Slurm step that this process is. Raises UsageError."""
        if text == "slurm":
            try:
                task, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
            except (KeyError, ValueError) as error:
                raise UsageError(
                    "--part slurm: SLURM_PROCID and SLURM_NTASKS are not set; start it with srun, or give --part K/N"
                ) from error
            return cls(task + 1, tasks)
        match = _PART.fullmatch(text)
        if match is None:
            raise UsageError(f"--part {text!r}: write K/N, such as 2/4, or slurm")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class PartFolder(UnfinishedFolder):
    """An unfinished folder that one of several processes writes to. Raises as `UnfinishedFolder`.

    Args:
        part: Which of them this is. No two processes may have the same part at a time.
    """

    def __init__(
        self, target: str, identity: str, part: Part, *, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.part = part
        self.log_name = f"{LOG}.{part.number}-of-{part.count}"
        self._own = -1
        super().__init__(target, identity, note=note, shared=True)
        try:
            self._own = os.open(
                os.path.join(self.path, f".lock.{part.number}-of-{part.count}"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o666,
            )
            _flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise StoreError(
                f"another process is at part {part} of {self.target}; wait for it to end, or stop it",
                file=self.target,
            ) from error
        except OSError as error:
            self.close()
            raise write_fault(self.path, "create", error) from error

    def _clear_others(self, note: Callable[[str], None]) -> None:
        """As for one process; several may be clearing the same folders at once."""
        for attempt in range(100):
            try:
                super()._clear_others(note)
            except (StoreError, FileNotFoundError):
                if attempt == 99:
                    raise
                time.sleep(0.05)
            else:
                return

    def logs(self) -> Iterator[bytes]:
        """The logs of all parts, and of a run in one go."""
        try:
            names = sorted(name for name in os.listdir(self.path) if _LOGS.fullmatch(name))
            for name in names:
                with open(os.path.join(self.path, name), "rb") as file:
                    yield file.read()
        except OSError as error:
            raise write_fault(self.path, "read", error) from error

    def restart(self) -> None:
        """Forget this part's own log and mark; files stay, and are written again."""
        for name in (self.log_name, self._mark(self.part.number)):
            try:
                os.unlink(os.path.join(self.path, name))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise write_fault(self.path, "clear", error) from error

    def discard(self) -> None:
        """Let go: what other parts have written stays."""
        self.close()

    def _mark(self, number: int) -> str:
        return f".part.{number}-of-{self.part.count}"

    def mark_done(self) -> None:
        """Say, durably, that all of this part is durable and was checked."""
        path = os.path.join(self.path, self._mark(self.part.number))
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            self.sync_folders()
        except OSError as error:
            raise write_fault(path, "create", error) from error

    def missing(self) -> list[int]:
        """Parts that are not done."""
        return [
            number
            for number in range(1, self.part.count + 1)
            if not os.path.lexists(os.path.join(self.path, self._mark(number)))
        ]

    @property
    def gone(self) -> bool:
        """Whether another process has put the folder in place."""
        return not os.path.isdir(self.path) and os.path.isdir(self.target)

    @contextmanager
    def last(self) -> Iterator[None]:
        """Hold the lock under which the folder is put in place; waits for whoever has it. Then see whether it is `gone`."""
        path = os.path.join(self.path, ".lock.commit")
        fd = -1
        try:
            # It goes only after the rename, so that all who wait have the same file.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if not self.gone:
                raise write_fault(path, "lock", error) from error
            fd = -1
        try:
            yield
        finally:
            if fd >= 0:
                os.close(fd)

    def _remove_log(self) -> None:
        """Logs and marks go only after the rename: until then any part may have to be run again."""

    def commit(self, marker: tuple[str, bytes] | None = None) -> None:
        # What a run in one go left is in the parts' own logs. A reader would take it for the mark of an unfinished folder.
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, LOG))
        super().commit(marker)
        tidy(self.target)

    def withdraw(self) -> None:
        """Remove a folder that was begun after all was in place."""
        shutil.rmtree(self.path, ignore_errors=True)
        sync_folder(self.parent)

    def close(self) -> None:
        super().close()
        own, self._own = self._own, -1
        if own >= 0:
            os.close(own)


def logs_of(target: str) -> Iterator[bytes]:
    """The logs of every unfinished folder of a destination, as they are now; what goes away meanwhile is left out."""
    parent, name = os.path.split(os.path.abspath(target))
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]+\.unfinished")
    with suppress(OSError):
        for folder in os.listdir(parent):
            if ours.fullmatch(folder):
                for log in os.listdir(os.path.join(parent, folder)):
                    if _LOGS.fullmatch(log):
                        with open(os.path.join(parent, folder, log), "rb") as file:
                            yield file.read()


def _flock(fd: int, how: int) -> None:
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        raise
    except OSError as error:
        # A file system without locks: parts must then not be started twice at a time.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
