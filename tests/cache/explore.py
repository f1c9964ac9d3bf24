"""All schedules of a small cluster, up to a depth: breadth first, equal states met once.

A step is one of: a message is delivered; something that ran beside ends, or fails; a rank acts; a daemon's clock ticks (everything
unanswered is sent again) or its long timeouts pass; a daemon is killed, between two events or between two effects of one; a daemon
starts; a rank is killed; a node loses its memory; the job starts again. Messages form a set: they wait for any time, may never come, come in any
order, and come again when they are sent again. How often faults and timers may strike is bounded by `Budget`; everything else is free.

Two reductions keep all reachable states: equal states are merged (clocks are no part of a state, since each timer is a step of its own), and
a message that the receiver ignores is not followed further.
"""

from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any

from ckptkit.cache import events as ev
from ckptkit.cache.messages import Record
from ckptkit.cache.placement import Cliques
from ckptkit.cache.settings import Settings
from tests.cache.world import _SAME, Violation, World

NEVER = float("-inf")
SETTINGS = Settings(
    resend_s=0, idle_poll_s=0, vote_s=100, replica_s=100, inventory_s=100, zombie_s=100, kill_zombies=True
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each may happen on one path."""

    crashes: int = 1
    ticks: int = 1
    timeouts: int = 1
    kills: int = 0
    losses: int = 0
    failures: int = 0
    epochs: int = 0
    steps: int = 2  # saves that a rank begins


@dataclass(frozen=True, slots=True)
class Found:
    """What an exploration saw. `path` leads to the violation, empty where there is none."""

    states: int
    transitions: int
    depth: int
    complete: bool
    violation: str = ""
    path: tuple[str, ...] = ()


def explore(root: World, budget: Budget, depth: int, most: int = 10**9, *, trust: bool = True) -> Found:
    """Look at every state within `depth` steps of `root` (or stop after `most`), until an invariant fails.

    With `trust`, messages that a receiver would ignore for ever are dropped (`purge`).
    """
    first = fork(root, set(root.hosts))
    calm(first)
    seen = {key(first, budget)}
    queue: deque[tuple[World, Budget, int, tuple[Any, ...]]] = deque([(first, budget, 0, ())])
    transitions = reached = 0
    complete = True
    while queue:
        world, left, at, path = queue.popleft()
        reached = max(reached, at)
        if at == depth:
            complete = False
            continue
        for label, rest, made in successors(world, left):
            transitions += 1
            if trust and isinstance(made, World):
                purge(made, rest)
            if isinstance(made, Violation):
                return Found(len(seen), transitions, at + 1, False, str(made), tuple(unwind((label, path))))
            found = key(made, rest)
            if found not in seen:
                if len(seen) >= most:
                    return Found(len(seen), transitions, reached, False)
                seen.add(found)
                queue.append((made, rest, at + 1, (label, path)))
    return Found(len(seen), transitions, reached, complete)


def unwind(path: tuple[Any, ...]) -> list[str]:
    labels = []
    while path:
        label, path = path
        labels.append(label)
    return labels[::-1]


# --- steps ----------------------------------------------------------------------------------------------------------------


def successors(world: World, left: Budget) -> Iterator[tuple[str, Budget, World | Violation]]:
    for host, label, rest, do in steps(world, left):
        # With crashes left, the same step is also cut short after each of its effects.
        cut: int | None = None
        effects = 0
        while cut is None or cut < effects:
            made = fork(world, set(world.hosts) if host is None else {host})
            made.crash_at = None if cut is None else (host, cut)
            made.performed = 0
            try:
                do(made)
                made.check()
            except Violation as violation:
                yield label, rest, violation
                return
            calm(made)
            yield (
                label if cut is None else f"{label}, killed after {cut} effects",
                rest if cut is None else replace(rest, crashes=rest.crashes - 1),
                made,
            )
            if cut is None:
                effects = made.performed if host is not None and left.crashes else 0
            cut = 0 if cut is None else cut + 1


def steps(world: World, left: Budget) -> Iterator[tuple[Any, ...]]:
    """Each step from here: the host that it changes (None: several), its name, the budget after it, and how to do it."""
    for to, message in world.bag:
        if world.hosts[to].node is not None:
            yield (
                to,
                f"deliver {to} {message}",
                left,
                lambda w, m=(to, message): (w.bag.remove(m), w.deliver(*m)),
            )
    for name, host in world.hosts.items():
        for op in dict.fromkeys(host.ops):
            yield name, f"{name} ends {op}", left, lambda w, n=name, o=op: w.finish(n, o)
            if left.failures and op[0] in ("hash", "pull", "drain", "manifest", "list", "inventory"):
                less = replace(left, failures=left.failures - 1)
                yield name, f"{name} fails at {op}", less, lambda w, n=name, o=op: w.finish(n, o, fails=True)
        if host.node is None:
            yield name, f"{name} starts", left, lambda w, n=name: w.boot(n)
            continue
        if left.ticks:
            yield name, f"{name} ticks", replace(left, ticks=left.ticks - 1), lambda w, n=name: tick(w, n, 0)
        if left.timeouts:
            yield (
                name,
                f"{name} waits",
                replace(left, timeouts=left.timeouts - 1),
                lambda w, n=name: tick(w, n, 1000),
            )
        if left.crashes:
            yield (
                name,
                f"{name} is killed",
                replace(left, crashes=left.crashes - 1),
                lambda w, n=name: w.crash(n),
            )
        if left.losses:
            yield (
                None,
                f"{name} loses its memory",
                replace(left, losses=left.losses - 1),
                lambda w, n=name: w.lose(n),
            )
    for index, process in enumerate(world.processes):
        for (action,) in world.actions(process):
            if action == "begin" and process.step - process.first >= left.steps:
                continue
            label = f"rank {process.rank} of epoch {process.epoch.epoch}: {action}"
            yield process.host, label, left, lambda w, i=index, a=action: w.act(w.processes[i], a)
        for slot in dict.fromkeys(process.slots.values()) if process.alive and process.fenced else ():
            # a zombie's copy engine goes on
            label = f"zombie rank {process.rank} writes slot {slot}"
            yield process.host, label, left, lambda w, i=index, s=slot: w.scribble(w.processes[i], s)
        if left.kills and process.alive:
            less = replace(left, kills=left.kills - 1)
            yield (
                process.host,
                f"rank {process.rank} is killed",
                less,
                lambda w, i=index: w.kill(w.processes[i]),
            )
    if left.epochs:
        less = replace(left, epochs=left.epochs - 1)
        for zombies in (0, 1) if any(p.alive for p in world.processes) else (0,):
            label = f"a new epoch, {zombies} zombies"
            yield None, label, less, lambda w, z=zombies: w.new_epoch(list(w.hosts), zombies=z)


def tick(world: World, name: str, later: float) -> None:
    host = world.hosts[name]
    world.now = later
    world.handle(name, ev.Tick())
    if host.coordinator is not None:
        world.handle(name, ev.Tick(), coordinator=True)


# --- states ---------------------------------------------------------------------------------------------------------------

_ATOMS = {int, str, float, bool, NoneType, bytes, tuple, frozenset}
_KINDS: dict[type, tuple[str, tuple[str, ...]]] = {}


def _kind(cls: type) -> tuple[str, tuple[str, ...]]:
    """How objects of a class are copied: whole values are shared, others attribute by attribute."""
    if cls not in _KINDS:
        if cls in _ATOMS or (is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
            _KINDS[cls] = ("value", ())
        elif cls in (dict, list, set, deque):
            _KINDS[cls] = (cls.__name__, ())
        elif cls is Cliques:
            _KINDS[cls] = ("cliques", ())
        elif hasattr(cls, "__slots__"):
            _KINDS[cls] = ("slots", tuple(f.name for f in fields(cls)))
        else:
            _KINDS[cls] = ("object", ())
    return _KINDS[cls]


def clone(value: Any, memo: dict[int, Any]) -> Any:
    kind, names = _kind(type(value))
    if kind in ("value", "cliques"):
        return value
    if kind == "dict":
        return {k: clone(v, memo) for k, v in value.items()}
    if kind == "list":
        return [clone(v, memo) for v in value]
    if kind == "set":
        return set(value)
    if kind == "deque":
        return deque(value, value.maxlen)
    if (made := memo.get(id(value))) is not None:
        return made
    made = memo[id(value)] = object.__new__(type(value))
    if kind == "slots":
        for name in names:
            object.__setattr__(made, name, clone(getattr(value, name), memo))
    else:
        for name, held in value.__dict__.items():
            if name != "_key":
                made.__dict__[name] = clone(held, memo)
    return made


def fork(world: World, changed: set[str]) -> World:
    """A copy that shares the hosts which are not about to change, and the past until it does."""
    made = copy(world)
    memo: dict[int, Any] = {}
    made.bag = list(world.bag)
    made.hosts = {name: clone(host, memo) if name in changed else host for name, host in world.hosts.items()}
    made.processes = [clone(p, memo) if p.host in changed else p for p in world.processes]
    world.shared = made.shared = True
    return made


def calm(world: World) -> None:
    """Set every clock to zero: when something was said last is no part of a state (each timer is a step)."""
    world.now = 0.0
    for host in world.hosts.values():
        if "_key" in host.__dict__:
            continue
        node, coordinator = host.node, host.coordinator
        if node is not None:
            for save in node.saves.open.values():
                save.sent = NEVER
            node._reported = node._polled = node.replication._held_sent = NEVER
            node.replication._landed = NEVER
            node.draining._sent = node.draining._asked = NEVER
            node._fenced = dict.fromkeys(node._fenced, 0.0)
            for told in node.replication.told.values():
                told.sent = NEVER
        if coordinator is not None:
            coordinator.restoring.deadline, coordinator._manifest_at = 100.0, NEVER
            coordinator._latencies.clear()
            for ballot in coordinator.ballots.values():
                ballot.started = 0.0
            if coordinator._copying is not None:
                coordinator._copying.since = 0.0


def purge(world: World, left: Budget) -> None:
    """Drop messages that no one will ever heed: of an epoch that their receiver has left (it never goes back), and old records."""
    kept = []
    for to, message in world.bag:
        node = world.hosts[to].node
        if node is not None and node.epoch is not None:
            if message.epoch < node.epoch.epoch:
                continue
            seen = node.record.dseq if node.record is not None and node.record.inc == message.inc else 0
            if type(message) is Record and message.dseq <= seen and not left.crashes:
                continue
        kept.append((to, message))
    if len(kept) < len(world.bag):
        world.bag = [_SAME[pair] for pair in kept]


def key(world: World, left: Budget) -> int:
    """A hash of all that the future depends on."""
    hosts = tuple(map(_known, world.hosts.values()))
    processes = tuple(map(_known, world.processes))
    bag = sum(map(_hash_of, world.bag)) & 0xFFFFFFFFFFFFFFFF  # in any order
    return hash((hosts, processes, bag, len(world.bag), _known(world.past), world.epochs, left))


def _known(held: Any) -> int:
    """The hash of an object that does not change any more, kept in it."""
    found = held.__dict__.get("_key")
    if found is None:
        found = held.__dict__["_key"] = hash(freeze(held))
    return found


def _hash_of(message: tuple[str, Any]) -> int:
    found = _HASHES.get(id(message))
    if found is None:
        found = _HASHES[id(message)] = hash(message)
    return found


_HASHES: dict[int, int] = {}
"""By identity: `World` keeps one object for equal messages, and keeps it for good."""


_DERIVED = {"_key", "_cliques", "_homes"}
"""Kept results, which say nothing that the rest does not."""


def freeze(value: Any, inside: tuple[int, ...] = ()) -> Any:
    kind, names = _kind(type(value))
    if kind == "value":
        return value if not isinstance(value, object) or value.__hash__ is not None else repr(value)
    if kind == "cliques":
        return value.groups
    if kind == "dict":
        return frozenset((k, freeze(v, inside)) for k, v in value.items())
    if kind in ("list", "deque"):
        return tuple(freeze(v, inside) for v in value)
    if kind == "set":
        return frozenset(value)
    if id(value) in inside:
        return None  # the way back from a part to its whole
    inside = (*inside, id(value))
    if kind == "slots":
        return tuple(freeze(getattr(value, name), inside) for name in names)
    return tuple(
        freeze(held, inside) for name, held in sorted(value.__dict__.items()) if name not in _DERIVED
    )
