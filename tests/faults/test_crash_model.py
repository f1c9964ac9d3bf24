"""What the models of a crash allow: classic programs whose states are known, and small cases counted by hand."""

import os
from collections.abc import Callable, Sequence

import pytest

from ckptkit.faults.crash.explore import minimize
from ckptkit.faults.crash.model import after_crash, growing, pending
from ckptkit.faults.crash.operations import Tree, tree_at
from ckptkit.faults.crash.record import Recorder
from ckptkit.faults.crash.states import drawn, moments

Program = Callable[[str], None]


def write(path: str, data: bytes, sync: bool) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def states(root: str, program: Program, model: str, at_end: bool = True) -> list[dict[str, bytes]]:
    """What may be there after a crash at the end of a program (or anywhere in it): every distinct content."""
    os.makedirs(root, exist_ok=True)
    with Recorder(root) as recorder:
        program(root)
    found: dict[str, dict[str, bytes]] = {}
    for moment in moments(recorder.start, recorder.ops, model, 100_000, 0):
        assert moment.complete
        if at_end and moment.stop != len(recorder.ops):
            continue
        for choice in moment.choices():
            tree = moment.tree(choice)
            found[tree.content()] = {path: tree.files[n] for path, n in tree.walk() if n in tree.files}
    return list(found.values())


def test_a_file_without_fsync_may_be_absent_empty_short_or_junk(tmp_path) -> None:
    """One sector: absent, empty, whole, zeros, or bytes nobody wrote; after fsync of the file only the name is open."""
    root = str(tmp_path / "w")

    loose = states(root, lambda r: write(f"{r}/a", b"data", False), "posix")
    synced = states(root + "2", lambda r: write(f"{r}/a", b"data", True), "posix")

    values = [state.get("a") for state in loose]
    assert sorted(values, key=str) == sorted([None, b"", b"data", bytes(4), b"\xa5" * 4], key=str)
    assert sorted((state.get("a") for state in synced), key=str) == [None, b"data"] or len(synced) == 2


def test_rename_without_fsync_is_the_zero_length_file(tmp_path) -> None:
    """The known trap of ext4's delayed allocation: the new name is durable before the bytes. With fsync it is not possible."""

    def replace(root: str, sync: bool) -> None:
        write(f"{root}/new", b"new", sync)
        os.rename(f"{root}/new", f"{root}/file")

    for model in ("posix", "ext4"):
        for sync in (False, True):
            root = tmp_path / f"{model}{sync}"
            root.mkdir()
            (root / "file").write_bytes(b"old")

            found = {state.get("file") for state in states(str(root), lambda r, s=sync: replace(r, s), model)}  # type: ignore[misc]

            assert (b"" in found) == (not sync)
            assert {b"old", b"new"} <= found


def test_all_of_the_rules_leaves_one_state(tmp_path) -> None:
    def careful(root: str) -> None:
        write(f"{root}/new", b"new", True)
        os.rename(f"{root}/new", f"{root}/file")
        sync_folder(root)

    assert states(str(tmp_path / "w"), careful, "posix") == [{"file": b"new"}]


def test_names_of_two_folders_are_independent_in_posix_and_ordered_in_ext4(tmp_path) -> None:
    """`b` may be there without `a` in the one model only."""

    def two(root: str) -> None:
        for name in ("a", "b"):
            os.mkdir(f"{root}/{name}")
            os.mkdir(f"{root}/{name}/in")

    def seen(model: str) -> set[tuple[bool, bool]]:
        root = tmp_path / model
        root.mkdir()
        with Recorder(str(root)) as recorder:
            two(str(root))
        found = set()
        for moment in moments(recorder.start, recorder.ops, model, 1000, 0):
            for choice in moment.choices():
                paths = {path for path, _ in moment.tree(choice).walk()}
                found.add(("a" in paths, "b" in paths))
        return found

    assert seen("posix") == {(False, False), (True, False), (False, True), (True, True)}
    assert seen("ext4") == {(False, False), (True, False), (True, True)}


def test_writes_are_torn_at_sectors(tmp_path) -> None:
    """Over an old file of the same size each sector is old or new; what lies beside the write never changes."""
    root = tmp_path / "w"
    root.mkdir()
    (root / "f").write_bytes(b"o" * 2048)

    def overwrite(path: str) -> None:
        fd = os.open(f"{path}/f", os.O_WRONLY)
        os.pwrite(fd, b"n" * 1536, 512)
        os.close(fd)

    for model in ("posix", "ext4"):
        found = {state["f"] for state in states(str(root), overwrite, model)}
        (root / "f").write_bytes(b"o" * 2048)

        texts = {"".join(chr(data[k * 512]) for k in range(4)) for data in found}
        assert texts == {"oooo", "onnn", "onoo", "oonn", "oono"}
        assert all(len(data) == 2048 for data in found)


def test_a_reserved_file_that_was_not_written_reads_as_zeros(tmp_path) -> None:
    def reserve(root: str) -> None:
        fd = os.open(f"{root}/f", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 1024)
        os.fsync(fd)
        sync_folder(root)
        os.pwrite(fd, b"x" * 512, 512)
        os.close(fd)

    found = {state["f"] for state in states(str(tmp_path / "w"), reserve, "posix")}

    assert found == {bytes(1024), bytes(512) + b"x" * 512}


def test_an_exchange_is_one_step(tmp_path) -> None:
    """Both folders are always there, once each."""
    from ckptkit.stores.system import exchange

    root = tmp_path / "w"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        (root / name / name).write_bytes(name.encode())

    found = states(str(root), lambda r: [exchange(f"{r}/a", f"{r}/b")], "posix")  # type: ignore[arg-type]

    assert sorted(map(sorted, found)) == [["a/a", "b/b"], ["a/b", "b/a"]]


def test_what_is_kept_is_what_the_file_system_has(tmp_path) -> None:
    """With nothing lost the model's tree equals the folder, after a program that does a bit of everything."""

    def busy(root: str) -> None:
        os.makedirs(f"{root}/a/b")
        write(f"{root}/a/one", b"1" * 5000, True)
        with open(f"{root}/a/one", "r+b") as file:
            file.seek(100)
            file.write(b"changed")
            file.truncate(3000)
        with open(f"{root}/a/text", "a", encoding="utf-8") as file:
            file.write("zeile\n")
        with open(f"{root}/a/text", "a", encoding="utf-8") as file:
            file.write("mehr\n")
        os.link(f"{root}/a/one", f"{root}/a/b/two")
        os.symlink("one", f"{root}/a/link")
        os.replace(f"{root}/a/text", f"{root}/text")
        fd = os.open(f"{root}/a/b", os.O_RDONLY)
        os.mkdir("in", dir_fd=fd)
        os.rename("in", "out", src_dir_fd=fd, dst_dir_fd=fd)
        os.close(fd)
        os.unlink(f"{root}/a/one")
        write(f"{root}/a/one", b"again", False)
        fd = os.open(f"{root}/pieces", os.O_RDWR | os.O_CREAT)
        os.writev(fd, [b"ab", b"cd"])
        os.posix_fallocate(fd, 0, 10)
        os.pwritev(fd, [b"e", b"f"], 8)
        source = os.open(f"{root}/text", os.O_RDONLY)
        os.lseek(fd, 20, os.SEEK_SET)
        os.sendfile(fd, source, 0, 4)
        os.copy_file_range(source, fd, 3, 0, 30)
        os.close(fd)
        os.close(source)

    root = str(tmp_path / "w")
    os.mkdir(root)
    with Recorder(root) as recorder:
        busy(root)

    model = after_crash(recorder.start, recorder.ops, {})
    assert model.content() == tree_at(root)[0].content()


def test_a_tree_comes_back_as_it_was(tmp_path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").write_bytes(b"x")
    os.link(tmp_path / "a" / "f", tmp_path / "g")
    os.symlink("g", tmp_path / "s")
    tree, _ = tree_at(str(tmp_path))
    (tmp_path.parent / "copy").mkdir()

    tree.put_at(str(tmp_path.parent / "copy"))

    again, _ = tree_at(str(tmp_path.parent / "copy"))
    assert again.content() == tree.content()
    assert os.stat(tmp_path.parent / "copy" / "g").st_nlink == 2


def test_pending_follows_syncs(tmp_path) -> None:
    """In posix a sync covers one node; in ext4 a sync that needs the journal covers every name."""
    root = str(tmp_path)
    with Recorder(root) as recorder:
        os.mkdir(f"{root}/d")
        write(f"{root}/d/f", b"x", True)
    ops = recorder.ops
    grown = growing(Tree(), ops)

    assert [type(ops[n]).__name__ for n in pending(ops, "posix", grown)] == ["Make", "Make"]
    assert pending(ops, "ext4", grown) == []


def test_a_drawn_state_is_one_of_those_that_may_be(tmp_path) -> None:
    """For power loss in a running program: the same seed gives the same content, and other seeds others."""

    def busy(root: str) -> None:
        write(f"{root}/kept", b"k" * 100, True)
        sync_folder(root)
        for name in ("a", "b", "c"):
            write(f"{root}/{name}", name.encode() * 600, False)

    root = str(tmp_path / "w")
    os.mkdir(root)
    with Recorder(root) as recorder:
        busy(root)

    for model in ("posix", "ext4"):
        (end,) = (
            m for m in moments(recorder.start, recorder.ops, model, 10**6, 0) if m.stop == len(recorder.ops)
        )
        possible = {end.tree(choice).content() for choice in end.choices()}
        seen = [drawn(recorder.start, recorder.ops, model, seed) for seed in range(30)]

        assert end.complete
        assert {tree.content() for tree in seen} <= possible
        assert len({tree.content() for tree in seen}) > 3
        assert all(tree.files[tree.folders[0]["kept"]] == b"k" * 100 for tree in seen)
        assert drawn(recorder.start, recorder.ops, model, 5).content() == seen[5].content()


@pytest.mark.parametrize("needed", [[], [3], [2, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 9]])
def test_minimize_finds_the_least_set(needed: list[int]) -> None:
    tries = []

    def fails(numbers: Sequence[int]) -> bool:
        tries.append(numbers)
        return set(needed) <= set(numbers)

    assert minimize(list(range(10)), fails) == needed
    assert len(tries) < 100
