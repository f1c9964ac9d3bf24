"""What a run was told to be safe, and what a fault must therefore leave.

A save is acknowledged at levels: 1 committed in memory, 2 copied to other nodes, 3 durable. A fault spares levels: the death of processes
spares all, the loss of nodes spares what has copies (2) unless a shard and its copies went together (3).
"""

from dataclasses import dataclass, field

SPARES = {"processes": 1, "node": 2, "memory": 3}
"""What is lost → the least level that it spares."""


@dataclass
class Ledger:
    """Acknowledged steps of a run.

    Attributes:
        level: Step → the highest level at which it was acknowledged.
        trained: The last step that a save was begun of.
        unusable: Steps that the drill itself made impossible to restore (banned; damaged in every copy).
        spared: The least level that all faults since the last recovery spare.
    """

    level: dict[int, int] = field(default_factory=dict)
    trained: int = 0
    unusable: set[int] = field(default_factory=set)
    spared: int = 1

    def began(self, step: int) -> None:
        self.trained = max(self.trained, step)

    def acknowledged(self, step: int, level: int) -> None:
        self.began(step)
        self.level[step] = max(level, self.level.get(step, 0))

    def lost(self, what: str) -> None:
        """A fault took something: a key of `SPARES`."""
        self.spared = max(self.spared, SPARES[what])

    @property
    def floor(self) -> int:
        """The least step that must be restored now; 0 where nothing need be there."""
        return max(
            (s for s, level in self.level.items() if level >= self.spared and s not in self.unusable),
            default=0,
        )

    def restored(self, step: int) -> int:
        """A recovery restored a step: what is above it is gone, and memory must prove itself anew. Gives the saves to do again."""
        redone = self.trained - step
        self.level = {
            s: level if level == 3 else 1
            for s, level in self.level.items()
            if s == step or (level == 3 and s < step)
        }
        if step:
            self.level.setdefault(step, 1)
        self.trained, self.spared = step, 1
        return redone
