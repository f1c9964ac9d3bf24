"""Plans: which source piece gives which part of which destination piece, with the proof that nothing is missing.

A plan keeps pairs of piece numbers; boxes are recomputed where they are needed (`ckptkit.core.copies`). The proof:
the chosen source pieces are disjoint, and for each destination piece the volumes of its overlaps with them add up to its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import ROLE_CODE, ROLES, Catalog, Pieces
from ckptkit.core.dtypes import DType
from ckptkit.core.joins import BoxSet, overlaps
from ckptkit.errors import CoverageError, LayoutError

Bounds = tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.signedinteger]]

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Key = tuple[str, str]
"""A canonical tensor's name and a role."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Values that change their dtype or role on the way."""

    tensor: str
    role: str
    from_role: str
    source: DType
    destination: DType

    @property
    def lossless(self) -> bool:
        """Whether the bits come back when cast the other way."""
        exact = {
            ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"),
            ("bfloat16", "float64"), ("float16", "float64"),
        }  # fmt: skip
        return self.source is self.destination or (self.source.name, self.destination.name) in exact


@dataclass(frozen=True, slots=True)
class Drop:
    """Source values that do not reach the destination, and why."""

    tensor: str
    role: str
    nbytes: int
    why: str


@dataclass
class Plan:
    """The copies from `source` to `destination`.

    Attributes:
        src, dst: Parallel columns: positions in `source_pieces` and `destination.pieces`, sorted by `dst`.
        source_pieces: Disjoint pieces of the source (replicas and overlaps removed).
        replicas: Pairs `(kept, other)` of positions in `source.pieces` whose boxes overlap: they must hold equal values.
        key_source: For each destination key, the source key that its values come from.
        casts, drops: What changes and what is left behind.
        elements: Elements copied, by destination key order; the sum is part of the proof.
    """

    source: Catalog
    destination: Catalog
    src: U32
    dst: U32
    source_pieces: Pieces
    replicas: tuple[U32, U32]
    key_source: dict[Key, Key]
    casts: list[Cast] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    elements: int = 0

    @property
    def lossless(self) -> bool:
        return not self.drops and all(cast.lossless for cast in self.casts)


def resolve(
    source: Mapping[Key, DType], wanted: Iterable[Key], *, master_from_param: bool = False
) -> dict[Key, Key]:
    """Which source key each wanted key is made from (design: roles resolve by rule).

    A parameter comes from the parameter, else from its master copy. A master copy comes from the master, else from a
    float32 parameter, else from any parameter when `master_from_param`.

    Raises:
        CoverageError: a wanted key has no source.
    """
    found: dict[Key, Key] = {}
    for tensor, role in wanted:
        options = [(tensor, role)]
        if role == "param":
            options.append((tensor, "master"))
        elif role == "master":
            param = source.get((tensor, "param"))
            if param is not None and (param.name == "float32" or master_from_param):
                options.append((tensor, "param"))
        for option in options:
            if option in source:
                found[tensor, role] = option
                break
        else:
            hint = ""
            if role == "master" and (tensor, "param") in source:
                hint = "; its parameter is there in lower precision: --master-from-param makes the master from it"
            raise CoverageError(f"the source has no {role} of {tensor}{hint}", tensor=tensor)
    return found


def make_plan(source: Catalog, destination: Catalog, *, master_from_param: bool = False) -> Plan:
    """Cover every piece of `destination` with pieces of `source`, and prove it.

    Raises:
        CoverageError: an element of the destination has no source; names tensor, box and files.
        LayoutError: a tensor has another shape in the two.
    """
    held = source.held
    wanted = destination.held
    key_source = resolve(held, wanted, master_from_param=master_from_param)
    for tensor in {name for name, _ in wanted}:
        ours, theirs = source.tensors[tensor], destination.tensors[tensor]
        if ours.shape != theirs.shape:
            raise LayoutError(
                f"{tensor} has shape {ours.shape} in {source.where} and {theirs.shape} in {destination.where}",
                tensor=tensor,
            )
    numbers = {key: number for number, key in enumerate(dict.fromkeys(key_source.values()))}
    source_key = _keys(source, numbers)
    target_key = _keys(destination, {key: numbers[key_source[key]] for key in wanted})
    width = max(source.width, destination.width)
    kept, replicas = _disjoint(source, source_key, width)
    left = BoxSet(_keys_of(source, kept, numbers), _widen(kept.lo, width, 0), _widen(kept.hi, width, 1))
    target = destination.pieces
    right = BoxSet(target_key, _widen(target.lo, width, 0), _widen(target.hi, width, 1))
    volume = target.volume
    got = np.zeros(len(target), np.int64)
    src_parts, dst_parts = [], []
    for i, j in overlaps(left, right):
        size = np.ones(len(i), np.int64)
        for d in range(width):
            size *= np.minimum(left.hi[i, d], right.hi[j, d]) - np.maximum(left.lo[i, d], right.lo[j, d])
        np.add.at(got, j, size)
        src_parts.append(i.astype(np.uint32))
        dst_parts.append(j.astype(np.uint32))
    src = np.concatenate(src_parts) if src_parts else np.zeros(0, np.uint32)
    dst = np.concatenate(dst_parts) if dst_parts else np.zeros(0, np.uint32)
    short = np.flatnonzero(got != volume)
    if len(short):
        _raise_gap(source, destination, int(short[0]), len(short), int(got[short[0]]), int(volume[short[0]]))
    order = np.argsort(dst, kind="stable")
    plan = Plan(
        source, destination, src[order], dst[order], kept, replicas, key_source, elements=int(volume.sum())
    )
    for key, origin in key_source.items():
        if origin[1] != key[1] or held[origin] is not wanted[key]:
            plan.casts.append(Cast(key[0], key[1], origin[1], held[origin], wanted[key]))
    plan.drops = _drops(source, destination, key_source)
    return plan


def _keys(catalog: Catalog, numbers: Mapping[Key, int]) -> I64:
    """The number of each piece's key; -1 for keys without one."""
    return _keys_of(catalog, catalog.pieces, numbers)


def _keys_of(catalog: Catalog, pieces: Pieces, numbers: Mapping[Key, int]) -> I64:
    table = np.full((len(catalog.tensors), len(ROLES)), -1, np.int64)
    position = {name: index for index, name in enumerate(catalog.tensors)}
    for (tensor, role), number in numbers.items():
        table[position[tensor], ROLE_CODE[role]] = number
    return table[catalog.segments.tensor[pieces.segment], catalog.entries.role[pieces.entry]]


def _widen(columns: npt.NDArray[np.signedinteger], width: int, fill: int) -> npt.NDArray[np.signedinteger]:
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=fill)


def _disjoint(source: Catalog, key: I64, width: int) -> tuple[Pieces, tuple[U32, U32]]:
    """Source pieces that are needed, made disjoint, and the replicas that were set aside.

    Order of preference: rank, then file, as the catalog lists them.
    """
    pieces = source.pieces
    index = np.flatnonzero(key >= 0)
    columns = [*(pieces.hi[index, d] for d in range(pieces.hi.shape[1]))]
    columns += [*(pieces.lo[index, d] for d in range(pieces.lo.shape[1]))]
    order = np.lexsort((index, *columns, key[index]))
    ordered = index[order]
    same = np.zeros(len(ordered), bool)
    if len(ordered) > 1:
        a, b = ordered[1:], ordered[:-1]
        same[1:] = (key[a] == key[b]) & np.all(pieces.lo[a] == pieces.lo[b], axis=1)
        same[1:] &= np.all(pieces.hi[a] == pieces.hi[b], axis=1)
    group = np.cumsum(~same) - 1
    first = ordered[~same]
    unique = np.sort(first)
    kept = pieces.take(unique)
    boxes = BoxSet(key[unique], _widen(kept.lo, width, 0), _widen(kept.hi, width, 1))
    clash: list[tuple[I64, I64]] = []
    for i, j in overlaps(boxes, boxes):
        before = i < j
        if before.any():
            clash.append((i[before], j[before]))
    replicas = [(first[group[same]], ordered[same]), *((unique[i], unique[j]) for i, j in clash)]
    if clash:
        kept = _subtract(kept, clash)
    return kept, (
        np.concatenate([r[0] for r in replicas]).astype(np.uint32),
        np.concatenate([r[1] for r in replicas]).astype(np.uint32),
    )


def _subtract(kept: Pieces, clash: list[tuple[I64, I64]]) -> Pieces:
    """Cut partly overlapping pieces so that earlier ones win."""
    earlier: dict[int, list[int]] = {}
    for i_, j_ in clash:
        for i, j in zip(i_.tolist(), j_.tolist(), strict=True):
            earlier.setdefault(j, []).append(i)
    keep = np.ones(len(kept), bool)
    owner, lo, hi = [], [], []
    for j, others in sorted(earlier.items()):
        rest = [(kept.lo[j], kept.hi[j])]
        for i in others:
            rest = [part for box in rest for part in _minus(box, (kept.lo[i], kept.hi[i]))]
        keep[j] = False
        owner += [j] * len(rest)
        lo += [part[0] for part in rest]
        hi += [part[1] for part in rest]
    axes = kept.lo.shape[1]
    return Pieces(
        np.concatenate([kept.segment[keep], kept.segment[owner]]),
        np.concatenate([kept.entry[keep], kept.entry[owner]]),
        np.concatenate([kept.lo[keep], np.asarray(lo, kept.lo.dtype).reshape(-1, axes)]),
        np.concatenate([kept.hi[keep], np.asarray(hi, kept.hi.dtype).reshape(-1, axes)]),
    )


def _minus(box: Bounds, hole: Bounds) -> list[Bounds]:
    """`box` without `hole`, as at most two boxes an axis."""
    lo, hi = box
    if np.any(hole[0] >= hi) or np.any(hole[1] <= lo):
        return [box]
    parts = []
    lo, hi = lo.copy(), hi.copy()
    for d in range(len(lo)):
        if lo[d] < hole[0][d]:
            a, b = lo.copy(), hi.copy()
            b[d] = hole[0][d]
            parts.append((a, b))
            lo[d] = hole[0][d]
        if hole[1][d] < hi[d]:
            a, b = lo.copy(), hi.copy()
            a[d] = hole[1][d]
            parts.append((a, b))
            hi[d] = hole[1][d]
    return parts


def _raise_gap(source: Catalog, destination: Catalog, piece: int, count: int, got: int, volume: int) -> None:
    pieces = destination.pieces
    tensor = destination.tensor_list[int(destination.segments.tensor[pieces.segment[piece]])]
    axes = len(tensor.shape)
    box = Box(tuple(map(int, pieces.lo[piece][:axes])), tuple(map(int, pieces.hi[piece][:axes])))
    more = f" (and {count - 1} more pieces)" if count > 1 else ""
    raise CoverageError(
        f"{source.where} holds {got} of the {volume} elements of {destination.describe_piece(piece)}{more}. "
        "A shard is missing or incomplete; `ckptkit verify` on the source names it",
        tensor=tensor.name,
        box=str(box),
    )


def _drops(source: Catalog, destination: Catalog, key_source: Mapping[Key, Key]) -> list[Drop]:
    """Source keys that nothing is made from, and destination keys that take only a part."""
    used = set(key_source.values())
    drops = []
    for (tensor, role), dtype in source.held.items():
        if (tensor, role) not in used:
            size = int(np.prod(source.tensors[tensor].shape, dtype=np.int64)) * dtype.itemsize
            drops.append(Drop(tensor, role, size, "not asked for"))
    return drops
