"""A small cluster around the real `Node` and `Coordinator`: disks, processes, a network that loses and reorders, faults.

The machines are the daemon's own; here are only the things around them: what is stored (each `Write…` at once, or not at all when a crash
comes before it), bytes as tokens, processes that copy into slots until they die, and the invariants, which are looked at after every step.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from ckptkit.cache import events as ev
from ckptkit.cache.coordinator import Coordinator
from ckptkit.cache.messages import (
    DURABLE,
    TO_COORDINATOR,
    TO_NODE,
    Bans,
    CoordinatorRecord,
    Epoch,
    Inventory,
    Member,
    Owner,
    Place,
    Record,
    RestoreDecision,
    Shard,
    SlotRecord,
    Version,
)  # fmt: skip
from ckptkit.cache.node import Node
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import nearest, safe
from ckptkit.cache.settings import Settings
from ckptkit.cache.slots import SlotTable

INDEX = "1d" * 16
SLOT_BYTES = 1 << 20
Content = tuple[Any, ...]
BAD = -1
"""Instead of an attempt's number: a rank found the version bad."""


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


@lru_cache(maxsize=100_000)
def digest_of(content: Content) -> str:
    return blake2b(repr(content).encode(), digest_size=16).hexdigest()


def data_of(version: Version, rank: int) -> Content:
    return ("data", version.epoch, version.inc, version.step, rank)


@dataclass
class Disk:
    """What outlives the daemon and not the node: a tmpfs."""

    slots: dict[int, SlotRecord] = field(default_factory=dict)
    content: dict[int, Content] = field(default_factory=dict)
    given: dict[int, str] = field(default_factory=dict)
    epoch: Epoch | None = None
    bans: Bans = Bans()  # noqa: RUF009
    coordinator: CoordinatorRecord | None = None


@dataclass(frozen=True)
class Shown:
    """What an inventory shows: sealed copies by slot, and versions that were committed."""

    slots: frozenset[tuple[int, int]]
    committed: tuple[Version, ...]


@dataclass
class Host:
    name: str
    domain: str
    disk: Disk = field(default_factory=Disk)
    node: Node | None = None
    coordinator: Coordinator | None = None
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    leased_epoch: int = 0
    seen: tuple[int, int] = (0, 0)
    shown: dict[str, Shown] = field(
        default_factory=dict
    )  # what nodes had when this coordinator got their inventories
    listed: bool = False  # whether it got the list of durable versions
    flipped: set[int] = field(default_factory=set)


@dataclass
class Process:
    """A rank. `slots` are those it was given and may be copying to; a fenced one goes on until it is killed."""

    owner: Owner
    rank: int
    host: str
    epoch: Epoch
    alive: bool = True
    session: int | None = None
    slots: dict[int, int] = field(default_factory=dict)  # step → slot
    step: int = 0
    first: int = 0
    loaded: tuple[int, Version | None] | None = None
    fenced: bool = False
    trained: bool = False


@dataclass
class Floor:
    """That `version` was said to have its copies; `losses` of nodes by clique since its copying began."""

    version: Version
    cliques: Cliques
    losses: dict[int, int] = field(default_factory=dict)

    def holds(self, bad: frozenset[str]) -> bool:
        """Whether no clique lost more than it promises to outlive."""
        return all(
            self.losses.get(index, 0) + len(bad.intersection(group)) <= self.cliques.copies
            for index, group in enumerate(self.cliques.groups)
        )


@dataclass
class Past:
    """What happened so far, as far as the invariants ask for it. Changed only after `World.touch`.

    Attributes:
        sealed: Shards that were sealed on the node of their rank; `held` the nodes on which they ever were.
        worlds: How many shards a version has.
        standing: Committed or restored, and not given up by a later restore.
        told: Records that were sent, by incarnation and dseq.
        left: Versions that left the record, by incarnation.
        floors: What was promised by `keep`; `since` counts losses from the time that a version's copying, or a restore's inventories, began.
        losses, losses_before: Losses so far, and when a version's first shard was sealed.
        flips: Nodes with a bad copy of a version, which is as lost as if their memory were.
        gave_up: Incarnations whose restore could not ask or read everything, so that an older step was right.
        failed: In which attempts of a restore a version was not reached, or `BAD`, by incarnation.
        durable, manifests: Durable storage.
    """

    sealed: set[tuple[Version, int]] = field(default_factory=set)
    held: dict[tuple[Version, int], frozenset[str]] = field(default_factory=dict)
    worlds: dict[Version, int] = field(default_factory=dict)
    committed: set[Version] = field(default_factory=set)
    standing: set[Version] = field(default_factory=set)
    aborted: set[Version] = field(default_factory=set)
    told: dict[tuple[str, int], Record] = field(default_factory=dict)
    left: dict[str, frozenset[Version]] = field(default_factory=dict)
    floors: list[Floor] = field(default_factory=list)
    since: dict[Version | str, Floor] = field(default_factory=dict)
    losses: int = 0
    losses_before: dict[Version, int] = field(default_factory=dict)
    flips: dict[Version, frozenset[str]] = field(default_factory=dict)
    gave_up: set[str] = field(default_factory=set)
    failed: dict[tuple[str, Version], frozenset[int]] = field(default_factory=dict)
    final: dict[str, Version | None] = field(default_factory=dict)
    decisions: dict[tuple[str, int], RestoreDecision] = field(default_factory=dict)
    by_inc: dict[str, Epoch] = field(default_factory=dict)
    durable: dict[tuple[Version, int], Content] = field(default_factory=dict)
    manifests: dict[Version, int] = field(default_factory=dict)


class World:
    """Nodes, ranks and messages. `hosts` nodes with `ranks` ranks each, `own` slots a rank, k = `copies`."""

    def __init__(
        self, hosts: int, ranks: int, own: int = 3, copies: int = 1, settings: Settings | None = None, domains: int = 0,
        *, as_set: bool = False,
    ) -> None:  # fmt: skip
        self.settings = settings or Settings()
        self.ranks, self.own, self.copies = ranks, own, copies
        self.now = 0.0
        self.hosts = {f"n{i}": Host(f"n{i}", f"d{i % domains}" if domains else "") for i in range(hosts)}
        self.processes: list[Process] = []
        self.bag: list[tuple[str, Any]] = []
        self.sessions = self.pids = 0
        self.as_set = as_set
        self.performed = 0
        self.crash_at: tuple[str, int] | None = None  # kill this host's daemon after n more effects
        self.past = Past()
        self.shared = False
        self.epochs = 0
        self.counts: dict[str, int] = {}
        for name in self.hosts:
            self.boot(name)

    def touch(self) -> Past:
        """The past, to be changed: a copy of its own where another world shares it."""
        if self.shared:
            self.past, self.shared = copied(self.past), False
        return self.past

    # --- daemons ----------------------------------------------------------------------------------------------------------

    def layout(self) -> SlotTable:
        own = dict.fromkeys(range(self.ranks), self.own)
        return SlotTable.layout(own, 2 * self.copies * self.ranks, SLOT_BYTES)

    def boot(self, name: str) -> None:
        """Start the daemon from what its disk holds."""
        host = self.hosts[name]
        assert host.node is None
        if host.disk.epoch is not None and host.disk.epoch.epoch < host.leased_epoch:
            raise Violation("I8", f"{name} forgot epoch {host.leased_epoch}")
        if host.disk.epoch is None and host.leased_epoch:
            raise Violation("I8", f"{name} forgot epoch {host.leased_epoch}")
        table = SlotTable.recovered(host.disk.slots.values(), self.layout())
        host.node, effects = Node.start(name, table, host.disk.epoch, host.disk.bans, self.settings, self.now)
        self.perform(host, effects)
        epoch = host.disk.epoch
        if host.node is not None and epoch is not None and epoch.coordinator == name:
            host.coordinator, effects = Coordinator.start(
                epoch, host.disk.coordinator, self.settings, self.now
            )
            self.perform(host, effects)

    def crash(self, name: str) -> None:
        """kill -9 of the daemon: the machine and all it was doing are gone."""
        host = self.hosts[name]
        for kind, *rest in host.ops:
            if kind == "pull":
                host.disk.content[rest[0].slot] = ("partial", "pull")
        host.node = host.coordinator = None
        host.seen = (0, 0)
        host.shown, host.listed = {}, False
        host.ops = []
        for process in self.processes:
            if process.host == name:
                process.session = None

    def lose(self, name: str) -> None:
        """Power loss: processes, daemon and memory. The node comes back empty."""
        host = self.hosts[name]
        for process in self.processes:
            if process.host == name:
                process.alive = False
        self.crash(name)
        host.disk, host.leased_epoch, host.flipped = Disk(), 0, set()
        self._lost_on(name)

    def _lost_on(self, name: str) -> None:
        """A node, or a copy on it, is gone: count it against what was promised."""
        self.touch().losses += 1
        for floor in [*self.past.floors, *self.past.since.values()]:
            for index, group in enumerate(floor.cliques.groups):
                if name in group:
                    floor.losses[index] = floor.losses.get(index, 0) + 1

    def flip(self, name: str, slot: int) -> None:
        """A bit of a sealed slot changes."""
        host = self.hosts[name]
        host.disk.content[slot] = ("flipped", *host.disk.content[slot])
        host.flipped.add(slot)
        version = host.disk.slots[slot].version
        assert version is not None
        self.touch().flips[version] = self.past.flips.get(version, frozenset()) | {name}

    def handle(self, name: str, event: Any, *, coordinator: bool = False) -> None:
        host = self.hosts[name]
        machine = host.coordinator if coordinator else host.node
        if machine is not None:
            self.perform(host, machine.handle(event, self.now))

    # --- effects ----------------------------------------------------------------------------------------------------------

    def perform(self, host: Host, effects: list[Any]) -> None:
        for effect in effects:
            if self.crash_at is not None and self.crash_at[0] == host.name:
                if self.crash_at[1] == 0:
                    self.crash_at = None
                    self.crash(host.name)
                    return
                self.crash_at = (host.name, self.crash_at[1] - 1)
            self._perform(host, effect)
            self.performed += 1
            if host.node is None:
                return
        self.watch(host)

    def _perform(self, host: Host, effect: Any) -> None:
        match effect:
            case ev.WriteSlot(record):
                self._write_slot(host, record)
            case ev.WriteEpoch(epoch):
                if host.disk.epoch is not None and epoch.epoch <= host.disk.epoch.epoch:
                    raise Violation("I8", f"{host.name}: epoch {host.disk.epoch.epoch} → {epoch.epoch}")
                host.disk.epoch = epoch
            case ev.WriteBans(bans):
                host.disk.bans = bans
            case ev.WriteCoordinator(record):
                self._write_coordinator(host, record)
            case ev.EpochAccepted(epoch):
                host.coordinator = None
                if epoch.coordinator == host.name:
                    stored = host.disk.coordinator
                    host.coordinator, more = Coordinator.start(epoch, stored, self.settings, self.now)
                    self.perform(host, more)
            case ev.Lease(session):
                process = self._of(session)
                assert process is not None and host.node is not None and host.node.epoch is not None
                host.leased_epoch = max(host.leased_epoch, host.node.epoch.epoch)
            case ev.Begun(session, slot):
                self._begun(host, session, slot)
            case ev.CloseSession(session):
                if (process := self._of(session)) is not None:
                    process.session, process.fenced = None, True
            case ev.Send(to, message):
                self._send(to, message)
            case ev.Broadcast(message):
                for to in host.coordinator.epoch.ranks if host.coordinator else ():
                    self._send(to, message)
            case ev.HashSlot() | ev.RepairSlot():
                host.ops.append(("hash" if isinstance(effect, ev.HashSlot) else "repair", effect))
            case ev.PullShard(slot):
                host.disk.content[slot] = ("partial", "pull")
                host.ops.append(("pull", effect))
            case ev.CancelPull(slot, seq):
                host.ops = [("cancelled", op[1]) if op[0] == "pull" and (op[1].slot, op[1].seq) == (slot, seq) else op
                            for op in host.ops]  # fmt: skip
            case ev.WatchOwner(owner):
                if not any(p.owner == owner and p.alive for p in self.processes):
                    host.ops.append(("exit", owner))
            case ev.KillOwner(owner):
                for process in self.processes:
                    if process.owner == owner and process.alive:
                        if host.node is not None and process.epoch == host.node.epoch:
                            raise Violation("I8", "a process of the present epoch was killed")
                        self.kill(process)
            case ev.DrainVersion():
                host.ops.append(("drain", effect))
            case ev.CancelDrain(version):
                host.ops = [op for op in host.ops if op[0] != "drain" or op[1].version != version]
            case ev.WriteManifest(version):
                if any((version, rank) not in self.past.durable for rank in range(self.past.worlds[version])):
                    raise Violation("I10", f"manifest of {version} before all its shards")
                host.ops.append(("manifest", version))
            case ev.AskInventories(epoch, nodes):
                if not nodes:
                    host.shown, host.listed = {}, False
                self.past.since.setdefault(
                    epoch.inc, Floor(epoch.version(0), Cliques(epoch.domains, epoch.copies))
                )
                host.ops += [
                    ("inventory", name)
                    for name in nodes or epoch.ranks
                    if ("inventory", name) not in host.ops
                ]
            case ev.ListDurable():
                host.ops.append(("list",))
            case ev.ReleaseMemory(slot):
                host.disk.content.pop(slot, None)
                host.ops.append(("ready", slot))
                self._lost_on(host.name)
            case ev.Answer(session, code):
                self._answered(session, code)
            case ev.Note(name):
                self.counts[name] = self.counts.get(name, 0) + 1

    def _of(self, session: int) -> Process | None:
        return next((p for p in self.processes if p.session == session), None)

    def _begun(self, host: Host, session: int, slot: int) -> None:
        process = self._of(session)
        if process is None or not process.alive:
            return
        process.slots[process.step] = slot
        self.scribble(process, slot)

    def _answered(self, session: int, code: int) -> None:
        self.counts[f"answer {code}"] = self.counts.get(f"answer {code}", 0) + 1

    def _send(self, to: str, message: Any) -> None:
        if isinstance(message, Record):
            if (message.inc, message.dseq) not in self.past.told:
                self.touch().told[message.inc, message.dseq] = message
            if self.past.told[message.inc, message.dseq] != message:
                raise Violation("I4", f"record {message.dseq} was told in two forms")
        pair = (to, message)
        if self.as_set:
            pair = _SAME.setdefault(pair, pair)
        if not self.as_set or pair not in self.bag:
            self.bag.append(pair)

    def scribble(self, process: Process, slot: int) -> None:
        """A copy engine writes a part of the slot: what it may do until the process is gone."""
        disk = self.hosts[process.host].disk
        record = disk.slots.get(slot)
        if (
            record is None
            or record.state not in ("WRITING", "QUARANTINED")
            or record.writer != process.owner
            or record.writer_done
        ):
            raise Violation("I6", f"{process.owner} writes slot {slot} of {process.host}, which is {record}")
        disk.content[slot] = ("partial", process.owner.pid)

    # --- messages ---------------------------------------------------------------------------------------------------------

    def deliver(self, to: str, message: Any) -> None:
        host = self.hosts[to]
        if type(message) in TO_COORDINATOR:
            self.handle(to, ev.Received(message), coordinator=True)
        if type(message) in TO_NODE and host.node is not None:
            epoch = host.node.epoch
            effects = host.node.handle(ev.Received(message), self.now)
            stale = epoch is None or (epoch.epoch, epoch.inc) != (message.epoch, message.inc)
            if stale and any(not isinstance(effect, ev.Refuse) for effect in effects):
                raise Violation("I8", f"{to} obeyed {message} in {epoch and epoch.epoch}")
            self.perform(host, effects)

    # --- what runs beside -------------------------------------------------------------------------------------------------

    def finish(self, name: str, op: tuple[Any, ...], *, fails: bool = False) -> None:
        """One thing that runs beside ends, well unless it cannot or `fails`."""
        host = self.hosts[name]
        host.ops.remove(op)
        match op:
            case ("hash", effect):
                content, given = (
                    host.disk.content.get(effect.slot, ("none",)),
                    host.disk.given.get(effect.slot, ""),
                )
                found = digest_of(content)
                self.handle(
                    name,
                    ev.Hashed(effect.slot, effect.seq, "" if fails or found != given else found, "differs"),
                )
            case ("pull", effect):
                good = None if fails else self.fetch(name, effect.shard, effect.sources)
                if good is None:
                    self.handle(name, ev.Pulled(effect.slot, effect.seq, "no good source"))
                else:
                    host.disk.content[effect.slot] = good
                    self.handle(name, ev.Pulled(effect.slot, effect.seq))
            case ("cancelled", effect):
                self.handle(name, ev.Pulled(effect.slot, effect.seq, "cancelled"))
            case ("repair", effect):
                good = None if fails else self.fetch(name, effect.shard, effect.sources)
                if good is not None and host.disk.slots[effect.slot].seq == effect.seq:
                    host.disk.content[effect.slot] = good
                    host.flipped.discard(effect.slot)
                self.handle(name, ev.Repaired(effect.slot, effect.seq, "no_source" if good is None else "ok"))
            case ("exit", owner):
                self.handle(name, ev.OwnerExited(owner))
            case ("drain", effect):
                self._drain(host, effect, fails)
            case ("manifest", version):
                whole = all(
                    digest_of(self.past.durable[version, rank]) == digest_of(data_of(version, rank))
                    for rank in range(self.past.worlds[version])
                )
                if not fails and whole:
                    self.touch().manifests[version] = self.past.worlds[version]
                self.handle(
                    name,
                    ev.ManifestWritten(version, "" if not fails and whole else "not whole"),
                    coordinator=True,
                )
            case ("inventory", other):
                inventory = None if fails else self._inventory(host, other)
                self.handle(name, ev.InventoryArrived(other, inventory), coordinator=True)
            case ("list",):
                shards = tuple(
                    Shard(version, rank, world, INDEX, 1, digest_of(self.past.durable[version, rank]))
                    for version, world in sorted(self.past.manifests.items()) for rank in range(world)
                )  # fmt: skip
                host.listed = not fails
                self.handle(
                    name,
                    ev.DurableListed(() if fails else shards, failure="away" if fails else ""),
                    coordinator=True,
                )
            case ("ready", slot):
                self.handle(name, ev.SlotReady(slot))

    def _inventory(self, host: Host, other: str) -> Inventory | None:
        """What a coordinator is told by a node, which remembers everyone who is no member any more."""
        node, coordinator = self.hosts[other].node, host.coordinator
        if node is None or coordinator is None:
            return None
        epoch = coordinator.epoch
        found = node.inventory()
        if other not in epoch.ranks or node.epoch == epoch:
            sealed = ((r.slot, r.seq) for r in node.table if r.state == "SEALED" and not r.damaged)
            host.shown[other] = Shown(frozenset(sealed), found.committed)
        former = tuple(Place(place, f"{place}:1") for place in self.hosts if place not in epoch.ranks)
        return replace(found, former=former)

    def _drain(self, host: Host, effect: ev.DrainVersion, fails: bool) -> None:
        assert host.node is not None
        if fails:
            host.ops.append(("drain", effect))
            self.handle(host.name, ev.Drained(effect.version, "store away"))
            return
        for slot in effect.slots:
            record = host.disk.slots[slot]
            if record.state != "SEALED" or record.version != effect.version:
                raise Violation("I7", f"{host.name}: {effect.version} left slot {slot} while it was drained")
            if digest_of(host.disk.content[slot]) != record.digest:
                host.ops.append(("drain", effect))
                self.handle(host.name, ev.Drained(effect.version, "corrupt"))
                return
            self.touch().durable[effect.version, record.rank] = host.disk.content[slot]
        self.handle(host.name, ev.Drained(effect.version))

    def fetch(self, name: str, shard: Shard, sources: tuple[str, ...]) -> Content | None:
        """Bytes of a shard that match its digest, from the first source that has them."""
        version, rank = shard.version, shard.rank
        for source in sources:
            content: Content | None = None
            if source == DURABLE:
                content = self.past.durable.get((version, rank)) if version in self.past.manifests else None
            elif (node := self.hosts[source].node) is not None and (found := node.acquire(version, rank)):
                content = self.hosts[source].disk.content.get(found.slot)
                node.release(found.slot)
            if content is not None and digest_of(content) == shard.digest:
                return content
        return None

    # --- ranks ------------------------------------------------------------------------------------------------------------

    def new_epoch(
        self,
        names: list[str],
        *,
        ranks: int | None = None,
        zombies: int = 0,
        fresh: bool = False,
        number: int | None = None,
    ) -> Epoch:
        """The job starts again on these nodes. `zombies` of the old processes go on running; the others die.

        `number` forces the epoch's, as where two incarnations start at once.
        """
        living = [p for p in self.processes if p.alive]
        for process in living[zombies:]:
            self.kill(process)
        self.epochs = number or 1 + max(
            [self.epochs, *(h.disk.epoch.epoch for h in self.hosts.values() if h.disk.epoch)]
        )
        inc = f"{len(self.past.by_inc) + 1:032x}"
        each = self.ranks if ranks is None else ranks
        where = [name for name in names for _ in range(each)]
        members = tuple(
            Member(rank, name, f"{name}:1", self.hosts[name].domain) for rank, name in enumerate(where)
        )
        epoch = self.touch().by_inc[inc] = Epoch(self.epochs, inc, members, self.copies, fresh)
        for member in members:
            self.pids += 1
            self.processes.append(Process(Owner(self.pids, self.pids), member.rank, member.node, epoch))
        self.processes = [p for p in self.processes if p.alive or p.epoch == epoch]
        return epoch

    def kill(self, process: Process) -> None:
        """The process ends; its daemon learns of it later."""
        process.alive = False
        host = self.hosts[process.host]
        if host.node is not None:
            host.ops.append(("exit", process.owner))
            if process.session is not None:
                self.handle(process.host, ev.SessionClosed(process.session))
        process.session = None

    def actions(self, process: Process) -> Iterator[tuple[str, ...]]:
        """What a living rank may do next."""
        node = self.hosts[process.host].node
        if not process.alive or node is None or process.fenced:
            return
        if process.session is None:
            yield ("join",)
            return
        if not node.trains:
            restore = node.restore
            if (
                restore is not None
                and not restore.error
                and (process.loaded is None or process.loaded[0] < restore.attempt)
            ):
                yield ("load",)
            return
        if process.step in process.slots:
            yield ("seal",)
        else:
            yield ("begin",)

    def act(self, process: Process, action: str, *, fails: bool = False) -> None:
        host = self.hosts[process.host]
        node = host.node
        assert node is not None
        local = process.epoch.ranks[process.host].index(process.rank)
        if action == "join":
            self.sessions += 1
            process.session = process.owner.pid if self.as_set else self.sessions
            call: Any = ev.Join(process.epoch, process.rank, local, 1)
            self.handle(process.host, ev.Called(process.session, process.owner, call))
            if host.node is not None and process.session not in host.node.sessions:
                process.session, process.fenced = None, True
            return
        assert process.session is not None
        if action == "load":
            self._load(process, node, fails)
        elif action == "begin":
            process.step += 1
            self._call(process, ev.Begin(process.step, 1))
        elif action == "skip":
            process.step += 1
        elif action == "abort":
            slot = process.slots.pop(process.step)
            self._call(process, ev.Abort(slot))
        elif action == "seal":
            slot = process.slots.pop(process.step)
            version = process.epoch.version(process.step)
            record = host.disk.slots[slot]
            content = data_of(version, process.rank)
            if (
                record.writer == process.owner
                and record.state in ("WRITING", "QUARANTINED")
                and not record.writer_done
            ):
                self.scribble(process, slot)
                host.disk.content[slot] = ("bad", *content) if fails else content
                host.disk.given[slot] = digest_of(content)
            self._call(process, ev.Seal(slot, 1, INDEX))

    def _call(self, process: Process, call: Any) -> None:
        assert process.session is not None
        self.handle(process.host, ev.Called(process.session, process.owner, call))

    def _load(self, process: Process, node: Node, fails: bool) -> None:
        decision = node.restore
        assert decision is not None
        failure, late = "told to" if fails else "", False
        if decision.version is not None and not fails:
            same = decision.world == process.epoch.world
            for rank in (process.rank,) if same else range(decision.world):
                cliques = Cliques(process.epoch.domains, process.epoch.copies)
                order = nearest(decision.sources[rank], process.host, cliques)
                shard = Shard(decision.version, rank, decision.world, INDEX, 1, decision.digests[rank])
                content = self.fetch(process.host, shard, order)
                if content is None:
                    failure = f"no source for shard {rank}"
                    late = any(source != DURABLE and self.hosts[source].node is None for source in order)
                elif content != data_of(decision.version, rank):
                    raise Violation("I2", f"rank {process.rank} restored {content} as {decision.version}")
        process.loaded = (decision.attempt, decision.version)
        if failure and decision.version is not None:
            key = (decision.inc, decision.version)
            attempt = decision.attempt if late else BAD
            self.touch().failed[key] = self.past.failed.get(key, frozenset()) | {attempt}
        self._call(process, ev.Loaded(decision.attempt, failure, late))

    # --- invariants -------------------------------------------------------------------------------------------------------

    def _write_slot(self, host: Host, record: SlotRecord) -> None:
        before = host.disk.slots.get(record.slot) or SlotRecord(record.slot, record.lane)
        where = f"slot {record.slot} of {host.name}"
        assert host.node is not None
        if (
            record.seq != before.seq
            and before.state in ("WRITING", "QUARANTINED")
            and before.writer
            and not before.writer_done
        ):
            owner = next((p for p in self.processes if p.owner == before.writer), None)
            if owner is not None and owner.alive and before.state == "QUARANTINED":
                raise Violation("I9", f"{where} was quarantined for {before.writer}, which lives")
            if owner is not None and owner.alive and record.slot in owner.slots.values():
                raise Violation("I6", f"{where} changes hands while {before.writer} writes to it")
        if record.state == "WRITING" and record.seq != before.seq:
            if before.state not in ("FREE", "SEALED") or host.node.table.refs[record.slot]:
                raise Violation("I7", f"{where} was {before.state} when it was given out")
            if before.state == "SEALED":
                self._may_go(before, where)
        if record.state == "SEALED" and before.state != "SEALED":
            assert record.version is not None
            shard = (record.version, record.rank)
            self.touch().held[shard] = self.past.held.get(shard, frozenset()) | {host.name}
            if digest_of(host.disk.content[record.slot]) != record.digest:
                raise Violation("I6", f"{where} is sealed with another digest")
            own = host.disk.epoch is not None and record.lane != "replica"
            if own:
                self.past.sealed.add((record.version, record.rank))
                self.past.worlds[record.version] = record.world
                self.past.losses_before.setdefault(record.version, self.past.losses)
        if record.seq != before.seq:
            host.flipped.discard(record.slot)
            host.disk.content.pop(record.slot, None)
        host.disk.slots[record.slot] = record

    def _may_go(self, before: SlotRecord, where: str) -> None:
        """I7: what is overwritten is in no coordinator's present record."""
        for host in self.hosts.values():
            stored = host.disk.coordinator.record if host.disk.coordinator else None
            if stored is None or stored.epoch != self.epochs:
                continue
            drain = stored.drain if before.lane != "replica" else None  # read from the own lanes only
            wanted = before.version in (stored.newest, stored.keep, stored.cand, drain)
            if wanted and before.version is not None and not stored.bans.hard(before.version):
                raise Violation("I7", f"{where} held {before.version}, which is protected")

    def _write_coordinator(self, host: Host, stored: CoordinatorRecord) -> None:
        self.touch()
        before, old = host.disk.coordinator, None
        if before is not None and before.inc == stored.inc:
            old = before.record
        if stored.restore is not None:
            key = (stored.inc, stored.restore.attempt)
            if self.past.decisions.setdefault(key, stored.restore) != stored.restore:
                raise Violation("I3", f"two restore decisions in attempt {stored.restore.attempt}")
            if before is None or before.restore != stored.restore:
                self._check_decision(host, stored.restore)
        host.disk.coordinator = stored
        new = stored.record
        if new is None:
            return
        self._check_record(old, new, stored)

    def _check_decision(self, host: Host, decision: RestoreDecision) -> None:
        if decision.excluded or set(self.hosts) - set(host.shown):
            self.past.gave_up.add(decision.inc)
        self._check_newest(host, decision)
        if decision.version is not None and (
            len(decision.sources) != decision.world or not all(decision.sources)
        ):
            raise Violation("I1", f"{decision.version} was decided without all its shards")
        for rank, digest in enumerate(decision.digests):
            if decision.version is not None and digest != digest_of(data_of(decision.version, rank)):
                raise Violation("I2", f"shard {rank} of {decision.version} was decided from another version")

    def _check_newest(self, host: Host, decision: RestoreDecision) -> None:
        """I16: a committed version whose shards all have good copies within reach is not passed over for an older one.

        Within reach is what members have, whether they have said so or not; and what others have shown, or may still show in time of a version
        that somebody has said to be committed.
        """
        coordinator = host.coordinator
        assert coordinator is not None
        epoch, bans = coordinator.epoch, coordinator.bans
        said = {version for shown in host.shown.values() for version in shown.committed}
        before = host.disk.coordinator
        if before is not None and before.inc != decision.inc and before.record is not None:
            said.update(before.record.acknowledged)
        early = self.now < coordinator.restoring.deadline
        found: dict[Version, set[int]] = {}
        for name, other in self.hosts.items():
            shown = host.shown.get(name)
            for slot, record in other.disk.slots.items():
                version = record.version
                if version is None or record.state != "SEALED" or record.damaged:
                    continue
                there = (slot, record.seq) in shown.slots if shown else name in epoch.ranks or (
                    early and other.node is not None and version in said)  # fmt: skip
                if there and other.disk.content.get(slot) == data_of(version, record.rank):
                    found.setdefault(version, set()).add(record.rank)
        for version, world in self.past.manifests.items() if host.listed else ():
            found[version] = set(range(world))
        for version in self.past.committed.intersection(found) - set(decision.excluded):
            whole = len(found[version]) == self.past.worlds[version]
            older = decision.version is None or decision.version < version
            if whole and older and not bans.hard(version) and not bans.soft(version):
                raise Violation("I16", f"{version} is whole, but {decision.version} is restored")
        for version in decision.excluded:
            failed = self.past.failed.get((decision.inc, version), frozenset())
            if len(failed) < 3 and BAD not in failed:
                raise Violation(
                    "I16", f"{version} is excluded, although only attempts {set(failed)} did not reach it"
                )

    def _check_record(self, old: Record | None, new: Record, stored: CoordinatorRecord) -> None:
        if old is None:
            if new.dseq != 1:
                raise Violation("I15", f"the first record has dseq {new.dseq}")
            self.past.final[new.inc] = new.restored
            if new.inc in self.past.gave_up:
                self.past.floors = [
                    f for f in self.past.floors if new.restored is not None and f.version <= new.restored
                ]
                self.past.standing = {
                    v for v in self.past.standing if new.restored is not None and v <= new.restored
                }
            if new.restored is not None:
                self.past.standing.add(new.restored)
        else:
            if new.dseq <= old.dseq or new.restored != old.restored:
                raise Violation(
                    "I15", f"dseq {old.dseq} → {new.dseq}, restored {old.restored} → {new.restored}"
                )
            for name in ("newest", "keep"):
                was, now = getattr(old, name), getattr(new, name)
                if was is not None and (now is None or now < was):
                    raise Violation("I15", f"{name} fell from {was} to {now}")
            held = {old.newest, old.keep, old.cand, old.drain} - {new.newest, new.keep, new.cand, new.drain}
            left = self.past.left.get(new.inc, frozenset()) | {
                version for version in held if version is not None
            }
            self.past.left[new.inc] = left
            if back := left & {new.newest, new.keep, new.cand, new.drain}:
                raise Violation("I15", f"{back} returned to the record")
        epoch = self.past.by_inc[new.inc]
        if new.newest is not None and new.newest.inc == new.inc and new.newest not in self.past.committed:
            missing = [rank for rank in range(epoch.world) if (new.newest, rank) not in self.past.sealed]
            if missing:
                raise Violation("I4", f"{new.newest} was committed without ranks {missing}")
            self.past.committed.add(new.newest)
            self.past.standing.add(new.newest)
        self.past.aborted |= {epoch.version(step) for step in new.aborted}
        if both := self.past.committed & self.past.aborted:
            raise Violation("I4", f"{both} committed and aborted")
        cliques = Cliques(epoch.domains, epoch.copies)
        if new.cand is not None and (old is None or old.cand != new.cand):
            self.past.since[new.cand] = Floor(new.cand, cliques)
        if new.keep is not None and (old is None or old.keep != new.keep):
            for rank in range(self.past.worlds[new.keep]):
                places = self.past.held[new.keep, rank] | (
                    {DURABLE} if new.keep in self.past.manifests else set()
                )
                if not safe(places, cliques):
                    raise Violation(
                        "I5", f"{new.keep} has no copies of shard {rank}, which is only on {sorted(places)}"
                    )
            floor = self.past.since[new.inc if old is None else new.keep]
            self.past.floors = [other for other in self.past.floors if other.version > new.keep]
            self.past.floors.append(Floor(new.keep, cliques, dict(floor.losses)))

    def watch(self, host: Host) -> None:
        """Look at what has no event of its own."""
        node = host.node
        assert node is not None
        assert not node.trains or node.record is not None
        if node.trains and node.record is not None:
            if host.seen > (node.record.epoch, node.record.dseq):
                raise Violation("I15", f"{host.name} went back from record {host.seen} to {node.record.dseq}")
            host.seen = (node.record.epoch, node.record.dseq)
            for process in self.processes:
                if process.host == host.name and process.session in node.sessions and not process.trained:
                    self._trains(process, node)
        for slot, refs in node.table.refs.items():
            if refs < 0:
                raise Violation("I12", f"slot {slot} of {host.name} has {refs} readers")

    def _trains(self, process: Process, node: Node) -> None:
        assert node.record is not None
        restored = node.record.restored
        if self.past.final.get(process.epoch.inc, "none") != restored:
            raise Violation(
                "I3",
                f"rank {process.rank} trains from {restored}, not {self.past.final.get(process.epoch.inc)}",
            )
        if process.loaded is None or process.loaded[1] != restored:
            raise Violation("I3", f"rank {process.rank} loaded {process.loaded}, but trains from {restored}")
        process.trained = True
        if process.step == 0 and restored is not None:
            process.step = process.first = restored.step

    def valid(self) -> dict[Version, set[int]]:
        """For each version the ranks of which a good copy exists, in memory or durable."""
        found: dict[Version, set[int]] = {}
        for host in self.hosts.values():
            for slot, record in host.disk.slots.items():
                version = record.version if record.state == "SEALED" else None
                if version is not None and host.disk.content.get(slot) == data_of(version, record.rank):
                    found.setdefault(version, set()).add(record.rank)
        for version, world in self.past.manifests.items():
            found[version] = set(range(world))
        return found

    def check(self) -> None:
        """I5, I6 and I12 over the whole state."""
        valid = self.valid()
        whole = [v for v, ranks in valid.items() if len(ranks) == self.past.worlds.get(v)]
        best = max(whole, default=None)
        for floor in self.past.floors:
            if floor.holds(self.past.flips.get(floor.version, frozenset())) and (
                best is None or best < floor.version
            ):
                raise Violation("I5", f"{floor.version} had its copies, but only {best} is left")
        newest = max(self.past.standing, default=None)
        if (
            newest is not None
            and newest not in self.past.flips
            and self.past.losses == self.past.losses_before[newest]
            and (best is None or best < newest)
        ):
            raise Violation("I5", f"{newest} was committed and nothing lost, but only {best} is left")
        for host in self.hosts.values():
            for slot, record in host.disk.slots.items():
                sound = record.state == "SEALED" and slot not in host.flipped
                if sound and digest_of(host.disk.content[slot]) != record.digest:
                    raise Violation("I6", f"bytes of sealed slot {slot} of {host.name} changed")


def copied(past: Past) -> Past:
    """A copy whose containers, and the floors in them, are its own."""
    made = copy(past)
    made.__dict__.pop("_key", None)
    for name, held in past.__dict__.items():
        if isinstance(held, dict | set | list):
            setattr(made, name, held.copy())
    made.floors = [replace(floor, losses=dict(floor.losses)) for floor in past.floors]
    made.since = {key: replace(floor, losses=dict(floor.losses)) for key, floor in past.since.items()}
    return made


_SAME: dict[tuple[str, Any], tuple[str, Any]] = {}
"""One object for all equal messages of explorations, so that each is hashed once."""
