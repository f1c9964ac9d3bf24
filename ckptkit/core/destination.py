"""Destinations: what a format wants written, before any byte moves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import Catalog

LEAF = 1 << 20
"""Bytes under one digest."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes of a destination file that are known before the data: headers, pickles, zip trailers."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Fixup:
    """A small field computed from a range of the same file as the data passes.

    `kind` is `crc32` (little-endian, of bytes `[start, stop)`), written at each of `offsets`.
    """

    kind: str
    start: int
    stop: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaves:
    """Digests of a file's data: xxh3-128 of each `LEAF` bytes from `data_start` on; the last leaf may be short.

    `digests` has 16 bytes (canonical, big-endian) a leaf, as an array `[leaves, 16]` of u8.
    """

    data_start: int
    size: int
    digests: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Written:
    """A destination file after its bytes are durable. `leaves` is None where the destination asks for no digests."""

    path: str
    size: int
    leaves: Leaves | None


@dataclass
class Destination:
    """The files of a checkpoint to be written.

    A file's bytes are its literals, its catalog entries, and zeros everywhere else (padding).

    Attributes:
        catalog: Laid out: files have path, size and data start, entries have offsets.
        literals, fixups: By file number.
        digests: Whether leaf digests are computed while the data passes.
        finish: Called once every file of the catalog is durable; gives the small files `(path, content)` to write
            after them, in order. The last one is what makes the checkpoint whole.
    """

    catalog: Catalog
    literals: Mapping[int, Sequence[Literal]] = field(default_factory=dict)
    fixups: Mapping[int, Sequence[Fixup]] = field(default_factory=dict)
    digests: bool = False
    finish: Callable[[Sequence[Written]], Iterable[tuple[str, bytes]]] = lambda written: ()
