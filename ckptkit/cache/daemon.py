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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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
    Begun,
    Drained,
    Effect,
    Lease,
    NodeEvent,
    Operator,
    Received,
    Refuse,
    SessionClosed,
    SlotReady,
    Tick,
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
    CopyLost,
    Epoch,
    Inventory,
    PeerMessage,
    Place,
    RestoreDecision,
    SlotRecord,
    Version,
)  # fmt: skip
from ckptkit.cache.metrics import Metrics
from ckptkit.cache.node import Node
from ckptkit.cache.notes import Notes
from ckptkit.cache.outbox import Outbox
from ckptkit.cache.performing import Effects
from ckptkit.cache.pull import Puller
from ckptkit.cache.sealing import Sealing
from ckptkit.cache.settings import Settings
from ckptkit.cache.slots import SlotTable
from ckptkit.cache.throttle import Gate, Throttle
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.cache.uds import Session, UdsServer
from ckptkit.cache.upkeep import Upkeep

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
        self.gate, self.effects = Gate(), Effects(self)
        self.node = Node(config.node, SlotTable([], 0), None, Bans(), self.settings)  # replaced by `_recover`
        self.coordinator: Coordinator | None = None
        self.address = ""
        self.former: dict[str, str] = {}
        self.sessions: dict[int, Session] = {}
        self.changed = asyncio.Event()
        self.stopping: str = ""
        self._stop = asyncio.Event()
        self.replies: dict[int, Answer | Begun | Lease] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._peers: Peers | None = None
        self.loop: asyncio.AbstractEventLoop

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until told to stop. Raises StoreError where it cannot listen or write its records."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._loop_fault)
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
            gate=self.gate, patience_s=30.0 * scale, index=self.gathering.fetch_index, done=self.from_thread,
            mismatch=self.metrics.hash_mismatch.labels("fetch").inc, moved=self.metrics.replica_bytes.labels("in").inc,
        )  # fmt: skip
        self.drainer: Drainer | None = None
        if self.run_folder is not None:
            self.drainer = Drainer(
                self.tmpfs, self.run_folder, Throttle(config.drain.max_bps), self.log, done=self.from_thread, over=self.effects.drain_over,
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
        epoch = self.stored("epoch.json", Epoch)
        bans = self.stored("banned.json", Bans) or Bans()
        self.former = {str(k): str(v) for k, v in (self.tmpfs.read_json("former.json") or {}).items()}
        self.puller.slot_bytes = table.slot_bytes
        self.start_node(table, epoch, bans)
        if table.unready:
            self.task(self._make_ready())
        if epoch is not None and epoch.coordinator == self.config.node:
            self.effects.coordinate(epoch)

    def start_node(self, table: SlotTable, epoch: Epoch | None, bans: Bans) -> None:
        """Begin with a table of slots, new or recovered."""
        self.node, effects = Node.start(
            self.config.node, table, epoch, bans, self.settings, self.now(), self.node.record
        )
        self.puller.slot_bytes = table.slot_bytes
        self.effects.perform(effects)

    def stored(self, name: str, kind: Any) -> Any:
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
            # The last save may still be voted on: it is the one that must not be left behind.
            while self.now() < until and any(not save.refusal for save in self.node.saves.open.values()):
                await self.wait_change(0.2 * self.scale)
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
        self.effects.close()
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

    def _loop_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.log(
            "fault in the loop",
            detail=str(context.get("message")),
            error=f"{type(error).__name__}: {error}" if error else None,
        )

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

    def places(self) -> tuple[Place, ...]:
        """Where members of earlier epochs are."""
        return tuple(Place(*item) for item in sorted(self.former.items()))

    def learn(self, places: Iterable[Place]) -> dict[str, str]:
        """Remember what others know of members of earlier epochs; gives what is new."""
        members = self.node.epoch.addresses if self.node.epoch is not None else {}
        new = {
            place.node: place.address for place in places
            if place.node not in members and place.node not in self.former and place.node != self.config.node
        }  # fmt: skip
        if new:
            self.former |= new
            self.tmpfs.write_json("former.json", self.former)
        return new

    def _epoch(self) -> int:
        return self.node.epoch.epoch if self.node.epoch is not None else 0

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until the protocol's state changes, or the time is over."""
        changed = self.changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    # ── events in ────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What happens in here happens as a whole, or the daemon ends: a state whose effects were not performed is no state to go on with."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def apply(self, event: NodeEvent) -> None:
        """Hand one event to the node."""
        with self._whole():
            self.effects.perform(self.node.handle(event, self.now()))

    def call(self, session: int, event: NodeEvent) -> Answer | Begun | Lease:
        """Hand over a rank's call and give its answer."""
        self.replies.pop(session, None)
        self.apply(event)
        return self.replies.pop(session, Answer(session, 500, "the call got no answer"))

    def tell_coordinator(self, event: Any) -> None:
        with self._whole():
            if self.coordinator is not None:
                self.effects.perform(self.coordinator.handle(event, self.now()))

    def receive(self, message: PeerMessage) -> tuple[int, str]:
        """A message of a peer, or of this node to itself; gives the code and text of the answer."""
        with self._whole():
            return self._receive(message)

    def _receive(self, message: PeerMessage) -> tuple[int, str]:
        answer: tuple[int, str] = (200, "")
        effects: list[Effect] = []
        if isinstance(message, TO_COORDINATOR):
            if self.coordinator is not None:
                effects += self.coordinator.handle(Received(message), self.now())
            elif not isinstance(message, TO_NODE):
                self.metrics.fenced.inc()
                return 409, "this node does not coordinate"
        if isinstance(message, TO_NODE):
            if isinstance(message, RestoreDecision):
                self.learn(message.former)
            effects += self.node.handle(Received(message), self.now())
        refusals = [effect for effect in effects if isinstance(effect, Refuse)]
        both = isinstance(message, (CopyLost, BanRequest)) and self.coordinator is not None
        if refusals and not (both and len(refusals) < 2):
            answer = refusals[0].code, refusals[0].detail
            if answer[0] == 409:
                self.metrics.fenced.inc()
        self.effects.perform(effects)
        return answer

    def deliver(self, message: PeerMessage) -> None:
        self.receive(message)

    def from_thread(self, event: Any) -> None:
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

    # ── what the HTTP server asks ────────────────────────────────────────────────────────────────────────────

    def inventory(self) -> Inventory:
        return replace(self.node.inventory(), former=self.places())

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
