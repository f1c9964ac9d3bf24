"""Local folders as stores: nothing is read outside the root, and every fault has its own error."""

import os

import pytest

from ckptkit.errors import FormatError, ShardMissingError, StoreError, UnsafeError
from ckptkit.stores.local import LocalStore


def test_reads_are_positioned_and_whole(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(bytes(range(100)))
    store = LocalStore(tmp_path)

    assert store.read("a/f", 10, 5) == bytes(range(10, 15))
    assert store.size("a/f") == 100
    assert list(store.files()) == ["a/f"]
    assert store.exists("a/f") and not store.exists("a/g") and not store.exists("a")


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../secret", "", "a\0b"])
def test_a_path_that_leaves_the_root_is_refused(tmp_path, path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("s")

    with pytest.raises(UnsafeError, match="not a path inside"):
        LocalStore(root).open(path)


@pytest.mark.parametrize("through_folder", [False, True])
def test_a_link_out_of_the_root_is_refused(tmp_path, through_folder) -> None:
    """Whether the file itself or a folder on the way is the link."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "f").write_text("s")
    (root / "x").symlink_to(outside if through_folder else outside / "f")
    path = "x/f" if through_folder else "x"

    for read in (LocalStore(root).open, LocalStore(root).size, LocalStore(root).identity):
        with pytest.raises(UnsafeError, match="outside the checkpoint"):
            read(path)


def test_a_link_inside_the_root_is_followed(tmp_path) -> None:
    (tmp_path / "f").write_text("data")
    (tmp_path / "link").symlink_to("f")

    assert LocalStore(tmp_path).read("link") == b"data"


def test_the_blobs_of_a_hub_cache_are_followed(tmp_path) -> None:
    """Snapshots of the Hugging Face cache are links into a sibling folder; other siblings stay out of reach."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for folder in ("blobs", "refs"):
        (cache / folder).mkdir()
        (cache / folder / "x").write_text(folder)
    (snapshot / "model").symlink_to("../../blobs/x")
    (snapshot / "bad").symlink_to("../../refs/x")
    store = LocalStore(snapshot)

    assert store.read("model") == b"blobs"
    with pytest.raises(UnsafeError):
        store.read("bad")


def test_a_directory_or_pipe_is_no_file_of_data(tmp_path) -> None:
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "p")
    store = LocalStore(tmp_path)

    for path, what in (("d", "a directory"), ("p", "no regular file")):
        for read in (store.open, store.size, store.identity):
            with pytest.raises(FormatError, match=what):
                read(path)


def test_a_missing_file_and_a_missing_root_are_told_apart(tmp_path) -> None:
    with pytest.raises(ShardMissingError, match="f is missing"):
        LocalStore(tmp_path).open("f")
    with pytest.raises(StoreError, match="does not exist"):
        LocalStore(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not a folder"):
        LocalStore(tmp_path / "file")


def test_a_name_too_long_for_any_file_is_a_missing_file(tmp_path) -> None:
    """An index may name anything; no disk is at fault then."""
    assert not LocalStore(tmp_path).exists("f" * 5000)
    with pytest.raises(ShardMissingError, match="is missing"):
        LocalStore(tmp_path).size("f" * 5000)


def test_a_file_that_ends_early_says_where(tmp_path) -> None:
    (tmp_path / "f").write_bytes(b"12345")

    with pytest.raises(FormatError, match="ends at byte 5, but bytes 2:12"):
        LocalStore(tmp_path).read("f", 2, 10)


def test_the_identity_changes_with_the_content(tmp_path) -> None:
    """A file of the same size, put in its place by rename, with its time set back, is still another file."""
    file, other = tmp_path / "f", tmp_path / "g"
    file.write_bytes(b"one")
    store = LocalStore(tmp_path)
    before, times = store.identity("f"), file.stat()
    assert store.identity("f") == before

    other.write_bytes(b"two")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.rename(other, file)

    assert store.identity("f") != before
