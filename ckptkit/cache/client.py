"""What a trainer's rank says to the cache daemon of its node.

    client = CacheClient.connect(job="zaya1")
    lane = client.join(epoch, inc, rank=3, local_rank=3, members=members, bytes_max=plan.largest)
    slot = client.begin(step, nbytes)             # a Slot, or Skipped: never an exception, never a wait of more than 50 ms
    ... copy the rank file's bytes into slot.buffer ...
    client.seal(slot, used, index_hash, digests, extras)

**The cache may refuse work, it may never kill or hang the trainer.** Every call has a deadline. `begin`, `seal` and `abort` do
not raise for anything the daemon does: they give `Skipped`, with the reason, and the training goes on. Calls before the first step (`connect`,
`join`, `locate`, `report`) raise, since nothing is lost yet.

A slot holds one rank's file of a native checkpoint, byte for byte; `digests` and `extras` are the contents of its `.digests` and `.extras`.
Calls may come from several threads. No torch, no asyncio. While the daemon is away its slots stay mapped: a copy that is under way goes on, and
`seal` waits up to `RECONNECT_S` for the daemon to come back.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import xxhash

from ckptkit.cache.connection import AwayError, Caller, Connection, RefusedError
from ckptkit.cache.handles import (
    Lane,
    Located,
    Member,
    NodeInfo,
    ShardSource,
    Skipped,
    Slot,
    TlsFiles,
    default_socket,
    located_from,
)
from ckptkit.cache.wire import OLDEST, PROTOCOL
from ckptkit.errors import FormatError, StoreError, UsageError

__all__ = [
    "AwayError", "CacheClient", "Lane", "Located", "Member", "NodeInfo", "RefusedError", "ShardSource", "Skipped", "Slot",
    "TlsFiles", "default_socket",
]  # fmt: skip

RECONNECT_S = 30.0
BEGIN_S = 0.05
WAIT_S = 5.0


class CacheClient:
    """One rank's connection to the daemon of its node; also what `ckptkit cache` uses. Make it with `connect`."""

    def __init__(self, path: str, job: str, *, time_scale: float = 1.0, begin_s: float = BEGIN_S) -> None:
        self.job, self.scale, self._begin_s = job, time_scale, begin_s
        self.skipped: dict[str, int] = {}
        """Saves that did not happen, by reason."""
        self.fenced = False
        self._joining: dict[str, Any] | None = None
        self._lane: Lane | None = None
        self._info: NodeInfo | None = None
        self._told_skipped: dict[str, int] = {}
        self._writing: set[int] = set()
        self._attempt = 0
        self._maps: dict[int, Slot] = {}
        self._connection = Connection(path, self._greet, self._on_event, self._on_late, time_scale=time_scale)

    # ── before the first step ────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def connect(
        cls,
        socket_path: str | None = None,
        job: str = "",
        *,
        timeout_s: float = 5.0,
        time_scale: float = 1.0,
        begin_s: float = BEGIN_S,
    ) -> Self:
        """A client of the daemon that listens at `socket_path` (`default_socket(job)` unless given).

        Args:
            timeout_s: How long a daemon that is just starting is waited for.
            time_scale: Multiplies all other times in here but `begin_s`; for tests.
            begin_s: Longest time that `begin` takes.

        Raises:
            AwayError: no daemon answers there.
            RefusedError: it is another job's, runs as another user, or speaks another protocol.
        """
        if not socket_path and not job:
            raise UsageError("give the name of the job, or the path of the daemon's socket")
        client = cls(socket_path or default_socket(job), job, time_scale=time_scale, begin_s=begin_s)
        client._connection.open(timeout_s)
        return client

    def info(self) -> NodeInfo:
        """What the daemon said of itself when the connection was made last."""
        assert self._info is not None
        return self._info

    @property
    def lane(self) -> Lane | None:
        """This rank's slots, once it has joined."""
        return self._lane

    def join(
        self,
        epoch: int,
        inc: str,
        *,
        rank: int,
        local_rank: int,
        members: Sequence[Member],
        bytes_max: int,
        numa: int | None = None,
        fresh: bool = False,
        timeout_s: float = 600.0,
    ) -> Lane:
        """Take part in an epoch and get this rank's slots. Returns when they are allocated and populated.

        Args:
            epoch: One number for all ranks of this start of the job, above `max_epoch` of every node.
            inc: 32 random hex digits, the same for all ranks of this start.
            rank, local_rank: Of the job, and on this node.
            members: All ranks, in order; the world is their number. Rank 0's node coordinates.
            bytes_max: Bytes of the largest rank file of any rank of the job: all ranks give the same number.
            numa: NUMA node next to this rank's device; its slots are placed there.
            fresh: Start from nothing where no whole version is found although something was saved; the same on all ranks.
            timeout_s: Allocation writes every page once: about 5 GB/s a NUMA node, only at the first start on a node.

        Raises:
            RefusedError: the epoch is stale (409), the memory is not there (507), or an argument makes no sense (400).
            AwayError: the daemon does not answer.
        """
        self._release_lane()
        self.fenced = False
        self._joining = {
            "epoch": epoch,
            "inc": inc,
            "rank": rank,
            "local_rank": local_rank,
            "members": [member.as_dict() for member in members],
            "bytes_max": bytes_max,
            "numa": numa,
            "fresh": fresh,
        }
        try:
            return self._join(self._connection.call, timeout_s)
        except BaseException:
            self._joining = None
            raise

    def locate(self, timeout_s: float = 120.0) -> Located | None:
        """What all ranks restore: the newest version of which every shard has a copy. Waits for the coordinator's decision.

        None where nothing was ever saved (no slot on any node and no step in durable storage), or nothing is whole and `fresh` was given. Call
        `report` then, too: saves begin when all ranks have.

        Raises:
            FormatError: something was saved, but no version is whole; the message says what. A fresh start is the caller's decision.
            RefusedError, AwayError: this rank was fenced; the daemon is gone, or the decision did not come in time.
        """
        found = self._poll_restore(timeout_s, lambda found: found["state"] != "deciding")
        if found["state"] == "failed":
            raise FormatError(str(found.get("detail", "no version is whole")))
        self._attempt = int(found["attempt"])
        return located_from(found["decision"]) if "decision" in found else None

    def report(self, ok: bool, why: str = "", timeout_s: float = 120.0, *, late: bool = False) -> bool:
        """Say whether this rank has read and verified all that it needs, and wait for all others.

        `late`: what failed may succeed when it is tried again (a `StoreError`: some copy was not reached); the next attempt may have the same step.

        True: every rank has; train on. False: a rank has not, another attempt was decided; call `locate` again and start over.

        Raises: as `locate`.
        """
        attempt = self._attempt
        try:
            self._call_until("restore_report", timeout_s, attempt=attempt, ok=ok, why=why, late=late)
        except RefusedError as error:
            if error.facts.get("code") != 409 or self.fenced:
                raise
            # Another attempt is on, or all is final: what follows tells.

        def over(found: Mapping[str, Any]) -> bool:
            return found["state"] in ("final", "failed") or int(found["attempt"]) > attempt

        found = self._poll_restore(timeout_s, over)
        if found["state"] == "failed":
            raise FormatError(str(found.get("detail", "no version is whole")))
        return found["state"] == "final"

    def put_index(self, index: bytes) -> str:
        """Hand over the content of `index.npz`, once for a layout; gives its hash, which `seal` takes. Raises as `join`."""
        digest = xxhash.xxh3_128_hexdigest(index)
        if not self._connection.call("has_index", index_hash=digest).fields.get("have"):
            self._connection.call(
                "put_index", blobs=(index,), index_hash=digest, deadline_s=60.0 * self.scale
            )
        return digest

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, step: int, nbytes: int, *, wait: bool = False) -> Slot | Skipped:
        """A slot to write this rank's file of `step` into, or why this save is skipped. Takes 50 ms at most, unless told to wait.

        Args:
            wait: Where no slot is free (`busy`), the step is not given up: this rank asks again. A daemon that is slow to answer is waited for.
        """
        lane = self._lane
        if lane is None:
            return self._skip("stale", "this rank has no slots")
        if self.fenced:
            return self._skip("fenced", "a newer incarnation of the job runs")
        try:
            found = self._connection.call(
                "begin",
                step=step,
                bytes=nbytes,
                wait=wait,
                skipped=self._news(),
                deadline_s=max(self._begin_s, WAIT_S * self.scale) if wait else self._begin_s,
            )
        except StoreError as error:
            if wait and error.facts.get("code") == 429:
                return Skipped("busy", str(error.facts.get("detail", error)))
            return self._skip_for(error)
        self._told_skipped = dict(self.skipped)
        number = found.fields.get("slot")
        for slot in lane.slots:
            if slot.number == number:
                self._writing.add(slot.number)
                return slot
        return self._skip(str(found.fields.get("skip", "refused")), str(found.fields.get("detail", "")))

    def seal(
        self,
        slot: Slot,
        used: int,
        index_hash: str,
        digests: bytes | None,
        extras: bytes,
        *,
        step: int,
        timings: Mapping[str, float] | None = None,
    ) -> Skipped | None:
        """Say that a slot is written: nobody writes to it from here on. None: the daemon has it, hashes it and votes.

        Args:
            used: Bytes of the rank file, header included.
            digests: The content of its `.digests`, computed by the device; the daemon compares it with what it reads. None: the daemon computes it.
            extras: The content of its `.extras`.
            timings: Seconds of this save by phase (`begin`, `d2h`), for the metrics.

        Waits up to 30 s for a daemon that is being restarted, so call it beside the training, not in it.
        """
        try:
            return self._seal(slot, used, index_hash, digests, extras, step, timings or {})
        finally:
            self._writing.discard(slot.number)

    def _seal(
        self,
        slot: Slot,
        used: int,
        index_hash: str,
        digests: bytes | None,
        extras: bytes,
        step: int,
        timings: Mapping[str, float],
    ) -> Skipped | None:
        blobs = (extras,) if digests is None else (extras, digests)
        until = time.monotonic() + RECONNECT_S * self.scale
        while True:
            try:
                self._connection.call(
                    "seal", blobs=blobs, slot=slot.number, step=step, used=used, index_hash=index_hash, timings=dict(timings),
                    deadline_s=10.0 * self.scale,
                )  # fmt: skip
                return None
            except AwayError as error:
                if time.monotonic() > until:
                    return self._skip_for(error)
                time.sleep(0.1 * self.scale)
            except RefusedError as error:
                return self._skip_for(error)

    def abort(self, slot: Slot, *, step: int, why: str = "") -> None:
        """Give a slot of `begin` back unsealed: this step will not be committed. Nothing writes to it from here on."""
        self._writing.discard(slot.number)
        with suppress(StoreError):
            self._connection.call("abort", slot=slot.number, step=step, why=why)

    def wait(self, step: int, level: int = 1, timeout_s: float = 60.0) -> bool:
        """Whether a step of this epoch reached a level in time: 1 committed, 2 replicated, 3 durable.

        False also where it was aborted, or the daemon is away. For tests and the last save of a run, not for the training loop.
        """
        until = time.monotonic() + timeout_s
        while True:
            with suppress(AwayError):
                found = self._connection.call("level", step=step).fields
                if int(found["level"]) >= level:
                    return True
                if found.get("aborted"):
                    return False
            if time.monotonic() > until:
                return False
            time.sleep(0.02 * max(self.scale, 0.1))

    def mark_bad(self, epoch: int, step: int, why: str = "") -> None:
        """Say that a version led to nonsense (a non-finite loss soon after it was loaded). Two epochs that say so ban it."""
        self._connection.call("mark_bad", epoch=epoch, step=step, why=why)

    def note(self, **facts: float | str) -> None:
        """Facts for the daemon's metrics: `register_seconds`, `register_mode` (`registered` or `bounce`), `d2h_bytes`."""
        with suppress(StoreError):
            self._connection.call("note", facts=facts)

    # ── operation ────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        """The daemon's own account: exposure, slots, versions, drain, warnings. Raises AwayError."""
        return self.request("status")

    def request(
        self, name: str, *, deadline_s: float = 10.0, blobs: Sequence[bytes] = (), **fields: Any
    ) -> dict[str, Any]:
        """Any other call, by name (docs/cache/operations.md). Raises RefusedError, AwayError."""
        return self._connection.call(name, blobs=blobs, deadline_s=deadline_s, **fields).fields

    def find(self, step: int, epoch: int | None = None, timeout_s: float = 60.0) -> Located:
        """Where the shards of any version are, for `LocatedStore`; not for a restore, which all ranks agree on.

        Args:
            epoch: Where several have the step: which one. [the newest]

        Raises:
            RefusedError: it is nowhere whole (404). AwayError: the daemon does not answer.
        """
        return located_from(
            self._connection.call("find", step=step, epoch=epoch, deadline_s=timeout_s).fields["decision"]
        )

    def map(self, number: int) -> Slot:
        """A slot of this node, mapped read-only. Raises RefusedError where there is none."""
        if number not in self._maps:
            found = self._connection.call("map", slot=number)
            try:
                self._maps[number] = Slot(number, int(found.fields["bytes"]), found.fds[0], writable=False)
            finally:
                for fd in found.fds:
                    os.close(fd)
        return self._maps[number]

    def unmap(self, number: int) -> None:
        """Give a slot of `map` back, so that it may be used again."""
        slot = self._maps.pop(number, None)
        if slot is not None:
            slot.close()
            self._connection.tell("unmap", slot=number)

    def side(self, number: int, what: str) -> bytes:
        """The `digests` or `extras` beside a slot of this node. Raises RefusedError, AwayError."""
        return self._connection.call("side", slot=number, what=what).blobs[0]

    def manifest(self, located: Located) -> bytes:
        """The content of the `manifest.json` of what is restored. Raises RefusedError, AwayError."""
        return self._connection.call("manifest", attempt=located.attempt, deadline_s=60.0 * self.scale).blobs[
            0
        ]

    def index(self, located: Located) -> bytes:
        """The content of the `index.npz` of what is restored. Raises RefusedError, AwayError."""
        found = self._connection.call("index", attempt=located.attempt, deadline_s=120.0 * self.scale)
        with os.fdopen(found.fds[0], "rb") as file:
            return file.read()

    def finish(self, *, drain: bool = True) -> None:
        """Say that the job ends normally: the newest committed step is drained, then the daemon exits. For one rank of the job."""
        with suppress(StoreError):
            self._connection.call("bye", drain=drain)

    def close(self) -> None:
        """End the connection and unmap the slots. An unsealed slot is free again when this process has exited."""
        self._connection.close()
        self._release_lane()
        for slot in self._maps.values():
            slot.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _greet(self, call: Caller) -> None:
        fields = call("hello", job=self.job, protocol=PROTOCOL, oldest=OLDEST).fields
        tls = fields.get("tls")
        self._info = NodeInfo(
            node=fields["node"], address=fields["address"], domain=fields["domain"], max_epoch=fields["max_epoch"], job=fields["job"],
            url=fields["url"], tls=TlsFiles(**tls) if tls else None, protocol=fields["protocol"], version=fields["version"],
        )  # fmt: skip
        if self._joining is not None and self._lane is not None:
            self._join(call, 60.0 * self.scale)

    def _join(self, call: Caller, timeout_s: float) -> Lane:
        assert self._joining is not None
        reply = call("join", deadline_s=timeout_s, writing=sorted(self._writing), **self._joining)
        try:
            slots = tuple(
                Slot(number, reply.fields["slot_bytes"], fd)
                for number, fd in zip(reply.fields["slots"], reply.fds, strict=True)
            )
        finally:
            for fd in reply.fds:
                os.close(fd)
        before = self._lane
        if (
            before is not None
        ):  # a reconnect: the trainer's mappings and registrations must still be the slots
            same = [(s.number, s.identity) for s in before.slots] == [(s.number, s.identity) for s in slots]
            for slot in slots:
                slot.close()
            if not same:
                self._lane = None
                raise RefusedError(
                    "the daemon has other slots than before; restart the job to use them", code=410
                )
            return before
        epoch, inc, rank = (self._joining[name] for name in ("epoch", "inc", "rank"))
        self._lane = Lane(epoch, inc, rank, slots, reply.fields["slot_bytes"])
        return self._lane

    def _release_lane(self) -> None:
        lane, self._lane = self._lane, None
        for slot in lane.slots if lane is not None else ():
            slot.close()

    def _on_event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "fenced":
            self.fenced = True

    def _on_late(self, reply: dict[str, Any]) -> None:
        """A slot that came after the deadline of `begin`: the save was skipped, so it is given back."""
        slot, step = reply.get("slot"), reply.get("step")
        if slot is not None and step is not None and slot not in self._writing:
            self._connection.tell("abort", slot=slot, step=step)

    def _skip(self, reason: str, detail: str) -> Skipped:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        return Skipped(reason, detail)

    def _skip_for(self, error: StoreError) -> Skipped:
        if isinstance(error, RefusedError):
            code = int(error.facts.get("code") or 0)
            known = {
                409: "fenced" if self.fenced else "aborted",
                410: "stale",
                413: "too_big",
                425: "restoring",
                429: "busy",
            }
            reason = known.get(code, "refused")
            return self._skip(reason, str(error.facts.get("detail", error)))
        return self._skip("away", str(error))

    def _news(self) -> dict[str, int]:
        """Skipped saves that the daemon does not know of yet."""
        return {
            reason: count - self._told_skipped.get(reason, 0)
            for reason, count in self.skipped.items()
            if count > self._told_skipped.get(reason, 0)
        }

    def _call_until(self, name: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """A call that may be repeated, tried until `timeout_s` is over while the daemon is away."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                return self._connection.call(name, **fields).fields
            except AwayError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1 * self.scale)

    def _poll_restore(self, timeout_s: float, over: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        until = time.monotonic() + timeout_s
        while True:
            found = self._call_until("restore", max(until - time.monotonic(), 0.0))
            if over(found):
                return found
            if time.monotonic() > until:
                raise AwayError(
                    f"the restore was not decided within {timeout_s:g} s ({found.get('detail', found['state'])}); see `ckptkit cache "
                    "status` on the node of rank 0"
                )
            time.sleep(0.05 * max(self.scale, 0.1))
