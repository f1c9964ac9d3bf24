"""What a daemon does besides the protocol: scrubbing, memory pressure, retention, and its account of itself."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from ckptkit.cache.events import Pressure, Scrubbed
from ckptkit.cache.limits import memory, reserve
from ckptkit.cache.messages import SlotRecord, Version
from ckptkit.cache.metrics import Metrics
from ckptkit.cache.throttle import Throttle
from ckptkit.errors import CkptError
from ckptkit.formats.native_digests import RankDigests

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon

_HOLD_S = 600.0
"""How long memory that the operator took back stays with the system."""


class Upkeep:
    """The background work of one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self.d = daemon
        self.pressure = 0
        self.last_drain: tuple[float, int] | None = None
        self._scrub = asyncio.Event()
        self._making = False
        self._evicted_until = 0.0
        self._certificate: float | None = None
        self._durable_steps: list[str] = []
        self._said_table = 0

    def start(self) -> None:
        self.d.task(self._pressing())
        self.d.task(self._scrubbing())

    # ── scrub ────────────────────────────────────────────────────────────────────────────────────────────────

    def scrub_now(self) -> None:
        """Begin a pass over all slots."""
        self._scrub.set()

    async def _scrubbing(self) -> None:
        """Slots taken over from an earlier daemon first, then all of them once in a while."""
        config = self.d.config.scrub
        throttle = Throttle(config.max_bps)
        for record in [r for r in self.d.node.table if r.state == "SEALED" and not r.verified]:
            await self._look(record, throttle)
        while True:
            self._scrub.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.period_s * self.d.scale if config.period_s else None):
                    await self._scrub.wait()
            for record in list(self.d.node.table):
                await self._look(record, throttle)

    async def _look(self, record: SlotRecord, throttle: Throttle) -> None:
        """Compare one slot with its digests."""
        d = self.d
        now = d.node.table.get(record.slot)
        if now is None or now.seq != record.seq or now.state != "SEALED" or now.damaged:
            return
        d.node.table.refs[record.slot] += 1
        try:
            bad = await asyncio.to_thread(self._bad, record, throttle)
        finally:
            d.release(record)
        d.metrics.scrub_bytes.inc(record.used)
        if bad:
            d.log(
                "slot differs from its digests",
                slot=record.slot,
                rank=record.rank,
                leaves=len(bad),
                first=bad[0],
            )
        d.apply(Scrubbed(record.slot, record.seq, bad))

    def _bad(self, record: SlotRecord, throttle: Throttle) -> tuple[int, ...]:
        try:
            digests = RankDigests.parse(f"slot {record.slot}", self.d.tmpfs.read_side(record.slot, "digests"))
            if digests.content.hex() != record.digest:
                return (-1,)
            with self.d.tmpfs.mapped(record.slot, record.used) as view:
                return self.d.hashing.bad_leaves(view, digests, throttle)
        except (CkptError, OSError):
            return (-1,)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _pressing(self) -> None:
        """Watch the node's memory: first no new copies, then give copies back; never what a rank has mapped."""
        while True:
            await asyncio.sleep(1.0 * self.d.scale)
            self.look_at_memory()

    def look_at_memory(self) -> None:
        d, now = self.d, memory()
        keep = reserve(d.config, now.total)
        left = now.available if now.cgroup is None else min(now.available, now.cgroup)
        level = 2 if left < keep // 2 else 1 if left < keep else 0
        release = 0
        if level == 2 and d.node.table.slot_bytes:
            release = max(1, -(-(keep // 2 - left) // d.node.table.slot_bytes))
        if level != self.pressure:
            d.log("memory pressure", level=level, available=left, reserve=keep)
            if level:
                d.metrics.pressure_actions.labels("refuse").inc()
            self.pressure = level
            d.apply(Pressure(level, release))
        elif release:
            d.apply(Pressure(level, release))
        if not level and left > keep + d.node.table.slot_bytes and d.now() > self._evicted_until:
            self.want_ready()

    def evict(self, slots: int) -> int:
        """Give up to so many slots for copies back to the system, for ten minutes; gives how many."""
        before = len(self.d.node.table.unready)
        self._evicted_until = self.d.now() + _HOLD_S * self.d.scale
        self.d.apply(Pressure(2, slots))
        self.d.apply(Pressure(self.pressure))
        return len(self.d.node.table.unready) - before

    def want_ready(self) -> None:
        """Give slots for copies that have no memory some, beside."""
        if self.d.node.table.unready and not self._making:
            self._making = True
            self.d.task(self._make_ready())

    async def _make_ready(self) -> None:
        d = self.d
        try:
            for slot in d.node.table.lanes.get("replica", ()):
                table = d.node.table
                if slot in table.unready and slot in table:
                    await d.memory.make([slot], table.slot_bytes)
        except OSError as error:
            d.log("no memory for copies", reason=error.strerror)
        finally:
            self._making = False

    def table_at_start(self) -> None:
        """Say once for each table who has how many slots."""
        d = self.d
        if self._said_table == id(d.node.table):
            return
        self._said_table = id(d.node.table)
        lanes = {lane: len(slots) for lane, slots in d.node.table.lanes.items()}
        d.log(
            "slots",
            bytes_each=d.node.table.slot_bytes,
            bytes_all=d.node.table.slot_bytes * len(d.node.table),
            lanes=lanes,
        )

    # ── durable ──────────────────────────────────────────────────────────────────────────────────────────────

    def drained(self, seconds: float, nbytes: int) -> None:
        """A drain of this node has ended: does one fit into the grace that the scheduler leaves?"""
        d, grace = self.d, self.d.config.drain.grace_s * self.d.scale
        self.last_drain = (seconds, nbytes)
        d.metrics.drain_seconds.set(seconds)
        d.log("drain ended", seconds=round(seconds, 3), bytes=nbytes)
        if seconds > grace:
            d.log(
                "drain is longer than the grace", seconds=round(seconds, 1), grace_s=grace,
                what_to_do="raise the grace period of the scheduler and drain.grace_s, or drain more often",
            )  # fmt: skip

    def all_durable(self) -> bool:
        """Whether the newest committed step is durable, or there is none."""
        record = self.d.node.record
        return record is None or record.newest is None or record.newest == record.durable

    async def retain(self) -> None:
        """Remove what retention lets go; for the coordinator, after a step became durable."""
        d, config, run = self.d, self.d.config.drain, self.d.run_folder
        epoch, record = d.node.epoch, d.coordinator.record if d.coordinator else None
        if run is None or epoch is None or record is None:
            return
        try:
            gone = await asyncio.to_thread(
                run.retain,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                epoch=epoch.epoch,
                restored=record.restored,
            )
            swept = await asyncio.to_thread(run.sweep, epoch.epoch, config.orphan_s * d.scale)
        except CkptError as error:
            d.log("retention failed", reason=str(error))
            return
        for name in gone:
            d.log("step removed", name=name)
        for name in swept:
            d.log("unfinished step removed", name=name)

    # ── account ──────────────────────────────────────────────────────────────────────────────────────────────

    async def status(self) -> dict[str, Any]:
        """The daemon's account of itself; exposure first: what is lost if a process, a node, a clique dies now."""
        d = self.d
        record, epoch, now = d.node.record, d.node.epoch, d.now()
        table = d.node.table
        slots: dict[str, dict[str, int]] = {}
        for item in table:
            states = slots.setdefault(item.lane, {})
            view = "UNREADY" if item.slot in table.unready else table.view(item.slot, record)
            states[view] = states.get(view, 0) + 1
        cliques = d.node.replication.cliques if epoch is not None else None
        found = memory()
        return {
            "exposure": self._exposure(),
            "job": d.config.job, "node": d.config.node, "address": d.address, "state": "ending" if d.stopping else "serving",
            "epoch": epoch.epoch if epoch else None, "coordinator": epoch.coordinator if epoch else None,
            "coordinates": d.coordinator is not None, "training": d.node.trains,
            "committed": _step(record.newest if record else None), "replicated": _step(record.keep if record else None),
            "copying": _step(record.cand if record else None), "draining": _step(record.drain if record else None),
            "durable": _step(record.durable if record else None), "restored": _step(record.restored if record else None),
            "degraded": bool(record and record.degraded),
            "clique": list(cliques.mates(d.config.node)) if cliques else [], "copies": cliques.copies if cliques else 0,
            "ages_s": {
                "committed": _age(now, d.notes.newest_at), "replicated": _age(now, d.notes.level2_at), "durable": _age(now, d.notes.durable_at),
            },
            "slots": slots, "slot_bytes": table.slot_bytes, "ranks": sorted({s.rank for s in d.node.sessions.values()}),
            "memory": {"available": found.available, "reserve": reserve(d.config, found.total), "pressure": self.pressure},
            "drain": {
                "url": d.run_folder.url if d.run_folder else "", "last_s": self.last_drain[0] if self.last_drain else None,
                "last_bytes": self.last_drain[1] if self.last_drain else None, "grace_s": d.config.drain.grace_s * d.scale,
            },
            "bans": len(d.node.bans.bans), "certificate_days_left": self._days(),
        }  # fmt: skip

    def _exposure(self) -> dict[str, Any]:
        """Which step is left after each kind of loss."""
        record = self.d.node.record
        if record is None:
            return {"process": None, "node": None, "clique": None, "durable_age_s": None}
        durable = record.durable or record.restored if record.restored == record.durable else record.durable
        copied = record.keep if self._copies() else durable
        return {
            "process": _step(record.newest), "node": _step(copied or durable), "clique": _step(durable),
            "durable_age_s": _age(self.d.now(), self.d.notes.durable_at),
        }  # fmt: skip

    def _copies(self) -> int:
        return self.d.node.replication.cliques.copies if self.d.node.epoch is not None else 0

    async def versions(self) -> list[dict[str, Any]]:
        """Every version that this node, or durable storage, holds something of; the newest first."""
        d, record = self.d, self.d.node.record
        rows: dict[Version, dict[str, Any]] = {}
        for item in d.node.table:
            if item.version is None or item.state not in ("SEALED", "WRITING"):
                continue
            row = rows.setdefault(item.version, _row(item.version))
            row["world"] = item.world
            row["bytes"] += item.used
            row["ranks" if item.state == "SEALED" else "writing"].append(item.rank)
        if d.run_folder is not None:
            steps, faults = await asyncio.to_thread(d.run_folder.steps)
            pins = await asyncio.to_thread(d.run_folder.pins)
            for fault in faults:
                d.log("durable step unusable", reason=fault)
            for step in steps:
                row = rows.setdefault(step.version, _row(step.version))
                row["world"], row["durable"], row["pinned"] = (
                    len(step.manifest.files),
                    True,
                    step.name in pins,
                )
        for version, row in rows.items():
            row["banned"] = d.node.bans.hard(version)
            if record is not None:
                names = {
                    "newest": record.newest,
                    "keep": record.keep,
                    "cand": record.cand,
                    "drain": record.drain,
                }
                row["marks"] = [name for name, marked in names.items() if marked == version]
        return [rows[version] for version in sorted(rows, reverse=True)]

    def refresh(self, metrics: Metrics) -> None:
        """Set the gauges that are read from the state."""
        d, record, now = self.d, self.d.node.record, self.d.now()
        table = d.node.table
        metrics.slots.clear()
        for item in table:
            metrics.slots.labels(item.lane.partition("/")[0], table.view(item.slot, record)).inc()
        metrics.quarantined.set(sum(item.state == "QUARANTINED" for item in table))
        metrics.retired.set(sum(item.state == "RETIRED" for item in table))
        metrics.budget_bytes.set(table.slot_bytes * (len(table) - len(table.unready)))
        metrics.mem_available.set(memory().available)
        metrics.epoch.set(d.node.epoch.epoch if d.node.epoch else 0)
        metrics.skipped_consecutive.set(max(d.notes.skipped_in_row.values(), default=0))
        for gauge, since in (
            (metrics.level2_age, d.notes.level2_at), (metrics.durable_age, d.notes.durable_at),
        ):  # fmt: skip
            gauge.set(now - since if since is not None else 0)
        waiting = (
            record is not None
            and record.newest is not None
            and record.newest != record.keep
            and self._copies()
        )
        metrics.replica_lag.set(now - (d.notes.newest_at or now) if waiting else 0)
        if (days := self._days()) is not None:
            metrics.certificate_days.set(days)

    def _days(self) -> float | None:
        if self.d.config.tls.mode != "all":
            return None
        from ckptkit.cache.certs import days_left

        try:
            return round(days_left(self.d.config.tls.cert), 2)
        except CkptError:
            return None


def _step(version: Version | None) -> dict[str, int] | None:
    return None if version is None else {"step": version.step, "epoch": version.epoch}


def _age(now: float, since: float | None) -> float | None:
    return None if since is None else round(now - since, 1)


def _row(version: Version) -> dict[str, Any]:
    return {
        "step": version.step, "epoch": version.epoch, "inc": version.inc, "world": 0, "bytes": 0, "ranks": [], "writing": [],
        "durable": False, "pinned": False, "banned": False, "marks": [],
    }  # fmt: skip
