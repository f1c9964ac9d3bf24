"""Megatron-core's distributed checkpoints (`torch_dist`), of any tensor, pipeline, expert and data parallel layout.

    latest_checkpointed_iteration.txt    (a run) which iteration is whole; written last
    iter_0001000/metadata.json           the backend; written last of its folder
                 common.pt               arguments, iteration, optimizer groups; newer versions keep it among the items
                 .metadata               which boxes of which tensors lie where, as in PyTorch's own format
                 __<rank>_<n>.distcp     items

Read are all forms of the distributed optimizer's state, and that of optimizers that are not distributed; written is the fully
reshardable form, which megatron-core 0.16 and later load into any layout.
Source: megatron-core 0.16.1, `dist_checkpointing/` and `optimizer/distrib_optimizer.py`.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ckptkit.core.catalog import NAMED_ROLES, Catalog, Checksum, File
from ckptkit.core.destination import Destination
from ckptkit.core.layouts import Layout
from ckptkit.core.names import Names
from ckptkit.core.schema import Model
from ckptkit.errors import FormatError, ShardMissingError
from ckptkit.formats import model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import CarriedFiles, carried
from ckptkit.formats.chunks import cut_boxes
from ckptkit.formats.dcp_items import item_checksums
from ckptkit.formats.dcp_metadata import (
    NAME,
    Index,
    check_files,
    rank_of,
    read_index,
    write_index,
)
from ckptkit.formats.distcp_writer import ItemWriter, path_of
from ckptkit.formats.megatron_adapters import with_stored_adapters
from ckptkit.formats.megatron_args import config_of
from ckptkit.formats.megatron_buffers import SLOTS, buffers, local_order
from ckptkit.formats.megatron_entries import Rows, add_buckets, add_known, flat_objects
from ckptkit.formats.megatron_flat import bucket_sizes, read_flat
from ckptkit.formats.megatron_folder import find_iteration, target_prefix, tracked, tracker_of
from ckptkit.formats.megatron_keys import Numbered, StoredKeys
from ckptkit.formats.megatron_probe import check_masters
from ckptkit.formats.megatron_state import (
    COMMON,
    State,
    read_common,
    read_extras,
    read_objects,
    write_extras,
)
from ckptkit.formats.megatron_tensors import Sorted, sort_tensors
from ckptkit.formats.megatron_writer import (
    choose_forms,
    extra_states,
    optimizer_roles,
    optimizer_state,
    small_files,
    tied,
    tied_copies,
    whole_names,
    write_boxes,
)
from ckptkit.formats.torch_zip import open_archive
from ckptkit.formats.torch_zip_writer import zip_bytes
from ckptkit.stores.base import Store

METADATA = "metadata.json"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
NAMES = "megatron"


class MegatronFormat(Format):
    """Names are those of Megatron's modules; with layers and experts as axes where they are alike."""

    name: ClassVar[str] = "megatron"
    names: ClassVar[str] = NAMES
    roles: ClassVar[tuple[str, ...]] = NAMED_ROLES
    ranks: ClassVar[bool] = True
    extras: ClassVar[bool] = True

    def detect(self, store: Store) -> bool:
        folder = tracked(store) if store.exists("latest_checkpointed_iteration.txt") else None
        prefix = f"{folder}/" if folder else ""
        if store.exists(prefix + METADATA):
            return True
        # The folder of a save that did not end.
        return store.exists(prefix + COMMON) and any(
            path.startswith(prefix) and path.endswith(".distcp") for path in store.files()
        )

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        here, prefix = find_iteration(store)
        _check_backend(here)
        index = read_index(here)
        check_files(here, index)
        warnings: list[str] = []
        state = read_common(here, index)
        objects = read_objects(here, index)
        files = carried(here, warnings)
        model = model_of(configuration(files, state, options, here.url, warnings), options, here.url)
        model = with_stored_adapters(model, NAMES, index, here.url)
        keys = _stored_keys(model, here.url)
        found = sort_tensors(index, model, keys, NAMES, here.url, warnings)
        layout = options.layout or state.layout(warnings)
        paths = index.files
        file_of = {path: number for number, path in enumerate(paths)}
        flat = _flat_state(here, index, found, model, keys, layout, state)
        extras = read_extras(state, objects, found.bound, found.roles, found.tensors, warnings)
        extras.files = files
        sources = [*index.sources, METADATA, *([COMMON] if here.exists(COMMON) else [])]
        known = Rows()
        add_known(known, here, index, found, file_of)

        def catalog(order: Sequence[str]) -> Catalog:
            rows = copy.deepcopy(known) if flat else known
            for add in flat:
                add(rows, order, file_of)
            return Catalog(
                format=self.name,
                where=store.url,
                tensors=found.tensors,
                locals=rows.locals.items,
                files=[File(prefix + path, here.size(path), 0, rank_of(path)) for path in paths],
                entries=rows.entries(),
                layout=layout,
                model=model,
                names=NAMES if model is not None else "stored",
                extras=extras,
                facts={**(state.note or {}).get("facts", {}), "warnings": warnings},
                identities={prefix + path: here.identity(path) for path in [*paths, *sources]},
            )

        if state.note is not None:  # what ckptkit wrote has the source's values, whatever they are
            return catalog(())
        orders: list[Sequence[str]] = [()]
        if model is not None and keys is not None and flat:
            orders = module_orders(model.names(NAMES), keys.names, state.args)
        return first_right(store, catalog, orders)

    def checksums(self, store: Store, catalog: Catalog) -> Iterator[Checksum]:
        here, prefix = find_iteration(store)
        return item_checksums(here, read_index(here), prefix)

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """One `.distcp` a rank that has a share, and a run around it, unless the destination is an iteration's folder."""
        step = shards.extras.common.get("step")
        prefix = target_prefix(shards.where, step if isinstance(step, int) else None)
        whole = whole_names(shards)
        roles = optimizer_roles(shards)
        keys = _stored_keys(shards.model, shards.where)
        cut = cut_boxes(shards, whole)
        copies = tied_copies(shards, roles)
        extras = write_extras(
            shards,
            {i.key: whole[i.key] for i in shards.locals if i.key not in copies},
            roles,
            options.facts,
        )
        writer = ItemWriter()
        forms = choose_forms(cut, keys)
        for key, value in {**(extra_states(forms) if keys else {}), **extras.objects}.items():
            writer.object(0, key, [value])
        write_boxes(writer, cut, forms, roles, copies)
        common = {**extras.common, **optimizer_state(extras.optimizers), "content_metadata": _CONTENT}
        small = [
            *small_files(shards, {NAME, COMMON, METADATA, *map(path_of, writer.ranks)}),
            (COMMON, zip_bytes(common, "common")),
            (NAME, write_index(writer.index)),
            (METADATA, json.dumps(_BACKEND).encode()),
        ]
        finish = [(prefix + path, content) for path, content in small] + tracker_of(prefix)
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=cut.locals,
            files=writer.files(prefix), entries=writer.placed(cut.entries), layout=shards.layout, model=shards.model,
            names=shards.names, extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        return Destination(
            catalog=catalog,
            literals=writer.literals(),
            fixups=writer.fixups(),
            finish=lambda written: finish,
        )


def _check_backend(store: Store) -> None:
    """Read `metadata.json`.

    Raises:
        ShardMissingError: it is absent: the save did not end.
        FormatError: it is damaged, or of a backend that is not read.
    """
    if not store.exists(METADATA):
        raise ShardMissingError(
            f"{store.url} has no {METADATA}, which is written last: the save did not end. Use an earlier iteration",
            file=METADATA,
        )
    try:
        found = json.loads(store.read(METADATA))
        backend = found["sharded_backend"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise FormatError(
            f"{METADATA} of {store.url} does not say how it was saved; restore it", file=METADATA
        ) from None
    if backend != "torch_dist":
        raise FormatError(
            f"{store.url} was saved with the backend {str(backend)[:40]!r}, but torch_dist is read only. Load it with "
            "Megatron-LM and save it with --dist-ckpt-format torch_dist",
            file=METADATA,
        )


def configuration(
    files: CarriedFiles, state: State, options: ReadOptions, where: str, warnings: list[str]
) -> Mapping[str, Any] | None:
    """What the user says, else a configuration file, else what the run's arguments come to."""
    told = model_config.read_config(files, options, where)
    if told is not None:
        return told
    found = config_of(state.args, warnings)
    if found is None and options.model is None and state.args:
        warnings.append(
            "the run's arguments are of no known model: tensors keep their names. Give the model's config.json with --config"
        )
    return found


def _stored_keys(model: Model | None, where: str) -> StoredKeys | None:
    if model is None:
        return None
    if NAMES not in model.families:
        raise FormatError(
            f"{where}: {model.schema.id} has no Megatron names; it has {', '.join(model.families)}"
        )
    return StoredKeys(model, NAMES)


_AddFlat = Callable[[Rows, Sequence[str], Mapping[str, int]], None]


def _flat_state(
    store: Store, index: Index, found: Sorted, model: Model | None, keys: StoredKeys | None,
    layout: Layout | None, state: State,
) -> list[_AddFlat]:  # fmt: skip
    """How to add the entries of state in flat buffers, which only a model and the layout it was saved in explain."""
    objects = list(flat_objects(index))
    if not objects and not found.buckets:
        return []
    if model is None or keys is None or layout is None:
        raise FormatError(
            f"{store.url} holds its optimizer's state in flat buffers, which only the model and the layout of the save explain. "
            "Give its config.json with --config, and the layout with --source-layout"
        )
    names = model.names(NAMES)
    trained = {
        name: dtype
        for name, dtype in found.dtypes.items()
        if found.tensors[found.bound[name].segments[0].tensor].kind == "param"
    }
    # Beside adapters the weights are frozen.
    adapters = {n for n in trained if found.tensors[found.bound[n].segments[0].tensor].part == "adapter"}
    trained = {name: dtype for name, dtype in trained.items() if name in adapters or not adapters}
    trained.update((name, trained[origin]) for name, origin in tied(names).items() if origin in trained)
    for name in trained:
        found.roles.setdefault(name, set()).update(SLOTS.values())
    shapes, numbered, world = found.shapes(model, NAMES), keys.names, layout

    def add(rows: Rows, order: Sequence[str], file_of: Mapping[str, int]) -> None:
        held = buffers(names, numbered, world, trained, shapes, order)
        add_buckets(rows, store, found, held, file_of)
        for group, key in objects:
            item = index.objects[key]
            with store.open(item.path) as reader:
                archive = open_archive(reader, key, item.offset, item.length)
            value = archive.value[0] if isinstance(archive.value, list) and archive.value else archive.value
            sizes = bucket_sizes(state.args, world.edp if group.expert else world.cp * world.dp)
            read_flat(value, held.get(group, []), sizes, archive.place, rows.adder(file_of[item.path]), key)

    return [add]


def module_orders(
    names: Names, numbered: Mapping[str, Numbered], args: Mapping[str, Any]
) -> list[Sequence[str]]:
    """The orders that a run's modules may have had, the likeliest first."""
    orders: list[Sequence[str]] = [(), local_order(names, numbered)]
    return orders[::-1] if args.get("transformer_impl") == "local" else orders


def first_right(
    store: Store, make: Callable[[Sequence[str]], Catalog], orders: Sequence[Sequence[str]]
) -> Catalog:
    """The catalog by the first order of modules that gives the optimizer the model's weights (`check_masters`)."""
    for order in orders[:-1]:
        try:
            found = make(order)
            check_masters(store, found)
            return found
        except FormatError:
            continue
    found = make(orders[-1])
    check_masters(store, found)
    return found
