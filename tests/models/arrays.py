"""The simplest possible reading of local tensors: one canonical element after another, by the words of their definition.

Tests compare schemas with NumPy through this, so that neither planner nor engine takes part.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.schema import Model

Arrays = dict[str, np.ndarray]


def positions(segment: Segment, shape: tuple[int, ...]) -> tuple[tuple[np.ndarray, ...], tuple[slice, ...]]:
    """Local indices of a segment's elements (one array a local dimension), and its canonical box as slices."""
    counts = np.indices(segment.box.shape)
    local = [np.full(segment.box.shape, origin) for origin in segment.origin]
    for count, dim, step in zip(counts, segment.dim, segment.step, strict=True):
        if dim >= 0:
            local[dim] = local[dim] + step * count
    box = tuple(slice(a, b) for a, b in zip(segment.box.start, segment.box.stop, strict=True))
    return tuple(local), box


def gathered(local: LocalTensor, canonical: Mapping[str, np.ndarray]) -> np.ndarray:
    """The local tensor, filled from canonical arrays; what no segment covers stays 0."""
    dtype = canonical[local.segments[0].tensor].dtype
    out = np.zeros(local.shape, dtype)
    for segment in local.segments:
        where, box = positions(segment, local.shape)
        out[where] = canonical[segment.tensor][box]
    return out


def scattered(locals_: Iterable[tuple[LocalTensor, np.ndarray]], model: Model) -> tuple[Arrays, Arrays]:
    """Canonical arrays filled from local ones, and how often each element was written."""
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors.values()}
    times = {t.name: np.zeros(t.shape, np.int64) for t in model.tensors.values()}
    for local, array in locals_:
        assert array.shape == local.shape, local.key
        for segment in local.segments:
            where, box = positions(segment, local.shape)
            values[segment.tensor][box] = array[where]
            times[segment.tensor][box] += 1
    return values, times


def to_canonical(model: Model, family: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Canonical arrays of a whole checkpoint in a family's names. Every element must come exactly once."""
    names = model.names(family).unpadded()
    assert set(names) == set(arrays), sorted(set(names) ^ set(arrays))[:6]
    values, times = scattered(((names[key], arrays[key]) for key in names), model)
    assert all((count == 1).all() for count in times.values())
    return values


def to_family(model: Model, family: str, canonical: Mapping[str, np.ndarray]) -> Arrays:
    """A whole checkpoint in a family's names."""
    return {key: gathered(local, canonical) for key, local in model.names(family).unpadded().items()}


def on_rank(model: Model, family: str, layout: str, rank: int, canonical: Mapping[str, np.ndarray]) -> Arrays:
    """What one rank of a layout holds, by name."""
    placements = model.names(family).placements(Layout.parse(layout))
    return {p.local.key: gathered(p.local, canonical) for p in placements if rank in p.ranks}


def numbered(model: Model) -> Arrays:
    """Canonical arrays of which no two elements are equal."""
    found: Arrays = {}
    start = 1
    for tensor in model.tensors.values():
        size = int(np.prod(tensor.shape))
        found[tensor.name] = np.arange(start, start + size, dtype=np.float64).reshape(tensor.shape)
        start += size
    return found
