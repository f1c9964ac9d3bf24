"""Folders that several machines fill: every file appears whole and durable, or not at all."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from ckptkit.errors import ShardMissingError, StoreError, UnsafeError
from ckptkit.stores.shared import SharedFolder, shared_folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> SharedFolder:
    url = str(tmp_path / "a" / "b") if request.param == "local" else f"memory://shared/{tmp_path.name}"
    return shared_folder(url)


def test_files_are_written_whole_and_read_back(folder: SharedFolder) -> None:
    """Several files at once, large and empty ones, in folders below."""
    contents = {f"steps/{n}": os.urandom(n) for n in (0, 1, 4096, 300_001)}

    def write(path: str, content: bytes) -> None:
        folder.write_file(
            path, len(content), [memoryview(content)[k : k + 65536] for k in range(0, len(content), 65536)]
        )

    threads = [threading.Thread(target=write, args=item) for item in contents.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert folder.files() == {path: len(content) for path, content in contents.items()}
    assert {path: folder.read(path) for path in contents} == contents


def test_a_file_that_fails_in_the_middle_does_not_appear(folder: SharedFolder) -> None:
    """Neither half of it, nor in the place of the old one."""
    folder.write_small("a", b"old")

    def chunks():
        yield memoryview(b"new")
        raise StoreError("the source is gone")

    for path in ("a", "b"):
        with pytest.raises(StoreError, match="the source is gone"):
            folder.write_file(path, 6, chunks())
        with pytest.raises(StoreError, match="announced with 6 bytes"):
            folder.write_file(path, 6, [memoryview(b"new")])

    assert folder.files() == {"a": 3}
    assert folder.read("a") == b"old"
    folder.write_small("a", b"newer")
    assert folder.read("a") == b"newer"


def test_a_claim_is_given_once(folder: SharedFolder) -> None:
    """Of all who create one file one is told that it is his; the content is his."""
    told: dict[int, bool] = {}

    def claim(number: int) -> None:
        told[number] = folder.write_new("epochs/3", str(number).encode())

    claim(0)
    threads = [threading.Thread(target=claim, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [number for number, mine in told.items() if mine] == [0]
    assert folder.read("epochs/3") == b"0"
    assert set(folder.files()) == {"epochs/3"}


def test_what_is_absent_is_said_so(folder: SharedFolder) -> None:
    assert folder.files() == {}
    assert folder.size("a") == -1
    with pytest.raises(ShardMissingError, match="missing"):
        folder.read("a")
    folder.remove("a")


def test_a_removed_file_is_gone(folder: SharedFolder) -> None:
    folder.write_small("a", b"x")

    folder.remove("a")

    assert folder.size("a") == -1
    folder.remove_empty()
    assert folder.files() == {}


@pytest.mark.parametrize("path", ["../a", "/a", "b/../../a", "", "a\0b"])
def test_no_path_leaves_the_folder(folder: SharedFolder, path: str) -> None:
    with pytest.raises(UnsafeError):
        folder.write_small(path, b"x")


def test_a_failed_write_leaves_no_temporary(tmp_path: Path) -> None:
    """A folder that may not be written: an error that says so, nothing else."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreError, match="file"):
        shared_folder(str(tmp_path / "file" / "below")).write_small("a", b"x")

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_goes_with_the_next_write_of_that_file_only(tmp_path) -> None:
    """Else a crash in a drain leaves gigabytes in a step that becomes whole; a writer that is alive keeps its work."""
    dead, other = (f".{name}.0123456789abcdef.tmp" for name in ("rank", "rank2"))
    for name in (dead, other, ".rank.fedcba9876543210.tmp"):
        (tmp_path / name).write_bytes(b"half")
    with open(tmp_path / ".rank.fedcba9876543210.tmp") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)

        shared_folder(str(tmp_path)).write_small("rank", b"whole")

    assert sorted(os.listdir(tmp_path)) == [".rank.fedcba9876543210.tmp", other, "rank"]
