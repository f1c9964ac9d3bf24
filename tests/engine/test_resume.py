"""Kill -9 at any moment: nobody sees half a result, and the next call ends it, bit for bit, without doing it all again."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from ckptkit.core.catalog import LEAF
from ckptkit.engine.run import RunResult, run
from ckptkit.errors import InterruptedRunError
from ckptkit.stores.base import Reader
from ckptkit.stores.local import LocalStore
from tests.engine.jobs import Job, forked

KILLS = 50


class WholeJob(Job):
    """24 files; about a tenth of a second."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, "tp=2,pp=2,dp=6,ep=4,zero=1")
        self.total = sum(file.size for file in self.target.files)

    def run(self, slow: bool = False) -> RunResult:
        return self.reshard(slow=slow, threads=2)

    def fork(self) -> int:
        return forked(lambda: self.run(slow=True))

    def kill_midway(self) -> str:
        """Kill a run whose journal has a few lines, and give its unfinished folder.

        On a busy machine the child may end before anyone looks; then another is tried.
        """
        for _ in range(50):
            child = self.fork()
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                found = [n for n in os.listdir(self.folder) if n.endswith(".unfinished")]
                if found and _lines(os.path.join(self.folder, found[0])) >= 3:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    if os.path.exists(os.path.join(self.folder, found[0], ".journal")):
                        return os.path.join(self.folder, found[0])
                    break
                time.sleep(0.001)
            shutil.rmtree(self.out, ignore_errors=True)
        raise AssertionError("every run ended before it could be killed")


def test_kill_at_any_moment(tmp_path) -> None:
    """What a reader looks for is absent until all is there; the second run keeps what was durable; nothing stays behind."""
    rng = random.Random(0)
    job = WholeJob(str(tmp_path))
    reference = job.run(slow=True)
    whole = {file.path: Path(job.out, file.path).read_bytes() for file in job.target.files}
    for number, want in enumerate(job.expected):
        data = np.frombuffer(whole[job.target.files[number].path], np.uint8).copy()
        if number == 0:
            data[:4] = want[:4]  # the checksum
        assert np.array_equal(data, want)
    shutil.rmtree(job.out)

    reused = ended = kills = 0
    while kills < KILLS or (
        reused <= job.total and kills < 10 * KILLS
    ):  # a busy machine may need more moments
        kills += 1
        child = job.fork()
        time.sleep(rng.random() * reference.seconds * 1.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

        if os.path.exists(job.out):
            ended += 1
        else:
            unfinished = [name for name in os.listdir(tmp_path) if name != "src"]
            assert all(name.startswith(".out.") and name.endswith(".unfinished") for name in unfinished)
            reused += job.run().reused_bytes

        assert sorted(os.listdir(job.out)) == sorted([*whole, "done.json"])
        for path, content in whole.items():
            assert Path(job.out, path).read_bytes() == content, path
        assert sorted(os.listdir(tmp_path)) == ["out", "src"]
        shutil.rmtree(job.out)

    assert ended < kills
    assert reused > job.total  # more than a whole result was not written twice


def test_durable_segments_are_not_written_again(tmp_path) -> None:
    """A segment that the journal lists is neither read nor written again, and its digests are known all the same."""
    job = WholeJob(str(tmp_path))
    job.kill_midway()

    result = job.run()

    assert 0 < result.reused_bytes < job.total
    assert result.bytes_in - 2 * result.compared_bytes < job.total
    for written, data in zip(result.written, job.expected, strict=True):
        assert written.leaves is not None
        assert len(written.leaves.digests) == -(-(len(data) - 64) // LEAF)


def _lines(folder: str) -> int:
    try:
        with open(folder + "/.journal", "rb") as file:
            return file.read().count(b"\n")
    except FileNotFoundError:
        return 0


def test_a_journal_that_outlived_its_file_is_not_believed(tmp_path) -> None:
    job = WholeJob(str(tmp_path))
    folder = job.kill_midway()
    for name in os.listdir(folder):
        if name != ".journal":
            os.unlink(os.path.join(folder, name))

    result = job.run()

    assert result.reused_bytes == 0
    for number, want in enumerate(job.expected[1:], 1):
        assert np.array_equal(np.fromfile(f"{job.out}/{job.target.files[number].path}", np.uint8), want)


def test_a_fresh_journal_does_not_vouch_for_files_that_are_gone(tmp_path) -> None:
    """A file lost by a first crash is written anew; a second crash in the middle of that must not pass its bytes as durable."""
    job = WholeJob(str(tmp_path))
    folder = job.kill_midway()
    listed = [json.loads(line)["file"] for line in Path(folder, ".journal").read_bytes().splitlines()[1:]]
    lost = job.target.files[listed[0]].path
    os.unlink(os.path.join(folder, lost))

    class Stop(LocalStore):
        """The second crash comes before any byte was read."""

        def open(self, path: str) -> Reader:  # type: ignore[override]
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(job.plan, job.destination, Stop(job.folder + "/src"), job.out, threads=1, replicas="first")
    Path(folder, lost).write_bytes(bytes(job.target.files[listed[0]].size))  # reserved, never written
    job.run()

    assert np.array_equal(np.fromfile(f"{job.out}/{lost}", np.uint8)[64:], job.expected[listed[0]][64:])
