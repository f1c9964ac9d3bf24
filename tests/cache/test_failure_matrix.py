"""Rows of the failure matrix that the protocol decides by itself; each test is named by its row.

A row is told with the real state machines in a small `World`: what fails, and what must stand afterwards. Rows about sockets, files,
memory and processes are tested with real daemons elsewhere.
"""

from collections.abc import Callable

import pytest

from ckptkit.cache import events as ev
from ckptkit.cache.messages import Ban, Bans, Owner, Record, RestoreDecision, Version, Vote
from ckptkit.cache.settings import Settings
from tests.cache.scenarios import all_train, cluster, fair, record, replicated, saving
from tests.cache.world import World

QUICK = Settings(vote_s=20, replica_s=30, inventory_s=15, zombie_s=10)


def newest(world: World) -> int:
    """The newest committed step, 0 where there is none."""
    found = record(world)
    return found.newest.step if found is not None and found.newest is not None else 0


def kept(world: World) -> int:
    found = record(world)
    return found.keep.step if found is not None and found.keep is not None else 0


def quiet(world: World, rounds: int = 3, until: Callable[[World], bool] = lambda world: False) -> None:
    """Messages, operations and ticks, without the ranks doing anything."""
    for _ in range(rounds):
        for _ in range(20):
            for name, host in world.hosts.items():
                for op in list(host.ops):
                    if op in host.ops:
                        world.finish(name, op)
            while world.bag:
                world.deliver(*world.bag.pop(0))
        world.now += 3
        tick(world)
        if until(world):
            return


def tick(world: World) -> None:
    for name, host in world.hosts.items():
        world.handle(name, ev.Tick())
        if host.coordinator is not None:
            world.handle(name, ev.Tick(), coordinator=True)


def start_daemons(world: World) -> None:
    for name, host in world.hosts.items():
        if host.node is None:
            world.boot(name)


def begin(world: World) -> None:
    for process in world.processes:
        if process.session is not None and process.step not in process.slots:
            world.act(process, "begin")


def seal(world: World) -> None:
    for process in world.processes:
        if process.session is not None and process.step in process.slots:
            world.act(process, "seal")


def save(world: World) -> int:
    """One save of all ranks, until everything is quiet. Gives its step."""
    begin(world)
    step = world.processes[-1].step
    seal(world)
    quiet(world)
    world.check()
    return step


def restart(world: World, names: list[str] | None = None, **how: object) -> Version | None:
    """The job starts again, until all ranks train. Gives what was restored."""
    start_daemons(world)
    world.new_epoch(names or list(world.hosts), **how)  # type: ignore[arg-type]
    fair(world, all_train)
    found = record(world)
    assert found is not None
    return found.restored


def saved(hosts: int = 2, ranks: int = 2, own: int = 3, saves: int = 1, **how: object) -> World:
    """A cluster with some whole saves, all with their copies."""
    world = cluster(hosts, ranks, own, settings=QUICK, **how)  # type: ignore[arg-type]
    for _ in range(saves):
        save(world)
    return world


def test_row_1_rank_killed_during_the_copy() -> None:
    world = saved()
    begin(world)

    world.kill(world.processes[0])
    seal(world)
    quiet(world)

    assert newest(world) == 1
    assert record(world).aborted == (2,)  # type: ignore[union-attr]
    assert all(slot.state != "WRITING" for slot in world.hosts["n0"].node.table)  # type: ignore[union-attr]
    before = world.counts.get("answer 409", 0)
    world.act(world.processes[1], "begin")
    assert world.counts["answer 409"] == before + 1, "nothing more is copied for nothing on that node"
    restored = restart(world)
    assert restored is not None and restored.step == 1


def test_row_2_rank_killed_after_seal() -> None:
    world = saved()
    begin(world)
    seal(world)

    world.kill(world.processes[0])
    quiet(world)

    assert newest(world) == 2


def test_row_3_daemon_killed_while_a_rank_writes() -> None:
    world = saving(2, 2, own=3)

    world.crash("n1")
    world.boot("n1")
    for process in world.processes:
        if process.session is None:
            world.act(process, "join")
    seal(world)
    quiet(world)

    assert newest(world) == 1


def test_row_4_daemon_killed_while_hashing_and_replicating() -> None:
    world = saved()
    begin(world)
    seal(world)
    assert any(op[0] == "hash" for op in world.hosts["n1"].ops)

    world.crash("n1")
    world.boot("n1")
    fair(world, lambda w: any(op[0] == "pull" for op in w.hosts["n1"].ops))
    world.crash("n1")
    world.boot("n1")
    quiet(world)

    assert (newest(world), kept(world)) == (2, 2)


def test_row_4_daemon_killed_while_draining() -> None:
    world = cluster(2, 2, 3, settings=Settings(drain_every=1))
    fair(world, lambda w: any(op[0] == "drain" for op in w.hosts["n1"].ops))

    world.crash("n1")
    world.boot("n1")
    quiet(world, until=lambda w: bool(w.past.manifests))

    assert {version.step for version in world.past.manifests} == {1}


def test_row_6_power_loss_of_a_node_whose_shards_have_copies() -> None:
    world = saved(hosts=4, saves=2)

    world.lose("n1")
    restored = restart(world)

    assert restored is not None and restored.step == 2
    decision = world.hosts["n0"].node.restore  # type: ignore[union-attr]
    assert decision is not None and "n1" not in decision.sources[2]


def test_row_6_what_failed_to_land_on_a_replaced_node_is_fetched_again() -> None:
    """Else the restored step would never have its copies again."""
    world = saved(hosts=2, saves=2)
    world.lose("n1")
    start_daemons(world)
    world.new_epoch(list(world.hosts))
    fair(world, lambda w: any(op[0] == "pull" for op in w.hosts["n1"].ops), hold="pull")
    for op in [op for op in world.hosts["n1"].ops if op[0] == "pull"]:
        world.finish("n1", op, fails=True)
    fair(world, all_train)

    quiet(world)

    restored = record(world).restored  # type: ignore[union-attr]
    assert restored is not None and kept(world) == restored.step == 2
    assert len(world.hosts["n1"].node.table.holding(restored)) == 4  # type: ignore[union-attr]


def test_row_6_a_member_that_is_late_is_waited_for() -> None:
    """However long: the step whose shards it has was committed, and nobody trains without it anyway."""
    world = saved(hosts=2, ranks=1, saves=2)
    begin(world)
    seal(world)
    fair(world, lambda w: newest(w) == 3)  # committed, not copied yet
    world.new_epoch(["n0", "n1"])
    first, late = world.processes
    world.act(first, "join")
    for _ in range(4):
        quiet(world)
        world.now += 60
    coordinator = world.hosts["n0"].coordinator
    assert coordinator is not None
    assert coordinator.restore is None and coordinator.restoring.waiting == ["n1"]
    assert world.counts["restore_waits"] >= 3

    world.act(late, "join")
    fair(world, all_train)

    assert record(world).restored.step == 3  # type: ignore[union-attr]


def test_row_6_a_committed_step_that_is_lost_is_named() -> None:
    """The node that alone had a shard is no member any more, and does not answer: said in the decision, after all the time there is."""
    world = saved(hosts=3, ranks=1, copies=0, saves=2)
    world.crash("n2")
    world.new_epoch(["n0", "n1"])
    for process in world.processes:
        world.act(process, "join")
    quiet(world, 1)
    coordinator = world.hosts["n0"].coordinator
    assert coordinator is not None and coordinator.restore is None, "the former member may still answer"

    world.now += 15
    tick(world)

    assert coordinator.restore is not None
    (why,) = coordinator.restore.passed_over
    assert "step 2 of epoch 1 was committed and is passed over: no node that answered has shard 2" in why
    assert "nodes n2, members before, did not answer" in why and why in coordinator.restore.error


def test_row_7_power_loss_of_a_whole_clique() -> None:
    world = cluster(2, 1, 3, settings=Settings(drain_every=2))
    for _ in range(3):
        save(world)
    assert {version.step for version in world.past.manifests} == {2}

    world.lose("n0")
    world.lose("n1")
    restored = restart(world)

    assert restored is not None and restored.step == 2


def test_row_8_node_lost_between_seal_and_copy() -> None:
    world = saved(saves=2)
    begin(world)
    seal(world)
    fair(world, lambda w: newest(w) == 3)
    assert kept(world) == 2

    world.lose("n1")
    restored = restart(world)

    assert restored is not None and restored.step == 2


def test_row_9_coordinator_restarts_between_votes() -> None:
    world = saved()
    begin(world)
    seal(world)
    fair(world, lambda w: any(isinstance(message, Vote) for _, message in w.bag))
    world.deliver(*next(pair for pair in world.bag if isinstance(pair[1], Vote)))

    world.crash("n0")
    world.boot("n0")
    quiet(world)

    assert newest(world) == 2


def test_row_10_coordinator_gone_after_all_voted() -> None:
    """Its daemon for good: the next epoch takes the version by evidence. Its node: the one that has its copies."""
    for lost, step in ((False, 2), (True, 1)):
        world = saved()
        begin(world)
        seal(world)
        for name in world.hosts:
            for op in list(world.hosts[name].ops):
                world.finish(name, op)
        world.bag.clear()

        (world.lose if lost else world.crash)("n0")
        restored = restart(world)

        assert restored is not None and restored.step == step


@pytest.mark.parametrize("fault", ["lost", "doubled", "late"])
def test_row_11_votes_lost_doubled_or_late(fault: str) -> None:
    world = saved()
    begin(world)
    seal(world)
    fair(world, lambda w: sum(isinstance(message, Vote) for _, message in w.bag) == 2)
    first, second = (pair for pair in world.bag if isinstance(pair[1], Vote))

    if fault == "lost":
        world.bag.remove(first)
    elif fault == "doubled":
        for _ in range(3):
            world.deliver(*first)
        assert newest(world) == 1, "one node's votes are one vote"
    else:
        world.bag.remove(first)
        world.deliver(*second)
        world.deliver(*first)
    quiet(world)

    assert newest(world) == 2


def test_row_12_straggler_seals_after_abort() -> None:
    world = saved()
    begin(world)
    straggler = world.processes[-1]
    slot = straggler.slots[straggler.step]
    world.act(world.processes[0], "abort")
    quiet(world)
    assert world.hosts["n1"].disk.slots[slot].state == "WRITING", "its owner may still write to it"

    before = world.counts.get("answer 409", 0)
    world.act(straggler, "seal")
    quiet(world)

    assert world.counts["answer 409"] == before + 1
    assert world.hosts["n1"].disk.slots[slot].state == "FREE"
    assert newest(world) == 1


def test_row_13_zombie_keeps_its_slot() -> None:
    world = saved()
    begin(world)
    zombie = world.processes[0]
    slot = zombie.slots[zombie.step]

    world.new_epoch(list(world.hosts), zombies=1)
    for process in world.processes[1:]:
        world.act(process, "join")
    fair(world, lambda w: all(p.trained for p in w.processes if p is not zombie))
    for _ in range(4):
        begin(world)
        world.scribble(zombie, slot)
        seal(world)
        quiet(world)
    assert world.hosts["n0"].disk.slots[slot].state == "QUARANTINED"
    world.kill(zombie)
    quiet(world)

    assert world.hosts["n0"].disk.slots[slot].state != "QUARANTINED"


def test_row_14_coordinator_of_an_older_epoch_is_not_heard() -> None:
    world = saved()
    old = world.hosts["n0"].coordinator
    assert old is not None and old.record is not None
    restart(world)
    before = world.hosts["n1"].node.record  # type: ignore[union-attr]

    world.deliver("n1", old.record)
    world.deliver("n1", RestoreDecision(old.epoch.epoch, old.epoch.inc, 9))

    assert world.hosts["n1"].node.record == before  # type: ignore[union-attr]


def test_row_15_two_incarnations_take_the_same_epoch() -> None:
    world = World(2, 1, 3, 1, QUICK)
    world.new_epoch(["n0", "n1"], number=1)
    first = world.processes[0]
    world.act(first, "join")
    world.new_epoch(["n0", "n1"], number=1, zombies=2)
    for process in world.processes[2:]:
        world.act(process, "join")

    loser, winner = world.processes[2], world.processes[3]
    assert loser.fenced and world.hosts["n0"].node.epoch == first.epoch  # type: ignore[union-attr]
    assert not winner.fenced and world.hosts["n1"].node.epoch == winner.epoch  # type: ignore[union-attr]
    assert restart(world) is None, "neither committed anything"


def test_row_16_the_same_step_saved_by_two_epochs() -> None:
    world = saved(saves=2)
    first = record(world)
    for host in world.hosts.values():  # the second save is not to be taken, so that its step comes again
        host.disk.bans = Bans((Ban(1, 2, 1, 2),))
        world.crash(host.name)
    restored = restart(world)
    assert restored is not None and restored.step == 1

    step = save(world)
    again = restart(world)

    assert step == 2 and first is not None and first.newest is not None and first.newest.step == 2
    assert again is not None and (again.epoch, again.step) == (2, 2)


def test_row_17_bit_flip_in_a_sealed_slot() -> None:
    """Found by the scrubber, it is repaired from the copy; found by a reader without a copy, the step before is taken."""
    world = saved(saves=2)
    slot = next(
        s
        for s, r in world.hosts["n0"].disk.slots.items()
        if r.version and r.version.step == 2 and r.lane != "replica"
    )
    world.flip("n0", slot)
    world.handle("n0", ev.Scrubbed(slot, world.hosts["n0"].disk.slots[slot].seq, (0,)))
    assert world.hosts["n0"].node.table[slot].damaged  # type: ignore[union-attr]
    quiet(world)
    assert not world.hosts["n0"].node.table[slot].damaged  # type: ignore[union-attr]

    alone = saved(saves=2, copies=0)
    slot = next(s for s, r in alone.hosts["n0"].disk.slots.items() if r.version and r.version.step == 2)
    alone.flip("n0", slot)
    restored = restart(alone)
    assert restored is not None and restored.step == 1


def test_row_18_copy_that_does_not_match_is_never_sealed() -> None:
    world = saved()
    begin(world)
    seal(world)
    fair(world, lambda w: any(op[0] == "pull" for op in w.hosts["n1"].ops))
    op = next(op for op in world.hosts["n1"].ops if op[0] == "pull")

    world.finish("n1", op, fails=True)

    assert world.hosts["n1"].disk.slots[op[1].slot].state == "FREE"
    quiet(world)
    assert kept(world) == 2, "it is offered again"


def test_row_19_bytes_differ_from_the_device_digests() -> None:
    world = saved()
    begin(world)

    world.act(world.processes[0], "seal", fails=True)
    seal(world)
    quiet(world)

    assert record(world).aborted == (2,)  # type: ignore[union-attr]
    assert save(world) == 3 and newest(world) == 3


def test_row_20_memory_that_is_bad_again_is_retired() -> None:
    world = saved()
    host = world.hosts["n0"]
    slot = next(s for s, r in host.disk.slots.items() if r.state == "SEALED")
    world.flip("n0", slot)
    world.handle("n0", ev.Scrubbed(slot, host.disk.slots[slot].seq, (0,)))
    quiet(world)

    world.handle("n0", ev.Scrubbed(slot, host.disk.slots[slot].seq, (0,)))
    assert host.disk.slots[slot].state == "RETIRED"
    world.crash("n0")
    world.boot("n0")

    assert host.node is not None and host.node.table[slot].state == "RETIRED"


def test_row_21_slot_without_a_readable_record_is_free() -> None:
    world = saved()
    host = world.hosts["n0"]
    world.crash("n0")
    sealed = [slot for slot, found in host.disk.slots.items() if found.state == "SEALED"]

    del host.disk.slots[sealed[0]]
    world.boot("n0")

    assert host.node is not None and host.node.table[sealed[0]].state == "FREE"
    assert all(host.node.table[slot].state == "SEALED" for slot in sealed[1:])


def test_row_23_pressure_releases_copies_only() -> None:
    world = saved(saves=2)
    host = world.hosts["n0"]
    own = [
        slot for slot, found in host.disk.slots.items() if found.lane != "replica" and found.state == "SEALED"
    ]

    world.handle("n0", ev.Pressure(2, release=99))

    assert all(host.disk.slots[slot].state == "SEALED" for slot in own)
    assert all(found.state == "FREE" for found in host.disk.slots.values() if found.lane == "replica")
    quiet(world, 1)
    assert record(world).degraded, "the loss of copies is said"  # type: ignore[union-attr]


def test_row_25_peer_that_hangs() -> None:
    world = saved()
    for _ in range(12):
        begin(world)
        seal(world)
        for _ in range(4):
            for name in world.hosts:
                for op in list(world.hosts[name].ops):
                    if op[0] != "pull":
                        world.finish(name, op)
            while world.bag:
                world.deliver(*world.bag.pop(0))
            world.now += 5
            tick(world)

    assert record(world).degraded and kept(world) == 1  # type: ignore[union-attr]
    assert newest(world) >= 4, "saves go on"
    quiet(world, 6)
    assert kept(world) == newest(world) and not record(world).degraded  # type: ignore[union-attr]


def test_row_26_partition_from_the_coordinator() -> None:
    world = saved()
    begin(world)
    seal(world)
    for _ in range(3):
        for name in world.hosts:
            for op in list(world.hosts[name].ops):
                world.finish(name, op)
        world.bag = [pair for pair in world.bag if pair[0] == getattr(pair[1], "node", "n0")]
        while world.bag:
            world.deliver(*world.bag.pop(0))
        world.now += 3
        tick(world)
    assert newest(world) == 1
    assert any(
        r.version and r.version.step == 2 and r.state == "SEALED"
        for r in world.hosts["n1"].disk.slots.values()
    )

    quiet(world)

    assert newest(world) == 2


def test_row_27_store_down_for_hours() -> None:
    """Saves and copies go on, one version waits; it is the newest one when the store comes back."""
    world = cluster(2, 1, 3, settings=Settings(drain_every=2))
    for _ in range(300):
        begin(world)
        seal(world)
        for name in world.hosts:
            for op in list(world.hosts[name].ops):
                world.finish(name, op, fails=op[0] == "drain")
        while world.bag:
            world.deliver(*world.bag.pop(0))
        world.now += 5
        tick(world)
    assert kept(world) > 200 and not world.past.manifests
    assert record(world).drain.step > 200  # type: ignore[union-attr]

    quiet(world, 6)

    assert max(version.step for version in world.past.manifests) > 200


def test_row_31_durable_shard_damaged_after_commit() -> None:
    world = cluster(2, 1, 3, settings=Settings(drain_every=1))
    for _ in range(2):
        save(world)
    world.lose("n0")
    world.lose("n1")
    last = max(world.past.manifests)
    world.past.durable[last, 0] = ("deleted",)
    del world.past.manifests[last]  # what listing says of a version whose shard is gone

    restored = restart(world)

    assert restored is not None and restored.step == last.step - 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_row_32_other_layout_with_one_node_gone(ranks: int) -> None:
    world = saved(hosts=4, ranks=2, saves=2)
    world.lose("n3")

    restored = restart(world, ["n0", "n1", "n2"], ranks=ranks)

    assert restored is not None and restored.step == 2  # bytes are compared as ranks load
    quiet(world)
    assert save(world) == 3 and newest(world) == 3
    quiet(world)
    assert kept(world) == 3


def test_row_33_marked_bad_in_two_epochs() -> None:
    world = saved(saves=2)
    for count in (1, 2):
        restored = restart(world)
        assert restored is not None and restored.step == 2, "one mark is not enough"
        process = world.processes[0]
        assert process.session is not None
        call = ev.Called(process.session, process.owner, ev.MarkBad(restored))
        world.handle(process.host, call)
        quiet(world, 1)
        assert count < 2 or world.hosts["n1"].node.bans.soft(restored)  # type: ignore[union-attr]

    restored = restart(world)
    assert restored is not None and restored.step == 1

    only = saved(saves=1)
    for _ in range(2):
        restored = restart(only)
        assert restored is not None
        process = only.processes[0]
        assert process.session is not None
        only.handle(process.host, ev.Called(process.session, process.owner, ev.MarkBad(restored)))
        quiet(only, 1)
    restored = restart(only)
    assert restored is not None and restored.step == 1, "the last one is never banned by itself"


def test_row_34_clock_jumps() -> None:
    """Only differences of a monotonic clock count: a jump ends waits that it outlasts, and loses nothing."""
    world = saved()
    begin(world)

    world.now += 3600
    tick(world)
    seal(world)
    quiet(world)

    assert newest(world) == 2


def test_row_35_another_process_with_the_same_pid() -> None:
    world = saving(2, 1, own=3)
    first = world.processes[0]
    world.crash("n0")
    world.boot("n0")
    other = Owner(first.owner.pid, first.owner.starttime + 1)

    effects = world.hosts["n0"].node.handle(ev.Called(99, other, ev.Join(first.epoch, 0, 0, 1)), 0.0)  # type: ignore[union-attr]

    assert [type(effect) for effect in effects] == [ev.Answer] and effects[0].code == 409  # type: ignore[union-attr]


def test_row_37_saves_faster_than_copies() -> None:
    world = saved(own=3)
    for _ in range(30):
        begin(world)
        seal(world)
        for name in world.hosts:
            for op in list(world.hosts[name].ops)[:1]:
                world.finish(name, op)
        for pair in list(reversed(world.bag))[:6]:  # the newest first
            world.bag.remove(pair)
            world.deliver(*pair)
        world.now += 1
        tick(world)
        world.check()

    assert world.counts.get("answer 429", 0) > 0
    quiet(world)
    assert kept(world) > 1


def test_row_38_asked_to_drain_at_the_end() -> None:
    world = saved(saves=2)

    world.handle("n1", ev.Operator(drain=True))
    quiet(world)

    assert {version.step for version in world.past.manifests} == {2}
    assert record(world).durable == record(world).newest  # type: ignore[union-attr]


def test_row_39_unfinished_saves_of_a_dead_epoch() -> None:
    world = replicated(2, 1, own=3)
    for _ in range(3):
        begin(world)
        if (last := world.processes[-1]).step in last.slots:
            world.act(last, "seal")
        quiet(world, 1)
    restart(world)

    for _ in range(3):
        save(world)

    found = record(world)
    assert found is not None and found.keep is not None and found.keep.epoch == 2


def test_a_start_without_anything_is_fresh_and_one_with_parts_only_is_an_error() -> None:
    world = cluster(2, 1, 3, settings=QUICK)
    assert isinstance(record(world), Record) and record(world).restored is None  # type: ignore[union-attr]
    begin(world)
    world.act(world.processes[0], "seal")
    quiet(world, 1)
    start_daemons(world)
    epoch = world.new_epoch(["n0", "n1"])
    for _ in range(10):
        for process in list(world.processes):
            for (action,) in list(world.actions(process)):
                world.act(process, action)
        quiet(world, 1)

    decision = world.hosts["n1"].node.restore  # type: ignore[union-attr]
    assert (
        decision is not None
        and decision.epoch == epoch.epoch
        and "parts or bad copies of 1" in decision.error
    )
    assert not any(process.trained for process in world.processes)
    assert restart(world, fresh=True) is None
