"""The daemon of one node and job: turns what happens into events, and the state machines' effects into I/O.

The protocol is `node.py` and `coordinator.py`; nothing is decided here. All of it runs in one event loop; effects are performed in order, and a record is in
place before anything behind it starts (writes to tmpfs are done at once, in the loop). Bulk work happens in threads and comes back as events.
"""

import asyncio
import contextlib
import os
import re
import signal
import ssl
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import ckptkit
from ckptkit.cache import codec
from ckptkit.cache.calls import Calls
from ckptkit.cache.config import CacheConfig
from ckptkit.cache.coordinator import Coordinator
from ckptkit.cache.drain import Drainer
from ckptkit.cache.durable import DurableRun
from ckptkit.cache.events import (
    Answer,
    AskInventories,
    Begun,
    Broadcast,
    CancelDrain,
    CancelPull,
    CloseSession,
    Drained,
    DrainVersion,
    Effect,
    EpochAccepted,
    Hashed,
    HashSlot,
    InventoryArrived,
    KillOwner,
    Lease,
    ListDurable,
    ManifestWritten,
    NodeEvent,
    Note,
    Operator,
    OwnerExited,
    PullShard,
    Received,
    Refuse,
    ReleaseMemory,
    RepairSlot,
    Send,
    SessionClosed,
    SlotReady,
    StateChanged,
    Tick,
    WatchOwner,
    WriteBans,
    WriteCoordinator,
    WriteEpoch,
    WriteManifest,
    WriteSlot,
)  # fmt: skip
from ckptkit.cache.fetch import Caller, Peers, client_context
from ckptkit.cache.gathering import Gathering
from ckptkit.cache.hashing import Hashing
from ckptkit.cache.http import HttpServer
from ckptkit.cache.lanes import Memory
from ckptkit.cache.logs import Log
from ckptkit.cache.messages import (
    TO_COORDINATOR,
    TO_NODE,
    BanRequest,
    Bans,
    CoordinatorRecord,
    CopyLost,
    Epoch,
    Inventory,
    Owner,
    PeerMessage,
    SlotRecord,
    Version,
)  # fmt: skip
from ckptkit.cache.metrics import Metrics
from ckptkit.cache.node import Node
from ckptkit.cache.notes import Notes
from ckptkit.cache.outbox import Outbox
from ckptkit.cache.peercred import start_time, watch
from ckptkit.cache.pull import Puller
from ckptkit.cache.sealing import Sealing
from ckptkit.cache.settings import Settings
from ckptkit.cache.slots import SlotTable
from ckptkit.cache.throttle import Gate, Throttle
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.cache.uds import Session, UdsServer
from ckptkit.cache.upkeep import Upkeep
from ckptkit.errors import CkptError, StoreError

NO_EPOCH = Caller("", 0, "0" * 32)


class Daemon:
    """One daemon. `await run()` serves until SIGTERM, SIGINT or a normal end of the job.

    Attributes:
        node, coordinator: The state machines; read by others, changed by `apply` and `tell_coordinator` only.
        saves: What is known of each step of this epoch, for logs: one line for its whole life.
        changed: Set, and replaced, whenever the protocol's state changed.
    """

    def __init__(self, config: CacheConfig, *, discard: bool = False, log: Log | None = None) -> None:
        self.config = config
        self.log = log or Log(job=config.job, node=config.node)
        self.tmpfs = Tmpfs(config.folder, config.node, discard=discard)
        self.scale = config.time_scale
        self.settings = _settings(config)
        self.run_folder = (
            DurableRun(f"{config.drain.url.rstrip('/')}/{config.job}") if config.drain.url else None
        )
        self.metrics = Metrics(ckptkit.__version__, lambda metrics: self.upkeep.refresh(metrics))
        self.notes = Notes(self)
        self.gate, self.saving = Gate(), False
        self.node = Node(config.node, SlotTable([], 0), None, Bans(), self.settings)  # replaced by `_recover`
        self.coordinator: Coordinator | None = None
        self.address = ""
        self.former: dict[str, str] = {}
        self.sessions: dict[int, Session] = {}
        self.changed = asyncio.Event()
        self.stopping: str = ""
        self._stop = asyncio.Event()
        self._replies: dict[int, Answer | Begun | Lease] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watched: dict[Owner, int] = {}
        self._held: dict[Version, list[SlotRecord]] = {}
        self._peers: Peers | None = None
        self.loop: asyncio.AbstractEventLoop

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until told to stop. Raises StoreError where it cannot listen or write its records."""
        self.loop = asyncio.get_running_loop()
        self._build()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.end, signal.Signals(number).name)
        try:
            self.address = _address(self.config.advertise, await self.http.start())
            self._recover()
            self.tmpfs.write_json("address.json", {"address": self.address, "pid": os.getpid()})
            self.uds.start()
            self.log(
                "serving",
                address=self.address,
                port=self.http.port,
                pid=os.getpid(),
                socket=self.config.socket,
                slots=len(self.node.table),
                epoch=self._epoch(),
            )
            self.task(self._ticking())
            self.upkeep.start()
            await self._stop.wait()
        finally:
            await self._close()

    def _build(self) -> None:
        config, scale = self.config, self.scale
        tls = config.tls
        self.tls: ssl.SSLContext | None = (
            client_context(tls.ca, tls.cert, tls.key) if tls.mode == "all" else None
        )
        self.outbox = Outbox(
            self.tls, lambda: self.caller.headers, 5.0 * scale,
            lambda address, why: self.log("peer does not answer", address=address, reason=why), config.source,
        )  # fmt: skip
        self.gathering = Gathering(
            self.tmpfs,
            self.outbox,
            lambda: self.peers,
            self.run_folder,
            config.node,
            self.address_of,
            lambda: self.former,
        )
        self.hashing = Hashing(config.threads)
        self.sealing = Sealing(self.tmpfs, self.hashing, verify=config.hash_verify)
        self.memory = Memory(self.tmpfs, lambda slot: self._ready(slot), self.metrics.populate_rate.set)
        self.puller = Puller(
            self.tmpfs, conns=config.replicas.conns, request=config.replicas.request, throttle=Throttle(config.replicas.max_bps),
            gate=self.gate, patience_s=30.0 * scale, index=self.gathering.fetch_index, done=self._from_thread,
            mismatch=self.metrics.hash_mismatch.labels("fetch").inc, moved=self.metrics.replica_bytes.labels("in").inc,
        )  # fmt: skip
        self.drainer: Drainer | None = None
        if self.run_folder is not None:
            self.drainer = Drainer(
                self.tmpfs, self.run_folder, Throttle(config.drain.max_bps), self.log, done=self._from_thread, over=self._drain_over,
                moved=self.metrics.drain_bytes.inc, mismatch=self.metrics.hash_mismatch.labels("drain").inc,
                pause_s=(1.0 * scale, 60.0 * scale),
            )  # fmt: skip
        self.upkeep = Upkeep(self)
        self.calls = Calls(self)
        self.http = HttpServer(config, self, self.metrics, self.log)
        limits = config.limits
        self.uds = UdsServer(
            config.socket, self.calls.handle, self._session_closed, uids=frozenset((os.geteuid(), *config.uids)),
            blob_limit=max(limits.index, limits.extras + (64 << 20)), slow_s=limits.header_s * scale, most=limits.clients,
            log=self.log, refused=lambda reason: self.metrics.refused.labels("uds", reason).inc(),
        )  # fmt: skip

    def _recover(self) -> None:
        """Take over what an earlier daemon left."""
        layout = self.tmpfs.read_json("layout.json") or {}
        lanes = {int(number): str(lane) for number, lane in layout.get("lanes", {}).items()}
        found = {item.number: item for item in self.tmpfs.scan()}
        expected = SlotTable(
            (SlotRecord(number, lane) for number, lane in sorted(lanes.items())),
            int(layout.get("slot_bytes", 0)),
        )
        stored = []
        for number, item in found.items():
            record = _record(item.record)
            if number not in expected:
                self.tmpfs.free(number)
                continue
            self.metrics.recovery_slots.labels("free" if record is None else record.state.lower()).inc()
            if record is None and item.record is not None:
                self.log("slot record unreadable", slot=number, now="free")
            if record is not None and record.slot == number:
                stored.append(record)
        table = SlotTable.recovered(stored, expected)
        known = {record.slot for record in stored}
        for record in table:
            if (
                record.slot not in found
                or found[record.slot].nbytes < table.slot_bytes
                or record.slot not in known
            ):
                table.unready.add(record.slot)
        epoch = self._stored("epoch.json", Epoch)
        bans = self._stored("banned.json", Bans) or Bans()
        self.former = {str(k): str(v) for k, v in (self.tmpfs.read_json("former.json") or {}).items()}
        self.puller.slot_bytes = table.slot_bytes
        self.start_node(table, epoch, bans)
        if table.unready:
            self.task(self._make_ready())
        if epoch is not None and epoch.coordinator == self.config.node:
            self._coordinate(epoch)

    def start_node(self, table: SlotTable, epoch: Epoch | None, bans: Bans) -> None:
        """Begin with a table of slots, new or recovered."""
        self.node, effects = Node.start(self.config.node, table, epoch, bans, self.settings, self.now())
        self.puller.slot_bytes = table.slot_bytes
        self.perform(effects)

    def _stored(self, name: str, kind: Any) -> Any:
        plain = self.tmpfs.read_json(name)
        if plain is None:
            return None
        plain.pop("type", None)
        try:
            return codec.build(kind, plain)
        except codec.MessageError as error:
            self.log("record unreadable", file=name, reason=str(error))
            return None

    def end(self, why: str) -> None:
        """Begin to end: drain what is newest within the grace, then stop. A second call stops at once."""
        if self.stopping:
            self._stop.set()
            return
        self.stopping = why
        self.log("ending", reason=why, grace_s=self.config.drain.grace_s * self.scale)
        self.task(self._end())

    async def _end(self) -> None:
        until = self.now() + self.config.drain.grace_s * self.scale
        if self.run_folder is not None and self.node.record is not None and self.node.trains:
            self.apply(Operator(drain=True))
            while self.now() < until and not self.upkeep.all_durable():
                await self.wait_change(0.2 * self.scale)
        left = self.node.record.newest if self.node.record is not None else None
        if left is not None:
            where = (
                "durable"
                if self.upkeep.all_durable()
                else "in memory only; it stays there until the node restarts"
            )
            self.log("newest committed step", step=left.step, epoch=left.epoch, where=where)
            if self.coordinator is not None and len(self.coordinator.epoch.ranks) > 1:
                await asyncio.sleep(
                    min(2 * self.settings.resend_s, max(until - self.now(), 0))
                )  # so that all others hear of it
        self._stop.set()

    async def _close(self) -> None:
        await self.uds.stop()
        await self.http.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.puller.close()
        if self.drainer is not None:
            await asyncio.to_thread(self.drainer.close)
        self.memory.close()
        self.hashing.close()
        await self.outbox.close()
        for pidfd in self._watched.values():
            self.loop.remove_reader(pidfd)
            os.close(pidfd)
        if self._peers is not None:
            self._peers.close()
        if self.run_folder is not None:
            self.run_folder.close()
        self.log("ended", reason=self.stopping)
        self.tmpfs.close()

    # ── what others use ──────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        return time.monotonic()

    def task(self, work: Any) -> None:
        """Run a coroutine beside; its fault ends the daemon, which recovers from what is stored."""
        task = self.loop.create_task(work)
        self._tasks.add(task)

        def over(done: asyncio.Task[Any]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                self.fail(error)

        task.add_done_callback(over)

    def fail(self, error: BaseException) -> None:
        self.log("fault", error=f"{type(error).__name__}: {error}", traceback=_where(error))
        self.stopping = self.stopping or "fault"
        self._stop.set()

    @property
    def caller(self) -> Caller:
        """What this daemon says of itself in requests."""
        epoch = self.node.epoch
        if epoch is None:
            return Caller(self.config.job, NO_EPOCH.epoch, NO_EPOCH.inc)
        return Caller(self.config.job, epoch.epoch, epoch.inc)

    @property
    def peers(self) -> Peers:
        """Connections for threads, of the present epoch."""
        caller = self.caller
        if self._peers is None or self._peers.caller != caller:
            self._peers = Peers(
                caller, self.tls, self.config.replicas.stall_s * self.scale, self.config.source
            )
        return self._peers

    def address_of(self, node: str) -> str | None:
        epoch = self.node.epoch
        found = epoch.addresses.get(node) if epoch is not None else None
        return found or self.former.get(node)

    def _epoch(self) -> int:
        return self.node.epoch.epoch if self.node.epoch is not None else 0

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until the protocol's state changes, or the time is over."""
        changed = self.changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    # ── events in ────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, event: NodeEvent) -> None:
        """Hand one event to the node."""
        self.perform(self.node.handle(event, self.now()))

    def call(self, session: int, event: NodeEvent) -> Answer | Begun | Lease:
        """Hand over a rank's call and give its answer."""
        self._replies.pop(session, None)
        self.apply(event)
        return self._replies.pop(session, Answer(session, 500, "the call got no answer"))

    def tell_coordinator(self, event: Any) -> None:
        if self.coordinator is not None:
            self.perform(self.coordinator.handle(event, self.now()))

    def receive(self, message: PeerMessage) -> tuple[int, str]:
        """A message of a peer, or of this node to itself; gives the code and text of the answer."""
        answer: tuple[int, str] = (200, "")
        effects: list[Effect] = []
        if isinstance(message, TO_COORDINATOR):
            if self.coordinator is not None:
                effects += self.coordinator.handle(Received(message), self.now())
            elif not isinstance(message, TO_NODE):
                self.metrics.fenced.inc()
                return 409, "this node does not coordinate"
        if isinstance(message, TO_NODE):
            effects += self.node.handle(Received(message), self.now())
        refusals = [effect for effect in effects if isinstance(effect, Refuse)]
        both = isinstance(message, (CopyLost, BanRequest)) and self.coordinator is not None
        if refusals and not (both and len(refusals) < 2):
            answer = refusals[0].code, refusals[0].detail
            if answer[0] == 409:
                self.metrics.fenced.inc()
        self.perform(effects)
        return answer

    def _deliver(self, message: PeerMessage) -> None:
        self.receive(message)

    def _from_thread(self, event: Any) -> None:
        self.loop.call_soon_threadsafe(self._arrived, event)

    def _arrived(self, event: Any) -> None:
        if isinstance(event, Drained) and event.failure:
            self.metrics.drain_retries.inc()
        self.apply(event)

    def _session_closed(self, session: Session) -> None:
        self.sessions.pop(session.number, None)
        self.calls.closed(session)
        self.apply(SessionClosed(session.number))

    def _ready(self, slot: int) -> None:
        record = self.node.table.get(slot)
        if record is not None:
            self.tmpfs.write_slot(slot, codec.plain(record))
            self.apply(SlotReady(slot))

    async def _make_ready(self) -> None:
        table = self.node.table
        try:
            await self.memory.make(sorted(table.unready), table.slot_bytes)
        except OSError as error:
            self.log("no memory for slots", reason=error.strerror)

    async def _ticking(self) -> None:
        while True:
            self.apply(Tick())
            self.tell_coordinator(Tick())
            await asyncio.sleep(min(1.0, self.settings.resend_s / 2))

    # ── effects out ──────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects, in order."""
        for effect in effects:
            try:
                self._perform(effect)
            except OSError as error:
                # A record that could not be written: nothing behind it may happen.
                self.fail(StoreError(f"cannot write {type(effect).__name__}: {error.strerror}"))
                raise

    def _perform(self, effect: Effect) -> None:
        match effect:
            case WriteSlot(record):
                if record.state == "WRITING" and not record.writer_done and record.bitmap == "":
                    self.metrics.slot_reuse.inc()
                self.tmpfs.write_slot(record.slot, codec.plain(record))
                self._watch_saving()
            case WriteEpoch(epoch):
                self.calls.new_epoch(epoch)
                self.tmpfs.write_json("epoch.json", codec.plain(epoch))
            case WriteBans(bans):
                self.tmpfs.write_json("banned.json", codec.plain(bans))
                if self.run_folder is not None and self.coordinator is not None:
                    self.task(self._store_bans(self.run_folder, bans))
            case WriteCoordinator(record):
                self.tmpfs.write_json("commits/coordinator.json", codec.plain(record))
            case EpochAccepted(epoch):
                self._accepted(epoch)
            case Lease(session) | Begun(session) | Answer(session):
                self._replies[session] = effect
            case CloseSession(number, reason):
                if (leaving := self.sessions.get(number)) is not None:
                    self.task(self.fence(leaving, reason))
            case Refuse():
                pass  # `receive` looks for it
            case Send(to, message):
                self._send(to, message)
            case Broadcast(message):
                for node in self.node.epoch.ranks if self.node.epoch is not None else ():
                    self._send(node, message)
            case HashSlot(slot, seq):
                self.task(self._hash(slot, seq))
            case PullShard():
                copies = self.gathering.copies(effect.shard.version, effect.shard.rank, effect.sources)
                self.puller.pull(effect, copies)
            case CancelPull(slot, seq):
                self.puller.cancel(slot, seq)
            case RepairSlot():
                self.puller.repair(
                    effect, self.gathering.copies(effect.shard.version, effect.shard.rank, effect.sources)
                )
            case ReleaseMemory(slot):
                self.metrics.pressure_actions.labels("release").inc()
                self.tmpfs.release(slot)
            case WatchOwner(owner):
                self.watch(owner)
            case KillOwner(owner):
                self._kill(owner)
            case DrainVersion(version, slots):
                self._drain(version, slots)
            case CancelDrain(version):
                if self.drainer is not None:
                    self.drainer.cancel(version)
            case StateChanged():
                self._state_changed()
            case Note(name, facts):
                self.notes.take(name, dict(facts))
            case AskInventories(epoch):
                self.task(self._ask_inventories(epoch))
            case ListDurable():
                self.task(self._list_durable())
            case WriteManifest(version):
                self.task(self._write_manifest(version))

    def _state_changed(self) -> None:
        if self.node.record is not None and self.node.trains:
            self.notes.saw(self.node.record)
        if self.node.restore is not None:
            self.notes.restore(self.node.restore)
        self.changed.set()
        self.changed = asyncio.Event()

    def _send(self, to: str, message: PeerMessage) -> None:
        self.notes.sending(message)
        if to == self.config.node:
            self.loop.call_soon(self._deliver, message)
        elif (address := self.address_of(to)) is not None:
            self.outbox.send(address, message)

    def _accepted(self, epoch: Epoch) -> None:
        self.coordinator = None
        self.log(
            "epoch accepted",
            epoch=epoch.epoch,
            inc=epoch.inc,
            ranks=epoch.world,
            coordinator=epoch.coordinator,
        )
        if epoch.coordinator == self.config.node:
            self._coordinate(epoch)

    def _coordinate(self, epoch: Epoch) -> None:
        stored = self._stored("commits/coordinator.json", CoordinatorRecord)
        self.coordinator, effects = Coordinator.start(epoch, stored, self.settings, self.now())
        collisions = self.coordinator.cliques.collisions()
        self.metrics.domain_collision.set(1 if collisions else 0)
        if collisions:
            self.log("copies share a failure domain", copies=collisions)
        self.perform(effects)

    async def fence(self, session: Session, reason: str) -> None:
        with contextlib.suppress(OSError):
            await session.send({"event": "fenced", "reason": reason})
        session.close()

    async def _hash(self, slot: int, seq: int) -> None:
        record = self.node.table.get(slot)
        if record is None or record.seq != seq:
            return
        began = self.now()
        digest, reason = await asyncio.to_thread(self.sealing.seal, record)
        self.metrics.hash_seconds.observe(self.now() - began)
        if not digest:
            self.metrics.hash_mismatch.labels("seal").inc()
            self.log(
                "shard refused",
                slot=slot,
                rank=record.rank,
                step=record.version and record.version.step,
                reason=reason,
            )
        self.apply(Hashed(slot, seq, digest, reason[:900]))

    def _watch_saving(self) -> None:
        """Replication yields while a rank writes."""
        saving = self.node.saving
        if saving != self.saving:
            self.saving = saving
            (self.gate.enter if saving else self.gate.leave)()

    def watch(self, owner: Owner) -> None:
        """Say when this process ends."""
        if owner in self._watched:
            return
        pidfd = self.calls.pidfd(owner)
        try:
            pidfd = watch(owner) if pidfd is None else pidfd
        except StoreError as error:
            self.log("cannot watch a process", pid=owner.pid, reason=str(error))
            return
        if pidfd is None:
            self.loop.call_soon(self.apply, OwnerExited(owner))
            return
        self._watched[owner] = pidfd
        self.loop.add_reader(pidfd, self._exited, owner)

    def _exited(self, owner: Owner) -> None:
        pidfd = self._watched.pop(owner)
        self.loop.remove_reader(pidfd)
        os.close(pidfd)
        self.log("process ended", pid=owner.pid)
        self.apply(OwnerExited(owner))

    def _kill(self, owner: Owner) -> None:
        pidfd = self._watched.get(owner)
        if pidfd is not None and (owner.pid == 0 or start_time(owner.pid) == owner.starttime):
            self.log("killing a process of an earlier epoch", pid=owner.pid)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # ── durable ──────────────────────────────────────────────────────────────────────────────────────────────

    def _drain(self, version: Version, slots: Sequence[int]) -> None:
        records = [record for slot in slots if (record := self.node.table.get(slot)) is not None]
        if self.drainer is None:
            self.loop.call_soon(self.apply, Drained(version, "no durable storage is configured"))
            return
        for record in records:
            self.node.table.refs[record.slot] += 1
        self._held[version] = records
        self.drainer.drain(version, records)

    def _drain_over(self, records: Sequence[SlotRecord], seconds: float) -> None:
        self.loop.call_soon_threadsafe(self._drain_ended, records, seconds)

    def _drain_ended(self, records: Sequence[SlotRecord], seconds: float) -> None:
        for record in records:
            if record.slot in self.node.table:
                self.release(record)
        self.upkeep.drained(seconds, sum(record.used for record in records))

    async def _store_bans(self, run: DurableRun, bans: Bans) -> None:
        try:
            await asyncio.to_thread(run.add_bans, bans)
        except CkptError as error:
            self.log("bans are not durable", reason=str(error))

    async def _list_durable(self) -> None:
        coordinator, pause = self.coordinator, 1.0
        while coordinator is not None and coordinator is self.coordinator:
            found = await self.gathering.durable()
            if coordinator is not self.coordinator:
                return
            self.tell_coordinator(found)
            if not found.failure:
                return
            self.log("durable storage does not answer", reason=found.failure)
            await asyncio.sleep(pause * self.scale)
            pause = min(2 * pause, 30.0)

    async def _write_manifest(self, version: Version) -> None:
        assert self.run_folder is not None and self.node.epoch is not None
        failure = ""
        try:
            await asyncio.to_thread(self.run_folder.write_manifest, version, self.node.epoch.world)
        except CkptError as error:
            failure = str(error)[:900]
            self.log("manifest not written", step=version.step, epoch=version.epoch, reason=failure)
        self.tell_coordinator(ManifestWritten(version, failure))
        if not failure:
            await self.upkeep.retain()

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_inventories(self, epoch: Epoch) -> None:
        """Former members first, once: the restore is decided when the last member has answered."""
        former = [item for item in self.former.items() if item[0] not in epoch.addresses]
        await asyncio.gather(*(self._ask_inventory(*item, again=False) for item in former))
        for node, address in epoch.addresses.items():
            self.task(self._ask_inventory(node, address, again=True))

    async def _ask_inventory(self, node: str, address: str, *, again: bool) -> None:
        coordinator = self.coordinator
        while coordinator is not None and coordinator is self.coordinator:
            found: Inventory | None
            found = (
                self.node.inventory() if node == self.config.node else await self.gathering.inventory(address)
            )
            if coordinator is not self.coordinator:
                return
            if found is not None and found.node != node:
                self.log("another node answers", address=address, expected=node, found=found.node)
                found = None
            if found is not None or not again:
                self.tell_coordinator(InventoryArrived(node, found))
                return
            await asyncio.sleep(1.0 * self.scale)

    # ── what the HTTP server asks ────────────────────────────────────────────────────────────────────────────

    def inventory(self) -> Inventory:
        return self.node.inventory()

    def acquire(self, version: Version, rank: int) -> SlotRecord | None:
        return self.node.acquire(version, rank)

    def release(self, record: SlotRecord) -> None:
        if self.node.table.refs.get(record.slot, 0) > 0:
            self.node.release(record.slot)

    def files(self, version: Version) -> list[dict[str, Any]]:
        return self.gathering.files(self.node.table.holding(version))

    def operate(self, what: str, facts: Mapping[str, Any]) -> None:
        """The operator's request over HTTP."""
        if what == "drain":
            self.apply(Operator(drain=True))
        elif what == "bans":
            self.apply(Operator(bans=facts["bans"]))
        else:
            self.upkeep.scrub_now()

    def health(self) -> dict[str, Any]:
        state = "ending" if self.stopping else "serving"
        return {"state": state, "node": self.config.node, "job": self.config.job, "epoch": self._epoch()}


def _settings(config: CacheConfig) -> Settings:
    made = Settings(
        vote_s=config.vote_s, replica_s=config.replicas.timeout_s, inventory_s=config.restore_wait_s, zombie_s=config.slots.zombie_s,
        kill_zombies=config.slots.kill_zombies, drain_every=config.drain.every if config.drain.url else 0,
    )  # fmt: skip
    return made.scaled(config.time_scale)


def _record(plain: dict[str, Any] | None) -> SlotRecord | None:
    if plain is None:
        return None
    try:
        return codec.build(SlotRecord, plain)
    except codec.MessageError:
        return None


def _address(advertise: str, port: int) -> str:
    """`host:port` for peers."""
    if re.fullmatch(r"(\[.+\]|[^:]+):[0-9]+", advertise):
        return advertise
    return f"[{advertise}]:{port}" if ":" in advertise else f"{advertise}:{port}"


def _where(error: BaseException) -> list[str]:
    return traceback.format_tb(error.__traceback__)[-4:]
