"""Statistics of a checkpoint's values, to find a sick tensor."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.layouts import Layout
from ckptkit.core.plan import Key
from ckptkit.ops.reports import Progress, Report
from ckptkit.ops.selection import select
from ckptkit.ops.sources import open
from ckptkit.ops.streaming import Chunk, visit
from ckptkit.ops.values import is_number, numbers


@dataclass(frozen=True)
class TensorStats:
    """Values of one tensor in one role. Padding and replicas are not counted.

    Attributes:
        elements: All of them; `nans`, `infs`, `zeros`: exact counts.
        min, max, mean, rms: Over finite elements, in float64; None where there is none (or the type has no order).
    """

    tensor: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    nans: int
    infs: int
    zeros: int

    @property
    def zero_share(self) -> float:
        return self.zeros / self.elements if self.elements else 0.0


@dataclass
class StatsReport(Report):
    """Statistics by tensor and role, in module order. `sick` lists `tensor/role` with NaN or Inf, and matrices of zeros."""

    url: str
    tensors: list[TensorStats] = field(default_factory=list)
    sick: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        lines = [
            f"{s.tensor}/{s.role} {s.dtype} {list(s.shape)}: min {s.min} max {s.max} mean {s.mean} rms {s.rms} "
            f"NaN {s.nans} Inf {s.infs} zero {s.zero_share:.1%}"
            for s in self.tensors
        ]
        return "\n".join([*lines, *(f"look at {name}" for name in self.sick)])


def stats(
    url: str,
    *,
    only: Sequence[str] = (),
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    progress: Progress | None = None,
) -> StatsReport:
    """Min, max, mean, rms and the counts of NaN, Inf and zero of every tensor and role, streamed.

    `only` are globs over canonical names or `name/role`.
    """
    began = time.monotonic()
    source = open(url, format=format, layout=layout, model=model, config=config)
    held = dict(source.catalog.held)
    if only:
        wanted = select(held, only)
        held = {key: dtype for key, dtype in held.items() if key in wanted}
    sums = {key: _Sums() for key in held}
    lock = Lock()

    def look(chunk: Chunk) -> None:
        key, (bits,) = chunk.key, chunk.bits
        if is_number(held[key]):
            found = _Sums.of(numbers(bits, held[key]))
            with lock:
                sums[key].add(found)

    visit([source], held, look, threads=threads, memory=memory, progress=progress)
    report = StatsReport(source.url, notes=list(source.notes))
    for key in _in_order(held, source.catalog.tensors):
        tensor = source.catalog.tensors[key[0]]
        row = sums[key].row(key, held[key].name, tensor.shape)
        report.tensors.append(row)
        # Biases and optimizer state may start at zero; a matrix of nothing but zeros was never written.
        matrix = key[1] in ("param", "master") and len(tensor.shape) > 1
        if row.nans or row.infs or (matrix and 0 < row.elements == row.zeros):
            report.sick.append(f"{key[0]}/{key[1]}")
    report.seconds = time.monotonic() - began
    return report


def _in_order(held: Mapping[Key, Any], tensors: Mapping[str, Any]) -> list[Key]:
    place = {name: number for number, name in enumerate(tensors)}
    return sorted(held, key=lambda key: place[key[0]])


@dataclass(slots=True)
class _Sums:
    """Sums over some elements; `add` joins two."""

    finite: int = 0
    nans: int = 0
    infs: int = 0
    zeros: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: npt.NDArray[np.floating]) -> "_Sums":
        found = cls(zeros=len(values) - int(np.count_nonzero(values)))
        finite = values
        # One sum tells whether all are finite, far more often than not.
        with np.errstate(all="ignore"):
            clean = bool(np.isfinite(np.sum(values, dtype=np.float64)))
        if not clean:
            found.nans = int(np.isnan(values).sum())
            found.infs = int(np.isinf(values).sum())
            finite = values[np.isfinite(values)]
        found.finite = len(finite)
        if len(finite):
            found.low, found.high = float(finite.min()), float(finite.max())
            found.total = float(np.sum(finite, dtype=np.float64))
            found.squares = _squares(finite)
        return found

    def add(self, other: "_Sums") -> None:
        for name in ("finite", "nans", "infs", "zeros", "total", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def row(self, key: Key, dtype: str, shape: tuple[int, ...]) -> TensorStats:
        n = self.finite
        return TensorStats(
            tensor=key[0],
            role=key[1],
            dtype=dtype,
            shape=shape,
            elements=prod(shape),
            min=self.low if n else None,
            max=self.high if n else None,
            mean=self.total / n if n else None,
            rms=sqrt(self.squares / n) if n else None,
            nans=self.nans,
            infs=self.infs,
            zeros=self.zeros,
        )


def _squares(values: npt.NDArray[np.floating]) -> float:
    """Sum of squares in float64, in pieces that stay in the cache: float32 squares of small moments would vanish."""
    total = 0.0
    for start in range(0, len(values), 1 << 15):
        part = values[start : start + (1 << 15)].astype(np.float64)
        total += float(part @ part)
    return total
