"""Catalogs: all pieces of one checkpoint, as columns.

An *entry* is a stored array: a local tensor, or one run of it, in a file. A *segment* is the affine map from one
canonical tensor to one local tensor; a *piece* is a canonical box of a segment that lies in an entry. So the address of
element `c` of a piece is

    entry.offset + itemsize * (segment.base + sum(c * segment.strides) - entry.first)

Offsets are relative to the start of a file's data (`File.data_start`), so that a catalog can be planned before headers
are written. A piece costs `8 + 8 * axes` bytes, whatever the format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Box
from ckptkit.core.dtypes import TABLE, DType
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.pieces import Pieces, Segments, affine_maps, cut_entries
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import FormatError

__all__ = [
    "I64", "ITEMSIZE", "LEAF", "ROLES", "ROLE_CODE", "U8", "U32",
    "Catalog", "Checksum", "Entries", "Extras", "File", "Leaves", "Pieces", "Scaled", "Segments", "is_weight",
]  # fmt: skip

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

ROLES = ("param", "buffer", "master", "exp_avg", "exp_avg_sq", "momentum", "ema", "state")
"""What a tensor's values are. `state` is optimizer state without a role of its own: a tensor called `PARAMETER@NAME`."""

NAMED_ROLES = ROLES[:-1]
"""Those that formats other than ours have a place for."""

ROLE_CODE = {role: code for code, role in enumerate(ROLES)}


def is_weight(role: int) -> bool:
    """Whether a role code is part of the model (param, buffer), not of the optimizer's state."""
    return role < 2


LEAF = 1 << 20
"""Bytes under one digest."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """Digests of a file's data: xxh3-128 of each `LEAF` bytes from `data_start` on; the last leaf may be short.

    `digests` has 16 bytes (canonical, big-endian) a leaf, as an array `[leaves, 16]` of u8.
    """

    data_start: int
    size: int
    digests: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Checksum:
    """A CRC-32 that a file states of its own bytes `[start, stop)`; `what` is in it, for messages."""

    path: str
    start: int
    stop: int
    crc32: int
    what: str


class Derived(Protocol):
    """A file that exists only while it is read."""

    @property
    def nbytes(self) -> int: ...

    def identity(self, of: Callable[[str], str]) -> str: ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A derived region: float32 values, row-major, made of narrow floats and one scale a block of the last two axes.

    Attributes:
        weight, scale: File and offset of each input; `dtype`, `scale_dtype` codes of `TABLE`, `shape`, `scale_shape` their shapes.
        block: Rows and columns under one scale.
    """

    weight: tuple[str, int]
    dtype: int
    shape: tuple[int, ...]
    scale: tuple[str, int]
    scale_dtype: int
    scale_shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.shape)

    def identity(self, of: Callable[[str], str]) -> str:
        """As `Store.identity`, from that of the inputs' files."""
        return f"{of(self.weight[0])} {of(self.scale[0])}"


@dataclass(slots=True)
class File:
    """A file of a checkpoint.

    Attributes:
        path: Relative to the checkpoint's root.
        size: Bytes; -1 when a destination is not laid out yet.
        data_start: Where entries' offsets count from.
        rank: The rank whose file it is, or -1.
    """

    path: str
    size: int = -1
    data_start: int = 0
    rank: int = -1


class Entries:
    """Columns of entries.

    Attributes:
        file: Index into the catalog's files (u32).
        local: Index into the catalog's local tensors (u32).
        role, dtype: Codes of `ROLES` and `ckptkit.core.dtypes.TABLE` (u8).
        first, last: The run of the local tensor that is stored (the whole: 0 and its size).
        offset: Bytes from the file's data start.
    """

    __slots__ = ("dtype", "file", "first", "last", "local", "offset", "role")

    def __init__(
        self,
        file: npt.ArrayLike,
        local: npt.ArrayLike,
        role: npt.ArrayLike,
        dtype: npt.ArrayLike,
        first: npt.ArrayLike,
        last: npt.ArrayLike,
        offset: npt.ArrayLike | None = None,
    ) -> None:
        self.file: U32 = np.asarray(file, np.uint32)
        self.local: U32 = np.asarray(local, np.uint32)
        self.role: U8 = np.asarray(role, np.uint8)
        self.dtype: U8 = np.asarray(dtype, np.uint8)
        self.first: I64 = np.asarray(first, np.int64)
        self.last: I64 = np.asarray(last, np.int64)
        self.offset: I64 = (
            np.zeros(len(self.file), np.int64) if offset is None else np.asarray(offset, np.int64)
        )

    def __len__(self) -> int:
        return len(self.file)

    def take(self, index: npt.NDArray[Any]) -> "Entries":
        """These entries in another order, or some of them."""
        return Entries(
            *(getattr(self, c)[index] for c in ("file", "local", "role", "dtype", "first", "last", "offset"))
        )

    @property
    def nbytes(self) -> I64:
        """Stored bytes of each entry."""
        size: I64 = (self.last - self.first) * ITEMSIZE[self.dtype]
        return size

    @staticmethod
    def concat(parts: Sequence["Entries"]) -> "Entries":
        if not parts:
            none = np.zeros(0, np.int64)
            return Entries(none, none, none, none, none, none)
        columns = ("file", "local", "role", "dtype", "first", "last", "offset")
        return Entries(*(np.concatenate([getattr(part, c) for part in parts]) for c in columns))


ITEMSIZE: I64 = np.asarray([dtype.itemsize for dtype in TABLE], np.int64)


@dataclass
class Extras:
    """What is no tensor. All values are plain JSON.

    Attributes:
        common: Kept on any change of layout: `step`, `groups` (optimizer groups, see below), scheduler, ...
        by_coordinate: Per mesh coordinate (`"tp=0,pp=1,cp=0,dp=3"`), such as RNG states: kept only where the
            destination has the coordinate in a mesh of the same sizes.
        by_sample: Loader state that is sharded by sample: a list of states, one a data-parallel rank of the source.
        files: Configuration and tokenizer files carried along: name to content.

    A group is `{kind, step, tensors: [canonical names], ...hyper-parameters}`.
    """

    common: dict[str, Any] = field(default_factory=dict)
    by_coordinate: dict[str, Any] = field(default_factory=dict)
    by_sample: list[Any] = field(default_factory=list)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Catalog:
    """All pieces of one checkpoint, where they lie, and what goes with them.

    Attributes:
        format: Name of the format, for example `native`.
        where: URL, for messages.
        tensors: Canonical tensors, by name. Where no model is known these are the stored names.
        locals: Local tensors that entries refer to.
        files, entries: What is stored where.
        layout: The layout it was written in, or None where the format does not tell.
        model: The bound model, or None.
        names: Family of names the files use.
        extras: Step, groups, configuration files, ...; may be given as a function, called when they are asked for.
        facts: Whatever else the format tells, for `inspect` (epoch, lineage, versions).
        leaves: File number to the digests of that file's data, loaded when asked for; None where there are none.
        identities: Path to `Store.identity` when headers were read, so that a source that changes is noticed.
        derived: Path to what lies there, for files that exist only while they are read (`ckptkit.engine.derived`).
    """

    def __init__(
        self,
        *,
        format: str,
        where: str,
        tensors: Mapping[str, Tensor],
        locals: Sequence[LocalTensor],
        files: Sequence[File],
        entries: Entries,
        layout: Layout | None = None,
        model: Model | None = None,
        names: str = "canonical",
        extras: Extras | Callable[[], Extras] | None = None,
        facts: Mapping[str, Any] | None = None,
        leaves: Callable[[int], Leaves | None] | None = None,
        identities: Mapping[str, str] | None = None,
        derived: Mapping[str, Derived] | None = None,
    ) -> None:
        self.format = format
        self.where = where
        self.tensors = dict(tensors)
        self.locals = list(locals)
        self.files = list(files)
        self.entries = entries
        self.layout = layout
        self.model = model
        self.names = names
        self._load_extras = extras if callable(extras) else lambda: extras or Extras()
        self.facts = dict(facts or {})
        self.leaves = leaves
        self.identities = dict(identities or {})
        self.derived = dict(derived or {})

    @cached_property
    def extras(self) -> Extras:
        """What is no tensor. May read small files on first use."""
        return self._load_extras()

    @cached_property
    def tensor_list(self) -> list[Tensor]:
        """Tensors by position: what `Segments.tensor` indexes."""
        return list(self.tensors.values())

    @cached_property
    def width(self) -> int:
        """Axes of the widest tensor."""
        return max((len(t.shape) for t in self.tensor_list), default=0)

    @cached_property
    def segments(self) -> Segments:
        """Affine maps of all local tensors. Raises FormatError when one leaves its tensor or local tensor."""
        return affine_maps({name: t.shape for name, t in self.tensors.items()}, self.locals, self.where)

    @cached_property
    def pieces(self) -> Pieces:
        """Every canonical box of every entry, sorted by entry. Raises FormatError when an entry leaves its tensor."""
        entries = self.entries
        sizes = np.asarray([item.size for item in self.locals], np.int64)
        strange = (entries.local >= len(sizes)) | (entries.file >= len(self.files))
        strange |= (entries.role >= len(ROLES)) | (entries.dtype >= len(TABLE))
        if strange.any():
            raise FormatError(
                f"{self.where}: entry {int(np.argmax(strange))} of its index refers to nothing there is"
            )
        outside = (entries.first < 0) | (entries.first > entries.last) | (entries.last > sizes[entries.local])
        if outside.any():
            entry = int(np.argmax(outside))
            item = self.locals[int(entries.local[entry])]
            raise FormatError(
                f"{self.where}: {self.describe_entry(entry)} leaves its tensor of {item.size} elements",
                file=self.files[int(entries.file[entry])].path,
            )
        wide = any(size >= 1 << 31 for tensor in self.tensor_list for size in tensor.shape)
        return cut_entries(
            self.segments, sizes, entries.local, entries.first, entries.last, np.int64 if wide else np.int32
        )

    @cached_property
    def piece_key(self) -> I64:
        """`tensor * len(ROLES) + role` of each piece, with the catalog's own tensor numbers."""
        pieces = self.pieces
        tensor = self.segments.tensor[pieces.segment].astype(np.int64)
        return tensor * len(ROLES) + self.entries.role[pieces.entry]

    @cached_property
    def held(self) -> dict[tuple[str, str], DType]:
        """`(tensor, role)` to the dtype it is stored in, for everything that has an entry.

        Raises:
            FormatError: one tensor and role is stored in two dtypes.
        """
        found: dict[tuple[str, str], DType] = {}
        kinds = len(ROLES) * len(TABLE)
        code = (self.entries.local.astype(np.int64) * len(ROLES) + self.entries.role) * len(TABLE)
        for number in np.unique(code + self.entries.dtype).tolist():
            local, kind = divmod(number, kinds)
            role, dtype = divmod(kind, len(TABLE))
            for segment in self.locals[local].segments:
                key = (segment.tensor, ROLES[role])
                if found.setdefault(key, TABLE[dtype]) is not TABLE[dtype]:
                    raise FormatError(
                        f"{self.where}: {key[0]} ({key[1]}) is stored as {found[key]} in one place and "
                        f"{TABLE[dtype]} in another",
                        tensor=key[0],
                    )
        return found

    @property
    def step(self) -> int | None:
        """Completed optimizer steps, where known."""
        step = self.facts["step"] if "step" in self.facts else self.extras.common.get("step")
        return int(step) if step is not None else None

    def describe_entry(self, entry: int) -> str:
        """`'key' (role) in file`, for messages."""
        e = self.entries
        item = self.locals[int(e.local[entry])]
        run = ""
        if (e.first[entry], e.last[entry]) != (0, item.size):
            run = f" elements {e.first[entry]}:{e.last[entry]}"
        return f"{item.key!r} ({ROLES[e.role[entry]]}){run} in {self.files[int(e.file[entry])].path}"

    def describe_piece(self, piece: int) -> str:
        """`tensor (role) [box], 'key' in file`, for messages."""
        pieces = self.pieces
        tensor = self.tensor_list[int(self.segments.tensor[pieces.segment[piece]])]
        axes = len(tensor.shape)
        box = Box(tuple(map(int, pieces.lo[piece][:axes])), tuple(map(int, pieces.hi[piece][:axes])))
        return f"{tensor.name} {box}, {self.describe_entry(int(pieces.entry[piece]))}"
