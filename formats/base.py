"""What a format is: a way to read a directory into a catalog, and to lay local tensors out into files.

A format module says only what its pieces are. It does no bulk I/O: `read` takes headers and metadata; `lay_out` decides every
byte's place before any byte moves.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptkit.core.catalog import Catalog, Checksum
from ckptkit.core.destination import Destination
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Schema
from ckptkit.errors import CkptError
from ckptkit.stores.base import Store


@dataclass(frozen=True)
class ReadOptions:
    """What a user may say about a source that the source does not say, or says wrongly.

    `dequantize` asks for block-scaled weights as float32 values, also where no schema needs them; `fill_missing` takes chunks that
    a zarr array lacks as its fill value.
    """

    model: Schema | None = None
    layout: Layout | None = None
    config: Mapping[str, Any] | None = None
    dequantize: bool = False
    fill_missing: bool = False


@dataclass(frozen=True)
class WriteOptions:
    """What a user may choose about a destination's files."""

    max_shard_size: int = 5_000_000_000
    facts: Mapping[str, Any] = field(default_factory=dict)


class Format(ABC):
    """One on-disk format.

    Attributes:
        name: As `--to` takes it.
        names: The family of names its files use, where it is one; `canonical` where files carry boxes of their own.
        any_names: Whether it can hold other families' names when asked to; `names` is then what it has unless asked.
        roles: Roles it can hold.
        parts: Which parts of a model (`Tensor.part`) it can hold.
        ranks: Whether it can hold a layout of more than one rank.
        extras: Whether it can hold step, optimizer groups and the rest of `Extras.common`.
        marker: The file that makes a checkpoint of this format whole, or None where completeness is by content.
    """

    name: ClassVar[str]
    names: ClassVar[str] = "canonical"
    any_names: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("param", "buffer")
    parts: ClassVar[tuple[str, ...]] = ("base", "adapter")
    ranks: ClassVar[bool] = False
    extras: ClassVar[bool] = False
    marker: ClassVar[str | None] = None

    @abstractmethod
    def detect(self, store: Store) -> bool:
        """Whether the root looks like this format (cheap: names, and at most one small file)."""

    @abstractmethod
    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        """The catalog of the checkpoint at the store's root. Headers and metadata only.

        Raises:
            FormatError, ShardMissingError, CorruptionError, UnsafeError: it is not a whole checkpoint of this format.
        """

    @abstractmethod
    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """Place the entries of `shards` (from `ckptkit.core.shards`) into files.

        `shards.extras` holds what to carry along; `shards.layout`, `shards.model` and `shards.names` say what it is.
        """

    def problems(self, store: Store, catalog: Catalog) -> Iterable[CkptError]:
        """What is wrong with a checkpoint that could be read, beyond its data: digest files, extras, an index.

        `catalog` is what `read` gave. Small files only, but all of them.
        """
        return ()

    def missing_ranks(self, store: Store) -> Sequence[int]:
        """Ranks whose files are absent from a checkpoint without its marker; empty where that cannot be told."""
        return ()

    def uncommitted(self, run: Store, folder: str) -> str:
        """Why a run does not count a step's folder as whole although its files are there; empty where it does.

        For formats whose steps are marked in the run's folder only.
        """
        return ""

    def checksums(self, store: Store, catalog: Catalog) -> Iterable[Checksum]:
        """Checksums that the files state themselves, where the format has such. Directories are read, data is not."""
        return ()
