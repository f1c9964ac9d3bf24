"""How a rank takes part in an epoch: the node's slots are laid out for it, populated, and handed over as descriptors."""

import asyncio
from typing import TYPE_CHECKING

from ckptkit.cache import codec, events
from ckptkit.cache.callgroup import CallGroup, refusal, whole
from ckptkit.cache.events import Called, Lease
from ckptkit.cache.lanes import next_table
from ckptkit.cache.limits import allot
from ckptkit.cache.messages import Epoch
from ckptkit.cache.slots import SlotTable
from ckptkit.cache.uds import CallError, Reply, Session
from ckptkit.cache.wire import Message

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon


class JoinCalls(CallGroup):
    """`join`."""

    names = ("join",)

    def __init__(self, daemon: "Daemon") -> None:
        super().__init__(daemon)
        self._laying_out = asyncio.Lock()

    def new_epoch(self, epoch: Epoch) -> None:
        """Keep the addresses of nodes that were members before: they may hold shards."""
        before = self.d.node.epoch
        known = dict(self.d.former)
        stored = self.d.tmpfs.read_json("epoch.json") or {}
        for member in stored.get("members", []):
            known[str(member.get("node"))] = str(member.get("address"))
        if before is not None:
            known |= before.addresses
        known = {node: address for node, address in known.items() if node not in epoch.addresses}
        self.d.former = known
        self.d.tmpfs.write_json("former.json", known)

    async def _join(self, session: Session, message: Message) -> Reply:
        fields = message.fields
        epoch = codec.build(
            Epoch,
            {
                "epoch": fields.get("epoch"), "inc": fields.get("inc"), "members": fields.get("members"),
                "copies": self.d.config.replicas.count, "fresh": fields.get("fresh", False),
            },
        )  # fmt: skip
        if epoch.problem:
            raise CallError(422, epoch.problem)
        bytes_max, numa = whole(fields, "bytes_max", 1), fields.get("numa")
        if numa is not None and type(numa) is not int:
            raise CallError(400, "numa is no number")
        join = codec.build(
            events.Join,
            {
                "epoch": codec.plain(epoch), "rank": fields.get("rank"), "local_rank": fields.get("local_rank"), "bytes_max": bytes_max,
            },
        )  # fmt: skip
        await self._lay_out(epoch, bytes_max)
        owner = session.peer.owner
        lease = self.d.call(session.number, Called(session.number, owner, join))
        if not isinstance(lease, Lease):
            raise refusal(lease)
        self.d.sessions[session.number] = session
        self.d.effects.watch(owner)
        session.facts["rank"] = join.rank
        writing = fields.get("writing", [])
        for record in self.d.node.table.written_by(owner):  # a `begin` whose answer never reached the rank
            if record.state == "WRITING" and record.slot not in writing:
                self.d.call(session.number, Called(session.number, owner, events.Abort(record.slot)))
        await self._populate(lease, numa)
        fds = [self.d.tmpfs.open_slot(slot, writable=True) for slot in lease.slots]
        self.d.upkeep.table_at_start()
        return Reply(
            {"slots": list(lease.slots), "slot_bytes": self.d.node.table.slot_bytes, "lane": lease.lane},
            fds=fds,
        )

    async def _lay_out(self, epoch: Epoch, bytes_max: int) -> None:
        """Have the slots that an epoch needs, where it is a new one."""
        d = self.d
        async with self._laying_out:
            known = d.node.epoch
            if known is not None and epoch.epoch <= known.epoch:
                if (epoch.epoch, epoch.inc) == (
                    known.epoch,
                    known.inc,
                ) and d.node.table.slot_bytes < bytes_max:
                    raise CallError(
                        409,
                        f"slots have {d.node.table.slot_bytes} bytes; give the same bytes_max on every rank",
                    )
                return
            local = len(epoch.ranks.get(d.config.node, ()))
            if not local:
                raise CallError(422, f"no member is on node {d.config.node}")
            allotment = allot(
                d.config,
                d.tmpfs,
                list(d.node.table),
                ranks=local,
                copies=epoch.copies,
                nodes=len(epoch.ranks),
                bytes_max=bytes_max,
            )
            for line in allotment.log:
                d.log("memory", detail=line)
            if allotment.refusal:
                raise CallError(507, allotment.refusal)
            table = next_table(
                d.node.table,
                ranks=local,
                per_rank=allotment.per_rank,
                replicas=allotment.replicas,
                slot_bytes=allotment.slot_bytes,
            )
            self._swap(table)

    def _swap(self, table: SlotTable) -> None:
        d = self.d
        before = d.node.table
        for record in before:
            if record.slot not in table:
                d.tmpfs.free(record.slot)
        for record in table:
            old = before.get(record.slot)
            table.refs[record.slot] = before.refs.get(record.slot, 0)
            if (
                d.tmpfs.slot_size(record.slot) < table.slot_bytes
                or old is None
                or record.slot in before.unready
            ):
                table.unready.add(record.slot)
            if old is not None and old != record:
                d.tmpfs.write_slot(record.slot, codec.plain(record))
        d.tmpfs.write_json(
            "layout.json",
            {"slot_bytes": table.slot_bytes, "lanes": {str(record.slot): record.lane for record in table}},
        )
        for session in list(d.sessions.values()):
            d.task(d.effects.fence(session, "FENCED"))
        d.sessions.clear()
        d.start_node(table, d.node.epoch, d.node.bans)

    async def _populate(self, lease: Lease, numa: int | None) -> None:
        """Give a lane its memory, and then, beside, the pool for copies."""
        d, table = self.d, self.d.node.table
        try:
            await d.memory.make(
                [slot for slot in lease.slots if slot in table.unready], table.slot_bytes, numa
            )
        except OSError as error:
            raise CallError(
                507, f"no memory for slots of {table.slot_bytes} bytes: {error.strerror}"
            ) from error
        d.upkeep.want_ready()
