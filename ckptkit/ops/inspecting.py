"""Inspection: what a checkpoint holds and where each element lies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.layouts import Layout
from ckptkit.ops.reports import Report
from ckptkit.ops.sources import Source


@dataclass(frozen=True)
class TensorRow:
    """Tensors that share everything but numbers in their names.

    Attributes:
        pattern: `layers.{0..39}.attn.q`; a plain name where it stands for one tensor.
        count: How many tensors it stands for.
        axes, shape: Of each.
        roles: Role to dtype.
        elements, nbytes: Of all of them; bytes over all roles, without replicas and padding.
    """

    pattern: str
    count: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    roles: dict[str, str]
    elements: int
    nbytes: int


@dataclass(frozen=True)
class RoleRow:
    """One role: how many tensors have it, their dtypes, elements and bytes."""

    role: str
    tensors: int
    dtypes: list[str]
    elements: int
    nbytes: int


@dataclass(frozen=True)
class EntryRow:
    """One stored array of one rank: its key, role, dtype, the run of the local tensor that is stored, and where."""

    rank: int
    file: str
    key: str
    role: str
    dtype: str
    local_shape: tuple[int, ...]
    first: int
    last: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PieceRow:
    """A piece of a box: `box` of `tensor/role` lies in `file` from byte `offset` on.

    Attributes:
        strides: Bytes from one element to the next, for each axis of the tensor.
        replica: Whether another piece before it holds the same elements.
    """

    tensor: str
    role: str
    box: str
    file: str
    rank: int
    key: str
    offset: int
    strides: tuple[int, ...]
    dtype: str
    nbytes: int
    replica: bool


@dataclass
class Inspection(Report):
    """What is in a checkpoint.

    Attributes:
        url, format, names, model: What it is.
        layout: Exactly what `--layout` takes; empty where the format does not tell.
        world: Ranks of the layout.
        step, epoch: Where known.
        files, nbytes: Files and bytes of the whole checkpoint.
        data_nbytes: Bytes of tensors, without replicas and padding; `padding_nbytes`, `replica_nbytes`: those.
        parameters: Elements of all parameters.
        tensors: Folded by pattern, or one row each with `everything`.
        roles: Sums by role.
        extras: Common extras (long lists shortened unless `everything`), and which files are carried.
        facts: What else the format tells (epoch, lineage, versions).
        notes: Which step of a run was taken, and the like.
    """

    url: str
    format: str
    names: str
    model: str
    layout: str
    world: int
    step: int | None
    epoch: int | None
    files: int
    nbytes: int
    data_nbytes: int
    padding_nbytes: int
    replica_nbytes: int
    parameters: int
    tensors: list[TensorRow] = field(default_factory=list)
    roles: list[RoleRow] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _source: Source | None = None

    def rank(self, rank: int) -> list[EntryRow]:
        """What one rank stores, in file order. Raises UsageError where there is no such rank."""
        raise NotImplementedError

    def where(self, text: str) -> list[PieceRow]:
        """The pieces that hold a box: `layers.0.attn.q/param[0:2, 5, :]` (role and box may be left out).

        Raises UsageError that names what does not fit.
        """
        raise NotImplementedError

    def values(self, text: str) -> npt.NDArray[np.generic]:
        """The elements of a box, as an array of its shape (axes given by one index are dropped).

        bfloat16 and float8 come in `ml_dtypes` types.
        """
        raise NotImplementedError


def inspect(
    url: str,
    *,
    everything: bool = False,
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
) -> Inspection:
    """What a checkpoint holds, from headers and metadata alone (arguments as `open`).

    Args:
        everything: One row a tensor, and extras in full.
    """
    raise NotImplementedError
