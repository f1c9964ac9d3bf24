"""Inspection: what a checkpoint holds and where each element lies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import ITEMSIZE, ROLES, Catalog
from ckptkit.core.dtypes import BY_NAME, TABLE
from ckptkit.core.layouts import Layout
from ckptkit.errors import UsageError
from ckptkit.ops.boxes import PieceRow, parse_box, pieces_of
from ckptkit.ops.fingerprinting import fingerprints
from ckptkit.ops.folding import fold, fold_names
from ckptkit.ops.reports import Progress, Report, count_text, nbytes_text
from ckptkit.ops.sizes import total_nbytes
from ckptkit.ops.sources import Source, open
from ckptkit.ops.streaming import read_box

__all__ = ["EntryRow", "Inspection", "PieceRow", "RoleRow", "TensorRow", "inspect", "inspection"]

_LONG_FACTS = ("digests", "fingerprints", "warnings")
"""Facts that `inspect` shows only when asked for everything."""


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
        fingerprints: `tensor/role` to 16 hex digits, where they were asked for; `fingerprints_computed` counts those that
            are not stored.
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
    fingerprints: dict[str, str] = field(default_factory=dict)
    fingerprints_computed: int = 0
    notes: list[str] = field(default_factory=list)
    _source: Source | None = None

    def rank(self, rank: int) -> list[EntryRow]:
        """What one rank stores, in file order. Raises UsageError where there is no such rank."""
        catalog = self._catalog
        files = [number for number, file in enumerate(catalog.files) if max(file.rank, 0) == rank]
        if not files:
            ranks = max((file.rank for file in catalog.files), default=0)
            raise UsageError(f"{self.url} has no rank {rank}; its ranks are 0 to {max(ranks, 0)}")
        entries = catalog.entries
        mine = np.flatnonzero(np.isin(entries.file, files))
        mine = mine[np.lexsort((entries.offset[mine], entries.file[mine]))]
        rows = []
        for k in mine.tolist():
            file, local = catalog.files[int(entries.file[k])], catalog.locals[int(entries.local[k])]
            rows.append(
                EntryRow(
                    rank=rank,
                    file=file.path,
                    key=local.key,
                    role=ROLES[entries.role[k]],
                    dtype=TABLE[entries.dtype[k]].name,
                    local_shape=local.shape,
                    first=int(entries.first[k]),
                    last=int(entries.last[k]),
                    offset=file.data_start + int(entries.offset[k]),
                    nbytes=int(entries.nbytes[k]),
                )
            )
        return rows

    def where(self, text: str) -> list[PieceRow]:
        """The pieces that hold a box: `layers.0.attn.q/param[0:2, 5, :]` (role and box may be left out).

        Raises UsageError that names what does not fit.
        """
        return pieces_of(self._catalog, parse_box(text, self._catalog))

    def values(self, text: str) -> npt.NDArray[np.generic]:
        """The elements of a box, as an array of its shape (axes given by one index are dropped).

        bfloat16 and float8 come in `ml_dtypes` types. Raises UsageError that names what does not fit.
        """
        assert self._source is not None
        wanted = parse_box(text, self._catalog)
        return read_box(self._source, wanted.tensor, wanted.role, wanted.box).squeeze(wanted.single)

    @property
    def _catalog(self) -> Catalog:
        assert self._source is not None, "an inspection is made by inspect()"
        return self._source.catalog

    def summary(self) -> str:
        step = f", step {self.step}" if self.step is not None else ""
        return (
            f"{self.url}: {self.format}, {self.model or 'unknown model'}, {self.layout or 'no layout'} "
            f"({count_text(self.world, 'rank')}){step}: {self.parameters:,} parameters, "
            f"{count_text(self.files, 'file')}, {nbytes_text(self.nbytes)}"
        )


def inspect(
    url: str,
    *,
    everything: bool = False,
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    fingerprint: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """What a checkpoint holds, from headers and metadata alone (arguments as `open`).

    Args:
        everything: One row a tensor, and extras in full.
        fingerprint: Also the fingerprints of all tensors. Those that are not stored are computed: every byte of
            these tensors is read.
    """
    source = open(url, format=format, layout=layout, model=model, config=config)
    found = inspection(source, everything=everything)
    if fingerprint:
        prints, found.fingerprints_computed = fingerprints(source, progress=progress)
        found.fingerprints = {f"{tensor}/{role}": f"{value:016x}" for (tensor, role), value in prints.items()}
    return found


def inspection(source: Source, *, everything: bool = False) -> Inspection:
    """As `inspect`, of a checkpoint that is open already (on a store of the caller's)."""
    catalog = source.catalog
    held = catalog.held
    data = sum(_size(catalog, name) * dtype.itemsize for (name, _), dtype in held.items())
    pieces, entries = catalog.pieces, catalog.entries
    real = int((pieces.volume * ITEMSIZE[entries.dtype[pieces.entry]]).sum())
    stored = int(entries.nbytes.sum())
    files = source.store.files()
    bound = catalog.model
    shown = catalog.layout
    facts = {name: value for name, value in catalog.facts.items() if everything or name not in _LONG_FACTS}
    return Inspection(
        url=source.url,
        format=catalog.format,
        names=catalog.names,
        model=bound.schema.id if bound is not None else "",
        layout=str(shown) if shown is not None else "",
        world=shown.world if shown is not None else 1,
        step=catalog.step,
        epoch=catalog.facts.get("epoch"),
        files=len(files),
        nbytes=total_nbytes(source.store, files),
        data_nbytes=data,
        padding_nbytes=stored - real,
        replica_nbytes=max(real - data, 0),
        parameters=sum(
            _size(catalog, name) for name in {n for n, role in held if role in ("param", "master")}
        ),
        tensors=_rows(catalog, fold_them=not everything),
        roles=_roles(catalog),
        extras=_extras(catalog, everything),
        facts=facts,
        notes=[*source.notes, *catalog.facts.get("warnings", ())],
        _source=source,
    )


def _size(catalog: Catalog, name: str) -> int:
    return prod(catalog.tensors[name].shape)


def _rows(catalog: Catalog, *, fold_them: bool) -> list[TensorRow]:
    roles: dict[str, list[tuple[str, str]]] = {}
    for (name, role), dtype in catalog.held.items():
        roles.setdefault(name, []).append((role, dtype.name))
    order = {role: place for place, role in enumerate(ROLES)}
    keyed = []
    for name, tensor in catalog.tensors.items():
        if name in roles:
            have = tuple(sorted(roles[name], key=lambda pair: order[pair[0]]))
            keyed.append((name, (tensor.axes, tensor.shape, have)))
    if fold_them:
        folded = [(pattern, value, len(names)) for pattern, value, names in fold(keyed)]
    else:
        folded = [(name, value, 1) for name, value in keyed]
    rows = []
    for pattern, (axes, shape, have), count in folded:
        width = sum(BY_NAME[dtype].itemsize for _, dtype in have)
        elements = prod(shape) * count
        rows.append(TensorRow(pattern, count, axes, shape, dict(have), elements, elements * width))
    return rows


def _roles(catalog: Catalog) -> list[RoleRow]:
    found = []
    for role in ROLES:
        members = [(name, dtype) for (name, r), dtype in catalog.held.items() if r == role]
        if members:
            sizes = [_size(catalog, name) for name, _ in members]
            nbytes = sum(size * dtype.itemsize for size, (_, dtype) in zip(sizes, members, strict=True))
            dtypes = sorted({dtype.name for _, dtype in members})
            found.append(RoleRow(role, len(members), dtypes, sum(sizes), nbytes))
    return found


def _extras(catalog: Catalog, everything: bool) -> dict[str, Any]:
    extras = catalog.extras
    found = dict(extras.common)
    if not everything and isinstance(found.get("groups"), list):
        found["groups"] = [_short_group(group) for group in found["groups"]]
    if extras.by_coordinate:
        found["by_coordinate"] = (
            dict(extras.by_coordinate) if everything else f"{len(extras.by_coordinate)} states"
        )
    if extras.by_sample:
        found["by_sample"] = list(extras.by_sample) if everything else f"{len(extras.by_sample)} states"
    if extras.files:
        found["files"] = sorted(extras.files)
    return found


def _short_group(group: Any) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("tensors"), list):
        return group
    return {**group, "tensors": fold_names(group["tensors"])}
