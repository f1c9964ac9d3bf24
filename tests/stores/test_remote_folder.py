"""Folders of remote stores appear whole or not at all, whatever fails and whenever the writer or the server dies."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit import stores
from ckptkit.errors import CkptError, StoreError, UsageError
from ckptkit.stores.folder import LOG, UNFINISHED_MARK
from ckptkit.stores.remote_folder import RemoteFolder
from ckptkit.stores.retrying import Retry
from tests.stores.faulty_fs import World

URL = "faulty://runs/step"
PART = 1000
RETRY = Retry(attempts=8, wait_s=0.0005, longest_s=0.004, total_s=30)
MARKER = ("manifest.json", b'{"whole": true}')
FILES = {"rank-0": 2500, "rank-1": 1000, "d/rank-2": 999, "empty": 0, "exact": 3000}


def content(path: str, size: int) -> bytes:
    return random.Random(path).randbytes(size)


def pieces(data: bytes, seed: int = 0) -> Iterator[memoryview]:
    """The data cut at random places, as someone else's buffers."""
    draw, at = random.Random(seed), 0
    while at < len(data):
        step = draw.randrange(1, 1500)
        yield memoryview(bytearray(data[at : at + step]))
        at += step


def folder(identity: str = "ab12", **options: object) -> RemoteFolder:
    return RemoteFolder(URL, identity, part=PART, retry=RETRY, **options)  # type: ignore[arg-type]


def write_all(identity: str = "ab12", **options: object) -> None:
    with folder(identity, **options) as out:
        for path, size in FILES.items():
            if not out.whole(path, size):
                out.write_file(path, size, pieces(content(path, size)))
        out.commit(MARKER)


def held(world: World) -> dict[str, bytes]:
    return {name.removeprefix("runs/step/"): data for name, data in world.objects.items()}


EXPECTED = {path: content(path, size) for path, size in FILES.items()} | dict([MARKER])


def is_whole(world: World) -> bool:
    """Whether a reader of ckptkit would take the folder for a whole one."""
    return MARKER[0] in held(world) and UNFINISHED_MARK not in held(world)


def test_a_folder_holds_what_was_written_and_nothing_else(world: World) -> None:
    write_all()

    assert held(world) == EXPECTED and not world.uploads


def test_many_files_are_written_at_once(world: World) -> None:
    world.set(slow_s=0.002)
    data = {f"f{k}": content(f"f{k}", 700 * k) for k in range(20)}

    with folder() as out:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda path: out.write_file(path, len(data[path]), pieces(data[path])), data))
        out.commit(MARKER)

    assert held(world) == data | dict([MARKER])


def test_data_comes_before_the_marker_and_the_marker_before_the_end(world: World) -> None:
    write_all()

    def when(*words: str) -> int:
        return world.log.index(" ".join(words))

    assert when("write", f"runs/step/{UNFINISHED_MARK}") == 0
    last = max(
        when("end", "runs/step/rank-0"),
        when("write", "runs/step/rank-1"),
        when("write", "runs/step/d/rank-2"),
    )
    assert last < when("write", "runs/step/manifest.json") < when("remove", f"runs/step/{UNFINISHED_MARK}")
    assert world.log[-1] == f"remove runs/step/{UNFINISHED_MARK}"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30), drop=st.sampled_from([0.02, 0.05, 0.2]), lie=st.sampled_from([0.0, 0.05])
)
def test_faults_lead_to_the_same_bytes_or_to_no_folder(
    world: World, seed: int, drop: float, lie: float
) -> None:
    """Bounded in either case: no request is made more often than `attempts` allows."""
    world.objects.clear()
    world.uploads.clear()
    world.set(seed=seed, drop=drop, lie=lie, truncate=drop)
    try:
        write_all()
    except StoreError:
        assert not is_whole(world)
    else:
        assert held(world) == EXPECTED
    # What nobody can know of: an upload whose beginning was not confirmed.
    assert not world.uploads or {"abort", "begin"} & world.failed.keys()
    needed = 12 * len(FILES) + 20
    assert world.requests.total() <= needed * RETRY.attempts


def test_a_part_that_never_gets_through_leaves_no_folder_and_no_upload(world: World) -> None:
    world.set(refuse=frozenset({"part"}))

    with pytest.raises(StoreError, match=r"cannot write faulty://runs/step/rank-0: part: refused \(8 tries"):
        write_all()

    assert not is_whole(world) and not world.uploads and world.requests["abort"] == 1


def test_wherever_the_server_dies_nothing_is_whole_and_a_rerun_finishes(world: World) -> None:
    """At every request in turn. A rerun of the same identity keeps objects that are complete."""
    write_all()
    total = world.requests.total()
    kept = 0
    quick = Retry(attempts=1)
    for dead in range(total):
        world.objects.clear()
        world.uploads.clear()
        world.set(dead_after=dead)
        with pytest.raises(CkptError), RemoteFolder(URL, "ab12", part=PART, retry=quick) as out:
            for path, size in FILES.items():
                out.write_file(path, size, pieces(content(path, size)))
            out.commit(MARKER)
        # The one request after which it is whole is the last.
        assert not is_whole(world), dead

        world.set()
        world.uploads.clear()
        write_all()

        assert held(world) == EXPECTED, dead
        kept += world.requests["end"] < 2
    assert kept > total // 3


def test_what_another_identity_left_is_removed(world: World) -> None:
    with folder("aa") as out:
        out.write_file("stray", 3, [b"abc"])
    notes: list[str] = []

    write_all("bb", note=notes.append)

    assert held(world) == EXPECTED and "interrupted run with other arguments" in notes[0]


def test_a_folder_that_is_whole_is_not_touched_unless_told(world: World) -> None:
    write_all()
    world.set()

    with pytest.raises(StoreError, match="exists; choose another destination or give --overwrite"):
        folder("cd")
    with pytest.raises(StoreError, match="exists"):
        stores.check_target(URL, False)
    assert held(world) == EXPECTED and not world.log

    with folder("cd", overwrite=True) as out:
        assert held(world).keys() == {
            UNFINISHED_MARK
        }  # documented: there is no folder until the new one is whole
        assert world.log[0] == f"write runs/step/{UNFINISHED_MARK}"  # and nobody could take the rest for one
        out.write_file("new", 1, [b"x"])
        out.commit(MARKER)
    assert held(world) == {"new": b"x"} | dict([MARKER])


def test_of_two_writers_at_most_the_later_one_commits(world: World) -> None:
    first = folder()
    first.write_file("a", 3, [b"abc"])
    second = folder()

    with pytest.raises(StoreError, match="another run writes to"):
        first.write_file("b", 3, [b"abc"])
    with pytest.raises(StoreError, match="another run writes to"):
        first.commit(MARKER)
    first.close()
    assert not is_whole(world)

    second.write_file("b", 3, [b"xyz"])
    second.commit(MARKER)
    assert held(world) == {"b": b"xyz"} | dict([MARKER])


def test_an_object_that_someone_else_replaced_is_noticed_at_the_commit(world: World) -> None:
    with folder() as out:
        out.write_file("a", 3, [b"abc"])
        world.objects["runs/step/a"] = b"abd"

        with pytest.raises(StoreError, match="no longer what was uploaded"):
            out.commit(MARKER)
    assert not is_whole(world)


def test_a_store_that_keeps_other_sizes_is_not_believed(world: World) -> None:
    world.set(lie=1.0)

    with pytest.raises(StoreError, match="3 bytes were uploaded, but the store has"), folder() as out:
        out.write_file("a", 3, [b"abc"])
    assert not is_whole(world)


@pytest.mark.parametrize("chunks", [[b"abc"], [b"abcdef"], [b"abc", b"de"], []])
def test_a_file_of_another_size_than_announced_is_refused(world: World, chunks: list[bytes]) -> None:
    with folder() as out, pytest.raises(StoreError, match="announced with 4 bytes"):
        out.write_file("a", 4, chunks)
    assert "a" not in held(world)


def test_a_file_can_be_written_again_after_it_failed(world: World) -> None:
    with folder() as out:
        with pytest.raises(StoreError, match="announced"):
            out.write_file("a", 4, [b"abc"])
        out.write_file("a", 4, [b"abcd"])
        out.commit(MARKER)
    assert held(world)["a"] == b"abcd"


def test_discard_leaves_nothing(world: World) -> None:
    out = folder()
    out.write_file("a", 3, [b"abc"])
    out.file("b", 5000).write(0, memoryview(bytes(2500)))
    out.start_log(["one"])

    out.discard()

    assert not world.objects and not world.uploads


def test_the_log_grows_and_outlives_its_writer(world: World) -> None:
    with folder() as out:
        assert out.read_log() is None
        out.start_log(["head"])
        out.append_log(["one", "two"])
        out.append_log(["three"])
    with folder() as out:
        assert out.resumed and out.read_log() == b"head\none\ntwo\nthree\n"
        out.start_log(["head", "one"])
        out.append_log(["four"])
    with folder() as out:
        assert out.read_log() == b"head\none\nfour\n"
        out.commit(MARKER)
    assert not [path for path in held(world) if path.startswith(LOG)]


def test_buffers_stay_within_the_memory_given(world: World) -> None:
    """As many files at once as fit, at least one."""
    out = folder(memory=40_000)
    assert out.open_files([500, 10_000]) == 10
    assert out.open_files([PART * 9_000 * 50]) == 1
    assert folder(memory=1).open_files([500]) == 1
    out.close()


def test_web_servers_are_not_written_to() -> None:
    with pytest.raises(UsageError, match="http:// can be read only"):
        stores.create_folder("http://127.0.0.1/x", "ab")


def test_an_upload_to_s3_in_parts_is_compared_with_its_etag(bucket: str) -> None:
    data = random.Random(3).randbytes((12 << 20) + 17)
    small = data[:1000]

    with stores.create_folder(f"{bucket}/step", "ab") as out:
        out.write_file("large", len(data), pieces_of(data, 1 << 20))
        out.write_file("small", len(small), [small])
        out.commit(MARKER)

    store = stores.open_store(f"{bucket}/step")
    assert store.files() == ["large", "manifest.json", "small"]
    assert store.read("large") == data and store.read("small") == small
    assert fsspec.filesystem("s3").info(f"{bucket}/step/large")["ETag"].endswith('-3"')


def test_uploads_to_s3_that_a_killed_run_left_are_aborted(bucket: str) -> None:
    files = fsspec.filesystem("s3")
    name = bucket.removeprefix("s3://")
    left = files.open(f"{name}/step/large", "wb", block_size=5 << 20)
    left.write(bytes(6 << 20))
    elsewhere = files.open(f"{name}/other/large", "wb", block_size=5 << 20)
    elsewhere.write(bytes(6 << 20))
    assert len(files.list_multipart_uploads(name)) == 2

    with stores.create_folder(f"{bucket}/step", "ab"):
        pass

    assert [upload["Key"] for upload in files.list_multipart_uploads(name)] == ["other/large"]
    elsewhere.discard()
    for file in (left, elsewhere):
        file.closed = True


def test_other_bytes_than_were_sent_are_found_by_the_md5(bucket: str) -> None:
    """The object is exchanged between upload and comparison, with one of the same size."""
    name = f"{bucket}/step/a".removeprefix("s3://")
    exchanged = threading.Event()

    class Exchanging(RemoteFolder):
        def info(self, path: str) -> object:  # type: ignore[override]
            if path == "a" and not exchanged.is_set():
                exchanged.set()
                fsspec.filesystem("s3").pipe_file(name, b"abd")
            return super().info(path)

    with (
        Exchanging(f"{bucket}/step", "ab") as out,
        pytest.raises(StoreError, match="holds other bytes than were uploaded"),
    ):
        out.write_file("a", 3, [b"abc"])
    assert exchanged.is_set()


def pieces_of(data: bytes, nbytes: int) -> Iterator[bytes]:
    for at in range(0, len(data), nbytes):
        yield data[at : at + nbytes]
