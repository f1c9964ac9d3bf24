"""Replicas: pieces of one catalog that hold the same elements, and a disjoint choice among them."""

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import Catalog
from ckptkit.core.joins import BoxSet, overlaps
from ckptkit.core.pieces import Pieces

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Bounds = tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.signedinteger]]


def shared_tensors(catalog: Catalog) -> npt.NDArray[np.bool_]:
    """For each tensor, whether pieces of one role may have common elements. Few catalogs have such tensors.

    Two pieces share elements only if their segments do, or if they are of one segment and their entries' runs
    overlap; there are far fewer segments than pieces, and runs are one-dimensional.
    """
    shared = np.zeros(len(catalog.tensors), bool)
    segments, entries = catalog.segments, catalog.entries
    rows = np.flatnonzero(~segments.empty)
    tensor, start, stop = segments.tensor[rows].astype(np.int64), segments.start[rows], segments.stop[rows]
    order = np.lexsort((*stop.T, *start.T, tensor))
    a, b = order[:-1], order[1:]
    same = (
        (tensor[a] == tensor[b]) & np.all(start[a] == start[b], axis=1) & np.all(stop[a] == stop[b], axis=1)
    )
    shared[tensor[a[same]]] = True
    rest = np.flatnonzero(~shared[tensor])
    boxes = BoxSet(tensor[rest], start[rest], stop[rest])
    for i, j in overlaps(boxes, boxes):
        shared[boxes.key[i[i != j]]] = True
    order = np.lexsort((entries.first, entries.role, entries.local))
    order = order[entries.first[order] < entries.last[order]]
    a, b = order[:-1], order[1:]
    clash = (entries.local[a] == entries.local[b]) & (entries.role[a] == entries.role[b])
    clash &= entries.first[b] < entries.last[a]
    twice = np.zeros(len(catalog.locals), bool)
    twice[entries.local[a[clash]]] = True
    shared[segments.tensor[twice[segments.local]]] = True
    return shared


def disjoint(catalog: Catalog, key: I64, shared: npt.NDArray[np.bool_]) -> tuple[Pieces, tuple[U32, U32]]:
    """Pieces with a key (at least 0), made disjoint within it, and the replicas that were set aside.

    Of pieces that share elements the first keeps them, in the order of the catalog's entries.

    Args:
        shared: Tensors that need a look (`shared_tensors`).

    Returns:
        The pieces, and pairs `(kept, other)` of positions in `catalog.pieces` whose boxes overlap.
    """
    pieces = catalog.pieces
    risky = (key >= 0) & shared[catalog.segments.tensor[pieces.segment]]
    index = np.flatnonzero(risky)
    if not len(index):
        none = np.zeros(0, np.uint32)
        return pieces if np.all(key >= 0) else pieces.take(np.flatnonzero(key >= 0)), (none, none)
    columns = [*(pieces.hi[index, d] for d in range(pieces.hi.shape[1]))]
    columns += [*(pieces.lo[index, d] for d in range(pieces.lo.shape[1]))]
    order = np.lexsort((index, *columns, key[index]))
    ordered = index[order]
    same = np.zeros(len(ordered), bool)
    if len(ordered) > 1:
        a, b = ordered[1:], ordered[:-1]
        same[1:] = (key[a] == key[b]) & np.all(pieces.lo[a] == pieces.lo[b], axis=1)
        same[1:] &= np.all(pieces.hi[a] == pieces.hi[b], axis=1)
    first = ordered[~same]
    replicas = [(first[np.cumsum(~same)[same] - 1], ordered[same])]
    unique = np.sort(first)
    kept = pieces.take(unique)
    boxes = BoxSet(key[unique], kept.lo, kept.hi)
    clash: list[tuple[I64, I64]] = []
    for i, j in overlaps(boxes, boxes):
        before = i < j
        if before.any():
            clash.append((i[before], j[before]))
            replicas.append((unique[i[before]], unique[j[before]]))
    if clash:
        kept = _subtract(kept, clash)
    safe = np.flatnonzero((key >= 0) & ~risky)
    if len(safe):
        kept = _join(pieces.take(safe), kept)
    return kept, (
        np.concatenate([r[0] for r in replicas]).astype(np.uint32),
        np.concatenate([r[1] for r in replicas]).astype(np.uint32),
    )


def _join(a: Pieces, b: Pieces) -> Pieces:
    columns = ((getattr(a, c), getattr(b, c)) for c in ("segment", "entry", "lo", "hi"))
    return Pieces(*(np.concatenate(pair) for pair in columns))


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
    rest_ = Pieces(
        kept.segment[owner],
        kept.entry[owner],
        np.asarray(lo, kept.lo.dtype).reshape(-1, axes),
        np.asarray(hi, kept.hi.dtype).reshape(-1, axes),
    )
    return _join(kept.take(np.flatnonzero(keep)), rest_)


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
