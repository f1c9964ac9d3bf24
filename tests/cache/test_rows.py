"""Rows of the failure matrix (docs/cache/failures.md) that have no other place, and that every row has a test."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit import ops
from ckptkit.cache.durable import DurableRun
from ckptkit.errors import StoreError
from ckptkit.faults.cluster.nodes import Cluster, Node, wait_for
from ckptkit.faults.inject.program import environment
from ckptkit.faults.inject.storage import Rule
from ckptkit.formats.native import step_dir
from tests.faults import test_crash_scenarios

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"test_(?:row_)?(\d{1,2})_\w+")


def rows() -> dict[int, list[str]]:
    """Row → the tests that have its number in their names."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for item in ast.parse(path.read_text()).body:
            if isinstance(item, ast.FunctionDef) and (match := NAME.fullmatch(item.name)):
                found.setdefault(int(match[1]), []).append(f"{path.name}::{item.name}")
    return found


def test_every_row_of_the_failure_matrix_has_a_test() -> None:
    text = (ROOT / "docs/cache/failures.md").read_text()
    documented = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert documented == list(range(1, 40))

    tests = rows()

    for row in documented:
        print(row, *tests.get(row, []))
    assert sorted(tests) == documented


def test_24_registration_that_fails_in_the_middle_is_undone_and_copies_bounce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third segment is refused: the first two are let go in reverse order, the driver's error is cleared."""
    torch = pytest.importorskip("torch")
    from ckptkit.hooks import buffers

    calls: list[tuple[str, int]] = []

    def register(address: int, nbytes: int) -> int:
        calls.append(("register", address))
        return 0 if len(calls) < 3 else 2

    def unregister(address: int) -> int:
        calls.append(("unregister", address))
        return 0

    runtime = buffers._Runtime(register, unregister, lambda: calls.append(("clear", 0)))
    monkeypatch.setattr(buffers, "SEGMENT", 1 << 20)
    monkeypatch.setattr(buffers._Runtime, "find", classmethod(lambda cls: runtime))
    monkeypatch.setattr(buffers._Runtime, "_forget", lambda self: self._clear())
    buffer = buffers.HostBuffer.own(4 << 20)

    mode = buffer.register(torch.device("cuda"))

    start = buffer.tensor.data_ptr()
    assert mode == buffer.mode == "bounce"
    assert calls == [
        *(("register", start + (k << 20)) for k in range(3)), ("clear", 0), ("unregister", start + (1 << 20)), ("unregister", start),
    ]  # fmt: skip
    buffer.tensor[:] = 7  # still memory like any other
    assert bytes(buffer.memory[:3]) == b"\7\7\7"


def test_28_a_sync_that_fails_once_is_followed_by_another_file(tmp_path: Path) -> None:
    """The daemon meets EIO on the first sync of a rank file: no manifest before all is written anew."""
    with Cluster(tmp_path, ranks=1, drain=True) as cluster:
        node = cluster.nodes[0]
        node.stop()
        node.environment = environment(
            str(tmp_path / "durable"),
            [Rule("eio", "sync,datasync", path="*rank-00000.safetensors*")],
            base={},
        )
        node.start()
        cluster.launch()
        cluster.start()
        cluster.save(1)
        with node.client() as client:
            client.request("drain")

        cluster.reach(1, level=3)

        failed = [line for line in node.events("drain failed") if "again_in_s" in line]
        assert len(failed) == 1 and "cannot sync" in failed[0]["reason"]
        assert ops.verify(str(cluster.durable / step_dir(1, 1))).exit_code == 0
        assert not list(cluster.durable.glob("**/*.tmp"))


def test_29_a_crash_anywhere_in_a_drain_leaves_whole_steps_or_none() -> None:
    """Every state that a crash may leave of the calls of a drain is recovered from (docs/crashes.md)."""
    test_crash_scenarios.test_no_crash_loses_anything("drain")


def test_30_an_upload_that_fails_in_the_middle_leaves_no_step() -> None:
    """An object store: a folder without a manifest is no step, whatever is in it, and is swept by a later epoch."""
    run = DurableRun("memory://row-30")
    name = step_dir(7, 1)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(9 << 20))
        raise StoreError("the slot's bytes are bad")

    run.folder.write_small(f"{name}/rank-00001.digests", b"of another rank")
    with pytest.raises(StoreError):
        run.folder.write_file(f"{name}/rank-00000.safetensors", 20 << 20, pieces())

    assert set(run.folder.files()) == {f"{name}/rank-00001.digests"}, "a part of an object is there"
    assert run.steps() == ([], [])
    assert run.sweep(epoch=1, age_s=-1.0) == []  # its own epoch may still be writing
    assert run.sweep(epoch=2, age_s=-1.0) == [name]
    assert not run.folder.files()
    run.close()


@pytest.mark.long
def test_30_a_drain_that_finds_bad_bytes_in_the_middle_of_an_upload_leaves_no_object(tmp_path: Path) -> None:
    """A daemon and S3: the first part is up when the next piece turns out bad. Nothing of the object appears; the folder is swept by the next epoch."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    from ckptkit.faults.cluster.nursery import Nursery
    from ckptkit.faults.cluster.objects import s3_server

    with s3_server() as (url, variables), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        Nursery.fresh()  # it must know the environment
        bucket = s3fs.S3FileSystem()

        def objects() -> set[str]:
            bucket.invalidate_cache()
            found = bucket.find(url)
            return {path.rpartition("/")[2] for path in found if f"/{step_dir(1, 1)}/" in path}

        try:
            large = {"w": ((4096, 1024), "float32")}
            cluster = Cluster(tmp_path, ranks=1, url=url, options={"shapes": large})
            cluster.config["drain"] = {"orphan_s": 10.0}
            with cluster:
                node = cluster.nodes[0]
                cluster.launch()
                cluster.start()
                cluster.save(1)
                (slot,) = node.holding(1)
                node.flip(slot, offset=9 << 20)
                _drain(node)
                wait_for(lambda: node.events("drain failed"), "the failure", cluster)

                assert objects() <= {"index.npz", "rank-00000.extras"}
                cluster.save(2)
                _drain(node, 2)
                assert not bucket.call_s3("list_multipart_uploads", Bucket="runs").get("Uploads")
                assert ops.verify(f"{url}/job/{step_dir(2, 1)}").exit_code == 0
                assert cluster.restart() == 2
                cluster.save(3)
                _drain(node, 3)
                wait_for(lambda: not objects(), "the sweep", cluster)
        finally:
            Nursery.fresh()


def _drain(node: Node, step: int | None = None) -> None:
    """Ask for the newest step in storage, and wait for it where it is given."""
    with node.client() as client:
        client.request("drain")
    if step is not None:
        node.cluster.reach(step, level=3)


def test_38_a_daemon_told_to_end_without_storage_says_that_the_step_stays_in_memory(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)

        assert cluster.nodes[0].stop() == 0

        wait_for(lambda: cluster.nodes[0].events("ended"), "the end", cluster)
        assert "in memory only" in cluster.nodes[0].events("newest committed step")[-1]["where"]
        cluster.nodes[0].start()
        assert cluster.restart() == 1
