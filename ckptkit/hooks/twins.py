"""Twins: ranks that hold the same values say so, by digest, at every save.

Silent corruption of a device shows as a difference between replicas. Each rank digests what it shares with others; rank 0 compares one
digest a set, and only where sets differ do their ranks send the digests of all leaves, so that the tensor can be named.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from ckptkit.core.catalog import LEAF
from ckptkit.hooks.holdings import Holding
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.planning import Replicas
from ckptkit.kernels.pack import PackPlan, digest_in_place


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        differing: A line for each leaf that differs, at most eight.
        odd: Ranks that are outvoted by a majority of three or more; -1 among them where there is none.
    """

    differing: tuple[str, ...] = ()
    odd: tuple[int, ...] = ()


@dataclass
class _Set:
    """One set of ranks: its tensors, one after the other, as leaves."""

    replicas: Replicas
    plan: PackPlan
    starts: list[int]
    names: list[str]
    digests: torch.Tensor


class Twins:
    """The sets that this rank belongs to."""

    def __init__(
        self, sets: Sequence[Replicas], holdings: Sequence[Holding], tensors: Sequence[torch.Tensor | None]
    ) -> None:
        self._sets: list[_Set] = []
        for one in sets:
            parts, starts, names, at = [], [], [], 0
            for number in one.holdings:
                tensor = tensors[number]
                h = holdings[number]
                if tensor is None or not h.fenced or not tensor.is_contiguous() or not tensor.numel():
                    continue
                parts.append(tensor)
                starts.append(at)
                names.append(h.what)
                at += -(-h.nbytes // 16) * 16
            devices = {part.device for part in parts}
            if parts and len(devices) == 1:
                plan = PackPlan(parts, starts, leaf_nbytes=_leaf(at))
                digests = torch.empty(plan.leaf_count, 16, dtype=torch.uint8, device=plan.device)
                self._sets.append(_Set(one, plan, starts, names, digests))

    def __len__(self) -> int:
        return len(self._sets)

    def digest(self) -> None:
        """Digest what is shared, before the optimizer's next step. On a device: enqueue it."""
        for one in self._sets:
            digest_in_place(one.plan, one.digests)

    def compare(self, meeting: Meeting, name: str) -> Verdict:
        """Compare with all ranks. Every rank calls it, those without sets too. Raises StoreError where one does not arrive."""
        tables = {one.replicas.name: one.digests.cpu().numpy().tobytes() for one in self._sets}
        short = {key: xxhash.xxh3_128_hexdigest(table) for key, table in tables.items()}
        members = {one.replicas.name: list(one.replicas.ranks) for one in self._sets}
        suspects = meeting.agree(name, [short, members], _suspects)
        if not suspects:
            return Verdict()
        details = {
            one.replicas.name: {
                "leaves": [tables[one.replicas.name][k : k + 16].hex() for k in range(0, len(tables[one.replicas.name]), 16)],
                "starts": one.starts, "names": one.names, "leaf": one.plan.leaf_nbytes,
            }
            for one in self._sets if one.replicas.name in suspects
        }  # fmt: skip
        found = meeting.agree(f"{name}/leaves", details, _judge)
        return Verdict(tuple(found["lines"]), tuple(found["odd"]))


MOST_LEAVES = 1 << 15


def _leaf(nbytes: int) -> int:
    """Bytes under one digest: as few as 1 KiB where little is shared, so that a tensor can be told from its neighbours."""
    leaf = 1024
    while leaf < LEAF and nbytes > leaf * MOST_LEAVES:
        leaf *= 2
    return leaf


def _suspects(said: Sequence[Any]) -> list[str]:
    """Sets whose ranks do not all say the same."""
    values: dict[str, set[str]] = {}
    for short, _ in said:
        for key, value in short.items():
            values.setdefault(key, set()).add(value)
    return sorted(key for key, found in values.items() if len(found) > 1)


@dataclass
class _Judged:
    lines: list[str] = field(default_factory=list)
    odd: set[int] = field(default_factory=set)


def _judge(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which leaves differ, and who is outvoted."""
    found = _Judged()
    for key in sorted({key for one in said for key in one}):
        ranks = {rank: one[key] for rank, one in enumerate(said) if key in one}
        first = next(iter(ranks.values()))
        for leaf in range(len(first["leaves"])):
            votes = Counter(one["leaves"][leaf] for one in ranks.values())
            if len(votes) == 1:
                continue
            winner, count = votes.most_common(1)[0]
            decided = len(ranks) >= 3 and count * 2 > len(ranks)
            odd = sorted(rank for rank, one in ranks.items() if one["leaves"][leaf] != winner)
            found.odd.update(odd if decided else [-1])
            if len(found.lines) < 8:
                low, high = leaf * first["leaf"], (leaf + 1) * first["leaf"]
                inside = [
                    name for name, start, end in zip(first["names"], first["starts"], [*first["starts"][1:], high], strict=True)
                    if start < high and end > low
                ]  # fmt: skip
                more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
                who = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}" if decided else (
                    f"one of ranks {', '.join(map(str, sorted(ranks)))}"
                )  # fmt: skip
                found.lines.append(
                    f"{who}: {', '.join(inside[:3])}{more}, in leaf {leaf} ({first['leaf']} bytes each) of what ranks "
                    f"{', '.join(map(str, sorted(ranks)))} share"
                )
    return {"lines": found.lines, "odd": sorted(found.odd)}


def line_of(verdict: Verdict) -> str:
    """A verdict for people."""
    return "replicas differ, so a device or its memory is not to be trusted: " + "; ".join(verdict.differing)
