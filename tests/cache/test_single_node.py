"""One node with real processes: faults that need no second node (numbers are those of docs/cache/failures.md)."""

import ast
import json
import signal
import time
from pathlib import Path

import pytest

import ckptkit.cache
from ckptkit.faults.cluster.nodes import Cluster, wait_for


def test_a_step_is_committed_and_restored(tmp_path: Path) -> None:
    """Saved by two ranks, restored by new processes: every element and every extra."""
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        assert cluster.start() is None
        cluster.save(1)
        cluster.save(2)

        assert cluster.restart() == 2
        cluster.save(3)

        assert cluster.restart() == 3
        assert all(set(answer["sources"]) == {"slot"} for answer in cluster.answers)


def test_01_a_rank_killed_while_it_writes_tears_the_slot_and_the_step_before_stands(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        first, second = cluster.ranks
        first.do("save", step=2)
        slot = second.do("begin", step=2)["slot"]
        second.do("write", step=2, part=0.5)

        second.kill()

        node = cluster.nodes[0]
        wait_for(lambda: node.records()[slot]["state"] == "FREE", "the torn slot to be free", cluster)
        assert not first.do("wait", step=2, timeout=5)["reached"]
        assert cluster.restart() == 1


def test_02_a_rank_killed_after_its_seal_has_saved(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        first, second = cluster.ranks
        second.do("save", step=1)
        second.kill()

        first.do("save", step=1)

        cluster.reach(1)
        assert cluster.restart() == 1


def test_03_a_daemon_killed_while_a_rank_writes_adopts_the_slot(tmp_path: Path) -> None:
    """The mapping stays; the rank seals when the daemon is back, and the step commits."""
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.all("begin", step=1)
        cluster.nodes[0].kill()
        cluster.all("write", step=1)
        for rank in cluster.ranks:
            rank.tell("seal", step=1)

        cluster.nodes[0].start()

        assert all(rank.answer()["sealed"] for rank in cluster.ranks)
        cluster.reach(1)
        cluster.save(2)
        assert cluster.restart() == 2


def test_04_a_daemon_killed_after_the_seal_hashes_again(tmp_path: Path) -> None:
    """Sealed slots are evidence on tmpfs; nothing is asked of the ranks again."""
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.all("begin", step=1)
        cluster.all("write", step=1)
        cluster.nodes[0].process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        cluster.nodes[0].process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        cluster.all("seal", step=1)

        cluster.nodes[0].kill()
        cluster.nodes[0].start()

        cluster.reach(1)
        assert cluster.restart() == 1


def test_05_without_a_daemon_saves_are_skipped_and_training_goes_on(tmp_path: Path) -> None:
    """Also seals, after their time to reconnect; the skipped ones are counted when the daemon is back."""
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        (rank,) = cluster.ranks
        cluster.save(1)
        rank.do("begin", step=2)
        rank.do("write", step=2)
        cluster.nodes[0].kill()

        assert "away" in rank.do("seal", step=2)["why"]
        began = time.monotonic()
        assert rank.do("begin", step=3)["skipped"] == "away"
        assert time.monotonic() - began < 5
        assert rank.do("skipped")["skipped"] == {"away": 2}

        cluster.nodes[0].start()
        wait_for(lambda: rank.do("save", step=4).get("sealed"), "saving again", cluster)
        cluster.reach(4)
        assert cluster.nodes[0].metric("save_skipped_total", reason="away") >= 2


def test_12_a_straggler_that_seals_after_the_abort_is_refused(tmp_path: Path) -> None:
    """The save was given up meanwhile; its slot is free at the seal, and nothing is resurrected."""
    with Cluster(tmp_path, ranks=2, vote_s=3.0) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        first, second = cluster.ranks
        slot = second.do("begin", step=2)["slot"]
        second.do("write", step=2)
        first.do("begin", step=2)
        first.do("abort", step=2)
        assert not first.do("wait", step=2, timeout=10)["reached"]

        answer = second.do("seal", step=2)

        assert not answer["sealed"] and "aborted" in answer["why"]
        assert cluster.nodes[0].records()[slot]["state"] == "FREE"
        cluster.save(3)
        assert cluster.restart() == 3


def test_13_a_zombies_slot_is_set_aside_until_it_exits(tmp_path: Path) -> None:
    """A process of an earlier epoch may still write to its slot: nobody else gets it."""
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        (zombie,) = cluster.ranks
        slot = zombie.do("begin", step=2)["slot"]
        zombie.do("write", step=2, part=0.3)
        cluster.ranks = []
        node = cluster.nodes[0]

        assert cluster.restart() == 1
        assert node.records()[slot]["state"] == "QUARANTINED"
        zombie.do("write", step=2)
        refused = zombie.do("seal", step=2)
        assert not refused["sealed"] and "fenced" in refused["why"]
        cluster.save(2)
        assert node.records()[slot]["state"] == "QUARANTINED"
        assert zombie.do("begin", step=3)["skipped"] == "fenced"

        zombie.close()
        wait_for(lambda: node.records()[slot]["state"] != "QUARANTINED", "the slot to be free", cluster)
        assert cluster.restart() == 2


@pytest.mark.long
def test_13_a_zombie_is_killed_where_that_is_allowed(tmp_path: Path) -> None:
    slots = {"kill_zombies": True, "zombie_s": 1.0}
    with Cluster(tmp_path, ranks=1, slots=slots) as cluster:
        cluster.launch()
        cluster.start()
        (zombie,) = cluster.ranks
        zombie.do("begin", step=1)
        cluster.ranks = []

        cluster.restart()

        wait_for(lambda: not zombie.alive, "the zombie to be killed", cluster)
        zombie.close()


def test_17_without_a_replica_a_flipped_bit_is_found_and_the_step_before_is_restored(tmp_path: Path) -> None:
    """The readers find it; the version is passed over by all ranks together."""
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.save(2)
        (slot,) = cluster.nodes[0].holding(2, rank=1)
        cluster.nodes[0].flip(slot)

        assert cluster.restart() == 1
        assert all(answer["attempts"] >= 2 for answer in cluster.answers)


def test_17_the_scrubber_finds_it_before_anyone_reads(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.save(2)
        node = cluster.nodes[0]
        (slot,) = node.holding(2)
        node.flip(slot, offset=1_200_000)

        with node.client() as client:
            client.request("scrub")

        wait_for(
            lambda: node.metric("hash_mismatch_total", where="scrub"), "the scrubber to find it", cluster
        )
        assert cluster.restart() == 1


def test_19_bytes_that_changed_during_the_copy_abort_the_save(tmp_path: Path) -> None:
    """The device's digests are of what the tensors held; the daemon compares them with what arrived."""
    with Cluster(tmp_path, ranks=2, options={"digests": True}) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.all("begin", step=2)
        cluster.ranks[0].do("write", step=2)
        cluster.ranks[1].do("write", step=2, flip=5000)
        cluster.all("seal", step=2)

        assert not cluster.ranks[0].do("wait", step=2, timeout=10)["reached"]
        assert "leaf 0" in cluster.nodes[0].events("shard refused")[0]["reason"]
        cluster.save(3)
        assert cluster.restart() == 3


@pytest.mark.parametrize(
    "content", ["", "{", '{"slot": 0}', '{"slot": 0, "lane": "own/0", "state": "EATEN"}', None]
)
def test_21_a_slot_without_a_readable_record_is_free_and_others_stay(
    tmp_path: Path, content: str | None
) -> None:
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.save(2)
        node = cluster.nodes[0]
        (slot,) = node.holding(2)
        node.kill()
        record = node.folder / "slots" / f"{slot:04d}.json"
        record.unlink()
        if content is not None:
            record.write_text(content)

        node.start()

        assert cluster.restart() == 1
        cluster.save(2)


def test_22_slots_shrink_to_the_budget_and_below_that_the_cache_is_off(tmp_path: Path) -> None:
    """Two slots instead of three where three do not fit; a rank is told why it gets none, and lives."""
    with Cluster(tmp_path, ranks=2, slots={"budget": "5MiB"}) as cluster:
        cluster.launch()
        answers = _join(cluster)
        assert all(answer["code"] == 507 and "not enough memory" in answer["error"] for answer in answers)
        assert cluster.ranks[0].do("begin", step=1)["skipped"] == "stale"

    with Cluster(tmp_path / "second", ranks=2, slots={"budget": "8MiB"}) as cluster:
        cluster.launch()
        cluster.start()
        assert {len(slots) for slots in _lanes(cluster).values()} == {2}
        cluster.save(1)
        cluster.save(2)
        cluster.save(3)
        assert cluster.restart() == 3
        assert any("slots.budget allows" in line["detail"] for line in cluster.nodes[0].events("memory"))


def _join(cluster: Cluster) -> list[dict]:
    members = [{k: v for k, v in rank.member.items() if k != "max_epoch"} for rank in cluster.ranks]
    for rank in cluster.ranks:
        rank.tell("join", members=members, epoch=1, inc="0" * 31 + "1")
    return [rank.raw_answer() for rank in cluster.ranks]


def _lanes(cluster: Cluster) -> dict[str, list[int]]:
    layout = json.loads((cluster.nodes[0].folder / "layout.json").read_text())
    found: dict[str, list[int]] = {}
    for number, lane in layout["lanes"].items():
        found.setdefault(lane, []).append(int(number))
    return found


def test_34_only_monotonic_clocks_are_read() -> None:
    """A jump of the wall clock has no effect where it is not read: it is only in the log, for people, and in certificates."""
    folder = Path(ckptkit.cache.__file__).parent
    readers = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and (
                (
                    isinstance(node.value, ast.Name)
                    and node.value.id == "time"
                    and node.attr in ("time", "time_ns", "localtime")
                )
                or (
                    node.attr in ("now", "utcnow", "st_mtime", "st_mtime_ns")
                    and ast.unparse(node.value) not in ("self", "self.d", "d", "daemon", "self._daemon")
                )
            ):
                readers.add(path.name)

    assert readers == {"logs.py", "certs.py"}


def test_35_a_second_daemon_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1) as cluster:
        node = cluster.nodes[0]
        first = node.process
        assert first is not None
        node.process = None

        node.start(wait=False)

        assert node.process is not None and node.process.wait() == 2
        assert f"process {first.pid}" in node.tail()
        node.process = first
        cluster.launch()
        cluster.start()


@pytest.mark.long
def test_35_a_process_with_the_number_of_an_earlier_one_adopts_nothing(tmp_path: Path) -> None:
    """The start time tells them apart."""
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        (rank,) = cluster.ranks
        slot = rank.do("begin", step=2)["slot"]
        node = cluster.nodes[0]
        node.kill()
        record = node.folder / "slots" / f"{slot:04d}.json"
        changed = json.loads(record.read_text())
        changed["writer"]["starttime"] -= 1
        record.write_text(json.dumps(changed))

        node.start()

        wait_for(
            lambda: node.records()[slot]["state"] == "FREE",
            "the slot of a process that is gone to be free",
            cluster,
        )


@pytest.mark.long
def test_saves_of_a_slow_trainer_overlap_with_nothing_lost(tmp_path: Path) -> None:
    """Many steps in a row, slots used again and again; the last is what is restored."""
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        cluster.start()
        cluster.all("run", first=0, steps=20, pause_s=0.02)
        cluster.save(21)

        assert cluster.restart() == 21
        assert cluster.nodes[0].metric("commit_total", outcome="commit") >= 2


@pytest.mark.long
def test_nothing_is_in_memory_and_something_was_saved_is_an_error(tmp_path: Path) -> None:
    """A damaged only version is no fresh start by accident; `fresh` allows it."""
    with Cluster(tmp_path, ranks=1, restore_wait_s=3.0) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        cluster.nodes[0].flip(*cluster.nodes[0].holding(1))
        cluster.launch()
        (rank,) = cluster.ranks
        members = [{k: v for k, v in rank.member.items() if k != "max_epoch"}]

        refused = rank.try_("start", members=members, epoch=2, inc="2" * 32)

        assert "no whole checkpoint" in refused["error"]
        cluster.launch()
        assert cluster.start(fresh=True) is None


@pytest.mark.long
def test_a_larger_model_gets_larger_slots(tmp_path: Path) -> None:
    """The next epoch's plan counts; what is in memory stays restorable in between."""
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        before = json.loads((cluster.nodes[0].folder / "layout.json").read_text())["slot_bytes"]
        more = {"w": ((2048, 1024), "float32"), "b": ((300,), "float32")}

        cluster.launch(shapes=more)
        (rank,) = cluster.ranks
        members = [{k: v for k, v in rank.member.items() if k != "max_epoch"}]
        joined = rank.do("join", members=members, epoch=2, inc="2" * 32)

        assert joined["slot_bytes"] > before
        assert cluster.nodes[0].holding(1)
