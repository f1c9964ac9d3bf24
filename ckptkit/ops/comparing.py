"""Comparison of two checkpoints by value."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any

import numpy as np

from ckptkit.core.boxes import Ints
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.plan import Key
from ckptkit.errors import UsageError
from ckptkit.ops.carrying import has_coordinate
from ckptkit.ops.differences import differences
from ckptkit.ops.folding import fold, fold_names
from ckptkit.ops.owners import Owners, one_place
from ckptkit.ops.reports import Progress, Report, count_text
from ckptkit.ops.selection import select
from ckptkit.ops.sources import Source, open
from ckptkit.ops.streaming import Chunk, visit
from ckptkit.ops.values import differing, is_number, numbers

_SAMPLE = 2048
"""Differing elements of a chunk whose rank is looked up, where nobody asked for counts."""


@dataclass(frozen=True)
class TensorDiff:
    """A tensor whose values differ.

    Attributes:
        differing, elements: How many elements differ, of how many.
        max_abs, max_rel: Largest differences, in float64 (inf where one side is not finite).
        at: Index of the largest difference.
        where: Where differing elements lie: `all in rank 13's pieces`; empty where they are spread.
        by_rank: Differing elements by rank of A, with `by_rank`.
    """

    tensor: str
    role: str
    differing: int
    elements: int
    max_abs: float
    max_rel: float
    at: tuple[int, ...]
    where: str = ""
    by_rank: dict[int, int] = field(default_factory=dict)


@dataclass
class DiffReport(Report):
    """How two checkpoints differ.

    Attributes:
        tensors: Tensors whose values differ, largest `max_abs` first, `top` of them; `tensors_differing` counts all.
        only_a, only_b: `tensor/role` that one side alone holds, folded.
        shapes, dtypes: `tensor/role: A, B` where these differ.
        extras, config: Keys whose values differ, with both.
        where: One sentence where all differences lie in one place (`all in rank 13's pieces`).
        compared: Elements compared.
        exit_code: 0 equal, 1 different.
    """

    a: str
    b: str
    tensors: list[TensorDiff] = field(default_factory=list)
    tensors_differing: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    extras: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    where: str = ""
    by_rank: dict[int, int] = field(default_factory=dict)
    compared: int = 0
    tensors_compared: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        parts = (
            self.tensors_differing,
            self.only_a,
            self.only_b,
            self.shapes,
            self.dtypes,
            self.extras,
            self.config,
        )
        return 1 if any(parts) else 0

    def summary(self) -> str:
        lines = [
            f"{row.tensor}/{row.role}: {row.differing:,} of {row.elements:,} differ, at most by {row.max_abs:.6g} "
            f"(relative {row.max_rel:.3g}) at {list(row.at)}{'; ' + row.where if row.where else ''}"
            for row in self.tensors
        ]
        for title, texts in (("only in A", self.only_a), ("only in B", self.only_b), ("shape", self.shapes)):
            lines += [f"{title}: {text}" for text in texts]
        for title, texts in (("dtype", self.dtypes), ("extras", self.extras), ("config", self.config)):
            lines += [f"{title}: {text}" for text in texts]
        verdict = f"{self.tensors_differing} of {count_text(self.tensors_compared, 'array')} differ"
        if self.where:
            verdict += f", {self.where}"
        return "\n".join([*lines, verdict])


def diff(
    a: str,
    b: str,
    *,
    by_rank: bool = False,
    top: int = 20,
    rtol: float = 0.0,
    atol: float = 0.0,
    only: tuple[str, ...] = (),
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two checkpoints of any layout and format, canonical tensor by canonical tensor.

    Args:
        by_rank: Also count differing elements by the rank of `a` that stores them.
        top: Tensors listed; 0 lists all.
        rtol, atol: Elements count as equal where |a - b| <= atol + rtol * |b|; 0 and 0 compare bits.
        only: Globs over canonical names or `name/role`; then extras and configurations are not compared.
    """
    if rtol < 0 or atol < 0:
        raise UsageError(f"rtol={rtol}, atol={atol}: tolerances are not negative")
    began = time.monotonic()
    left, right = open(a, model=model, config=config), open(b, model=model, config=config)
    report = DiffReport(left.url, right.url, notes=[*left.notes, *right.notes])
    wanted, kinds = _common(left, right, only, report)
    comparer = _Comparer(left, right, wanted, kinds, rtol, atol, by_rank)
    visit([left, right], wanted, comparer.look, threads=threads, memory=memory, progress=progress)
    rows = comparer.rows()
    rows.sort(key=lambda row: (-row.max_abs, -row.differing, row.tensor, row.role))
    report.tensors = rows[:top] if top else rows
    report.tensors_differing = len(rows)
    report.compared = sum(prod(left.catalog.tensors[name].shape) for name, _ in wanted)
    report.tensors_compared = len(wanted)
    report.where = comparer.everywhere()
    if by_rank:
        for row in rows:
            for rank, count in row.by_rank.items():
                report.by_rank[rank] = report.by_rank.get(rank, 0) + count
        report.by_rank = dict(sorted(report.by_rank.items()))
    ours, theirs = left.catalog.model, right.catalog.model
    if not only:
        report.extras = _extras(left, right, report)
    if not only and ours is not None and theirs is not None:
        report.config = differences(ours.config, theirs.config)
    report.seconds = time.monotonic() - began
    return report


def _common(
    left: Source, right: Source, only: tuple[str, ...], report: DiffReport
) -> tuple[dict[Key, DType], dict[Key, bool]]:
    """What can be compared and in which dtype, and whether by bits; all else goes into the report."""
    a, b = left.catalog, right.catalog
    ours, theirs = dict(a.held), dict(b.held)
    if only:
        chosen = select({**ours, **theirs}, only)
        ours = {key: dtype for key, dtype in ours.items() if key in chosen}
        theirs = {key: dtype for key, dtype in theirs.items() if key in chosen}
    report.only_a = fold_names(f"{name}/{role}" for name, role in ours if (name, role) not in theirs)
    report.only_b = fold_names(f"{name}/{role}" for name, role in theirs if (name, role) not in ours)
    wanted: dict[Key, DType] = {}
    same: dict[Key, bool] = {}
    shapes, dtypes = [], []
    for key, dtype in ours.items():
        other = theirs.get(key)
        if other is None:
            continue
        name = f"{key[0]}/{key[1]}"
        if a.tensors[key[0]].shape != b.tensors[key[0]].shape:
            shapes.append((name, f"{list(a.tensors[key[0]].shape)}, {list(b.tensors[key[0]].shape)}"))
            continue
        if dtype is not other:
            dtypes.append((name, f"{dtype}, {other}"))
            if not (dtype.is_float and other.is_float and is_number(dtype) and is_number(other)):
                continue
        wide = "float64" if "float64" in (dtype.name, other.name) else "float32"
        wanted[key] = dtype if dtype is other else BY_NAME[wide]
        same[key] = dtype is other
    report.shapes = [f"{pattern}: {text}" for pattern, text, _ in fold(shapes)]
    report.dtypes = [f"{pattern}: {text}" for pattern, text, _ in fold(dtypes)]
    return wanted, same


class _Comparer:
    """Compares chunks and collects what differs, by tensor and role."""

    def __init__(
        self,
        left: Source,
        right: Source,
        wanted: Mapping[Key, DType],
        same: Mapping[Key, bool],
        rtol: float,
        atol: float,
        by_rank: bool,
    ) -> None:
        self._left, self._wanted, self._same = left, wanted, same
        self._rtol, self._atol, self._by_rank = rtol, atol, by_rank
        self._sides = [(name, Owners(side.catalog)) for name, side in (("A", left), ("B", right))]
        self._found: dict[Key, _Found] = {}
        self._lock = Lock()

    def look(self, chunk: Chunk) -> None:
        dtype = self._wanted[chunk.key]
        a, b = chunk.bits
        where = differing(a, b, dtype.itemsize)
        if not len(where):
            return
        large = relative = float("inf")
        at = int(where[0])
        if is_number(dtype):
            x = numbers(a, dtype)[where].astype(np.float64)
            y = numbers(b, dtype)[where].astype(np.float64)
            with np.errstate(all="ignore"):
                apart = np.where(np.isnan(x) & np.isnan(y), 0.0, np.abs(x - y))
                apart = np.where(np.isfinite(apart), apart, np.inf)
                if self._rtol or self._atol:
                    # Two NaN are as equal as they can be; bits alone tell them apart.
                    far = ~(apart <= self._atol + self._rtol * np.abs(y)) | (np.isinf(apart))
                    where, apart, y = where[far], apart[far], y[far]
                    if not len(where):
                        return
                ratio = np.where(apart == 0, 0.0, np.where(np.isfinite(y), apart / np.abs(y), np.inf))
            best = int(np.argmax(apart))
            large, relative, at = float(apart[best]), float(ratio.max()), int(where[best])
        shape = self._left.catalog.tensors[chunk.key[0]].shape
        owners = self._owners(chunk.key, shape, where + chunk.first)
        with self._lock:
            found = self._found.setdefault(chunk.key, _Found())
            if large > found.max_abs or found.count == 0:
                found.max_abs, found.at = large, chunk.first + at
            found.max_rel = max(found.max_rel, relative)
            found.count += len(where)
            for side, ranks in owners.items():
                for rank, count in ranks.items():
                    found.ranks[side][rank] = found.ranks[side].get(rank, 0) + count

    def _owners(self, key: Key, shape: tuple[int, ...], where: Ints) -> dict[str, dict[int, int]]:
        """Differing elements by rank, for each side that has ranks; a sample where nobody asked for counts."""
        if not self._by_rank and len(where) > _SAMPLE:
            where = where[np.linspace(0, len(where) - 1, _SAMPLE).astype(np.int64)]
        return {side: owners.count(key, shape, where) for side, owners in self._sides}

    def rows(self) -> list[TensorDiff]:
        rows = []
        for key, found in self._found.items():
            shape = self._left.catalog.tensors[key[0]].shape
            index = tuple(int(i) for i in np.unravel_index(found.at, shape)) if shape else ()
            rows.append(
                TensorDiff(
                    tensor=key[0],
                    role=key[1],
                    differing=found.count,
                    elements=prod(shape),
                    max_abs=found.max_abs,
                    max_rel=found.max_rel,
                    at=index,
                    where=one_place(found.ranks, self._worlds()),
                    by_rank=dict(sorted(found.ranks["A"].items())) if self._by_rank else {},
                )
            )
        return rows

    def everywhere(self) -> str:
        """One sentence where all differences of all tensors lie in one rank's pieces."""
        together: dict[str, dict[int, int]] = {"A": {}, "B": {}}
        for found in self._found.values():
            for side, ranks in found.ranks.items():
                for rank, count in ranks.items():
                    together[side][rank] = together[side].get(rank, 0) + count
        return one_place(together, self._worlds()) if self._found else ""

    def _worlds(self) -> dict[str, int]:
        return {side: owners.world for side, owners in self._sides}


@dataclass
class _Found:
    count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    at: int = 0
    ranks: dict[str, dict[int, int]] = field(default_factory=lambda: {"A": {}, "B": {}})


def _extras(left: Source, right: Source, report: DiffReport) -> list[str]:
    """Differing extras; nothing where a format holds none."""
    for side in (left, right):
        if side.format is None or not side.format.extras:
            return []
    a, b = left.catalog.extras, right.catalog.extras
    found = differences(a.common, b.common)
    if a.by_sample != b.by_sample:
        found.append("loader states: differ")
    if all(
        has_coordinate(name, left.catalog.layout, right.catalog.layout)
        for name in a.by_coordinate | b.by_coordinate
    ):
        found += differences(a.by_coordinate, b.by_coordinate, "per-rank states")
    else:
        report.notes.append("per-rank states are not compared: the layouts have other coordinates")
    return found
