"""Calls of a rank that saves: a slot is asked for, sealed or given back; indexes and facts are handed over."""

from collections.abc import Sequence
from typing import Any

import xxhash

from ckptkit.cache import codec, events
from ckptkit.cache.callgroup import CallGroup, numbers, refusal, whole
from ckptkit.cache.events import Answer, Begun
from ckptkit.cache.uds import CallError, Reply, Session
from ckptkit.cache.wire import Message


class SaveCalls(CallGroup):
    """The calls of this module."""

    names = ("begin", "seal", "abort", "has_index", "put_index", "level", "note", "mark_bad")

    async def _begin(self, session: Session, message: Message) -> Reply:
        fields = message.fields
        self._count_skipped(session, fields.get("skipped", {}))
        begin = events.Begin(whole(fields, "step"), whole(fields, "bytes", 1), fields.get("wait") is True)
        answer = self.called(session, begin)
        if isinstance(answer, Begun):
            record = self.d.node.table[answer.slot]
            assert record.version is not None
            self.d.notes.begun(record.version, begin.nbytes)
            self.d.notes.skipped_in_row.pop(session.number, None)
            return Reply({"slot": answer.slot, "step": begin.step})
        if isinstance(answer, Answer) and answer.code in (413, 429) and not begin.wait:
            row = self.d.notes.skipped_in_row
            row[session.number] = row.get(session.number, 0) + 1
            self.d.metrics.save_skipped.labels("busy" if answer.code == 429 else "too_big").inc()
            self.d.log("save skipped", rank=session.facts.get("rank"), step=begin.step, reason=answer.detail)
        raise refusal(answer)

    async def _seal(self, session: Session, message: Message) -> Reply:
        fields, blobs, d = message.fields, message.blobs, self.d
        slot, step = whole(fields, "slot"), whole(fields, "step")
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
            self._keep(slot, blobs)
        answer = self.called(session, seal)
        if not isinstance(answer, Answer) or answer.code != 200:
            raise refusal(answer)
        d.notes.mark(record.version, "sealed")
        for phase, seconds in numbers(fields.get("timings")).items():
            if phase in ("begin", "d2h", "seal"):
                d.metrics.save_stall.labels(phase).observe(seconds)
        return Reply()

    def _keep(self, slot: int, blobs: Sequence[bytes]) -> None:
        """Put extras and given digests beside the slot; ones of an earlier use must not be taken for them. Raises CallError."""
        try:
            self.d.tmpfs.write_side(slot, "extras", blobs[0])
            if len(blobs) > 1:
                self.d.tmpfs.write_side(slot, "digests", blobs[1])
            else:
                self.d.tmpfs.drop_side(slot, "digests")
        except OSError as error:
            raise CallError(507, f"no room for extras and digests: {error.strerror}") from error

    async def _abort(self, session: Session, message: Message) -> Reply:
        answer = self.called(session, events.Abort(whole(message.fields, "slot")))
        if not isinstance(answer, Answer) or answer.code != 200:
            raise refusal(answer)
        return Reply()

    async def _has_index(self, session: Session, message: Message) -> Reply:
        return Reply({"have": message.fields.get("index_hash") in self.d.tmpfs.indexes()})

    async def _put_index(self, session: Session, message: Message) -> Reply:
        given = str(message.fields.get("index_hash"))
        if len(message.blobs) != 1 or len(message.blobs[0]) > self.d.config.limits.index:
            raise CallError(413, f"an index has at most {self.d.config.limits.index} bytes")
        if xxhash.xxh3_128_hexdigest(message.blobs[0]) != given:
            raise CallError(422, "the index is not the one of this hash")
        try:
            self.d.tmpfs.put_index(given, message.blobs[0])
        except OSError as error:
            raise CallError(
                507, f"no room for an index of {len(message.blobs[0])} bytes: {error.strerror}"
            ) from error
        return Reply()

    async def _level(self, session: Session, message: Message) -> Reply:
        step, epoch = whole(message.fields, "step"), self.d.node.epoch
        if epoch is None:
            raise CallError(409, "no epoch is on")
        level, aborted = self.d.notes.level(epoch.version(step))
        return Reply({"level": level, "aborted": aborted})

    async def _note(self, session: Session, message: Message) -> Reply:
        facts, metrics = message.fields.get("facts", {}), self.d.metrics
        for name, value in numbers(facts).items():
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
        version = self.version_of(message)
        answer = self.called(session, events.MarkBad(version))
        self.d.log(
            "marked bad", step=version.step, epoch=version.epoch, why=str(message.fields.get("why", ""))[:500]
        )
        if not isinstance(answer, Answer) or answer.code != 200:
            raise refusal(answer)
        return Reply()

    def _count_skipped(self, session: Session, skipped: Any) -> None:
        for reason, count in numbers(skipped).items():
            if reason in ("away", "fenced", "aborted", "stale", "refused", "restoring"):
                self.d.metrics.save_skipped.labels(reason).inc(count)
                self.d.log("saves skipped", rank=session.facts.get("rank"), reason=reason, saves=count)
