"""Several nodes with real processes: copies, restores from peers and storage, drains (numbers are those of docs/cache/failures.md)."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from ckptkit import ops
from ckptkit.faults.cluster.nodes import Cluster, Node, wait_for
from ckptkit.faults.cluster.rank import Model, check
from ckptkit.formats.native import NativeFormat, step_dir
from ckptkit.stores.local import LocalStore


def test_06_a_lost_node_is_restored_from_its_clique(tmp_path: Path) -> None:
    """Its shards come over HTTP; the replaced node has them again afterwards."""
    with Cluster(tmp_path, nodes=2, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.save(2, level=2)
        second = cluster.nodes[1]

        second.lose()
        second.start()

        assert cluster.restart() == 2
        assert any(answer["sources"].get("peer") for answer in cluster.answers)
        wait_for(lambda: len(second.holding(2)) == 4, "copies on the replaced node", cluster)
        cluster.save(3, level=2)
        cluster.nodes[0].lose()
        cluster.nodes[0].start()
        assert cluster.restart() == 3


def test_06_a_job_on_a_new_node_alone_finds_the_others_through_storage(tmp_path: Path) -> None:
    """No member knows anything: who the nodes were is in the epoch's claim. Else an older durable step would be taken."""
    with Cluster(tmp_path, nodes=2, ranks=1, drain=True) as cluster:
        _save_a_durable_and_a_copied_step(cluster)
        cluster.nodes[0].lose()
        cluster.nodes[0].start()

        assert cluster.restart([cluster.nodes[0]]) == 2


def test_07_a_lost_clique_is_restored_from_storage(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, ranks=1, drain=True) as cluster:
        _save_a_durable_and_a_copied_step(cluster)

        for node in cluster.nodes:
            node.lose()
        for node in cluster.nodes:
            node.start()

        assert cluster.restart() == 1
        assert all(set(answer["sources"]) == {"durable"} for answer in cluster.answers)
        assert all(rank.member["max_epoch"] == 1 for rank in cluster.ranks), (
            "storage knows which epochs there were"
        )
        cluster.save(2, level=2)


def _save_a_durable_and_a_copied_step(cluster: Cluster) -> None:
    """Step 1 is in storage and in memory, step 2 in the memory of both nodes only."""
    cluster.launch()
    cluster.start()
    cluster.save(1)
    _drain(cluster, 1)
    cluster.save(2, level=2)


def _drain(cluster: Cluster, step: int) -> None:
    with cluster.nodes[0].client() as client:
        client.request("drain")
    cluster.reach(step, level=3)


def test_08_a_node_lost_before_its_copy_leaves_the_copied_step(tmp_path: Path) -> None:
    """Never a mix of two steps: the newer one has a shard nowhere."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        cluster.proxy.partition({"n0"}, {"n1"})
        for rank in cluster.ranks:
            rank.do("save", step=2)
        cluster.nodes[1].lose()
        cluster.proxy.heal()
        cluster.nodes[1].start()

        assert cluster.restart() == 1


def test_14_a_coordinator_of_an_earlier_epoch_writes_no_manifest(tmp_path: Path) -> None:
    """Epochs are claimed in storage; whoever finds a later one claimed leaves its step unfinished."""
    with Cluster(tmp_path, ranks=1, drain=True) as cluster:
        cluster.launch()
        cluster.start()
        claim = cluster.durable / "epochs" / "00000001"
        wait_for(claim.exists, "the claim", cluster)
        assert json.loads(claim.read_text()) == {
            "inc": cluster.inc,
            "members": {"n0": cluster.ranks[0].member["address"]},
        }
        (cluster.durable / "epochs" / "00000002").write_text('{"inc": "another"}')
        cluster.save(1)
        with cluster.nodes[0].client() as client:
            client.request("drain")

        wait_for(lambda: cluster.nodes[0].events("manifest not written"), "the refusal", cluster)
        assert "epoch 2 was claimed" in cluster.nodes[0].events("manifest not written")[0]["reason"]
        assert not list(cluster.durable.glob("step-*/manifest.json"))


def test_14_a_coordinator_that_was_cut_off_writes_no_manifest_beside_the_next_one(tmp_path: Path) -> None:
    """The job was started again elsewhere while its old nodes go on: what they made durable before is restored, nothing of theirs after."""
    url = str(tmp_path / "durable")
    with (
        Cluster(tmp_path / "old", ranks=2, url=url) as old,
        Cluster(tmp_path / "new", ranks=2, url=url) as new,
    ):
        run = tmp_path / "durable" / "job"
        old.launch()
        old.start()
        old.save(1)
        _drain(old, 1)
        old.save(2)

        new.launch()
        assert new.start() == 1
        assert (old.epoch, new.epoch) == (1, 2)
        wait_for((run / "epochs" / "00000002").exists, "the claim", new)
        old.save(3)
        with old.nodes[0].client() as client:
            client.request("drain")

        zombie = old.nodes[0]
        wait_for(lambda: zombie.events("manifest not written"), "the refusal", old)
        assert "epoch 2 was claimed" in zombie.events("manifest not written")[0]["reason"]
        assert (run / step_dir(3, 1)).is_dir(), "it had written its shards"
        new.save(2)
        _drain(new, 2)
        assert {path.parent.name for path in run.glob("*/manifest.json")} == {step_dir(1, 1), step_dir(2, 2)}
        new.nodes[0].lose()
        new.nodes[0].start()
        assert new.restart() == 2
        assert {answer["epoch"] for answer in new.answers} == {2}


@pytest.mark.long
def test_15_two_starts_with_one_epoch(tmp_path: Path) -> None:
    """The first incarnation has it; the second is told, and takes a higher one. Nothing of the two is mixed."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        first = cluster.ranks
        cluster.ranks = []
        cluster.launch()
        members = [{k: v for k, v in rank.member.items() if k != "max_epoch"} for rank in cluster.ranks]
        for rank in cluster.ranks:
            assert rank.try_("join", members=members, epoch=1, inc="5" * 32)["code"] == 409

        assert cluster.start() == 1
        assert cluster.epoch == 2
        assert all(rank.do("begin", step=2)["skipped"] == "fenced" for rank in first)
        for rank in first:
            rank.close()


@pytest.mark.long
def test_16_one_step_of_two_epochs_is_two_versions(tmp_path: Path) -> None:
    """The later epoch's is restored, never a mix."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(2, level=2)
        assert cluster.restart() == 2
        cluster.ranks[0].do("save", step=2)
        assert cluster.restart() == 2
        assert {answer["epoch"] for answer in cluster.answers} == {1}, "one rank's part makes no version"
        cluster.save(2, level=2)

        assert cluster.restart() == 2
        assert {answer["epoch"] for answer in cluster.answers} == {3}


def test_17_a_bad_leaf_is_repaired_from_the_copy(tmp_path: Path) -> None:
    """Found by the scrubber, replaced in place, read again; the slot counts again."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        node = cluster.nodes[0]
        (slot,) = node.holding(1, rank=0)
        before = (node.folder / "slots" / f"{slot:04d}.dat").read_bytes()
        node.flip(slot)

        with node.client() as client:
            client.request("scrub")

        data = node.folder / "slots" / f"{slot:04d}.dat"
        wait_for(lambda: data.read_bytes() == before, "the leaf to be repaired", cluster)
        wait_for(lambda: not node.records()[slot]["damaged"], "the slot to be sound", cluster)
        assert node.metric("hash_mismatch_total", where="scrub") == 1
        assert cluster.restart() == 1


def test_17_a_reader_takes_a_bad_leaf_from_the_copy(tmp_path: Path) -> None:
    """Leaf by leaf: the rest still comes from the slot, and the step is not given up."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        node = cluster.nodes[0]
        node.flip(*node.holding(1, rank=0))

        assert cluster.restart() == 1
        assert cluster.answers[0]["attempts"] == 1
        assert node.metric("hash_mismatch_total", where="restore") >= 1


@pytest.mark.long
def test_20_a_cell_that_stays_bad_retires_the_slot(tmp_path: Path) -> None:
    """A second bad leaf after a repair: the slot is out of use, and what it held is copied again."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        node = cluster.nodes[0]
        (slot,) = node.holding(1, rank=0)
        for bad in range(2):
            node.flip(slot)
            with node.client() as client:
                client.request("scrub")

            def seen(bad: int = bad) -> bool:
                return node.records()[slot]["strikes"] > bad or node.records()[slot]["state"] == "RETIRED"

            wait_for(seen, "the scrub", cluster)

        wait_for(lambda: node.records()[slot]["state"] == "RETIRED", "the slot to be retired", cluster)
        cluster.save(2, level=2)
        assert cluster.restart() == 2


def test_18_a_bit_flipped_on_the_wire_is_fetched_again(tmp_path: Path) -> None:
    """And a connection that is cut in the middle: the copy is right all the same."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.proxy.flip = {"n0": 2, "n1": 2}
        cluster.proxy.cut_after = {"n0": 600_000}

        cluster.save(1, level=2)

        assert sum(node.metric("hash_mismatch_total", where="fetch") for node in cluster.nodes) >= 1
        cluster.nodes[1].lose()
        cluster.nodes[1].start()
        assert cluster.restart() == 1


@pytest.mark.long
def test_23_copies_are_given_back_under_pressure_and_own_slots_never(tmp_path: Path) -> None:
    """The level falls and comes back; what ranks have mapped stays."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        node = cluster.nodes[0]
        own = node.holding(1, rank=0)

        with node.client() as client:
            assert client.request("evict", slots=10)["released"] == 2

        assert node.holding(1, rank=0) == own
        assert not node.holding(1, rank=1)
        assert node.metric("pressure_actions_total", action="release") == 2
        cluster.save(2)
        cluster.nodes[1].lose()
        cluster.nodes[1].start()


@pytest.mark.long
def test_25_a_hanging_peer_costs_the_copy_not_the_saves(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, ranks=1, replicas={"timeout_s": 20.0, "stall_s": 5.0}) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        cluster.proxy.rate = {"n1": 200_000.0}  # votes get through, shards take for ever

        for step in range(2, 6):
            cluster.all("save", step=step, tries=100)
        wait_for(lambda: cluster.nodes[0].metric("replica_degraded"), "the copies to be given up", cluster)

        cluster.proxy.heal()
        wait_for(lambda: not cluster.nodes[0].metric("replica_degraded"), "the copies to be made", cluster)
        cluster.save(10, level=2)


def test_26_a_partition_commits_nothing_and_heals(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        cluster.proxy.partition({"n0"}, {"n1"})
        cluster.all("save", step=2)
        assert not cluster.ranks[0].do("wait", step=2, timeout=2)["reached"]

        cluster.proxy.heal()

        cluster.reach(2, level=2)


def test_32_another_layout_after_a_node_is_gone(tmp_path: Path) -> None:
    """Four ranks on two nodes, then three on one: all shards are there, the values equal."""
    with Cluster(tmp_path, nodes=2, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        cluster.nodes[1].lose()

        assert cluster.restart(cluster.nodes[:1], per_node=3) == 1
        cluster.save(2)
        assert cluster.restart(cluster.nodes[:1], per_node=1) == 2


@pytest.mark.long
def test_a_shard_of_a_node_that_left_is_still_read_there(tmp_path: Path) -> None:
    """Two nodes, then one of them: what only the former member has comes from it."""
    with Cluster(tmp_path, nodes=2, ranks=1, replicas={"count": 0}) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)

        assert cluster.restart(cluster.nodes[:1]) == 1
        assert set(cluster.answers[0]["sources"]) == {"slot", "peer"}


def test_drained_steps_are_native_checkpoints(tmp_path: Path) -> None:
    """Every tool reads them; `latest` finds the newest; the values are those that were saved."""
    with Cluster(tmp_path, nodes=2, ranks=2, drain=True) as cluster:
        cluster.config["drain"] = {"every": 2}
        for node in cluster.nodes:
            node.stop()
            node.start()
        cluster.launch()
        cluster.start()
        for step in range(1, 5):
            cluster.save(step)
            if step % 2 == 0:
                cluster.reach(step, level=3)

        steps = ops.steps(str(cluster.durable))
        assert [(row.step, row.state) for row in steps.steps] == [(2, "whole"), (4, "whole")]
        assert ops.latest(str(cluster.durable)).endswith(step_dir(4, 1))
        assert ops.verify(f"{cluster.durable}/{step_dir(4, 1)}").exit_code == 0
        store = LocalStore(cluster.durable / step_dir(2, 1))
        assert NativeFormat().read(store).facts["incarnation"] == cluster.inc
        check(store, Model(4, 0).truth, 2)
        assert not list(cluster.durable.glob("**/.*"))


def test_04_a_daemon_killed_while_it_drains_goes_on(tmp_path: Path) -> None:
    """Ranks that were written are not written again; the step becomes whole."""
    with Cluster(tmp_path, nodes=1, ranks=3, drain=True) as cluster:
        cluster.config["drain"] = {"max_bps": 1_500_000}
        node = cluster.nodes[0]
        node.stop()
        node.start()
        cluster.launch()
        cluster.start()
        cluster.save(1)
        with node.client() as client:
            client.request("drain")
        folder = cluster.durable / step_dir(1, 1)
        wait_for(lambda: list(folder.glob("rank-*.digests")), "a rank to be durable", cluster)
        assert not (folder / "manifest.json").exists()
        done = {
            path.name: path.stat().st_mtime_ns
            for path in folder.glob("rank-*.safetensors")
            if path.with_suffix(".digests").exists()
        }

        node.kill()
        node.start()

        cluster.reach(1, level=3)
        assert {name: (folder / name).stat().st_mtime_ns for name in done} == done
        assert ops.verify(str(folder)).exit_code == 0


@pytest.mark.long
def test_27_a_drain_waits_for_storage_that_is_away(tmp_path: Path) -> None:
    """Failures are counted and tried again; memory's levels do not care."""
    with Cluster(tmp_path, ranks=1, drain=True) as cluster:
        cluster.launch()
        cluster.start()
        shutil.rmtree(tmp_path / "durable", ignore_errors=True)
        (tmp_path / "durable").write_bytes(b"in the way")
        cluster.save(1)
        with cluster.nodes[0].client() as client:
            client.request("drain")
        wait_for(lambda: cluster.nodes[0].metric("drain_retries_total") >= 2, "tries", cluster)
        cluster.save(2, level=2)

        (tmp_path / "durable").unlink()

        wait_for(
            lambda: ops.steps(str(cluster.durable)).steps if cluster.durable.exists() else [],
            "the drain",
            cluster,
        )
        cluster.reach(2, level=3)  # the newest that was asked for; the first was overtaken


@pytest.mark.long
def test_31_a_durable_file_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1, drain=True) as cluster:
        cluster.launch()
        cluster.start()
        for step in (1, 2):
            cluster.save(step)
            _drain(cluster, step)
        data = cluster.durable / step_dir(2, 1) / "rank-00000.safetensors"
        content = bytearray(data.read_bytes())
        content[100_000] ^= 1
        data.write_bytes(content)
        cluster.nodes[0].lose()
        cluster.nodes[0].start()

        assert cluster.restart() == 1
        assert cluster.answers[0]["attempts"] == 2


@pytest.mark.long
def test_33_a_step_that_two_epochs_called_bad_is_avoided(tmp_path: Path) -> None:
    """But not when it is the last one left."""
    with Cluster(tmp_path, nodes=2, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        cluster.save(2, level=2)
        for _ in range(2):
            assert cluster.restart() == 2
            cluster.ranks[0].do("mark_bad", epoch=1, step=2)

            def known(epoch: int = cluster.epoch) -> bool:
                return all(epoch in _marks(node) for node in cluster.nodes)

            wait_for(known, "the mark everywhere", cluster)

        assert cluster.restart() == 1
        cluster.ranks[0].do("mark_bad", epoch=1, step=1)
        assert cluster.restart() == 1


def _marks(node: Node) -> list[int]:
    """Epochs that have marked a version as bad, as a node knows them."""
    path = node.folder / "banned.json"
    return [mark["epoch"] for mark in json.loads(path.read_text())["marks"]] if path.exists() else []


@pytest.mark.long
def test_a_banned_step_is_not_restored_and_stays_banned(tmp_path: Path) -> None:
    """The operator's ban holds on all nodes, and over the loss of all memory."""
    with Cluster(tmp_path, nodes=2, ranks=1, drain=True) as cluster:
        cluster.launch()
        cluster.start()
        for step in (1, 2):
            cluster.save(step, level=2)
            _drain(cluster, step)
        with cluster.nodes[1].client() as client:
            client.request("ban", epoch=1, step=1, newer=True)
        wait_for(lambda: (cluster.durable / "banned.json").exists(), "the ban to be durable", cluster)

        assert cluster.restart() == 1
        for node in cluster.nodes:
            node.lose()
        for node in cluster.nodes:
            node.start()
        assert cluster.restart() == 1


def test_38_sigterm_drains_the_newest_step(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, ranks=1, drain=True) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.save(2, level=2)
        for node in cluster.nodes:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)

        assert [node.process.wait() for node in cluster.nodes if node.process] == [0, 0]

        assert ops.latest(str(cluster.durable)).endswith(step_dir(2, 1))
        assert cluster.nodes[0].events("newest committed step")[-1]["where"] == "durable"


@pytest.mark.long
def test_38_a_normal_end_drains_too(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1, ranks=1, drain=True) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(3)
        cluster.ranks[0].do("finish")

        assert cluster.nodes[0].process is not None and cluster.nodes[0].process.wait() == 0
        assert ops.latest(str(cluster.durable)).endswith(step_dir(3, 1))


@pytest.mark.long
def test_retention_keeps_the_newest_pins_and_multiples(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1, drain=True) as cluster:
        cluster.config["drain"] = {"keep_last": 2, "keep_every": 4}
        node = cluster.nodes[0]
        node.stop()
        node.start()
        cluster.launch()
        cluster.start()
        for step in range(3, 9):
            cluster.save(step)
            _drain(cluster, step)
            if step == 5:
                with node.client() as client:
                    client.request("pin", step=5)

        kept = {step_dir(step, 1) for step in (4, 5, 7, 8)}
        wait_for(lambda: {path.name for path in cluster.durable.glob("step-*")} == kept, "retention", cluster)
        with node.client() as client:
            client.request("unpin", step=5)
        assert {row["step"] for row in node.versions() if row["durable"]} == {4, 5, 7, 8}


@pytest.mark.long
def test_a_step_drained_to_an_object_store_is_whole(tmp_path: Path) -> None:
    """A store without renames: uploads, compared; the manifest last."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from ckptkit.faults.cluster.objects import s3_server

    with s3_server() as (url, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        from ckptkit.faults.cluster.nursery import Nursery

        Nursery.fresh()  # it must know the environment
        try:
            with Cluster(tmp_path, nodes=2, ranks=1, url=url) as cluster:
                cluster.launch()
                cluster.start()
                cluster.save(1)
                _drain(cluster, 1)
                for node in cluster.nodes:
                    node.lose()
                for node in cluster.nodes:
                    node.start()
                assert cluster.restart() == 1
                assert ops.latest(f"{url}/job").endswith(step_dir(1, 1))
        finally:
            Nursery.fresh()


@pytest.mark.parametrize("replaced", ["coordinator", "other"])
def test_06_a_node_that_lost_its_memory_learns_where_former_members_are(
    tmp_path: Path, replaced: str
) -> None:
    """Only a node that is no member any more has some shards; one that knows nothing takes part, or decides."""
    with Cluster(tmp_path, nodes=3, ranks=1, replicas={"count": 0}) as cluster:
        gone, other, left = cluster.nodes
        cluster.launch([left, other])
        cluster.start()
        cluster.save(1)
        gone.lose()
        gone.start()

        members = [gone, other] if replaced == "coordinator" else [other, gone]
        assert cluster.restart(members) == 1
        assert all("peer" in answer["sources"] for answer in cluster.answers)
