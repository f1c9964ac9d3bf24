"""Statistics of a checkpoint's values, to find a sick tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.layouts import Layout
from ckptkit.ops.reports import Progress, Report


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
    """Statistics by tensor and role, in module order. `sick` lists `tensor/role` with NaN, Inf or nothing but zeros."""

    url: str
    tensors: list[TensorStats] = field(default_factory=list)
    sick: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


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
    raise NotImplementedError
