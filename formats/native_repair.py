"""What a native checkpoint should be, as far as what is left of it can tell: for repair.

Manifest, index, digests and headers say most things twice. `Remains` collects what still agrees, so that a part which is
damaged is made from the others, or, where it holds data, is known by its digest before it is put in place.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.core.catalog import I64, Catalog
from ckptkit.errors import CkptError, FormatError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.binding import bind
from ckptkit.formats.native_checks import read_digests
from ckptkit.formats.native_columns import RANK_FILE, Columns, unique_form
from ckptkit.formats.native_digests import RankDigests, content_digest
from ckptkit.formats.native_header import Headers
from ckptkit.formats.native_index import index_bytes, parse_index
from ckptkit.formats.native_manifest import (
    INDEX,
    NAME,
    Manifest,
    RankFile,
    digests_name,
    extras_name,
    manifest_of,
)
from ckptkit.formats.native_ranks import columns_of_ranks
from ckptkit.stores.base import Store


@dataclass
class Rank:
    """One rank's files.

    Attributes:
        listed: As the manifest lists it.
        header: The bytes of its header, as they should be.
        digests: Of its data, where its digest file is whole.
        extras: Its extras, where they are whole.
        nbytes: Bytes of the rank file that are there; 0 where it is missing.
    """

    listed: RankFile
    header: bytes
    digests: RankDigests | None
    extras: bytes | None
    nbytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)


@dataclass
class Remains:
    """What is left of a native checkpoint.

    Attributes:
        manifest: Read, or made of the ranks' digests (`rebuilt`).
        columns: Of the index, or of the headers.
        index: The index file as it should be; `index_lost` where it is not so.
        ranks: In order.
        problems: What is wrong with everything but the data, as sentences.
    """

    store: Store
    manifest: Manifest
    rebuilt: bool
    columns: Columns
    index: bytes
    index_lost: bool
    ranks: list[Rank]
    problems: list[str] = field(default_factory=list)

    def catalog(self) -> Catalog:
        """The catalog that the checkpoint has once it is repaired."""
        manifest = self.manifest
        model = bind(manifest.schema, manifest.model, self.columns.tensors, ReadOptions(), self.store.url, [])
        found = self.columns.catalog(
            where=self.store.url, layout=manifest.layout, model=model, names=manifest.names, extras=lambda: None,  # type: ignore[arg-type,return-value]
            facts={}, leaves=None, identities={},
        )  # fmt: skip
        return found

    def new_digests(self, rank: int, leaves: npt.NDArray[np.uint8]) -> RankDigests:
        """The digest file of a rank whose leaves have these digests."""
        listed, header, manifest = self.manifest.files[rank], self.ranks[rank].header, self.manifest
        return RankDigests(
            data_start=len(header), data_size=listed.size - len(header), header=xxhash.xxh3_128_digest(header),
            extras=bytes.fromhex(listed.extras), index=bytes.fromhex(manifest.index), world=len(manifest.files), rank=rank,
            step=manifest.step, epoch=manifest.epoch, incarnation=bytes.fromhex(manifest.incarnation or "00" * 16),
            leaves=leaves,
        )  # fmt: skip

    def is_right(self, rank: int, leaves: npt.NDArray[np.uint8]) -> bool:
        """Whether a rank file with the right header and these leaves is the one that was written."""
        listed, header = self.manifest.files[rank], self.ranks[rank].header
        found = content_digest(xxhash.xxh3_128_digest(header), leaves, listed.size - len(header))
        return found.hex() == listed.digest


def remains(store: Store, *, rebuild_manifest: bool) -> Remains:
    """Look at everything but the data.

    Raises:
        FormatError: it cannot be told what the checkpoint was: its manifest is lost and not to be rebuilt, or the ranks' digest files
            do not agree, or both the index and a header are lost.
    """
    problems: list[str] = []
    manifest, rebuilt = _manifest(store, rebuild_manifest, problems)
    there = set(store.files())
    columns, index, lost = _columns(store, manifest, there, problems)
    headers = _headers(columns, manifest)
    ranks = []
    for number, listed in enumerate(manifest.files):
        header = headers.text(number)
        nbytes = store.size(listed.path) if listed.path in there else 0
        if nbytes != listed.size:
            problems.append(f"{listed.path} has {nbytes:,} of its {listed.size:,} bytes")
        elif store.read(listed.path, 0, len(header)) != header:
            problems.append(f"the header of {listed.path} is damaged")
        digests = None
        try:
            digests = read_digests(store, listed, manifest)
        except CkptError as error:
            problems.append(str(error))
        extras: bytes | None = None
        if extras_name(listed.path) in there:
            extras = store.read(extras_name(listed.path))
        if extras is None or xxhash.xxh3_128_hexdigest(extras) != listed.extras:
            extras = None
            problems.append(f"{extras_name(listed.path)} is missing or damaged")
        ranks.append(Rank(listed, header, digests, extras, nbytes))
    return Remains(store, manifest, rebuilt, columns, index, lost, ranks, problems)


def _manifest(store: Store, rebuild: bool, problems: list[str]) -> tuple[Manifest, bool]:
    try:
        return Manifest.read(store), False
    except CkptError as error:
        if not rebuild:
            raise FormatError(
                f"{error}. Without it nobody can tell whether the checkpoint was ever whole; if you know that it was, give "
                "--rebuild-manifest, which makes it of the ranks' digest files where all of them agree",
                file=NAME,
            ) from error
        problems.append(str(error))
    paths = sorted(path for path in store.files() if RANK_FILE.fullmatch(path))
    if not paths:
        raise FormatError(f"{store.url} holds no rank file of a native checkpoint", file=NAME)
    digests = [RankDigests.parse(digests_name(path), store.read(digests_name(path))) for path in paths]
    return manifest_of(f"{store.url}/{NAME}", store.read(extras_name(paths[0])), digests), True


def _columns(
    store: Store, manifest: Manifest, there: set[str], problems: list[str]
) -> tuple[Columns, bytes, bool]:
    data = store.read(INDEX) if INDEX in there else b""
    if xxhash.xxh3_128_hexdigest(data) == manifest.index:
        return parse_index(INDEX, data), data, False
    problems.append(f"{INDEX} is missing or damaged")
    try:
        columns = columns_of_ranks(store, [file.path for file in manifest.files])
        data = index_bytes(columns)
    except CkptError as error:
        raise FormatError(
            f"{store.url}: {INDEX} is lost, and it cannot be made of the headers: {error}", file=INDEX
        ) from error
    if xxhash.xxh3_128_hexdigest(data) != manifest.index:
        raise FormatError(
            f"{store.url}: {INDEX} is lost, and the rank files' headers do not give the one that the manifest names",
            file=INDEX,
        )
    return columns, data, True


def _headers(columns: Columns, manifest: Manifest) -> Headers:
    layout = manifest.layout
    common = {
        "world": layout.world, "layout": str(layout), "names": manifest.names, "schema": manifest.schema,
    }  # fmt: skip
    # An index does not say what strides unused axes have.
    columns = replace(columns, parts=unique_form(columns.parts))
    found = Headers(columns, _gaps(columns), common)
    # What is written has the length that its writer gave it, whatever this version of ckptkit would give it.
    found.sizes = columns.data_starts
    return found


def _gaps(columns: Columns) -> tuple[I64, I64, I64]:
    """Padding between entries, as columns file, offset, nbytes."""
    entries = columns.entries
    order = np.lexsort((entries.offset + entries.nbytes, entries.offset, entries.file))
    file, start = entries.file[order].astype(np.int64), entries.offset[order]
    stop = start + entries.nbytes[order]
    new = np.diff(file, prepend=-1) != 0
    before = np.where(new, 0, np.concatenate([[0], stop[:-1]]))
    gap = np.flatnonzero(start > before)
    return file[gap], before[gap], start[gap] - before[gap]
