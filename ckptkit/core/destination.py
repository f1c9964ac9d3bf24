"""Destinations: what a format wants written, before any byte moves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.core.catalog import LEAF, Catalog, Leaves

__all__ = ["LEAF", "Destination", "Fixup", "Leaves", "Literal", "Written"]


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
class Written:
    """A destination file after its bytes are durable. `leaves` is None where the destination asks for no digests.

    `fingerprints` has, by `(tensor, role)`, what the file adds to fingerprints; None where the destination asks for none.
    """

    path: str
    size: int
    leaves: Leaves | None
    fingerprints: Mapping[tuple[str, str], int] | None = None


@dataclass
class Destination:
    """The files of a checkpoint to be written.

    A file's bytes are its literals, its catalog entries, and zeros everywhere else (padding).

    Attributes:
        catalog: Laid out: files have path, size and data start, entries have offsets.
        literals, fixups: By file number.
        digests: Whether leaf digests are computed while the data passes.
        fingerprints: Whether fingerprints of tensors are (`ckptkit.core.fingerprints`).
        finish: Called once every file of the catalog is durable; gives the small files `(path, content)` to write
            after them, in order. The last one is what makes the checkpoint whole.
    """

    catalog: Catalog
    literals: Mapping[int, Sequence[Literal]] = field(default_factory=dict)
    fixups: Mapping[int, Sequence[Fixup]] = field(default_factory=dict)
    digests: bool = False
    fingerprints: bool = False
    finish: Callable[[Sequence[Written]], Iterable[tuple[str, bytes]]] = lambda written: ()
