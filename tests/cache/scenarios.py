"""Where explorations start: small clusters brought by a fair schedule to a state in which much can go wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckptkit.cache import events as ev
from ckptkit.cache.messages import Record, Version, Vote
from ckptkit.cache.settings import Settings
from tests.cache.explore import SETTINGS
from tests.cache.world import World


def fair(world: World, until: Callable[[World], bool], rounds: int = 60, hold: str = "") -> None:
    """Let everything happen in order until a condition holds. Ranks act in turn, one step each a round; operations `hold` never end."""
    for _ in range(rounds):
        slowest = min((p.step for p in world.processes if p.alive), default=0)
        for process in list(world.processes):
            for (action,) in list(world.actions(process)):
                if not until(world) and (action != "begin" or process.step == slowest):
                    world.act(process, action)
        for _ in range(30):
            if until(world):
                return
            for name, host in world.hosts.items():
                for op in list(host.ops):
                    if op in host.ops and op[0] != hold and not until(world):
                        world.finish(name, op)
            while world.bag and not until(world):
                world.deliver(*world.bag.pop(0))
        for name, host in world.hosts.items():
            if not until(world):
                world.handle(name, ev.Tick())
                if host.coordinator is not None:
                    world.handle(name, ev.Tick(), coordinator=True)
    raise AssertionError("the scenario was not reached")


def record(world: World) -> Record | None:
    """The record of the newest epoch's coordinator."""
    for host in world.hosts.values():
        stored = host.disk.coordinator
        if stored is not None and stored.epoch == world.epochs and stored.record is not None:
            return stored.record
    return None


def committed_more(before: set[Version], world: World) -> bool:
    return len(world.past.committed) > len(before)


def all_train(world: World) -> bool:
    return all(p.trained for p in world.processes if p.alive)


def cluster(hosts: int, ranks: int, own: int = 2, copies: int = 1, settings: Settings = SETTINGS) -> World:
    """A cluster whose ranks are about to begin their first save."""
    world = World(hosts, ranks, own, copies, settings, as_set=True)
    world.new_epoch(list(world.hosts))
    fair(world, all_train)
    world.bag.clear()
    return world


def saving(hosts: int, ranks: int, own: int = 2) -> World:
    """Every rank is writing its first save."""
    world = cluster(hosts, ranks, own)
    for process in world.processes:
        world.act(process, "begin")
    return world


def last_vote(hosts: int, ranks: int) -> World:
    """Every rank has sealed its first save, and all votes but one were counted."""
    world = saving(hosts, ranks)
    for process in world.processes:
        world.act(process, "seal")
    for name, host in world.hosts.items():
        for op in list(host.ops):
            world.finish(name, op)
    for pair in list(world.bag)[:-1]:
        world.bag.remove(pair)
        world.deliver(*pair)
    assert isinstance(world.bag[0][1], Vote)
    return world


def daemon_down(hosts: int, ranks: int) -> World:
    """Every rank is writing its first save, and the last node's daemon was killed."""
    world = saving(hosts, ranks)
    world.crash(f"n{hosts - 1}")
    return world


def copying(hosts: int, ranks: int, own: int = 2) -> World:
    """The first save is committed and not yet copied."""
    world = cluster(hosts, ranks, own)
    fair(world, lambda w: (r := record(w)) is not None and r.cand is not None)
    return world


def replicated(hosts: int, ranks: int, own: int = 2) -> World:
    """The first save has its copies; the second is about to begin."""
    world = cluster(hosts, ranks, own)
    fair(world, lambda w: (r := record(w)) is not None and r.keep is not None)
    fair(world, lambda w: not w.bag and all(h.node.record == record(w) for h in w.hosts.values() if h.node))
    return world


def second_copying(hosts: int, ranks: int, own: int = 3) -> World:
    """The first save has its copies; the second is committed; the third is about to begin."""
    world = replicated(hosts, ranks, own)
    keep = record(world)
    fair(world, lambda w: (r := record(w)) is not None and keep is not None and r.newest != keep.newest)
    return world


def draining(hosts: int, ranks: int) -> World:
    """The first save is being written to durable storage."""
    world = cluster(hosts, ranks, 2, settings=replace(SETTINGS, drain_every=1))
    fair(world, lambda w: (r := record(w)) is not None and r.drain is not None)
    return world


def draining_long(hosts: int, ranks: int) -> World:
    """The first save is still being written to durable storage, while two later ones have been committed and copied."""
    world = cluster(hosts, ranks, 4, settings=replace(SETTINGS, drain_every=1))
    fair(
        world,
        lambda w: (r := record(w)) is not None and r.keep is not None and r.keep.step >= 3,
        hold="drain",
    )
    return world


def late_records(hosts: int, ranks: int) -> World:
    """Two saves were aborted, and no node has heard of either decision."""
    world = cluster(hosts, ranks)
    for _ in range(2):
        world.act(world.processes[0], "begin")
        world.act(world.processes[0], "abort")
    for to, message in [pair for pair in world.bag if isinstance(pair[1], Vote)]:
        world.bag.remove((to, message))
        world.deliver(to, message)
    return world


def restarting(hosts: int, ranks: int, own: int = 2, zombies: int = 0) -> World:
    """A save has its copies, the next one is under way, and the job starts again."""
    world = replicated(hosts, ranks, own)
    for process in world.processes:
        if process.step not in process.slots:
            world.act(process, "begin")
    world.act(world.processes[-1], "seal")
    world.new_epoch(list(world.hosts), zombies=zombies)
    world.bag.clear()
    return world


def restoring(hosts: int, ranks: int) -> World:
    """A save is committed and not copied, and the job starts again; the first node has joined and shown what it has."""
    world = copying(hosts, ranks)
    world.new_epoch(list(world.hosts))
    _coordinated(world, "n0")
    return world


def _coordinated(world: World, name: str) -> None:
    """The ranks of a node have joined the new epoch, and its coordinator has its inventory and that of durable storage."""
    world.bag.clear()
    for process in world.processes:
        if process.host == name and process.alive and process.epoch.epoch == world.epochs:
            world.act(process, "join")
    for op in (("inventory", name), ("list",)):
        world.finish(name, op)


def moving(*, decided: bool) -> World:
    """A save of two nodes is committed and not copied; the job starts again on the first alone, which may have `decided` what it restores."""
    world = copying(2, 1)
    epoch = world.new_epoch(["n0"])
    if not decided:
        _coordinated(world, "n0")
    else:
        fair(world, lambda w: any(inc == epoch.inc for inc, _ in w.past.decisions) and not w.bag)
        world.bag.clear()
    return world


def unreached() -> World:
    """As `moving`, and the node that is no member was killed before the ranks read its shard: they did not reach it."""
    world = moving(decided=True)
    world.crash("n1")
    for process in world.processes:
        if process.host == "n0" and process.alive and process.session is not None:
            world.act(process, "load")
    return world


def overtaken() -> World:
    """A save lacks one vote, whose rank is a zombie by now: the job starts again, and another node coordinates."""
    world = saving(2, 1)
    world.act(world.processes[1], "seal")
    world.finish("n1", world.hosts["n1"].ops[0])
    world.deliver(*world.bag.pop())
    world.new_epoch(["n1", "n0"], zombies=1)
    world.act(next(p for p in world.processes if p.host == "n1"), "join")
    world.bag.clear()
    return world


def split_brain() -> World:
    """Two incarnations took the same epoch on different nodes and saved the same step; the job starts again on both nodes."""
    world = World(2, 2, 2, 0, SETTINGS, as_set=True)
    for name in world.hosts:
        world.new_epoch([name], zombies=9, number=1)
        before = set(world.past.committed)
        fair(world, partial(committed_more, before))
    world.new_epoch(list(world.hosts))
    world.bag.clear()
    for process in world.processes:
        if process.alive and process.session is None and not process.fenced:
            world.act(process, "join")
    return world
