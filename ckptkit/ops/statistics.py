"""Statistics of a checkpoint's values, to find a sick tensor."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import Key
from ckptkit.ops.reports import Progress, Report
from ckptkit.ops.selection import select
from ckptkit.ops.sources import open
from ckptkit.ops.streaming import Chunk, visit
from ckptkit.ops.values import Bits, is_number, numbers

_PIECE = 1 << 15
"""Elements that are looked at together."""


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
            found = _Sums.of(bits, held[key])
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
    def of(cls, bits: Bits, dtype: DType) -> "_Sums":
        """Sums over elements in pieces that stay in the cache. All sums are float64: squares of moments vanish in float32."""
        found = cls()
        step = _PIECE * dtype.itemsize
        with np.errstate(all="ignore"):
            for start in range(0, len(bits), step):
                found._piece(numbers(bits[start : start + step], dtype))
        return found

    def _piece(self, values: npt.NDArray[np.floating]) -> None:
        self.zeros += int(np.count_nonzero(values == 0))
        low, high = values.min(), values.max()
        if not (np.isfinite(low) and np.isfinite(high)):  # a NaN anywhere makes both NaN
            finite = np.isfinite(values)
            nans = int(np.count_nonzero(np.isnan(values)))
            self.nans += nans
            self.infs += len(values) - nans - int(np.count_nonzero(finite))
            values = values[finite]
            if not len(values):
                return
            low, high = values.min(), values.max()
        exact = values.astype(np.float64, copy=False)
        self.finite += len(exact)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        self.total += float(exact.sum())
        # Not `@`: BLAS would wake threads of its own for each piece.
        self.squares += float(np.square(exact).sum())

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
