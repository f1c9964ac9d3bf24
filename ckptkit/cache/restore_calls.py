"""Calls of a rank that restores, and of `ckptkit cache get`: what is restored, from where, and slots of this node to read."""

import asyncio
import os
from typing import TYPE_CHECKING, Any

from ckptkit.cache import events
from ckptkit.cache.callgroup import CallGroup, refusal, whole
from ckptkit.cache.events import Answer
from ckptkit.cache.messages import DURABLE, RestoreDecision, SlotRecord
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import nearest
from ckptkit.cache.uds import CallError, Reply, Session
from ckptkit.cache.wire import Message
from ckptkit.errors import CkptError
from ckptkit.formats.native import step_dir

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon


class RestoreCalls(CallGroup):
    """The calls of this module."""

    names = ("restore", "restore_report", "find", "manifest", "index", "map", "unmap", "side")

    def __init__(self, daemon: "Daemon") -> None:
        super().__init__(daemon)
        self._manifests: dict[tuple[int, int], asyncio.Task[bytes]] = {}
        self._found = 1 << 40  # far above any attempt of a restore

    def forget(self) -> None:
        """A new epoch has begun."""
        self._manifests.clear()

    def closed(self, session: Session) -> None:
        """A session has ended: what it held for reading is free."""
        for record in session.facts.pop("held", {}).values():
            self.d.release(record)

    async def _restore(self, session: Session, message: Message) -> Reply:
        node = self.d.node
        if session.number not in node.sessions:
            raise CallError(409, "this connection has joined no epoch, or a later one has begun")
        decision = node.restore
        facts: dict[str, Any] = {"attempt": decision.attempt if decision else 0}
        if decision is not None and decision.version is not None:
            facts["decision"] = self._decision(decision)
        if node.trains:
            return Reply(
                {
                    "state": "final",
                    "from": node.record is not None and node.record.restored is not None,
                    **facts,
                }
            )
        if decision is None:
            return Reply({"state": "deciding", "detail": self._waiting(), **facts})
        if decision.error:
            return Reply({"state": "failed", "detail": decision.error, **facts})
        return Reply({"state": "located" if decision.version is not None else "none", **facts})

    def _waiting(self) -> str:
        """What the decision waits for; only the coordinator's node knows."""
        coordinator = self.d.coordinator
        names = ", ".join(coordinator.restoring.waiting[:8]) if coordinator is not None else ""
        if names:
            return f"nodes {names} have not said yet what they hold"
        return "inventories are being gathered"

    def _decision(self, decision: RestoreDecision) -> dict[str, Any]:
        version, d = decision.version, self.d
        assert version is not None
        step_url = (
            f"{d.run_folder.url}/{step_dir(version.step, version.epoch)}" if d.run_folder is not None else ""
        )
        cliques = self._cliques()

        def place(rank: int, source: str) -> dict[str, str] | None:
            if source == DURABLE:
                return {"kind": "durable", "node": "", "place": step_url} if step_url else None
            if source == d.config.node:
                record = d.node.table.find(version, rank)
                return (
                    {"kind": "slot", "node": source, "place": str(record.slot)}
                    if record is not None
                    else None
                )
            address = d.address_of(source)
            return {"kind": "peer", "node": source, "place": address} if address is not None else None

        sources = [
            [
                found
                for source in nearest(places, d.config.node, cliques)
                if (found := place(rank, source)) is not None
            ]
            for rank, places in enumerate(decision.sources)
        ]
        everywhere = bool(step_url) and all(DURABLE in places for places in decision.sources)
        return {
            "attempt": decision.attempt, "epoch": version.epoch, "step": version.step, "inc": version.inc, "world": decision.world,
            "index_hash": decision.index_hash, "sources": sources, "digests": list(decision.digests),
            "url": step_url if everywhere else "", "passed_over": list(decision.passed_over),
        }  # fmt: skip

    def _cliques(self) -> Cliques:
        return (
            self.d.node.replication.cliques
            if self.d.node.epoch is not None
            else Cliques({self.d.config.node: ""}, 0)
        )

    async def _restore_report(self, session: Session, message: Message) -> Reply:
        fields = message.fields
        failure = (
            "" if fields.get("ok") is True else (str(fields.get("why") or "a rank could not load"))[:900]
        )
        if failure:
            self.d.log(
                "restore failed in a rank",
                rank=session.facts.get("rank"),
                attempt=fields.get("attempt"),
                why=failure,
            )
        late = fields.get("late") is True
        answer = self.called(session, events.Loaded(whole(fields, "attempt"), failure, late))
        if not isinstance(answer, Answer) or answer.code != 200:
            raise refusal(answer)
        return Reply()

    async def _find(self, session: Session, message: Message) -> Reply:
        """Look for any version on all nodes and in storage; `manifest` and `index` answer for it in this session."""
        step, epoch = whole(message.fields, "step"), message.fields.get("epoch")
        choice = await self.d.gathering.find(self.d.node, step, epoch if type(epoch) is int else None)
        if choice is None:
            raise CallError(
                404, f"step {step} is whole nowhere: some shard of it is on no node and not in storage"
            )
        self._found += 1
        decision = RestoreDecision(
            0,
            "0" * 32,
            self._found,
            choice.version,
            choice.world,
            choice.index_hash,
            choice.sources,
            choice.digests,
        )
        session.facts["found"] = decision
        return Reply({"decision": self._decision(decision)})

    def _wanted(self, session: Session, message: Message) -> RestoreDecision:
        found: RestoreDecision | None = session.facts.get("found")
        if found is not None and found.attempt == message.fields.get("attempt"):
            return found
        decision = self.d.node.restore
        if decision is None or decision.version is None or decision.attempt != message.fields.get("attempt"):
            raise CallError(409, "another attempt of the restore is on")
        return decision

    async def _manifest(self, session: Session, message: Message) -> Reply:
        decision, d = self._wanted(session, message), self.d
        key = (decision.epoch, decision.attempt)
        if key not in self._manifests:
            assert decision.version is not None
            own = d.node.table.holding(decision.version)
            self._manifests[key] = asyncio.ensure_future(d.gathering.manifest(decision, own))
        task = self._manifests[key]
        try:
            return Reply(blobs=(await asyncio.shield(task),))
        except CkptError:
            self._manifests.pop(key, None)
            raise

    async def _index(self, session: Session, message: Message) -> Reply:
        decision, d = self._wanted(session, message), self.d
        assert decision.version is not None
        sources = [
            source
            for places in decision.sources
            for source in nearest(places, d.config.node, self._cliques())
        ]
        await asyncio.to_thread(
            d.gathering.fetch_index, decision.index_hash, [*dict.fromkeys(sources)], decision.version
        )
        fd = d.tmpfs.open_index(decision.index_hash)
        if fd is None:
            raise CallError(404, "the index is not here")
        return Reply({"bytes": os.fstat(fd).st_size}, fds=(fd,))

    async def _map(self, session: Session, message: Message) -> Reply:
        record = self._sealed(message)
        held: dict[int, SlotRecord] = session.facts.setdefault("held", {})
        if record.slot not in held:
            self.d.node.table.refs[record.slot] += 1
            held[record.slot] = record
        return Reply({"bytes": record.used}, fds=(self.d.tmpfs.open_slot(record.slot, writable=False),))

    async def _unmap(self, session: Session, message: Message) -> Reply:
        record = session.facts.get("held", {}).pop(message.fields.get("slot"), None)
        if record is not None:
            self.d.release(record)
        return Reply()

    async def _side(self, session: Session, message: Message) -> Reply:
        what = message.fields.get("what")
        if what not in ("digests", "extras"):
            raise CallError(400, "a slot has digests and extras")
        return Reply(blobs=(self.d.tmpfs.read_side(self._sealed(message).slot, what),))

    def _sealed(self, message: Message) -> SlotRecord:
        record = self.d.node.table.get(whole(message.fields, "slot"))
        if record is None or record.state != "SEALED" or record.damaged:
            raise CallError(404, "the slot holds no shard that may be read")
        return record
