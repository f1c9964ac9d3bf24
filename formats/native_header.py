"""Headers of native rank files: sizes for all ranks at once, bytes one rank at a time, and their reading.

An entry is called `<tensor>/<role>`, and `<tensor>/<role>#<k>` where a file holds several runs of it (k counts them by position). It has
the shape of its local tensor, or one axis where it is a run. `__metadata__["ckptkit"]` is one JSON object:

    version, rank, world, layout, names, schema
    tensors   name -> {n: number in the checkpoint, axes, shape, and kind, optimizer, decay, keep_fp32 where unusual}
    locals    <tensor> -> {n, shape, of: [[tensor, start, stop] or [tensor, start, stop, offset, strides], ...]}
    runs      entry -> its first element in the flattened local tensor

Nothing in a header changes from step to step, so that equal content gives equal files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from ckptkit.core.catalog import I64, ROLES, U32
from ckptkit.core.destination import Literal
from ckptkit.core.dtypes import BY_SAFETENSORS, TABLE
from ckptkit.core.schema import Tensor
from ckptkit.errors import LayoutError
from ckptkit.formats.native_columns import FLAGS, Columns
from ckptkit.formats.safetensors_file import entry_text, header_bytes

PAGE = 4096
"""Data starts at a multiple of this."""

LIMIT = 90_000_000
"""Largest header that is written; readers take 100 MB."""

VERSION = 1


def dumps(value: object) -> str:
    """Compact JSON; the same value always gives the same text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class Headers(Mapping[int, Sequence[Literal]]):
    """The headers of all rank files: sizes at once, bytes when asked for (file number to one literal).

    Args:
        columns: Laid out, but for sizes and data starts.
        pads: Gaps in the data, as columns file, offset, nbytes; sorted by file.
        common: What every rank's metadata says: world, layout, names, schema.
    """

    def __init__(
        self, columns: Columns, pads: tuple[I64, I64, I64], common: Mapping[str, Any], limit: int = LIMIT
    ) -> None:
        self.columns = columns
        self.pads = pads
        self.common = dict(common)
        self.limit = limit
        self._digests: dict[int, bytes] = {}
        files = np.arange(len(columns.ranks) + 1)
        self._entries_of = np.searchsorted(columns.entries.file, files)
        self._pads_of = np.searchsorted(pads[0], files)
        self._repeats = _repeats(columns)

    def __len__(self) -> int:
        return len(self.columns.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, file: int) -> Sequence[Literal]:
        if not 0 <= file < len(self):
            raise KeyError(file)
        return [Literal(0, self.text(file))]

    def digest(self, file: int) -> bytes:
        """xxh3-128 of the header, length field and padding included."""
        if file not in self._digests:
            self.text(file)
        return self._digests[file]

    @cached_property
    def sizes(self) -> I64:
        """Bytes of each header, length field and padding included: where data starts.

        Bounds from above, to the page: every number counts with the digits of the largest of its kind.

        Raises:
            LayoutError: a header would exceed what readers take.
        """
        columns, entries, files = self.columns, self.columns.entries, len(self.columns.ranks)
        local, file = entries.local, entries.file
        name = (
            _lengths(json.dumps(key, ensure_ascii=False) for key in columns.keys)
            + _longest(ROLES)
            + len("/#")
        )
        name += len(str(int(self._repeats.max(initial=0))))
        escaped = _lengths(_escaped(json.dumps(key, ensure_ascii=False)) for key in columns.keys) - _lengths(
            json.dumps(key, ensure_ascii=False) for key in columns.keys
        )
        shape = _lengths(",".join(str(2 * n) for n in (*shape, 1)) for shape in columns.shapes)
        number = len(str(2 * int((entries.offset + entries.nbytes).max(initial=0))))
        frame = len(':{"dtype":"","shape":[],"data_offsets":[,]},') + _longest(BY_SAFETENSORS) + 2 * number
        member = frame + (name + np.maximum(shape, number))[local]
        member += np.where(self._is_run, (name + escaped)[local] + len(":,") + number, 0)
        total = np.bincount(file, member, files).astype(np.int64)
        for owner, used, lengths in (
            (
                *self._locals_of_files,
                _lengths(_escaped(self._local_text(k)) for k in range(len(columns.keys))),
            ),
            (
                *self._tensors_of_files,
                _lengths(_escaped(_tensor_text(n, t)) for n, t in enumerate(columns.tensors)),
            ),
        ):
            total += np.bincount(owner, lengths[used] + len(","), files).astype(np.int64)
        total += np.bincount(self.pads[0], minlength=files) * (frame + len('"__pad/"') + 2 * number)
        total += len(header_bytes([], self._metadata(files, [], [], []))) + len("{},")
        sizes = -(-total // PAGE) * PAGE
        if len(sizes) and sizes.max() > self.limit:
            worst = int(sizes.argmax())
            count = int(self._entries_of[worst + 1] - self._entries_of[worst])
            raise LayoutError(
                f"rank {int(columns.ranks[worst])} would hold {count} tensors, whose header of {int(sizes[worst])} bytes exceeds "
                f"{self.limit}; use a layout with more ranks"
            )
        return sizes

    def text(self, file: int) -> bytes:
        """The header of one file."""
        columns, entries = self.columns, self.columns.entries
        members: list[tuple[int, str]] = []
        runs = []
        for row in range(int(self._entries_of[file]), int(self._entries_of[file + 1])):
            key = columns.keys[entries.local[row]]
            repeat = int(self._repeats[row])
            name = f"{key}/{ROLES[entries.role[row]]}" + (f"#{repeat}" if repeat >= 0 else "")
            shape = columns.shapes[entries.local[row]]
            if self._is_run[row]:
                shape = (int(entries.last[row] - entries.first[row]),)
                runs.append(f"{json.dumps(name, ensure_ascii=False)}:{int(entries.first[row])}")
            offset = int(entries.offset[row])
            members.append((offset, entry_text(name, shape, TABLE[entries.dtype[row]], offset)))
        for k, row in enumerate(range(int(self._pads_of[file]), int(self._pads_of[file + 1]))):
            offset = int(self.pads[1][row])
            members.append(
                (offset, entry_text(f"__pad/{k}", (int(self.pads[2][row]),), BY_SAFETENSORS["U8"], offset))
            )
        members.sort(key=lambda member: member[0])  # stable: what is empty stays before what follows it
        owner, used = self._tensors_of_files
        tensors = [
            _tensor_text(n, columns.tensors[n])
            for n in used[slice(*np.searchsorted(owner, [file, file + 1]))].tolist()
        ]
        owner, used = self._locals_of_files
        locals_ = [
            self._local_text(n) for n in used[slice(*np.searchsorted(owner, [file, file + 1]))].tolist()
        ]
        metadata = self._metadata(int(columns.ranks[file]), tensors, locals_, runs)
        text = header_bytes((m for _, m in members), metadata, nbytes=int(self.sizes[file]))
        self._digests[file] = xxhash.xxh3_128_digest(text)
        return text

    def _metadata(
        self, rank: int, tensors: Sequence[str], locals_: Sequence[str], runs: Sequence[str]
    ) -> dict[str, str]:
        head = dumps({"version": VERSION, "rank": rank, **self.common})
        lists = (("tensors", tensors), ("locals", locals_), ("runs", runs))
        return {
            "ckptkit": head[:-1] + "".join(f',"{name}":{{{",".join(items)}}}' for name, items in lists) + "}"
        }

    @cached_property
    def _is_run(self) -> np.ndarray:
        """Whether each entry is a run of its local tensor rather than the whole."""
        entries = self.columns.entries
        whole = np.asarray([int(np.prod(shape, dtype=np.int64)) for shape in self.columns.shapes], np.int64)
        if not len(entries):
            return np.zeros(0, bool)
        return (entries.first != 0) | (entries.last != whole[entries.local])

    @cached_property
    def _locals_of_files(self) -> tuple[I64, I64]:
        """Columns file, local tensor: which are used in which file, sorted."""
        entries = self.columns.entries
        return _distinct(entries.file, entries.local, len(self.columns.keys))

    @cached_property
    def _tensors_of_files(self) -> tuple[I64, I64]:
        """Columns file, tensor: which are used in which file, sorted."""
        files, used = self._locals_of_files
        edges = self.columns.parts_of_local
        count = np.diff(edges)[used]
        part = (
            np.repeat(edges[used], count)
            + np.arange(int(count.sum()))
            - np.repeat(np.cumsum(count) - count, count)
        )
        return _distinct(np.repeat(files, count), self.columns.parts.tensor[part], len(self.columns.tensors))

    def _local_text(self, number: int) -> str:
        columns, parts = self.columns, self.columns.parts
        of: list[list[Any]] = []
        for k in range(int(columns.parts_of_local[number]), int(columns.parts_of_local[number + 1])):
            tensor = columns.tensors[parts.tensor[k]]
            axes = len(tensor.shape)
            part = [tensor.name, parts.start[k, :axes].tolist(), parts.stop[k, :axes].tolist()]
            of.append(
                part if columns.plain[k] else [*part, int(parts.offset[k]), parts.strides[k, :axes].tolist()]
            )
        key = json.dumps(columns.keys[number], ensure_ascii=False)
        return f"{key}:{dumps({'n': number, 'shape': columns.shapes[number], 'of': of})}"


def _tensor_text(number: int, tensor: Tensor) -> str:
    unusual = {name: getattr(tensor, name) for name, usual in FLAGS.items() if getattr(tensor, name) != usual}
    text = dumps({"n": number, "axes": tensor.axes, "shape": tensor.shape, **unusual})
    return f"{json.dumps(tensor.name, ensure_ascii=False)}:{text}"


def _repeats(columns: Columns) -> I64:
    """For each entry its number among the entries of the same tensor and role in its file; -1 where it is the only one.

    Raises:
        LayoutError: one file would hold two different local tensors of one name.
    """
    entries = columns.entries
    if not len(entries):
        return np.zeros(0, np.int64)
    names = {key: k for k, key in enumerate(dict.fromkeys(columns.keys))}
    key = np.asarray([names[key] for key in columns.keys], np.int64)[entries.local]
    order = np.lexsort((entries.first, entries.local, entries.role, key, entries.file))
    new = np.ones(len(order), bool)
    for column in (entries.file, key, entries.role):
        changed = column[order][1:] != column[order][:-1]
        new[1:] = changed if column is entries.file else new[1:] | changed
    clash = np.flatnonzero(~new[1:] & (entries.local[order][1:] != entries.local[order][:-1]))
    if len(clash):
        row = order[int(clash[0])]
        raise LayoutError(
            f"{columns.keys[entries.local[row]]} would be in {columns.ranks[entries.file[row]]} in two shapes"
        )
    start = np.flatnonzero(new)
    count = np.diff([*start, len(order)])
    within = np.arange(len(order)) - np.repeat(start, count)
    result = np.empty(len(order), np.int64)
    result[order] = np.where(np.repeat(count, count) > 1, within, -1)
    return result


def _distinct(owner: U32 | I64, item: U32 | I64, items: int) -> tuple[I64, I64]:
    both = np.unique(owner.astype(np.int64) * max(items, 1) + item.astype(np.int64))
    found, which = np.divmod(both, max(items, 1))
    return found, which


def _lengths(texts: Iterable[str]) -> I64:
    return np.asarray([len(text.encode()) for text in texts], np.int64)


def _escaped(text: str) -> str:
    """As it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts))
