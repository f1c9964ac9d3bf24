"""Durable writing: a folder appears whole or not at all, with the right modes, and faults say what to do."""

import os
import resource
import stat
import subprocess
import sys
import textwrap

import pytest

from ckptkit.errors import StoreError
from ckptkit.stores.durable import PAGE, OutFile, UnfinishedFolder
from ckptkit.stores.system import exchange, file_system


def names(path) -> list[str]:
    return sorted(os.listdir(path))


def test_nothing_is_at_the_target_before_commit_and_all_of_it_after(tmp_path) -> None:
    folder = UnfinishedFolder(str(tmp_path / "out"), "ab12")
    folder.write_small("sub/file", b"data")
    assert names(tmp_path) == [".out.ab12.unfinished"]

    folder.commit()

    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "sub" / "file").read_bytes() == b"data"


@pytest.mark.parametrize("atomic", [True, False])
def test_an_old_folder_is_replaced_only_with_overwrite(tmp_path, atomic) -> None:
    """Also where the system cannot swap two folders in one step."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(StoreError, match="exists; choose another destination or give --overwrite"):
        UnfinishedFolder(str(tmp_path / "out"), "ab")
    swap = exchange if atomic else lambda one, other: False
    folder = UnfinishedFolder(str(tmp_path / "out"), "ab", overwrite=True, swap=swap)
    folder.write_small("new", b"new")
    assert names(tmp_path / "out") == ["old"]

    folder.commit()

    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path) -> None:
    folder = UnfinishedFolder(str(tmp_path / "out"), "ab")
    folder.write_small("new", b"new")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(StoreError, match="exists"):
        folder.commit()

    assert names(tmp_path / "out") == ["theirs"]


def test_an_empty_folder_is_no_obstacle_but_a_file_or_link_is(tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("out")
    UnfinishedFolder(str(tmp_path / "out"), "ab").commit()
    assert names(tmp_path) == ["file", "link", "out"]

    for name in ("file", "link"):
        with pytest.raises(StoreError, match="remove it or choose another"):
            UnfinishedFolder(str(tmp_path / name), "ab", overwrite=True)


def test_two_runs_cannot_write_one_folder(tmp_path) -> None:
    """Neither the same work twice, nor other work for the same target."""
    first = UnfinishedFolder(str(tmp_path / "out"), "ab")

    for identity in ("ab", "cd"):
        with pytest.raises(StoreError, match="another run is writing"):
            UnfinishedFolder(str(tmp_path / "out"), identity)

    first.close()
    assert UnfinishedFolder(str(tmp_path / "out"), "ab").resumed


def test_what_other_runs_left_for_the_target_is_removed_and_told(tmp_path) -> None:
    UnfinishedFolder(str(tmp_path / "out"), "ab").close()
    UnfinishedFolder(str(tmp_path / "out.x"), "ab").close()  # of another target, whose name starts alike
    notes: list[str] = []

    folder = UnfinishedFolder(str(tmp_path / "out"), "cd", note=notes.append)

    assert not folder.resumed
    assert names(tmp_path) == [".out.cd.unfinished", ".out.x.ab.unfinished"]
    assert len(notes) == 1 and ".out.ab.unfinished" in notes[0]


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_modes_follow_the_umask(tmp_path, mask, file_mode, folder_mode) -> None:
    before = os.umask(mask)
    try:
        folder = UnfinishedFolder(str(tmp_path / "out"), "ab")
        folder.write_small("sub/file", b"data")
        folder.commit()
    finally:
        os.umask(before)

    found = {
        stat.S_IMODE(os.stat(tmp_path / "out" / path).st_mode): path for path in ("sub/file", "sub", ".")
    }
    assert set(found) == {file_mode, folder_mode}
    assert found[file_mode] == "sub/file"


def test_a_group_sticky_folder_keeps_its_group(tmp_path) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    os.chmod(parent, 0o2775)

    folder = UnfinishedFolder(str(parent / "out"), "ab")
    folder.write_small("file", b"data")
    folder.commit()

    assert os.stat(parent / "out").st_mode & stat.S_ISGID
    assert os.stat(parent / "out" / "file").st_gid == os.stat(parent).st_gid


@pytest.mark.parametrize("direct", [False, True])
def test_writes_of_any_alignment_arrive(tmp_path, direct) -> None:
    """Direct writes need whole pages; what is not aligned takes the other way, in the same file."""
    data = os.urandom(5 * PAGE + 77)
    file = OutFile(str(tmp_path / "f"), len(data), direct=direct, memory=False)
    aligned = memoryview(bytearray(PAGE * 8))

    for start, stop in ((2 * PAGE, len(data)), (100, 2 * PAGE), (0, 100)):
        view = aligned[: stop - start]
        view[:] = data[start:stop]
        file.write(start, view)
    file.sync()
    file.close()

    assert (tmp_path / "f").read_bytes() == data


def test_an_open_file_keeps_what_was_written_and_another_size_starts_over(tmp_path) -> None:
    path = str(tmp_path / "f")
    file = OutFile(path, 10, direct=False, memory=False)
    file.write(0, memoryview(b"0123456789"))
    file.close()

    OutFile(path, 10, direct=False, memory=False).close()
    assert (tmp_path / "f").read_bytes() == b"0123456789"

    OutFile(path, 12, direct=False, memory=False).close()
    assert (tmp_path / "f").read_bytes() == bytes(12)


def test_a_sync_that_failed_never_succeeds_later(tmp_path) -> None:
    """The kernel reports lost pages once; a second fsync would claim that all is well."""
    file = OutFile(str(tmp_path / "f"), 4, direct=False, memory=False)
    good = os.dup(file.fileno())
    read, write = os.pipe()
    os.dup2(write, file.fileno())  # a pipe cannot be synced
    with pytest.raises(StoreError, match="cannot sync"):
        file.sync()
    os.dup2(good, file.fileno())

    with pytest.raises(StoreError, match="earlier sync failed"):
        file.sync()

    for fd in (good, read, write):
        os.close(fd)
    file.close()


def test_too_little_space_is_noticed_before_writing(tmp_path) -> None:
    folder = UnfinishedFolder(str(tmp_path / "out"), "ab")
    free = os.statvfs(tmp_path)

    folder.check_space(1)
    with pytest.raises(StoreError, match="Free some space"):
        folder.check_space(free.f_blocks * free.f_frsize * 2)


def test_a_write_that_hits_a_limit_says_so(tmp_path) -> None:
    """A limit on file sizes stands in for a full disk: the kernel refuses the write in the middle."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from ckptkit.errors import StoreError
        from ckptkit.stores.durable import OutFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = OutFile(sys.argv[1], 4096, direct=False, memory=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            file.write(2000, memoryview(bytes(100)))
        except StoreError as error:
            print(error)
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "f")], capture_output=True, text=True, check=True
    )

    assert "cannot write bytes 2000:2100 of" in run.stdout
    assert "Files may not grow that large" in run.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_may_not_be_written_is_a_store_error(tmp_path) -> None:
    os.chmod(tmp_path, 0o555)
    with pytest.raises(StoreError, match="You may not write there"):
        UnfinishedFolder(str(tmp_path / "out"), "ab")


def test_a_file_system_that_is_read_only_or_special_is_a_store_error() -> None:
    with pytest.raises(StoreError, match=r"cannot create /proc/\.out\.ab\.unfinished"):
        UnfinishedFolder("/proc/out", "ab")


def test_files_are_synced_before_the_rename_and_folders_around_it(tmp_path) -> None:
    """The order of calls, as the process makes them: the rename never gets ahead of the bytes."""
    script = textwrap.dedent(
        """
        import os, sys
        calls = []
        def traced(name):
            real = getattr(os, name)
            def call(*args, **kwargs):
                what = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else a for a in args[:2]]
                calls.append(" ".join([name, *map(str, what)]))
                return real(*args, **kwargs)
            setattr(os, name, call)
        for name in ("fsync", "fdatasync", "rename"):
            traced(name)
        from ckptkit.stores.durable import UnfinishedFolder
        folder = UnfinishedFolder(sys.argv[1], "ab")
        for name in ("one", "sub/two"):
            folder.write_small(name, b"data")
        folder.commit()
        print("\\n".join(calls))
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )

    work = f"{tmp_path}/.out.ab.unfinished"
    calls = run.stdout.split("\n")[:-1]
    rename = calls.index(f"rename {work} {tmp_path}/out")
    before = {f"fdatasync {work}/one", f"fdatasync {work}/sub/two", f"fsync {work}", f"fsync {work}/sub"}
    assert before <= set(calls[:rename])
    assert calls[rename + 1 :] == [f"fsync {tmp_path}"]


def test_the_file_system_has_a_name() -> None:
    assert file_system("/proc") == "proc"
    assert file_system("/does/not/exist") == "unknown"


def test_a_file_where_the_parent_should_be_is_named(tmp_path) -> None:
    """What is to be removed is the file that is there, not a folder that never was."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match=r"/file is in the way"):
        UnfinishedFolder(str(tmp_path / "file" / "x"), "00ff")


def test_names_of_new_folders_above_the_target_are_durable_too(tmp_path, monkeypatch) -> None:
    """A new run folder whose name is lost in a crash takes the committed step along."""
    synced: list[str] = []
    original = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)

    UnfinishedFolder(str(tmp_path / "runs" / "zaya" / "step-1"), "ab").commit()

    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "zaya")} <= set(synced)
