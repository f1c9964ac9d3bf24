"""What a drill is, and the list of all of them.

A drill is a function that takes a stage (`light.Light` or `training.Training`), puts the faults of its plan into the run, and lets the
stage recover. What it promises is checked by the stage; the drill adds what only it knows (`stage.expect`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ckptkit.errors import UsageError
from ckptkit.faults.inject.plan import Choice, FaultPlan

Kind = Literal["light", "zaya"]
Run = TypeVar("Run", bound=Callable[[Any], None])

MATRIX = {
    1: "a rank is killed while it copies", 2: "a rank is killed after its seal", 3: "a daemon is killed while a rank writes",
    4: "a daemon is killed while it hashes, replicates or drains", 5: "a daemon is away for long", 6: "a node loses power, its shards have copies",
    7: "a whole clique loses power", 8: "a node is lost between seal and copy", 9: "the coordinator restarts during the vote",
    10: "the coordinator is gone after all have voted", 11: "votes are lost, doubled or late", 12: "a straggler seals after the abort",
    13: "a zombie writes to its slot", 14: "a zombie coordinator writes a manifest", 15: "two incarnations start with one epoch",
    16: "two epochs save the same step", 17: "a bit flips in a sealed slot", 18: "a bit flips on the wire, an answer is cut short",
    19: "bytes change while they are copied", 20: "a memory cell stays bad", 21: "a slot's record is torn or missing", 22: "memory is out at the start",
    23: "the trainer needs the memory", 24: "host memory cannot be registered", 25: "a peer is slow or hangs", 26: "the network is partitioned",
    27: "the durable store is away for hours", 28: "a sync fails", 29: "power is lost during a drain", 30: "an upload breaks off",
    31: "a durable file is damaged after its commit", 32: "the run goes on in another layout", 33: "a step is called bad in two epochs",
    34: "the clock jumps", 35: "a second daemon starts; a pid is used again", 36: "hostile requests", 37: "saves are faster than copies",
    38: "SIGTERM, and a normal end", 39: "a dead epoch left unfinished steps in every slot",
}  # fmt: skip
"""Rows of the node cache's failure matrix: each has a drill."""

CLASSES = ("processes", "nodes", "daemon", "network", "storage", "memory", "objects", "time")
"""Kinds of injection: each has a drill."""


@dataclass(frozen=True)
class Drill:
    """A named drill.

    Attributes:
        promise: What holds, in one sentence.
        covers: Rows of `MATRIX` and names of `CLASSES`.
        kind: `light` for ranks without a model, `zaya` for the training loop.
        menu, faults: The faults that a plan is drawn from, and how many of them.
        run: The drill itself, with a stage.
        options: Of the stage.
        smoke: Whether it is in the small set.
    """

    name: str
    promise: str
    covers: tuple[int | str, ...]
    kind: Kind
    menu: tuple[Choice, ...]
    run: Callable[[Any], None]
    faults: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    smoke: bool = False

    def plan(self, seed: int) -> FaultPlan:
        """The faults of a seed. Times are shares of what the drill does with them, or steps."""
        if not self.menu:
            return FaultPlan(())
        return FaultPlan.draw(_mixed(self.name, seed), self.menu, self.faults, 0, 1, whole=False)


DRILLS: dict[str, Drill] = {}


def drill(
    promise: str,
    *covers: int | str,
    kind: Kind = "light",
    menu: Sequence[Choice] = (),
    faults: int = 1,
    smoke: bool = False,
    **options: Any,
) -> Callable[[Run], Run]:
    """Register a function as a drill; its name with dashes is the drill's. `options` are those of the stage."""

    def register(function: Run) -> Run:
        name = function.__name__.replace("_", "-")
        if name in DRILLS:
            raise ValueError(f"two drills are called {name}")
        unknown = [one for one in covers if one not in MATRIX and one not in CLASSES]
        if unknown or not covers:
            raise ValueError(f"drill {name} covers {unknown or 'nothing'}")
        DRILLS[name] = Drill(
            name,
            promise,
            covers,
            kind,
            tuple(menu),
            function,
            faults if menu else 0,
            tuple(options.items()),
            smoke,
        )
        return function

    return register


def chosen(names: Sequence[str], *, smoke: bool = False) -> list[Drill]:
    """Drills by name, or all; raises UsageError for a name that is none."""
    from ckptkit.faults.drills import catalogue  # noqa: F401  (fills the list)

    for name in names:
        if name not in DRILLS:
            from difflib import get_close_matches

            near = get_close_matches(name, DRILLS, n=1)
            hint = f"did you mean {near[0]}?" if near else "`ckptkit drill list` names them all"
            raise UsageError(f"there is no drill {name!r}; {hint}")
    found = [DRILLS[name] for name in names] if names else list(DRILLS.values())
    return [one for one in found if one.smoke or not smoke]


def _mixed(name: str, seed: int) -> int:
    """A seed of its own for every drill, so that equal seeds do not mean the same victim everywhere."""
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:6], "big")
