"""A node's part in writing a version to durable storage: follow the record, say how it goes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.cache.events import CancelDrain, Drained, DrainVersion, Effect, Send
from ckptkit.cache.messages import DrainReport, DrainRequest, Version

if TYPE_CHECKING:
    from ckptkit.cache.node import Node

LONG_AGO = float("-inf")


@dataclass
class Draining:
    """The part of a `Node` that drains. `wanted`: the newest step was asked for and is not durable yet."""

    node: "Node"
    wanted: bool = False

    def __post_init__(self) -> None:
        self._version: Version | None = None
        self._report: DrainReport | None = None
        self._sent = self._asked = LONG_AGO

    def new_epoch(self) -> list[Effect]:
        self.wanted = False
        return self._stop()

    def new_record(self, now: float) -> list[Effect]:
        """Write what the record says, and nothing else."""
        record, epoch = self.node.record, self.node.epoch
        assert record is not None and epoch is not None
        if self.wanted and record.newest == record.durable:
            self.wanted = False
        if self._version == record.drain:
            return []
        effects = self._stop()
        if record.drain is None:
            return effects
        self._version = record.drain
        own = [self.node.table.find(record.drain, rank) for rank in epoch.ranks[self.node.name]]
        slots = tuple(found.slot for found in own if found is not None)
        if len(slots) < len(own):
            return effects + self.ended(Drained(record.drain, "a shard of this node is gone"), now)
        return [*effects, DrainVersion(record.drain, slots)]

    def ended(self, event: Drained, now: float) -> list[Effect]:
        """Tell the coordinator that this node's shards are durable, or that it fails."""
        epoch = self.node.epoch
        if event.version != self._version or epoch is None:
            return []
        self._report = DrainReport(
            epoch.epoch, epoch.inc, self.node.name, event.version, event.failure[:1000]
        )
        self._sent = now
        return [Send(epoch.coordinator, self._report)]

    def want(self, now: float) -> list[Effect]:
        """Ask for the newest step to be made durable, and go on asking until it is."""
        epoch = self.node.epoch
        if epoch is None:
            return []
        self.wanted, self._asked = True, now
        return [Send(epoch.coordinator, DrainRequest(epoch.epoch, epoch.inc, self.node.name))]

    def tick(self, now: float) -> list[Effect]:
        epoch, again = self.node.epoch, now - self.node.settings.resend_s
        effects: list[Effect] = []
        if epoch is not None and self._report is not None and self._sent <= again:
            self._sent = now
            effects.append(Send(epoch.coordinator, self._report))
        return effects + (self.want(now) if self.wanted and self._asked <= again else [])

    def _stop(self) -> list[Effect]:
        version, self._version, self._report = self._version, None, None
        return [] if version is None else [CancelDrain(version)]
