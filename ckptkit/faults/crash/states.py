"""Enumeration of what a crash may leave at one moment: every combination of fates where they are few, else a frontier and a sample.

With `limit` as the largest number of combinations that are all tried:

1. If the fates of all pending operations have no more combinations than that, all are tried: the moment is *complete*.
2. Else: all kept, all lost; each operation with each fate alone among kept ones, and alone among lost ones; for each file and
   each folder every prefix of its own operations (what was written back in order), with all others kept and with all others lost;
   all pairs of such prefixes; and combinations drawn from a seed, until there are `limit`.

In the ext4 model names and sizes are lost from the end only, so a moment has one frontier for them, and the fates of bytes beside it.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import prod

from ckptkit.faults.crash.model import Fate, after_crash, fates, folders_of, growing, node_of, pending
from ckptkit.faults.crash.operations import Mark, Op, Resize, Sync, Tree

Choice = dict[int, Fate]
"""Fates by number of the operation; what is not named was kept."""


class Moment:
    """A crash behind `ops[:stop]`.

    Attributes:
        passed: Promises that were made before.
        pending: Operations that are not durable.
        complete: Whether `choices` gives every combination.
    """

    def __init__(
        self,
        start: Tree,
        ops: Sequence[Op],
        stop: int,
        model: str,
        limit: int,
        seed: int,
        grown: Collection[int],
    ) -> None:
        self.ops, self.stop, self.model, self.limit = ops[:stop], stop, model, limit
        self.passed = tuple(op.text for op in self.ops if isinstance(op, Mark))
        self.pending = pending(self.ops, model, grown)
        self._rng = random.Random(f"{seed} {stop} {model}")
        self._fates = {n: fates(self.ops[n], model, n in grown) for n in self.pending}
        self._journal = [n for n in self.pending if model == "ext4" and _in_journal(self.ops[n])]
        self._free = [n for n in self.pending if n not in set(self._journal)]
        self.complete = prod(len(self._fates[n]) for n in self._free) <= self._share
        # What no crash can lose is applied once.
        self._first = self.pending[0] if self.pending else stop
        self._base = after_crash(start, self.ops[: self._first], {})

    @property
    def _share(self) -> int:
        """Combinations of free operations to try for each frontier of the journal."""
        return max(8, self.limit // (len(self._journal) + 1))

    def tree(self, choice: Choice) -> Tree:
        """What is on the disk then."""
        return after_crash(self._base, self.ops, choice, self._first)

    def draw(self) -> Choice:
        """One combination of fates."""
        frontier = self._rng.randint(0, len(self._journal))
        lost: Choice = dict.fromkeys(self._journal[frontier:], "lost")
        share = self._rng.random()
        return {**self._sampled(self._free, share), **lost}

    def _sampled(self, numbers: Sequence[int], share: float) -> Choice:
        return {n: self._rng.choice(self._fates[n][1:]) for n in numbers if self._rng.random() < share}

    def choices(self) -> Iterator[Choice]:
        """Fates to try; some may lead to the same content."""
        for frontier in range(len(self._journal), -1, -1):
            lost: Choice = dict.fromkeys(self._journal[frontier:], "lost")
            for choice in self._combinations(self._free, self._share):
                yield {**choice, **lost}

    def _combinations(self, numbers: Sequence[int], limit: int) -> Iterator[Choice]:
        """Combinations of operations that are independent of each other."""
        options = [self._fates[n] for n in numbers]
        if prod(map(len, options)) <= limit:
            for combination in product(*options):
                yield {n: fate for n, fate in zip(numbers, combination, strict=True) if fate != "kept"}
            return
        every: Choice = dict.fromkeys(numbers, "lost")
        yield {}
        yield every
        for n in numbers:
            for fate in self._fates[n][1:]:
                yield {n: fate}
            for fate in self._fates[n]:
                if fate != "lost":
                    yield _with(every, n, fate)
        units = self._units(numbers)
        for unit in units:
            for prefix in range(1, len(unit)):
                yield dict.fromkeys(unit[prefix:], "lost")
                yield {n: "lost" for n in numbers if n not in unit[:prefix]}
        left = limit
        for one, other in combinations(units, 2):
            for a, b in product(range(len(one) + 1), range(len(other) + 1)):
                if left <= 0:
                    break
                left -= 1
                yield dict.fromkeys([*one[a:], *other[b:]], "lost")
        for _ in range(limit):
            yield self._sampled(numbers, self._rng.random())

    def _units(self, numbers: Sequence[int]) -> list[list[int]]:
        """Operations by what they belong to: a file's bytes, or the names of a folder."""
        found: dict[tuple[str, int], list[int]] = {}
        for n in numbers:
            op = self.ops[n]
            node = node_of(op)
            key = ("file", node) if node is not None else ("folder", folders_of(op)[0])
            found.setdefault(key, []).append(n)
        return list(found.values())


def moments(start: Tree, ops: Sequence[Op], model: str, limit: int, seed: int) -> Iterator[Moment]:
    """A crash before the first operation, and behind each one that does something or promises something."""
    grown = growing(start, ops)
    for stop in range(len(ops) + 1):
        if stop == 0 or not (isinstance(ops[stop - 1], Sync) and stop < len(ops)):
            yield Moment(start, ops, stop, model, limit, seed, grown)


def drawn(start: Tree, ops: Sequence[Op], model: str, seed: int) -> Tree:
    """One content that a crash now may leave, drawn from a seed: for a power loss in a running program."""
    moment = Moment(start, ops, len(ops), model, 1, seed, growing(start, ops))
    return moment.tree(moment.draw())


def _in_journal(op: Op) -> bool:
    return bool(folders_of(op)) or isinstance(op, Resize)


def _with(choice: Mapping[int, Fate], number: int, fate: Fate) -> Choice:
    changed = dict(choice)
    if fate == "kept":
        del changed[number]
    else:
        changed[number] = fate
    return changed
