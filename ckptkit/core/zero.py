"""ZeRO: how the tensors of one group of replicas are cut over its ranks.

A cut is a list of runs: elements `[first, last)` of a local tensor, in row-major order, owned by one rank of the
group. Everything that ZeRO, FSDP and flat optimizer buffers do to a tensor has this form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm, prod

import numpy as np

from ckptkit.core.boxes import Ints
from ckptkit.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of a list of tensors over a group of ranks: parallel columns.

    Attributes:
        tensor: Position in the list that was cut.
        rank: Index of the owner within the group.
        first, last: The run, in elements of the tensor.
    """

    tensor: Ints
    rank: Ints
    first: Ints
    last: Ints


def cut_flat(start: Ints, size: Ints, parts: Sequence[tuple[int, int, int]]) -> Cut:
    """Cut tensors that lie at `start` in a flat buffer along `parts`: `(rank, first, last)` of the buffer."""
    rank = np.asarray([part[0] for part in parts], np.int64)
    lo = np.asarray([part[1] for part in parts], np.int64)
    hi = np.asarray([part[2] for part in parts], np.int64)
    order = np.lexsort(
        (start + size, start)
    )  # an empty tensor sorts before the one that starts at the same place
    begin, end = start[order], (start + size)[order]
    # Tensors are disjoint and sorted, so each part meets one stretch of them.
    left = np.searchsorted(end, lo, side="right")
    right = np.searchsorted(begin, hi, side="left")
    count = np.maximum(right - left, 0)
    which = np.repeat(np.arange(len(parts)), count)
    inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    tensor = left[which] + inside
    first = np.maximum(lo[which], begin[tensor]) - begin[tensor]
    last = np.minimum(hi[which], end[tensor]) - begin[tensor]
    keep = first < last
    return Cut(order[tensor[keep]].astype(np.int64), rank[which[keep]], first[keep], last[keep])


def even(shapes: Sequence[tuple[int, ...]], ranks: int, multiple: int | None = None) -> Cut:
    """Concatenate in order, pad to a multiple (of `ranks` unless given), give each rank an equal range."""
    size = np.asarray([prod(shape) for shape in shapes], np.int64)
    start = np.cumsum(size) - size
    unit = multiple or ranks
    total = -(-int(size.sum()) // unit) * unit
    share = total // ranks
    return cut_flat(start, size, [(rank, rank * share, (rank + 1) * share) for rank in range(ranks)])


def deepspeed(shapes: Sequence[tuple[int, ...]], ranks: int) -> Cut:
    """DeepSpeed ZeRO-1/2: as `even`, padded to a multiple of twice the ranks."""
    return even(shapes, ranks, 2 * ranks)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of Megatron's flat gradient buffer. Offsets in elements of the padded buffer."""

    start: int
    padded: int
    unpadded: int
    tensors: tuple[int, ...]


def megatron_buckets(
    sizes: Sequence[int], ranks: int, bucket_size: int | None = None
) -> tuple[Ints, list[Bucket]]:
    """Megatron-core's buffer layout: `(start of each tensor, buckets)`.

    Tensors are laid in reverse order, each start aligned to 64 elements; a bucket ends once it holds `bucket_size`
    elements and is padded to `lcm(ranks, 128)` (`param_and_grad_buffer.py`).
    """
    start = np.zeros(len(sizes), np.int64)
    buckets: list[Bucket] = []
    begin = end = 0
    members: list[int] = []

    def close() -> int:
        unit = lcm(ranks, 128)
        padded = -(-(end - begin) // unit) * unit
        buckets.append(Bucket(begin, padded, end - begin, tuple(members)))
        return begin + padded

    for tensor in reversed(range(len(sizes))):
        at = -(-end // 64) * 64
        start[tensor], end = at, at + sizes[tensor]
        members.append(tensor)
        if bucket_size is not None and end - begin >= bucket_size:
            begin = end = close()
            members = []
    if members:
        close()
    return start, buckets


def megatron(shapes: Sequence[tuple[int, ...]], ranks: int, bucket_size: int | None = None) -> Cut:
    """Megatron's distributed optimizer: every rank owns an equal part of every padded bucket."""
    sizes = [prod(shape) for shape in shapes]
    start, buckets = megatron_buckets(sizes, ranks, bucket_size)
    parts = []
    for bucket in buckets:
        share = bucket.padded // ranks
        parts += [(r, bucket.start + r * share, bucket.start + (r + 1) * share) for r in range(ranks)]
    return cut_flat(start, np.asarray(sizes, np.int64), parts)


def whole(shapes: Sequence[tuple[int, ...]], ranks: int) -> Cut:
    """Deal whole tensors out, largest first, each to the rank with the least so far (layer-wise Muon)."""
    sizes = [prod(shape) for shape in shapes]
    load = np.zeros(ranks, np.int64)
    owner = np.zeros(len(sizes), np.int64)
    for tensor in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        owner[tensor] = int(np.argmin(load))
        load[owner[tensor]] += sizes[tensor]
    index = np.flatnonzero(np.asarray(sizes, np.int64) > 0)
    return Cut(index, owner[index], np.zeros(len(index), np.int64), np.asarray(sizes, np.int64)[index])


def rows(shapes: Sequence[tuple[int, ...]], ranks: int) -> Cut:
    """FSDP2: each tensor alone, dim 0 in chunks of `ceil(rows / ranks)` rows, as `torch.chunk`; later ranks may hold none.

    A tensor without axes stays whole on the first rank.
    """
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []
    for tensor, shape in enumerate(shapes):
        count = shape[0] if shape else 1
        width = prod(shape[1:])
        chunk = -(-count // ranks) if shape else 1
        rank = np.arange(-(-count // chunk) if chunk else 0, dtype=np.int64)
        first = rank * chunk
        last = np.minimum(first + chunk, count)
        columns.append((np.full(len(rank), tensor, np.int64), rank, first * width, last * width))
    if not columns:
        none = np.zeros(0, np.int64)
        return Cut(none, none, none, none)
    tensor_, rank_, first_, last_ = (np.concatenate(column) for column in zip(*columns, strict=True))
    keep = first_ < last_
    return Cut(tensor_[keep], rank_[keep], first_[keep], last_[keep])


_RULES: dict[str, Callable[[Sequence[tuple[int, ...]], int], Cut]] = {
    "even": even,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "whole": whole,
}


def cut(rule: str, shapes: Sequence[tuple[int, ...]], ranks: int) -> Cut:
    """Cut tensors of `shapes` over `ranks` by a rule of `ckptkit.core.layouts.ZERO_RULES`."""
    if rule not in _RULES:
        raise LayoutError(f"unknown ZeRO rule {rule!r}; known: {', '.join(_RULES)}")
    return _RULES[rule](shapes, ranks)
