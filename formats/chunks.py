"""Chunks of global tensors as entries, and entries as chunks: what formats with global shapes share.

Reading: a stored box of a family's tensor becomes a run of the whole tensor where it is one (every cut of dimension 0), else
a local tensor of its own. Writing: an entry of any layout becomes boxes of the family's whole tensor, in its own rank's file.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptkit.core.boxes import Box, interval_boxes, row_major_strides
from ckptkit.core.catalog import Catalog, Entries
from ckptkit.core.clips import clip, images, strided
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import FormatError
from ckptkit.formats.peft_names import adapt


def plain_local(name: str, shape: tuple[int, ...]) -> LocalTensor:
    """A stored tensor whose meaning is not known: itself."""
    axes = len(shape)
    return LocalTensor(
        name, shape, (Segment(name, Box.whole(shape), tuple(range(axes)), (1,) * axes, (0,) * axes),)
    )


def plain_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Its axes have no meaning but their position."""
    return Tensor(name, tuple(f"d{d}" for d in range(len(shape))), shape)


def family_of(model: Model, names: Collection[str], where: str) -> str:
    """The family that stored names are of; canonical names are one too. Raises FormatError as `Model.family_of`."""
    stored = {name for name in names if not model.schema.is_harmless(name)}
    if stored and stored <= model.tensors.keys():
        return "canonical"
    return model.family_of(names, where)


def bind_names(
    model: Model, family: str, shapes: Mapping[str, tuple[int, ...]], where: str, warnings: list[str]
) -> dict[str, LocalTensor]:
    """The model's local tensors of stored names. Those that every library makes anew are left out with a warning.

    A padded dimension may be stored with or without its padding.

    Raises:
        FormatError: names are unknown or of another shape; lists them.
    """
    names = model.names(family)
    known = {**names.copies, **names.unpadded()}
    padded = names.whole
    found: dict[str, LocalTensor] = {}
    problems: list[str] = []
    for name, shape in shapes.items():
        options = [item for item in (known.get(name), padded.get(name)) if item is not None]
        match = next((item for item in options if item.shape == shape), None)
        if match is not None:
            found[name] = match
        elif model.schema.is_harmless(name):
            warnings.append(f"{name} is made anew by every library and was left out")
        elif options:
            problems.append(f"{name} has shape {shape} instead of {options[0].shape}")
        else:
            problems.append(f"{name} is none of this model's")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise FormatError(
            f"{where} does not hold the model of its configuration ({model.schema.id}, names {family}): "
            f"{'; '.join(problems[:5])}{more}. Give the right --config, or the files again",
            tensor=problems[0].split(" ")[0],
        )
    return found


def ties(shards: Catalog) -> dict[str, str]:
    """Names of tied weights that loaders ask for besides those that are stored: name to the stored name it equals."""
    if shards.model is None:
        return {}
    names = shards.model.names(shards.names)
    stored = {item.key for item in shards.locals}
    same = {item.segments: name for name, item in names.unpadded().items() if name in stored}
    return {
        name: same[item.segments]
        for name, item in names.copies.items()
        if name not in stored and item.segments in same
    }


@dataclass(frozen=True)
class Bound:
    """What stored names are.

    Attributes:
        model: With the adapters that are stored; None where it is not known.
        family: Of the names; `stored` without a model.
        locals: Whole tensors by name.
        tensors: Canonical tensors.
        renamed: Stored names that have others here (`ckptkit.formats.peft_names`).
    """

    model: Model | None
    family: str
    locals: dict[str, LocalTensor]
    tensors: Mapping[str, Tensor]
    renamed: Mapping[str, str]


def bind_stored(
    model: Model | None, shapes: Mapping[str, tuple[int, ...]], where: str, warnings: list[str]
) -> Bound:
    """What names of stored whole tensors are: a model's, or without one themselves.

    Raises:
        FormatError: they are not this model's; lists them.
    """
    if model is None:
        locals_ = {name: plain_local(name, shape) for name, shape in shapes.items()}
        return Bound(None, "stored", locals_, {name: plain_tensor(name, s) for name, s in shapes.items()}, {})
    model, renamed = adapt(model, shapes, where)
    named = {renamed.get(name, name): shape for name, shape in shapes.items()}
    family = family_of(model, named, where)
    return Bound(model, family, bind_names(model, family, named, where, warnings), model.tensors, renamed)


class Locals:
    """Local tensors that entries refer to, each once."""

    def __init__(self) -> None:
        self.items: list[LocalTensor] = []
        self._number: dict[tuple[object, ...], int] = {}

    def whole(self, item: LocalTensor) -> int:
        """The number of a whole family tensor."""
        return self._of(("whole", item.key, item.shape), lambda: item)

    def exact(self, item: LocalTensor) -> int:
        """The number of one rank's tensor, which others of its name and shape may differ from."""
        return self._of(("exact", item), lambda: item)

    def chunk(
        self,
        item: LocalTensor,
        start: tuple[int, ...],
        sizes: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> tuple[int, int, int]:
        """`(local, first, last)` of a stored box of `item`: a run of the whole where it is one.

        `strides` are those of its storage where it is not row-major.
        """
        if strides is None and start[1:] == (0,) * (len(start) - 1) and sizes[1:] == item.shape[1:]:
            inner = prod(item.shape[1:])
            first = start[0] * inner if start else 0
            return self.whole(item), first, first + (sizes[0] * inner if sizes else 1)
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))

        def make() -> LocalTensor:
            part = clip(item, box)
            if strides is None:
                return part
            return strided(part, strides, 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))

        number = self._of((item.key, item.shape, start, sizes, strides), make)
        return number, 0, self.items[number].size

    def _of(self, key: tuple[object, ...], make) -> int:  # type: ignore[no-untyped-def]
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self.items)
            self.items.append(make())
        return number


@dataclass
class Cut:
    """Entries cut into boxes of whole family tensors: parallel to `entries`.

    Attributes:
        locals: What the entries refer to.
        start, sizes: The box that each entry is, in the dimensions of its family's tensor.
        shapes: Global shape, by key.
    """

    locals: list[LocalTensor]
    entries: Entries
    start: list[tuple[int, ...]]
    sizes: list[tuple[int, ...]]
    shapes: dict[str, tuple[int, ...]]


def cut_boxes(shards: Catalog, whole: Mapping[str, LocalTensor]) -> Cut:
    """Every entry of `shards` as boxes of the tensors in `whole`, which must name every local tensor's key.

    Entries of a tensor that is whole on its rank are runs: each gives at most `2 * axes - 1` boxes, and one when it is cut
    between rows. Others are found through canonical boxes; padding is left out, and what several ranks hold (a KV head on
    two of them) is stored by the first.
    """
    entries = shards.entries
    rows: list[tuple[int, int, int, int, int, int]] = []  # file, local, role, dtype, first, last
    start: list[tuple[int, ...]] = []
    sizes: list[tuple[int, ...]] = []
    found = Locals()
    direct = [
        item.segments == whole[item.key].segments and item.shape == whole[item.key].shape
        for item in shards.locals
    ]
    straight = np.asarray(direct, bool)[entries.local] if len(entries) else np.zeros(0, bool)
    order = np.argsort(entries.local, kind="stable")
    for stretch in _stretches(entries.local, order[straight[order]]):
        item = whole[shards.locals[int(entries.local[stretch[0]])].key]
        number = found.whole(item)
        strides = row_major_strides(item.shape)
        if 0 in item.shape:
            owner, lo, hi = _whole_boxes(item.shape, len(stretch))
        else:
            owner, lo, hi = interval_boxes(item.shape, entries.first[stretch], entries.last[stretch])
        for k, low, high in zip(stretch[owner].tolist(), lo.tolist(), hi.tolist(), strict=True):
            first = sum(a * s for a, s in zip(low, strides, strict=True))
            size = tuple(b - a for a, b in zip(low, high, strict=True))
            rows.append(
                (
                    int(entries.file[k]),
                    number,
                    int(entries.role[k]),
                    int(entries.dtype[k]),
                    first,
                    first + prod(size),
                )
            )
            start.append(tuple(low))
            sizes.append(size)
    if not straight.all():
        pieces = shards.pieces
        taken: dict[tuple[str, int], list[Box]] = {}
        segment_tensor, names = shards.segments.tensor, shards.tensor_list
        for p in np.flatnonzero(~straight[pieces.entry]).tolist():
            k = int(pieces.entry[p])
            tensor = names[int(segment_tensor[pieces.segment[p]])]
            axes = len(tensor.shape)
            box = Box(tuple(pieces.lo[p][:axes].tolist()), tuple(pieces.hi[p][:axes].tolist()))
            item = whole[shards.locals[int(entries.local[k])].key]
            earlier = taken.setdefault((item.key, int(entries.role[k])), [])
            for image in images(item, tensor.name, box):
                for part in _without(image, earlier):
                    local, first, last = found.chunk(item, part.start, part.shape)
                    rows.append(
                        (
                            int(entries.file[k]),
                            local,
                            int(entries.role[k]),
                            int(entries.dtype[k]),
                            first,
                            last,
                        )
                    )
                    start.append(part.start)
                    sizes.append(part.shape)
                earlier.append(image)
    columns = np.asarray(rows, np.int64).reshape(-1, 6).T
    shapes = {item.key: whole[item.key].shape for item in shards.locals}
    return Cut(found.items, Entries(*columns), start, sizes, shapes)


def _stretches(local: np.ndarray, order: np.ndarray) -> Sequence[np.ndarray]:
    """Entries of one local tensor each."""
    if not len(order):
        return []
    return np.split(order, np.flatnonzero(np.diff(local[order])) + 1)


def _whole_boxes(shape: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    owner = np.arange(count)
    return owner, np.zeros((count, len(shape)), np.int64), np.tile(np.asarray(shape, np.int64), (count, 1))


def _without(box: Box, holes: Sequence[Box]) -> list[Box]:
    """The part of `box` outside all of `holes`, as disjoint boxes."""
    rest = [box]
    for hole in holes:
        if any(part.overlap(hole) is not None for part in rest):
            rest = [piece for part in rest for piece in _minus(part, hole)]
    return rest


def _minus(box: Box, hole: Box) -> list[Box]:
    common = box.overlap(hole)
    if common is None:
        return [box]
    parts = []
    lo, hi = list(box.start), list(box.stop)
    for axis in range(len(lo)):
        if lo[axis] < common.start[axis]:
            parts.append(Box(tuple(lo), (*hi[:axis], common.start[axis], *hi[axis + 1 :])))
        if common.stop[axis] < hi[axis]:
            parts.append(Box((*lo[:axis], common.stop[axis], *lo[axis + 1 :]), tuple(hi)))
        lo[axis], hi[axis] = common.start[axis], common.stop[axis]
    return parts
