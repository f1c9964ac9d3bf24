"""A catalog whose adapters serve several projections together, as one whose projections have adapters of their own.

Bytes stay where they are: the one `lora_A` is that of each, and the rows of `lora_B` belong to one each.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from ckptkit.core.adapters import Share, apart, ranks_of, with_adapters
from ckptkit.core.boxes import Box
from ckptkit.core.catalog import Catalog
from ckptkit.core.local import LocalTensor, Segment


def split_adapters(catalog: Catalog, tensors: set[str]) -> Catalog:
    """The catalog with these adapters of its model taken apart where they can be; itself where none can."""
    if catalog.model is None:
        return catalog
    shares = apart(catalog.model, tensors)
    if not shares:
        return catalog
    ranks = ranks_of((tensor.name, tensor.axes) for tensor in catalog.model.tensors.values())
    found = {name: rank for name, rank in ranks.items() if name not in shares}
    found.update((share.tensor, ranks[name]) for name, listed in shares.items() for share in listed)
    model = with_adapters(catalog.model, found)
    locals_: list[LocalTensor] = []
    copies: list[list[int]] = []
    for item in catalog.locals:
        made = list(_apart(item, shares))
        copies.append(list(range(len(locals_), len(locals_) + len(made))))
        locals_ += made
    entries = catalog.entries
    count = np.asarray([len(numbers) for numbers in copies], np.int64)[entries.local]
    taken = entries.take(np.repeat(np.arange(len(entries)), count))
    taken.local = np.asarray([n for k in entries.local.tolist() for n in copies[k]], np.uint32)
    return Catalog(
        format=catalog.format, where=catalog.where, tensors=model.tensors, locals=locals_, files=catalog.files, entries=taken,
        layout=catalog.layout, model=model, names=catalog.names, extras=lambda: catalog.extras, facts=catalog.facts,
        leaves=catalog.leaves, identities=catalog.identities, derived=catalog.derived,
    )  # fmt: skip


def _apart(item: LocalTensor, shares: Mapping[str, Sequence[Share]]) -> Iterator[LocalTensor]:
    """A local tensor once for each tensor that the whole of it is; in one where each segment is one or more of disjoint parts."""
    segments = [_shared(segment, shares.get(segment.tensor)) for segment in item.segments]
    for chosen in product(*segments):
        yield LocalTensor(item.key, item.shape, tuple(part for parts in chosen for part in parts))


def _shared(segment: Segment, shares: Sequence[Share] | None) -> list[list[Segment]]:
    """The alternatives that a segment is; each is a list of disjoint segments."""
    if shares is None:
        return [[segment]]
    whole = [
        [Segment(share.tensor, segment.box, segment.dim, segment.step, segment.origin)]
        for share in shares
        if share.axis < 0
    ]
    cut = [_at(segment, share) for share in shares if share.axis >= 0]
    parts = [part for part in cut if part is not None]
    return whole + ([parts] if parts or not whole else [])


def _at(segment: Segment, share: Share) -> Segment | None:
    """A segment at one index of an axis, which goes; None where it does not hold that index."""
    axis, box = share.axis, segment.box
    if not box.start[axis] <= share.index < box.stop[axis]:
        return None
    origin = list(segment.origin)
    if segment.dim[axis] >= 0:
        origin[segment.dim[axis]] += segment.step[axis] * (share.index - box.start[axis])

    def rest(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:axis], *values[axis + 1 :])

    return Segment(
        share.tensor,
        Box(rest(box.start), rest(box.stop)),
        rest(segment.dim),
        rest(segment.step),
        tuple(origin),
    )
