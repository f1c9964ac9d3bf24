"""Comparison of two checkpoints by value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.ops.reports import Progress, Report


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
        only: Globs over canonical names or `name/role`.
    """
    raise NotImplementedError
