"""Effects of the state machines, performed: records written, messages sent, threads started.

In order, and in the event loop: a record is in place before anything behind it in its list starts. What takes long runs beside and comes back as an event.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptkit.cache import codec
from ckptkit.cache.coordinator import Coordinator
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
    Note,
    OwnerExited,
    PullShard,
    Refuse,
    ReleaseMemory,
    RepairSlot,
    Send,
    StateChanged,
    WatchOwner,
    WriteBans,
    WriteCoordinator,
    WriteEpoch,
    WriteManifest,
    WriteSlot,
)  # fmt: skip
from ckptkit.cache.messages import (
    Bans,
    CoordinatorRecord,
    Epoch,
    Inventory,
    Owner,
    PeerMessage,
    Place,
    RestoreDecision,
    SlotRecord,
    Version,
)
from ckptkit.cache.peercred import start_time, watch
from ckptkit.cache.uds import Session
from ckptkit.errors import CkptError, StoreError

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon


class Effects:
    """Performs the effects of one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self.d = daemon
        self._watched: dict[Owner, int] = {}
        self._held: dict[Version, list[SlotRecord]] = {}
        self._saving = False
        self._asking: set[tuple[str, str]] = set()

    def close(self) -> None:
        """Stop watching processes."""
        for pidfd in self._watched.values():
            self.d.loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects, in order."""
        for effect in effects:
            try:
                self._perform(effect)
            except OSError as error:
                # A record that could not be written: nothing behind it may happen.
                self.d.fail(StoreError(f"cannot write {type(effect).__name__}: {error.strerror}"))
                raise

    def _perform(self, effect: Effect) -> None:
        match effect:
            case WriteSlot(record):
                if record.state == "WRITING" and not record.writer_done and record.bitmap == "":
                    self.d.metrics.slot_reuse.inc()
                self.d.tmpfs.write_slot(record.slot, codec.plain(record))
                self._watch_saving()
            case WriteEpoch(epoch):
                self.d.calls.new_epoch(epoch)
                self.d.tmpfs.write_json("epoch.json", codec.plain(epoch))
            case WriteBans(bans):
                self.d.tmpfs.write_json("banned.json", codec.plain(bans))
                if self.d.run_folder is not None and self.d.coordinator is not None:
                    self.d.task(self._store_bans(self.d.run_folder, bans))
            case WriteCoordinator(record):
                self.d.tmpfs.write_json("commits/coordinator.json", codec.plain(record))
            case EpochAccepted(epoch):
                self._accepted(epoch)
            case Lease(session) | Begun(session) | Answer(session):
                self.d.replies[session] = effect
            case CloseSession(number, reason):
                if (leaving := self.d.sessions.get(number)) is not None:
                    self.d.task(self.fence(leaving, reason))
            case Refuse():
                pass  # `receive` looks for it
            case Send(to, message):
                self._send((to,), message)
            case Broadcast(message):
                self._send(self.d.node.epoch.ranks if self.d.node.epoch is not None else (), message)
            case HashSlot(slot, seq):
                self.d.task(self._hash(slot, seq))
            case PullShard():
                copies = self.d.gathering.copies(effect.shard.version, effect.shard.rank, effect.sources)
                self.d.puller.pull(effect, copies)
            case CancelPull(slot, seq):
                self.d.puller.cancel(slot, seq)
            case RepairSlot():
                self.d.puller.repair(
                    effect, self.d.gathering.copies(effect.shard.version, effect.shard.rank, effect.sources)
                )
            case ReleaseMemory(slot):
                self.d.metrics.pressure_actions.labels("release").inc()
                self.d.tmpfs.release(slot)
            case WatchOwner(owner):
                self.watch(owner)
            case KillOwner(owner):
                self._kill(owner)
            case DrainVersion(version, slots):
                self._drain(version, slots)
            case CancelDrain(version):
                if self.d.drainer is not None:
                    self.d.drainer.cancel(version)
            case StateChanged():
                self._state_changed()
            case Note(name, facts):
                self.d.notes.take(name, dict(facts))
            case AskInventories(epoch, nodes):
                assert self.d.coordinator is not None
                for node in nodes or epoch.ranks:
                    self.d.task(self._ask_inventory(self.d.coordinator, node))
            case ListDurable():
                self.d.task(self._list_durable())
            case WriteManifest(version):
                self.d.task(self._write_manifest(version))

    def _state_changed(self) -> None:
        if self.d.node.record is not None and self.d.node.trains:
            self.d.notes.saw(self.d.node.record)
        if self.d.node.restore is not None:
            self.d.notes.restore(self.d.node.restore)
        self.d.changed.set()
        self.d.changed = asyncio.Event()

    def _send(self, nodes: Iterable[str], message: PeerMessage) -> None:
        self.d.notes.sending(message)
        if isinstance(message, RestoreDecision):
            message = replace(message, former=self.d.places())
        addresses = []
        for node in nodes:
            if node == self.d.config.node:
                self.d.loop.call_soon(self.d.deliver, message)
            elif (address := self.d.address_of(node)) is not None:
                addresses.append(address)
        if addresses:
            self.d.outbox.send(addresses, message)

    def _accepted(self, epoch: Epoch) -> None:
        self.d.coordinator = None
        held = {record.index_hash for record in self.d.node.table}
        for index_hash in set(self.d.tmpfs.indexes()) - held:
            self.d.tmpfs.remove_index(index_hash)
        self.d.log(
            "epoch accepted",
            epoch=epoch.epoch,
            inc=epoch.inc,
            ranks=epoch.world,
            coordinator=epoch.coordinator,
        )
        if epoch.coordinator == self.d.config.node:
            self.coordinate(epoch)

    def coordinate(self, epoch: Epoch) -> None:
        stored = self.d.stored("commits/coordinator.json", CoordinatorRecord)
        self.d.coordinator, effects = Coordinator.start(epoch, stored, self.d.settings, self.d.now())
        if self.d.run_folder is not None:
            self.d.task(self._claim(self.d.run_folder, epoch))
        collisions = self.d.coordinator.cliques.collisions()
        self.d.metrics.domain_collision.set(1 if collisions else 0)
        if collisions:
            self.d.log("copies share a failure domain", copies=collisions)
        self.perform(effects)

    async def _claim(self, run: DurableRun, epoch: Epoch) -> None:
        """Claim the epoch in durable storage, so that a coordinator of an earlier one writes no manifest there any more."""
        pause = 1.0
        while self.d.coordinator is not None and self.d.coordinator.epoch == epoch:
            try:
                places = tuple(Place(*item) for item in epoch.addresses.items())
                await asyncio.to_thread(run.claim, epoch.epoch, epoch.inc, places)
                return
            except CkptError as error:
                self.d.log("epoch not claimed", epoch=epoch.epoch, reason=str(error))
            await asyncio.sleep(pause * self.d.scale)
            pause = min(2 * pause, 60.0)

    async def fence(self, session: Session, reason: str) -> None:
        with contextlib.suppress(OSError):
            await session.send({"event": "fenced", "reason": reason})
        session.close()

    async def _hash(self, slot: int, seq: int) -> None:
        record = self.d.node.table.get(slot)
        if record is None or record.seq != seq:
            return
        began = self.d.now()
        digest, reason = await asyncio.to_thread(self.d.sealing.seal, record)
        self.d.metrics.hash_seconds.observe(self.d.now() - began)
        if not digest:
            self.d.metrics.hash_mismatch.labels("seal").inc()
            self.d.log(
                "shard refused",
                slot=slot,
                rank=record.rank,
                step=record.version and record.version.step,
                reason=reason,
            )
        self.d.apply(Hashed(slot, seq, digest, reason[:900]))

    def _watch_saving(self) -> None:
        """Replication yields while a rank writes."""
        saving = self.d.node.saving
        if saving != self._saving:
            self._saving = saving
            (self.d.gate.enter if saving else self.d.gate.leave)()

    def watch(self, owner: Owner) -> None:
        """Say when this process ends."""
        if owner in self._watched:
            return
        pidfd = self.d.calls.pidfd(owner)
        try:
            pidfd = watch(owner) if pidfd is None else pidfd
        except StoreError as error:
            self.d.log("cannot watch a process", pid=owner.pid, reason=str(error))
            return
        if pidfd is None:
            self.d.loop.call_soon(self.d.apply, OwnerExited(owner))
            return
        self._watched[owner] = pidfd
        self.d.loop.add_reader(pidfd, self._exited, owner)

    def _exited(self, owner: Owner) -> None:
        pidfd = self._watched.pop(owner)
        self.d.loop.remove_reader(pidfd)
        os.close(pidfd)
        self.d.log("process ended", pid=owner.pid)
        self.d.apply(OwnerExited(owner))

    def _kill(self, owner: Owner) -> None:
        pidfd = self._watched.get(owner)
        if pidfd is not None and (owner.pid == 0 or start_time(owner.pid) == owner.starttime):
            self.d.log("killing a process of an earlier epoch", pid=owner.pid)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # ── durable ──────────────────────────────────────────────────────────────────────────────────────────────

    def _drain(self, version: Version, slots: Sequence[int]) -> None:
        records = [record for slot in slots if (record := self.d.node.table.get(slot)) is not None]
        if self.d.drainer is None:
            self.d.loop.call_soon(self.d.apply, Drained(version, "no durable storage is configured"))
            return
        for record in records:
            self.d.node.table.refs[record.slot] += 1
        self._held[version] = records
        self.d.drainer.drain(version, records)

    def drain_over(self, records: Sequence[SlotRecord], seconds: float) -> None:
        self.d.loop.call_soon_threadsafe(self._drain_ended, records, seconds)

    def _drain_ended(self, records: Sequence[SlotRecord], seconds: float) -> None:
        for record in records:
            if record.slot in self.d.node.table:
                self.d.release(record)
        self.d.upkeep.drained(seconds, sum(record.used for record in records))

    async def _store_bans(self, run: DurableRun, bans: Bans) -> None:
        try:
            await asyncio.to_thread(run.add_bans, bans)
        except CkptError as error:
            self.d.log("bans are not durable", reason=str(error))

    async def _list_durable(self) -> None:
        coordinator, pause = self.d.coordinator, 1.0
        while coordinator is not None and coordinator is self.d.coordinator:
            found = await self.d.gathering.durable()
            if coordinator is not self.d.coordinator:
                return
            self.d.learn(found.former)
            self.d.tell_coordinator(found)
            if not found.failure:
                return
            self.d.log("durable storage does not answer", reason=found.failure)
            await asyncio.sleep(pause * self.d.scale)
            pause = min(2 * pause, 30.0)

    async def _write_manifest(self, version: Version) -> None:
        epoch = self.d.node.epoch
        assert self.d.run_folder is not None and epoch is not None
        failure = ""
        try:
            await asyncio.to_thread(
                self.d.run_folder.write_manifest, version, epoch.world, (epoch.epoch, epoch.inc)
            )
        except CkptError as error:
            failure = str(error)[:900]
            self.d.log("manifest not written", step=version.step, epoch=version.epoch, reason=failure)
        self.d.tell_coordinator(ManifestWritten(version, failure))
        if not failure:
            await self.d.upkeep.retain()

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_inventory(self, coordinator: Coordinator, node: str) -> None:
        asking = (coordinator.epoch.inc, node)
        if asking in self._asking:
            return
        self._asking.add(asking)
        try:
            found = await self._inventory(node)
        finally:
            self._asking.discard(asking)
        if coordinator is self.d.coordinator:
            if found is not None:
                self.d.learn(found.former)
            self.d.tell_coordinator(InventoryArrived(node, found))

    async def _inventory(self, node: str) -> Inventory | None:
        if node == self.d.config.node:
            return self.d.inventory()
        address = self.d.address_of(node)
        found = await self.d.gathering.inventory(address) if address is not None else None
        if found is not None and found.node != node:
            self.d.log("another node answers", address=address, expected=node, found=found.node)
            return None
        return found
