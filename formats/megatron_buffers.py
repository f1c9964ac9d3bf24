"""Megatron's flat buffers: where each parameter lies in the state of the distributed optimizer.

Neither names nor ranges are stored, so the map is worked out again as Megatron makes it: every model-parallel group has, for each
model chunk and element type, one buffer of its dense parameters and one of its experts; parameters come in reverse module
order, each at a multiple of 64 elements; a bucket ends once it is large enough, and before and after an embedding that two
stages share. Files leave out the padding after each bucket, not that before a parameter.

Source: megatron-core 0.16.1, `distributed/param_and_grad_buffer.py` and `optimizer/distrib_optimizer.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ckptkit.core.boxes import Box
from ckptkit.core.clips import clip
from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.names import Names, Placement
from ckptkit.errors import FormatError
from ckptkit.formats.megatron_keys import Numbered

ALIGN = 64
"""Elements at multiples of which parameters start."""

SLOTS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""The flat tensors of a buffer, and the roles they are."""


@dataclass
class Buffer:
    """Parameters of one model chunk and element type, in module order.

    Attributes:
        alone: Positions of members that have a bucket of their own.
    """

    chunk: int
    dtype: DType
    members: list[LocalTensor] = field(default_factory=list)
    alone: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Group:
    """A model-parallel group: of dense parameters, or of experts. `index` is Megatron's `dp_group_idx`."""

    expert: bool
    index: int


def chunk_of(parts: Numbered, layers: int, layout: Layout) -> int:
    """The model chunk of its stage (virtual pipeline) that a name belongs to."""
    if layout.vpp == 1 or parts.home == "first":
        return 0
    if parts.home == "last":
        return layout.vpp - 1
    return parts.layer // (layers // (layout.pp * layout.vpp)) // layout.pp


def padded_placements(
    names: Names, layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Placement]:
    """As `Names.placements`, with the padding of a vocabulary as `shapes` (of whole tensors) has it."""
    unpadded = {**names.copies, **names.unpadded()} if shapes else {}
    for p in names.placements(layout):
        shape = shapes.get(p.local.key)
        if shape is not None and shape[0] // layout.tp != p.local.shape[0]:
            tp = int(layout.dense["tp"][p.ranks[0]])
            rows = shape[0] // layout.tp
            box = Box((rows * tp, *(0 for _ in shape[1:])), (rows * (tp + 1), *shape[1:]))
            whole = LocalTensor(p.local.key, shape, unpadded[p.local.key].segments)
            p = Placement(clip(whole, box), p.ranks, p.order, p.expert)
        yield p


def buffers(
    names: Names,
    numbered: Mapping[str, Numbered],
    layout: Layout,
    dtypes: Mapping[str, DType],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    order: Sequence[str] = (),
) -> dict[Group, list[Buffer]]:
    """The buffers of every model-parallel group, in Megatron's order.

    Without expert parallelism experts are parameters like others: one buffer holds both.

    Args:
        dtypes: Element type of each trained parameter, by name; others have no place in a buffer.
        shapes: Whole shapes of tensors whose padding is not this model's usual one.
        order: The order of the run's modules, where that is not the family's.
    """
    dense, expert = layout.dense, layout.expert
    index = {
        False: dense["pp"] * layout.tp + dense["tp"],
        True: (expert["pp"] * layout.ep + expert["ep"]) * layout.etp + expert["etp"],
    }
    found: dict[Group, dict[tuple[int, DType], Buffer]] = {}
    copied = names.copies.values() if layout.pp > 1 else ()
    shared = {segment.tensor for item in copied for segment in item.segments}
    placements = list(padded_placements(names, layout, shapes or {}))
    if order:
        place = {name: k for k, name in enumerate(order)}
        placements.sort(key=lambda p: place.get(p.local.key, len(place)))
    for p in placements:
        dtype = dtypes.get(p.local.key)
        if dtype is None:
            continue
        chunk = chunk_of(numbered[p.local.key], names.model.layers, layout)
        apart = p.expert and layout.ep > 1
        for number in sorted(set(index[apart][p.ranks].tolist())):
            group = found.setdefault(Group(apart, number), {})
            buffer = group.setdefault((chunk, dtype), Buffer(chunk, dtype))
            if any(s.tensor in shared for s in p.local.segments):
                buffer.alone.add(len(buffer.members))
            buffer.members.append(p.local)
    return {
        group: sorted(by_kind.values(), key=lambda b: b.chunk) for group, by_kind in sorted(
            found.items(), key=lambda item: (item[0].expert, item[0].index)
        )
    }  # fmt: skip


@dataclass(frozen=True)
class Laid:
    """Where tensors lie: the bucket of each and its offset there, and the elements of each bucket without padding."""

    bucket: list[int]
    offset: list[int]
    unpadded: list[int]

    @property
    def total(self) -> int:
        """Elements of all buckets one after the other."""
        return sum(self.unpadded)

    @property
    def flat(self) -> list[int]:
        """Offsets in all buckets one after the other."""
        begin = [sum(self.unpadded[:k]) for k in range(len(self.unpadded))]
        return [begin[b] + at for b, at in zip(self.bucket, self.offset, strict=True)]


def lay(sizes: Sequence[int], alone: AbstractSet[int] = frozenset(), bucket_size: int | None = None) -> Laid:
    """Lay tensors (in module order) into buckets of at least `bucket_size` elements, or one bucket."""
    bucket, offset, unpadded = [0] * len(sizes), [0] * len(sizes), []
    end, used = 0, False
    for k in reversed(range(len(sizes))):
        start = -(-end // ALIGN) * ALIGN
        if k in alone and used:
            unpadded.append(start)  # with the gap before the tensor that comes next
            start = 0
        end, used = start + sizes[k], True
        bucket[k], offset[k] = len(unpadded), start
        if k in alone or (bucket_size is not None and end >= bucket_size):
            unpadded.append(end)
            end, used = 0, False
    if used:
        unpadded.append(end)
    return Laid(bucket, offset, unpadded)


def lay_as(sizes: Sequence[int], unpadded: Sequence[int], what: str) -> Laid:
    """Lay tensors into buckets whose sizes are known.

    Raises:
        FormatError: they do not come to these sizes.
    """
    bucket, offset = [0] * len(sizes), [0] * len(sizes)
    full: list[int] = []
    end = 0
    for k in reversed(range(len(sizes))):
        start = -(-end // ALIGN) * ALIGN
        if end and len(full) < len(unpadded) and start == unpadded[len(full)]:
            full.append(start)
            start = 0
        end = start + sizes[k]
        bucket[k], offset[k] = len(full), start
        if len(full) < len(unpadded) and end == unpadded[len(full)]:
            full.append(end)
            end = 0
    if full != list(unpadded) or end:
        raise FormatError(
            f"{what} has buckets of {', '.join(map(str, unpadded[:6]))} elements, but the parameters of this model and layout "
            f"come to {', '.join(map(str, [*full, *([end] if end else [])][:6]))}. Give the layout and configuration that it "
            "was saved with (--source-layout, --config)"
        )
    return Laid(bucket, offset, list(unpadded))


def local_order(family: Names, numbered: Mapping[str, Numbered]) -> list[str]:
    """Module order where norms are modules of their own (`--transformer-impl local`): that of attention comes first."""
    names = [numbered[name] for name in [*family.whole, *family.copies]]
    last: dict[int, int] = {}
    for k, parts in enumerate(names):
        last.setdefault(parts.number, k)

    def place(k: int) -> tuple[int, int, int]:
        parts = names[k]
        if parts.number < 0:
            return (k, 0, 0)
        fused = parts.rest.startswith("self_attention.linear_qkv.layer_norm_")
        return (last[parts.number], 0 if fused else 1, k)

    return [names[k].name for k in sorted(range(len(names)), key=place)]
