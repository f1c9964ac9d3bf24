"""Native checkpoints: one safetensors file a rank, with digests, extras, an index and a manifest.

    rank-00003.safetensors   what rank 3 stores; valid for any safetensors reader
    rank-00003.digests       its digests (`native_digests`)
    rank-00003.extras        what is no tensor (`native_manifest`)
    index.npz                all columns of the catalog (`native_index`)
    manifest.json            written last; a checkpoint without it is unfinished

Bytes are written down in docs/formats/native.md. Opening reads manifest and index only, and asks each rank file's size.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from ckptkit.core.catalog import I64, ITEMSIZE, LEAF, ROLES, Catalog, Entries, File
from ckptkit.core.destination import Destination, Written
from ckptkit.core.dtypes import TABLE
from ckptkit.core.fingerprints import MASK
from ckptkit.errors import CkptError, FormatError, LayoutError, ShardMissingError
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import bind
from ckptkit.formats.native_checks import check_sizes, leaves_of, missing_ranks_of, problems_of
from ckptkit.formats.native_columns import RANK_FILE, Columns, file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_header import Headers
from ckptkit.formats.native_index import index_bytes, parse_index
from ckptkit.formats.native_manifest import (
    INDEX,
    NAME,
    Manifest,
    RankFile,
    about,
    check_extras,
    digests_name,
    extras_bytes,
    extras_name,
    read_extras,
)
from ckptkit.formats.native_ranks import columns_of_ranks
from ckptkit.formats.safetensors_file import check_writable
from ckptkit.stores.base import Store

_STEP = re.compile(r"step-([0-9]{1,18})(?:\.e([0-9]{1,18}))?")


def step_dir(step: int, epoch: int) -> str:
    """The folder of one step in a run: `step-00001200.e3`."""
    return f"step-{step:08d}.e{epoch}"


def parse_step_dir(name: str) -> tuple[int, int] | None:
    """`(step, epoch)` of a step's folder, or None for a name that only resembles one.

    The epoch may be left out, and counts as 0.

    >>> parse_step_dir("step-00001200.e3"), parse_step_dir("step-100"), parse_step_dir("step-100.tmp")
    ((1200, 3), (100, 0), None)
    """
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


class NativeFormat(Format):
    """The native format (module docstring)."""

    name = "native"
    roles = ROLES
    ranks = True
    extras = True
    marker = NAME
    header_limit = 90_000_000

    def detect(self, store: Store) -> bool:
        """Whether there is a manifest, or at least a rank file (an unfinished checkpoint).

        Any rank's: where nodes write at their own pace, rank 1's file alone would pass for a whole `model.safetensors`.
        """
        if store.exists(NAME) or store.exists(file_name(0)):
            return True
        return any(RANK_FILE.fullmatch(path) for path in store.files())

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        """The catalog, from manifest and index; from the rank files' headers where the index is missing or damaged."""
        if not store.exists(NAME):
            raise FormatError(
                f"{store.url} has no {NAME}, so its writing was not finished: take an older step, or look at what is there "
                "with `ckptkit verify`",
                file=NAME,
            )
        manifest = Manifest.read(store)
        warnings: list[str] = []
        identities = check_sizes(store, manifest)
        columns = _indexed(store, manifest, warnings)
        if columns is None:
            columns = columns_of_ranks(store, [f.path for f in manifest.files])
        _check_files(store, manifest, columns, warnings)
        model = bind(manifest.schema, manifest.model, columns.tensors, options, store.url, warnings)
        facts: dict[str, Any] = {
            "version": 1,
            "step": manifest.step,
            "epoch": manifest.epoch,
            "incarnation": manifest.incarnation,
            "schema": manifest.schema,
            "lineage": list(manifest.lineage),
            "index": manifest.index,
            "digests": {file.path: file.digest for file in manifest.files},
            "fingerprints": dict(manifest.fingerprints or {}),
            "warnings": warnings,
        }
        return columns.catalog(
            where=store.url,
            layout=options.layout or manifest.layout,
            model=model,
            names=manifest.names,
            extras=lambda: read_extras(store, manifest.files),
            facts=facts,
            leaves=leaves_of(store, manifest),
            identities=identities,
        )

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """Place entries: widest types first, in each those that are multiples of 1 MiB first (on the leaf grid), then by name."""
        layout = shards.layout
        if layout is None:
            raise LayoutError("native checkpoints have a layout; give one with --layout")
        check_writable({TABLE[code] for code in np.unique(shards.entries.dtype)}, "native")
        check_extras(shards.extras, layout)
        _check_facts(shards, options.facts)
        entries, pads, sizes = _place(shards)
        files = [File(file_name(rank), rank=rank) for rank in range(layout.world)]
        schema = shards.model.schema.id if shards.model is not None else None
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=shards.locals, files=files, entries=entries,
            layout=layout, model=shards.model, names=shards.names, extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        common = {"world": layout.world, "layout": str(layout), "names": shards.names, "schema": schema}
        headers = Headers(Columns.of(catalog), pads, common, self.header_limit)
        for file, start, size in zip(files, headers.sizes.tolist(), sizes.tolist(), strict=True):
            file.data_start, file.size = start, start + size
        return Destination(
            catalog=catalog,
            literals=headers,
            digests=True,
            fingerprints=True,
            finish=lambda written: _finish(catalog, headers, options.facts, written),
        )

    def problems(self, store: Store, catalog: Catalog) -> Iterator[CkptError]:
        """What is wrong with everything but the data: headers, digest files, extras, index."""
        return problems_of(store, catalog)

    def missing_ranks(self, store: Store) -> Sequence[int]:
        """Ranks without a rank file or without its digests, which follow it; the world is what any digest file says."""
        return missing_ranks_of(store)


def _check_facts(shards: Catalog, facts: Mapping[str, Any]) -> None:
    """Raise LayoutError, before any byte moves, for what the manifest could not say."""
    try:
        json.dumps(
            [shards.model.config if shards.model is not None else None, facts.get("lineage")], allow_nan=False
        )
        valid = len(bytes.fromhex(str(facts.get("incarnation", "")))) in (0, 16)
    except (TypeError, ValueError, RecursionError) as error:
        raise LayoutError(
            f"the manifest cannot hold configuration, lineage or incarnation: {error}"
        ) from None
    if not valid:
        raise LayoutError(f"an incarnation is 32 hex digits, not {facts['incarnation']!r}")


def _place(shards: Catalog) -> tuple[Entries, tuple[I64, I64, I64], I64]:
    """Entries with offsets, in file order; gaps as columns file, offset, nbytes; bytes of data of each file."""
    entries, files = shards.entries, len(shards.files)
    names = np.unique(np.asarray([item.key for item in shards.locals], object), return_inverse=True)[1]
    item, nbytes = ITEMSIZE[entries.dtype], entries.nbytes
    gridded = (nbytes % LEAF == 0) & (nbytes > 0)
    name = names[entries.local] if len(entries) else np.zeros(0, np.int64)
    order = np.lexsort((entries.first, entries.role, name, ~gridded, -item, entries.file))
    placed = entries.take(order)
    item, nbytes, gridded = item[order], nbytes[order], gridded[order]
    cursor = np.zeros(files, np.int64)
    gaps = []
    for width in np.unique(ITEMSIZE)[::-1].tolist():
        here = np.flatnonzero(item == width)
        file = placed.file[here]
        on_grid = np.zeros(files, bool)
        on_grid[file[gridded[here]]] = True
        start = np.where(on_grid, -(-cursor // LEAF) * LEAF, cursor)
        gap = np.flatnonzero(start > cursor)
        gaps.append((gap, cursor[gap], start[gap] - cursor[gap]))
        before = np.cumsum(nbytes[here]) - nbytes[here]
        first = np.searchsorted(file, np.arange(files))
        base = np.append(before, 0)[np.minimum(first, len(before))]
        placed.offset[here] = start[file] + before - base[file]
        cursor = start + np.bincount(file, nbytes[here], files).astype(np.int64)
    gap_file, gap_offset, gap_size = (np.concatenate(column) for column in zip(*gaps, strict=True))
    by_file = np.lexsort((gap_offset, gap_file))
    placed = placed.take(np.lexsort((np.arange(len(placed)), placed.offset, placed.file)))
    return placed, (gap_file[by_file], gap_offset[by_file], gap_size[by_file]), cursor


def _finish(
    catalog: Catalog, headers: Headers, facts: Mapping[str, Any], written: Sequence[Written]
) -> Iterator[tuple[str, bytes]]:
    """Extras and digests of each rank, index, and last the manifest."""
    layout = catalog.layout
    assert layout is not None
    by_path = {file.path: file for file in written}
    starts, sizes = ([getattr(f, name) for f in catalog.files] for name in ("data_start", "size"))
    index = index_bytes(replace(headers.columns, data_starts=np.asarray(starts), sizes=np.asarray(sizes)))
    index_hash = xxhash.xxh3_128_digest(index)
    incarnation = str(facts.get("incarnation", ""))
    epoch = int(facts.get("epoch") or 0)
    model = catalog.model
    schema, config = (model.schema.id, model.config) if model is not None else (None, None)
    said = about(layout, catalog.names, schema, config)
    listed = []
    for number, file in enumerate(catalog.files):
        leaves = by_path[file.path].leaves
        assert leaves is not None, f"{file.path} was written without digests"
        extras = extras_bytes(catalog.extras, layout, file.rank, said)
        extras_digest = xxhash.xxh3_128_digest(extras)
        digests = RankDigests(
            data_start=file.data_start, data_size=file.size - file.data_start, header=headers.digest(number),
            extras=extras_digest, index=index_hash, world=layout.world, rank=file.rank, step=catalog.step, epoch=epoch,
            incarnation=bytes.fromhex(incarnation or "00" * 16), leaves=leaves.digests,
        )  # fmt: skip
        yield extras_name(file.path), extras
        yield digests_name(file.path), digests.to_bytes()
        listed.append(RankFile(file.path, file.size, digests.content.hex(), extras_digest.hex()))
    yield INDEX, index
    manifest = Manifest(
        index=index_hash.hex(), files=listed, layout=layout, names=catalog.names, schema=schema, model=config,
        step=catalog.step, epoch=epoch, incarnation=incarnation, lineage=list(facts.get("lineage", [])),
        fingerprints=_fingerprints(written),
    )  # fmt: skip
    yield NAME, manifest.to_bytes()


def _fingerprints(written: Sequence[Written]) -> dict[str, str] | None:
    """Of every tensor and role, in hex; None where a file was written without."""
    found: dict[str, int] = {}
    for file in written:
        if file.fingerprints is None:
            return None
        for (tensor, role), value in file.fingerprints.items():
            key = f"{tensor}/{role}"
            found[key] = found.get(key, 0) + value & MASK
    return {key: f"{value:016x}" for key, value in found.items()}


def _indexed(store: Store, manifest: Manifest, warnings: list[str]) -> Columns | None:
    """The columns from the index; None, and a warning, where it cannot be used."""
    try:
        data = store.read(INDEX)
    except ShardMissingError:
        warnings.append(
            f"{INDEX} is missing; read from the headers of {len(manifest.files)} rank files instead"
        )
        return None
    if xxhash.xxh3_128_hexdigest(data) != manifest.index:
        warnings.append(
            f"{INDEX} is not the one that the manifest names; read from the rank files' headers instead"
        )
        return None
    return parse_index(INDEX, data)


def _check_files(store: Store, manifest: Manifest, columns: Columns, warnings: list[str]) -> None:
    """Compare files with columns, and note rank files that do not belong here."""
    ranks, sizes = columns.ranks.tolist(), columns.sizes.tolist()
    if ranks != list(range(len(manifest.files))) or sizes != [file.size for file in manifest.files]:
        raise FormatError(
            f"{store.url}: {NAME} and {INDEX} list different rank files; one was replaced", file=INDEX
        )
    listed = {file.path for file in manifest.files}
    for path in store.files():
        if RANK_FILE.fullmatch(path) and path not in listed:
            warnings.append(f"{path} is not in the manifest and was left out")
