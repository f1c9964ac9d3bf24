"""Calls on the Unix socket: those of ranks become events of the protocol, those of the operator are answered from its state.

Arguments are checked here by name and type; nothing of them reaches a path. A connection says `hello` first.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

import ckptkit
from ckptkit.cache import codec, events
from ckptkit.cache.codec import MessageError
from ckptkit.cache.events import Answer, Begun, Called, Lease, Operator
from ckptkit.cache.lanes import next_table
from ckptkit.cache.limits import allot
from ckptkit.cache.messages import DURABLE, Ban, Bans, Epoch, Owner, RestoreDecision, SlotRecord, Version
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import nearest
from ckptkit.cache.uds import CallError, Reply, Session
from ckptkit.cache.wire import OLDEST, PROTOCOL, Message
from ckptkit.errors import CkptError, StoreError
from ckptkit.formats.native import step_dir

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon

Handler = Callable[[Session, Message], Awaitable[Reply]]


class Calls:
    """The calls of one daemon. Every method `_name` is the call `name`."""

    def __init__(self, daemon: "Daemon") -> None:
        self.d = daemon
        self._laying_out = asyncio.Lock()
        self._pidfds: dict[Owner, int] = {}
        self._manifests: dict[tuple[int, int], asyncio.Task[bytes]] = {}
        self._found = 1 << 40  # far above any attempt of a restore
        self._calls: dict[str, Handler] = {
            name: getattr(self, f"_{name}")
            for name in (
                "hello", "join", "begin", "seal", "abort", "has_index", "put_index", "level", "note", "mark_bad", "restore",
                "restore_report", "find", "manifest", "index", "map", "unmap", "side", "status", "ls", "pin", "unpin", "drain", "evict", "ban",
                "scrub", "bye",
            )
        }  # fmt: skip

    async def handle(self, session: Session, message: Message) -> Reply:
        """Answer one call. Raises CallError."""
        name = message.fields.pop("call")
        handler = self._calls.get(name)
        if handler is None:
            raise CallError(
                400,
                f"there is no call {name[:40]!r}; this daemon is ckptkit {ckptkit.__version__}, protocol {PROTOCOL}",
            )
        if not session.greeted and name != "hello":
            raise CallError(403, "say hello first")
        try:
            return await handler(session, message)
        except MessageError as error:
            raise CallError(400, str(error)) from None
        except CallError:
            raise
        except CkptError as error:
            raise CallError(503, str(error)) from None

    def closed(self, session: Session) -> None:
        """A session has ended: what it held for reading is free."""
        for record in session.facts.pop("held", {}).values():
            self.d.release(record)

    def pidfd(self, owner: Owner) -> int | None:
        """A descriptor of a process that is connected, duplicated; None for others."""
        for session in self.d.uds.sessions:
            if session.peer.owner == owner:
                return os.dup(session.peer.pidfd)
        return None

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
        self._manifests.clear()

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hello(self, session: Session, message: Message) -> Reply:
        fields, config = message.fields, self.d.config
        protocol, oldest = _int(fields, "protocol"), _int(fields, "oldest")
        if protocol < OLDEST or oldest > PROTOCOL:
            raise CallError(
                400, f"the trainer speaks protocol {oldest} to {protocol}, this daemon {OLDEST} to {PROTOCOL}; update the older of the two",
            )  # fmt: skip
        job = fields.get("job", "")
        if job not in ("", config.job):
            raise CallError(403, f"this is the daemon of job {config.job}, not of {str(job)[:80]!r}")
        session.greeted = True
        tls = config.tls
        return Reply(
            {
                "node": config.node, "address": self.d.address, "domain": config.domain, "job": config.job,
                "max_epoch": self.d.node.epoch.epoch if self.d.node.epoch else 0,
                "url": self.d.run_folder.url if self.d.run_folder else "",
                "tls": {"ca": tls.ca, "cert": tls.cert, "key": tls.key} if tls.mode == "all" else None,
                "protocol": min(protocol, PROTOCOL), "version": ckptkit.__version__,
            }
        )  # fmt: skip

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
        bytes_max, numa = _int(fields, "bytes_max", 1), fields.get("numa")
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
            raise _refusal(lease)
        self.d.sessions[session.number] = session
        self.d.watch(owner)
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
            self._swap(table, epoch)

    def _swap(self, table: Any, epoch: Epoch) -> None:
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
            d.task(d.fence(session, "FENCED"))
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

    async def _begin(self, session: Session, message: Message) -> Reply:
        fields = message.fields
        self._count_skipped(session, fields.get("skipped", {}))
        begin = events.Begin(_int(fields, "step"), _int(fields, "bytes", 1))
        answer = self._called(session, begin)
        if isinstance(answer, Begun):
            record = self.d.node.table[answer.slot]
            assert record.version is not None
            self.d.notes.begun(record.version, begin.nbytes)
            self.d.notes.skipped_in_row.pop(session.number, None)
            return Reply({"slot": answer.slot, "step": begin.step})
        if answer.code in (413, 429):
            row = self.d.notes.skipped_in_row
            row[session.number] = row.get(session.number, 0) + 1
            self.d.metrics.save_skipped.labels("busy" if answer.code == 429 else "too_big").inc()
            self.d.log("save skipped", rank=session.facts.get("rank"), step=begin.step, reason=answer.detail)
        raise _refusal(answer)

    async def _seal(self, session: Session, message: Message) -> Reply:
        fields, blobs, d = message.fields, message.blobs, self.d
        slot, step = _int(fields, "slot"), _int(fields, "step")
        seal = codec.build(events.Seal, {name: fields.get(name) for name in ("slot", "used", "index_hash")})
        if not 1 <= len(blobs) <= 2 or len(blobs[0]) > d.config.limits.extras:
            raise CallError(
                413,
                f"a seal comes with extras of at most {d.config.limits.extras} bytes, and perhaps digests",
            )
        record = d.node.table.get(slot)
        if (
            record is None
            or record.writer != session.peer.owner
            or record.version is None
            or record.version.step != step
        ):
            raise CallError(409, f"slot {slot} is not this rank's, for step {step}")
        if seal.index_hash not in d.tmpfs.indexes():
            raise CallError(409, "hand over the index first")
        if record.state == "WRITING" and not record.writer_done:
            d.tmpfs.write_side(slot, "extras", blobs[0])
            if len(blobs) > 1:
                d.tmpfs.write_side(slot, "digests", blobs[1])
            else:
                d.tmpfs.drop_side(slot, "digests")
        answer = self._called(session, seal)
        if not isinstance(answer, Answer) or answer.code != 200:
            raise _refusal(answer)
        d.notes.mark(record.version, "sealed")
        for phase, seconds in _numbers(fields.get("timings")).items():
            if phase in ("begin", "d2h", "seal"):
                d.metrics.save_stall.labels(phase).observe(seconds)
        return Reply()

    async def _abort(self, session: Session, message: Message) -> Reply:
        answer = self._called(session, events.Abort(_int(message.fields, "slot")))
        if not isinstance(answer, Answer) or answer.code != 200:
            raise _refusal(answer)
        return Reply()

    async def _has_index(self, session: Session, message: Message) -> Reply:
        return Reply({"have": message.fields.get("index_hash") in self.d.tmpfs.indexes()})

    async def _put_index(self, session: Session, message: Message) -> Reply:
        given = str(message.fields.get("index_hash"))
        if len(message.blobs) != 1 or len(message.blobs[0]) > self.d.config.limits.index:
            raise CallError(413, f"an index has at most {self.d.config.limits.index} bytes")
        if xxhash.xxh3_128_hexdigest(message.blobs[0]) != given:
            raise CallError(422, "the index is not the one of this hash")
        self.d.tmpfs.put_index(given, message.blobs[0])
        return Reply()

    async def _level(self, session: Session, message: Message) -> Reply:
        step, epoch = _int(message.fields, "step"), self.d.node.epoch
        if epoch is None:
            raise CallError(409, "no epoch is on")
        level, aborted = self.d.notes.level(epoch.version(step))
        return Reply({"level": level, "aborted": aborted})

    async def _note(self, session: Session, message: Message) -> Reply:
        facts, metrics = message.fields.get("facts", {}), self.d.metrics
        for name, value in _numbers(facts).items():
            if name == "register_seconds":
                metrics.register_seconds.set(value)
            elif name == "d2h_bytes":
                metrics.d2h_bytes.inc(value)
            elif name.startswith("restore_seconds_") and name[16:] in ("slot", "peer", "durable"):
                metrics.restore_seconds.labels(name[16:]).observe(value)
            elif name.startswith("restore_bytes_") and name[14:] in ("slot", "peer", "durable"):
                metrics.restore_bytes.labels(name[14:]).inc(value)
            elif name == "restore_mismatch":
                metrics.hash_mismatch.labels("restore").inc(value)
        if isinstance(facts, dict) and facts.get("register_mode") in ("registered", "bounce"):
            for mode in ("registered", "bounce"):
                metrics.register_mode.labels(mode).set(mode == facts["register_mode"])
        return Reply()

    async def _mark_bad(self, session: Session, message: Message) -> Reply:
        version = self._version(message)
        answer = self._called(session, events.MarkBad(version))
        self.d.log(
            "marked bad", step=version.step, epoch=version.epoch, why=str(message.fields.get("why", ""))[:500]
        )
        if not isinstance(answer, Answer) or answer.code != 200:
            raise _refusal(answer)
        return Reply()

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────

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
            return Reply({"state": "deciding", "detail": "inventories are being gathered", **facts})
        if decision.error:
            return Reply({"state": "failed", "detail": decision.error, **facts})
        return Reply({"state": "located" if decision.version is not None else "none", **facts})

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
            "url": step_url if everywhere else "", "passed_over": [str(other) for other in decision.excluded],
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
        answer = self._called(session, events.Loaded(_int(fields, "attempt"), failure))
        if not isinstance(answer, Answer) or answer.code != 200:
            raise _refusal(answer)
        return Reply()

    async def _find(self, session: Session, message: Message) -> Reply:
        """Look for any version on all nodes and in storage; `manifest` and `index` answer for it in this session."""
        step, epoch = _int(message.fields, "step"), message.fields.get("epoch")
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
        record = self.d.node.table.get(_int(message.fields, "slot"))
        if record is None or record.state != "SEALED" or record.damaged:
            raise CallError(404, "the slot holds no shard that may be read")
        return record

    # ── operator ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _status(self, session: Session, message: Message) -> Reply:
        return Reply({"status": await self.d.upkeep.status()})

    async def _ls(self, session: Session, message: Message) -> Reply:
        return Reply({"versions": await self.d.upkeep.versions()})

    async def _pin(self, session: Session, message: Message) -> Reply:
        version = self._version(message)
        await asyncio.to_thread(self._durable().pin, step_dir(version.step, version.epoch))
        self.d.log("pinned", step=version.step, epoch=version.epoch)
        return Reply()

    async def _unpin(self, session: Session, message: Message) -> Reply:
        version = self._version(message)
        await asyncio.to_thread(self._durable().unpin, step_dir(version.step, version.epoch))
        self.d.log("unpinned", step=version.step, epoch=version.epoch)
        return Reply()

    def _durable(self) -> Any:
        if self.d.run_folder is None:
            raise StoreError("this daemon drains to nowhere; give drain.url in its configuration")
        return self.d.run_folder

    async def _drain(self, session: Session, message: Message) -> Reply:
        self._durable()
        self.d.apply(Operator(drain=True))
        record = self.d.node.record
        return Reply({"step": record.newest.step if record and record.newest else None})

    async def _evict(self, session: Session, message: Message) -> Reply:
        return Reply({"released": self.d.upkeep.evict(_int(message.fields, "slots"))})

    async def _ban(self, session: Session, message: Message) -> Reply:
        fields = message.fields
        epoch, step = _int(fields, "epoch"), _int(fields, "step")
        top = 2**53 - 1
        ban = Ban(epoch, step + 1, top, top) if fields.get("newer") is True else Ban(epoch, step, epoch, step)
        self.d.log("ban", epoch=epoch, step=step, newer=fields.get("newer") is True)
        self.d.apply(Operator(bans=Bans((ban,))))
        return Reply()

    async def _scrub(self, session: Session, message: Message) -> Reply:
        self.d.upkeep.scrub_now()
        return Reply()

    async def _bye(self, session: Session, message: Message) -> Reply:
        if message.fields.get("drain") is True:
            self.d.end("the job has ended")
        else:
            self.d.stopping = self.d.stopping or "the job has ended"
            self.d.end("the job has ended")
        return Reply()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _called(self, session: Session, call: Any) -> Answer | Begun | Lease:
        return self.d.call(session.number, Called(session.number, session.peer.owner, call))

    def _count_skipped(self, session: Session, skipped: Any) -> None:
        for reason, count in _numbers(skipped).items():
            if reason in ("away", "fenced", "aborted", "stale", "refused", "restoring"):
                self.d.metrics.save_skipped.labels(reason).inc(count)
                self.d.log("saves skipped", rank=session.facts.get("rank"), reason=reason, saves=count)

    def _version(self, message: Message) -> Version:
        """The version that is meant by a step, and an epoch where the step is in several."""
        step, epoch = _int(message.fields, "step"), message.fields.get("epoch")
        node = self.d.node
        known = {r.version for r in node.table if r.version is not None}
        if node.record is not None:
            known |= {
                v
                for v in (node.record.newest, node.record.keep, node.record.durable, node.record.restored)
                if v is not None
            }
        if node.epoch is not None:
            known.add(node.epoch.version(step))
        found = sorted(v for v in known if v.step == step and epoch in (None, v.epoch))
        if not found and type(epoch) is int:
            return Version(epoch, step, "0" * 32)
        if not found:
            raise CallError(404, f"step {step} is not known here; name its epoch, too")
        return found[-1]


def _refusal(answer: Answer | Begun | Lease) -> CallError:
    if isinstance(answer, Answer):
        return CallError(answer.code, answer.detail or "refused")
    return CallError(500, f"an unexpected answer ({type(answer).__name__})")


def _int(fields: dict[str, Any], name: str, low: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value < 2**53:
        raise CallError(400, f"{name} is {str(value)[:40]}, but should be a number from {low} on")
    return value


def _numbers(value: Any) -> dict[str, float]:
    """The numbers of an object, at most a few; anything else is left out."""
    if not isinstance(value, dict):
        return {}
    items: Sequence[tuple[Any, Any]] = list(value.items())[:32]
    return {str(k): float(v) for k, v in items if type(v) in (int, float) and 0 <= v < 1e18}
