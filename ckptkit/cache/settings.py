"""The times and choices of the protocol."""

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds of a monotonic clock.

    Attributes:
        resend_s: After what time a message without an answer is sent again.
        idle_poll_s: How often a node asks for the record while it waits for nothing.
        vote_s: After what time since a version's first vote a missing one aborts it (or 4 times the median, if that is longer).
        replica_s: After what time a version is given up whose copies do not get done, where a newer one waits.
        inventory_s: How long a restore waits for inventories of nodes that are no members and the list of durable versions.
        zombie_s: After what time a process of a fenced epoch is killed, with `kill_zombies`.
        drain_every: Steps of which every multiple is written to durable storage; 0: none.
    """

    resend_s: float = 2.0
    idle_poll_s: float = 10.0
    vote_s: float = 120.0
    replica_s: float = 120.0
    inventory_s: float = 30.0
    zombie_s: float = 30.0
    kill_zombies: bool = False
    drain_every: int = 0

    def scaled(self, factor: float) -> Self:
        """The same with all times multiplied, for tests and drills."""
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        changed |= {name: value * factor for name, value in changed.items() if name.endswith("_s")}
        return type(self)(**changed)
