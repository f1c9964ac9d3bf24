"""PyTorch distributed checkpoints (`torch.distributed.checkpoint`): FSDP2, DTensor, torchtitan.

    .metadata              which boxes of which tensors lie where; written last
    __<rank>_<n>.distcp    items, one after the other

Files that torch wrote as safetensors instead are read too (`ckptkit.formats.dcp_safetensors`).
Any set of boxes that tiles a tensor is read, and any layout is written: every rank's share as boxes of global tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import ClassVar

import numpy as np

from ckptkit.core import zero
from ckptkit.core.catalog import NAMED_ROLES, ROLE_CODE, ROLES, Catalog, Checksum, Entries, File
from ckptkit.core.destination import Destination
from ckptkit.core.dtypes import TABLE
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import STATE_ROLES, Tensor
from ckptkit.errors import CoverageError, FormatError
from ckptkit.formats import dcp_safetensors, model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import carried
from ckptkit.formats.chunks import (
    Locals,
    bind_stored,
    cut_boxes,
    plain_local,
    ties,
)
from ckptkit.formats.dcp_items import Found, Wanted, item_checksums, load_objects, locate
from ckptkit.formats.dcp_metadata import (
    NAME,
    Chunk,
    Index,
    Stored,
    check_files,
    metadata_files,
    rank_of,
    read_index,
    write_index,
)
from ckptkit.formats.dcp_state import read_extras, wanted_objects, write_extras
from ckptkit.formats.distcp_writer import ItemWriter
from ckptkit.formats.model_config import small_files
from ckptkit.formats.peft_names import known_names
from ckptkit.formats.stored_keys import SLOT_OF, Keys, sort_keys
from ckptkit.stores.base import Store

_Key = tuple[str, str]
"""A name of the family and a role."""


class DcpFormat(Format):
    """Names are those of the training state; with a model, those of Transformers."""

    name: ClassVar[str] = "dcp"
    names: ClassVar[str] = "transformers"
    any_names: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = NAMED_ROLES
    ranks: ClassVar[bool] = True
    extras: ClassVar[bool] = True
    marker: ClassVar[str | None] = NAME

    def detect(self, store: Store) -> bool:
        if metadata_files(store):
            return not store.exists("metadata.json")  # that one is Megatron's
        return dcp_safetensors.looks_like(store)

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        warnings: list[str] = []
        if not metadata_files(store) and dcp_safetensors.looks_like(store):
            headers, found = dcp_safetensors.read_shards(store, warnings)
            index = Index(found)
            files = [File(h.path, h.size, h.data_start, dcp_safetensors.rank_of(h.path)) for h in headers]
            place = _placed
        else:
            index = read_index(store)
            check_files(store, index)
            files = [File(path, store.size(path), 0, rank_of(path)) for path in index.files]
            place = locate
        carried_ = carried(store, warnings)
        model = model_of(model_config.read_config(carried_, options, store.url), options, store.url)
        known = known_names(model, index.tensors) if model is not None else set()
        keys = sort_keys(index.tensors, index.objects, index.paths, known)
        stored = _stored(keys, index)
        shapes = {name: tensor.shape for (name, _), tensor in stored.items()}
        bound = bind_stored(model, shapes, store.url, warnings)
        keys.rename(bound.renamed)
        stored = {(bound.renamed.get(name, name), role): tensor for (name, role), tensor in stored.items()}
        if keys.unknown:
            warnings.append(
                f"{len(keys.unknown)} optimizer tensors of unknown meaning were left out, such as {keys.unknown[0]}"
            )
        paths = [file.path for file in files]
        locals_, entries = _entries(store, stored, bound.locals, bound.tensors, paths, place)
        values = load_objects(store, wanted_objects(index, keys, warnings))
        extras, origin = read_extras(values, index.paths, keys, bound.locals, warnings)
        extras.files = carried_
        return Catalog(
            format=self.name,
            where=store.url,
            tensors=bound.tensors,
            locals=locals_,
            files=files,
            entries=entries,
            layout=origin.layout or _fsdp_layout(stored, max((file.rank for file in files), default=0) + 1),
            model=bound.model,
            names=bound.family,
            extras=extras,
            facts={**origin.facts, "warnings": warnings},
            identities={path: store.identity(path) for path in [*paths, *index.sources]},
        )

    def checksums(self, store: Store, catalog: Catalog) -> Iterator[Checksum]:
        return item_checksums(store, read_index(store)) if metadata_files(store) else iter(())

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """One `.distcp` a rank, objects first; ranks without a share have no file."""
        whole = _whole(shards)
        cut = cut_boxes(shards, whole)
        stored = {whole[item.key].key: whole[item.key] for item in shards.locals}
        trained = {
            shards.locals[int(k)].key
            for k in np.unique(shards.entries.local[shards.entries.role == ROLE_CODE["exp_avg"]])
        }
        state = write_extras(shards, stored, trained, options.facts)
        conv = state.convention
        writer = ItemWriter()
        for key, path, value in state.objects:
            writer.object(0, key, value, path)
        for key, path, scalar in state.scalars:
            writer.scalar(0, key, scalar, path)
        boxes = cut.entries
        for k in np.lexsort((boxes.first, boxes.local, boxes.role, boxes.file)).tolist():
            role, item = ROLES[boxes.role[k]], cut.locals[int(boxes.local[k])]
            key, path = conv.state(item.key, SLOT_OF[role]) if role in STATE_ROLES else conv.weight(item.key)
            dtype, shape = TABLE[boxes.dtype[k]], cut.shapes[item.key]
            writer.box(int(boxes.file[k]), k, key, dtype, shape, cut.start[k], cut.sizes[k], path)
        for name, original in ties(shards).items():
            key, path = conv.weight(name)
            writer.tie(key, conv.weight(original)[0], path)
        files = writer.files()
        small = dict(small_files(shards, {NAME, *(file.path for file in files)}))
        small[NAME] = write_index(writer.index)
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=cut.locals, files=files,
            entries=writer.placed(cut.entries), layout=shards.layout, model=shards.model, names=shards.names,
            extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        return Destination(
            catalog=catalog,
            literals=writer.literals(),
            fixups=writer.fixups(),
            finish=lambda written: small.items(),
        )


def _stored(keys: Keys, index: Index) -> dict[_Key, Stored]:
    """Stored tensors by name and role; weights have the role `param`, which a model may know better."""
    found = {(name, "param"): index.tensors[key] for name, key in keys.weights.items()}
    found.update(((name, role), index.tensors[key]) for (name, role), key in keys.state.items())
    return found


def _entries(
    store: Store,
    stored: Mapping[_Key, Stored],
    bound: Mapping[str, LocalTensor],
    tensors: Mapping[str, Tensor],
    paths: Sequence[str],
    place: Callable[[Store, Sequence[Wanted]], list[Found]],
) -> tuple[list[LocalTensor], Entries]:
    """Every stored chunk as an entry. Raises CoverageError where the chunks of a tensor leave a gap."""
    file_of = {path: number for number, path in enumerate(paths)}
    wanted: list[Wanted] = []
    rows: list[tuple[_Key, Chunk]] = []
    empty: list[tuple[_Key, Chunk]] = []
    for (name, role), tensor in stored.items():
        if name not in bound:
            continue
        _check_tiling(name, role, tensor)
        for chunk in tensor.chunks:
            if chunk.item is None or 0 in chunk.sizes:
                continue
            wanted.append(Wanted(f"{name} ({role})", chunk.item, tensor.dtype, chunk.sizes))
            rows.append(((name, role), chunk))
        if 0 in tensor.shape:
            first = next((chunk for chunk in tensor.chunks if chunk.item is not None), None)
            if first is not None:
                empty.append(((name, role), first))
    locals_ = Locals()
    table = []
    for ((name, role), chunk), found in zip(rows, place(store, wanted), strict=True):
        item, tensor = bound[name], stored[name, role]
        local, first_, last = locals_.chunk(item, chunk.start, chunk.sizes, found.strides)
        assert chunk.item is not None
        table.append(
            (
                file_of[chunk.item.path],
                local,
                _role(role, item, tensors),
                tensor.dtype.code,
                first_,
                last,
                found.offset,
            )
        )
    for (name, role), chunk in empty:
        assert chunk.item is not None
        code, dtype = _role(role, bound[name], tensors), stored[name, role].dtype.code
        table.append(
            (file_of[chunk.item.path], locals_.whole(bound[name]), code, dtype, 0, 0, chunk.item.offset)
        )
    file, local_, role_, dtype_, first__, last_, offset = np.asarray(table, np.int64).reshape(-1, 7).T
    return locals_.items, Entries(file, local_, role_, dtype_, first__, last_, offset)


def _role(role: str, item: LocalTensor, tensors: Mapping[str, Tensor]) -> int:
    return ROLE_CODE[tensors[item.segments[0].tensor].kind if role == "param" else role]


def _check_tiling(name: str, role: str, tensor: Stored) -> None:
    """Volumes must add up. A gap that an overlap hides is found when a plan proves its cover."""
    have, want = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.shape)
    if have < want:
        raise CoverageError(
            f"{name} ({role}) has {want} elements, but its chunks hold {have}: a rank's part is missing. Use another copy",
            tensor=name,
        )
    if have > want:
        raise FormatError(
            f"{name} ({role}) has {want} elements, but its chunks hold {have}: they overlap. It was not written by one save",
            tensor=name,
        )


def _placed(store: Store, wanted: Sequence[Wanted]) -> list[Found]:
    """Of items that are bare tensors."""
    return [Found(one.item.offset) for one in wanted]


def _fsdp_layout(stored: Mapping[_Key, Stored], ranks: int) -> Layout | None:
    """The layout, where every tensor is cut as FSDP2 does it over the ranks that have files."""
    if ranks <= 1:
        return Layout()
    for (_, role), tensor in stored.items():
        parts = sorted(
            chunk.start[0] if chunk.start else 0 for chunk in tensor.chunks if 0 not in chunk.sizes
        )
        cut = zero.rows([tensor.shape], ranks)
        width = prod(tensor.shape[1:])
        whole = len(parts) <= 1 and (role == "param" or len(cut.first) <= 1)
        if not whole and parts != [int(first) // width for first in cut.first]:
            return None
    return Layout(dp=ranks, zero=3)


def _whole(shards: Catalog) -> dict[str, LocalTensor]:
    """The family's whole tensors, by name, without padding."""
    if shards.model is None:
        return {item.key: plain_local(item.key, item.shape) for item in shards.locals}
    names = shards.model.names(shards.names)
    return {**names.copies, **names.unpadded()}
