"""Interposing: every change is seen, whichever way it is made; strace is the judge of a real reshard."""

import mmap
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from ckptkit.faults.crash.record import Recorder
from ckptkit.faults.interpose import Call, Interposer, Proceed


def seen(root: Any) -> tuple[Interposer, list[Call]]:
    calls: list[Call] = []

    def note(call: Call, proceed: Proceed) -> Any:
        calls.append(call)
        return proceed(call)

    return Interposer(str(root), note), calls


def test_all_is_as_before_at_the_end(tmp_path) -> None:
    before = (os.open, os.write, os.fsync, open, shutil.rmtree)
    it, _ = seen(tmp_path)

    with (
        it,
        pytest.raises(RuntimeError, match="active already"),
        Interposer(str(tmp_path), lambda c, p: p(c)),
    ):
        pass

    assert (os.open, os.write, os.fsync, open, shutil.rmtree) == before


def test_python_s_ways_of_writing_are_seen(tmp_path) -> None:
    it, calls = seen(tmp_path)

    with it:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "f").write_bytes(b"one")
        with open(tmp_path / "a" / "g", "w", encoding="utf-8") as file:
            print("two", file=file)
        (tmp_path / "a" / "g").rename(tmp_path / "h")
        shutil.copy(tmp_path / "h", tmp_path / "i")
        shutil.rmtree(tmp_path / "a")

    kinds = [call.kind for call in calls]
    assert kinds[:5] == ["mkdir", "open", "write", "open", "write"]
    assert [k for k in kinds if k in ("rename", "unlink", "rmdir")] == ["rename", "unlink", "rmdir"]
    assert it.escapes == []
    assert (tmp_path / "i").read_text() == "two\n"


def test_other_folders_are_left_alone(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    it, calls = seen(tmp_path / "in")

    with it:
        (tmp_path / "out").write_bytes(b"x")
        os.rename(tmp_path / "out", tmp_path / "in" / "moved")
        os.mkdir(tmp_path / "in-between")

    assert [(call.kind, os.path.basename(call.other)) for call in calls] == [("rename", "moved")]


def test_a_handler_may_shorten_delay_or_refuse(tmp_path) -> None:
    def handle(call: Call, proceed: Proceed) -> Any:
        if call.kind == "write":
            call.data = call.data[:2]
        if call.kind == "sync":
            raise OSError(5, "Input/output error")
        return proceed(call)

    with Interposer(str(tmp_path), handle):
        fd = os.open(tmp_path / "f", os.O_WRONLY | os.O_CREAT)
        assert os.write(fd, b"four") == 2
        with pytest.raises(OSError, match="Input/output"):
            os.fsync(fd)
        os.close(fd)
        with open(tmp_path / "g", "wb") as file:
            file.write(b"whole")  # a buffered file writes the rest again

    assert (tmp_path / "f").read_bytes() == b"fo"
    assert (tmp_path / "g").read_bytes() == b"whole"


def test_writable_maps_and_foreign_calls_are_escapes(tmp_path) -> None:
    """What cannot be recorded is at least noticed, and a recording with it is refused."""
    (tmp_path / "f").write_bytes(b"x" * 10)
    raw_open = os.open

    with (
        pytest.raises(RuntimeError, match=r"cannot be recorded: mmap .*/f; open .*/g"),
        Recorder(str(tmp_path)),
    ):
        fd = os.open(tmp_path / "f", os.O_RDWR)
        mmap.mmap(fd, 10)
        os.close(fd)
        os.close(raw_open(tmp_path / "g", os.O_WRONLY | os.O_CREAT))


PROGRAM = """
import os, sys
from ckptkit import ops
from ckptkit.faults.crash.record import Recorder
from ckptkit.faults.crash.scenarios.base import synth
root = sys.argv[1]
os.mkdir(root + "/watched")
synth(root + "/source", 2)
with Recorder(root + "/watched") as recorder:
    ops.reshard(root + "/source", root + "/watched/run/step-1", to="native", layout="ep=2,dp=2", threads=2)
    ops.reshard(root + "/source", root + "/watched/run/step-1", to="dcp", overwrite=True, threads=2)
print(len([op for op in recorder.ops if type(op).__name__ == "Write"]),
      len([op for op in recorder.ops if type(op).__name__ == "Sync"]),
      len([op for op in recorder.ops if type(op).__name__ in ("Rename", "Exchange")]))
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_strace_sees_no_change_that_was_not_recorded(tmp_path) -> None:
    """As many writes, syncs and renames below the folder by the system's count as in the recording."""
    calls = "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,sendfile,mmap"
    log = tmp_path / "strace"

    done = subprocess.run(
        ["strace", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={calls}", "-o", str(log), sys.executable, "-c", PROGRAM,
         str(tmp_path)], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    if "Operation not permitted" in done.stderr:
        pytest.skip("ptrace is not allowed here")
    assert done.returncode == 0, done.stderr
    below = [line for line in log.read_text().splitlines() if f"{tmp_path}/watched" in line]
    names = [match[1] for line in below if (match := re.match(r"\d+ +(\w+)\(", line))]
    writes = sum(name in ("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile") for name in names)
    syncs = sum(name in ("fsync", "fdatasync") for name in names)
    renames = sum(name.startswith("rename") for name in names)
    assert done.stdout.split() == [str(writes), str(syncs), str(renames)]
    assert writes > 10 and syncs > 10 and renames >= 2
    assert not any("PROT_WRITE" in line and "MAP_SHARED" in line for line in below)
