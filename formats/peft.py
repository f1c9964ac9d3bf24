"""LoRA adapters as peft saves them.

    adapter_model.safetensors    the adapter's tensors, and trained copies of weights (`modules_to_save`)
    adapter_config.json          rank, scaling, and which modules; carried along

An adapter's scaling (`lora_alpha`) is in no tensor, so that adapters from elsewhere need an `adapter_config.json` to become such a
folder. Its ranks are compared with the tensors. With the configuration of the model that was adapted, tensors are canonical
(`ckptkit.core.adapters`) and go into any layout; without, they keep their names.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ckptkit.core.catalog import ROLE_CODE, Catalog, Entries, Extras, File
from ckptkit.core.destination import Destination, Literal
from ckptkit.core.dtypes import TABLE
from ckptkit.core.layouts import Layout
from ckptkit.errors import FormatError, LayoutError, ShardMissingError
from ckptkit.formats import model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import carried
from ckptkit.formats.chunks import Locals, bind_stored
from ckptkit.formats.peft_names import from_file, in_file, is_adapter
from ckptkit.formats.safetensors_file import entry_text, header_bytes, read_header
from ckptkit.formats.safetensors_index import INDEX, SINGLE, load_json
from ckptkit.formats.safetensors_split import check_holds
from ckptkit.stores.base import Store

FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_OLD = "adapter_model.bin"


class PeftFormat(Format):
    """One adapter of a model, under the names of peft."""

    name: ClassVar[str] = "peft"
    names: ClassVar[str] = "transformers"
    any_names: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("adapter",)

    def detect(self, store: Store) -> bool:
        return store.exists(FILE) and not any(map(store.exists, (SINGLE, INDEX)))

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        if not store.exists(FILE):
            old = f"; {_OLD} is a pickle: load it with peft and save it again" if store.exists(_OLD) else ""
            raise ShardMissingError(f"{store.url} has no {FILE}{old}", file=FILE)
        if not store.exists(CONFIG):
            raise ShardMissingError(
                f"{store.url} has no {CONFIG}, which says how the adapter is scaled. Fetch it again",
                file=CONFIG,
            )
        _check_config(load_json(store, CONFIG), store.url)
        header = read_header(store, FILE)
        warnings: list[str] = []
        files = carried(store, warnings)
        model = model_of(model_config.read_config(files, options, store.url), options, store.url)
        names = [from_file(key) for key in header.names]
        shapes = dict(zip(names, header.shapes, strict=True))
        if len(shapes) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise FormatError(f"{FILE} of {store.url} holds {twice} twice", file=FILE, tensor=twice)
        bound = bind_stored(model, shapes, store.url, warnings)
        locals_ = Locals()
        rows = []
        for name, dtype, begin in zip(names, header.dtype.tolist(), header.begin.tolist(), strict=True):
            item = bound.locals.get(bound.renamed.get(name, name))
            if item is not None:
                rows.append((0, locals_.whole(item), ROLE_CODE["param"], dtype, 0, item.size, begin))
        return Catalog(
            format=self.name, where=store.url, tensors=bound.tensors, locals=locals_.items,
            files=[File(header.path, header.size, header.data_start, 0)],
            entries=Entries(*np.asarray(rows, np.int64).reshape(-1, 7).T), layout=Layout(), model=bound.model,
            names=bound.family, extras=Extras(files=files), facts={"warnings": warnings},
            identities={path: store.identity(path) for path in (FILE, CONFIG)},
        )  # fmt: skip

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """One file, tensors with the widest types first, then by name."""
        check_holds(self, True, shards)
        whole = shards.model.names(shards.names).keys if shards.model is not None else ()
        keys = in_file([item.key for item in shards.locals], whole)
        for item in shards.locals:
            if not is_adapter(item.key):
                raise LayoutError(
                    f"format peft holds adapters only, and {item.key} is none; choose them with --only '*.lora_*'",
                    tensor=item.key,
                )
        if CONFIG not in shards.extras.files:
            raise LayoutError(
                f"peft needs {CONFIG}: how an adapter is scaled (lora_alpha) is in no tensor. Put the one of the training run beside "
                "the model's config.json, and give that folder with --config"
            )
        config = _parsed(shards.extras.files[CONFIG], shards.where)
        _check_config(config, shards.where)
        _check_ranks(config, {keys[item.key]: item.shape for item in shards.locals}, shards)
        entries = shards.entries
        listed = [keys[shards.locals[k].key] for k in entries.local.tolist()]
        order = sorted(
            range(len(entries)), key=lambda row: (-TABLE[entries.dtype[row]].itemsize, listed[row])
        )
        placed = entries.take(np.asarray(order, np.int64))
        placed.file[:] = 0
        placed.offset[:] = np.cumsum(placed.nbytes) - placed.nbytes
        members = [
            entry_text(listed[row], shards.locals[int(k)].shape, TABLE[code], offset)
            for row, k, code, offset in zip(
                order, placed.local.tolist(), placed.dtype.tolist(), placed.offset.tolist(), strict=True
            )
        ]
        head = header_bytes(members, {"format": "pt"})
        small = dict(model_config.small_files(shards, {FILE}))
        small[CONFIG] = small.pop(CONFIG)  # last: before it the folder is no adapter
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=shards.locals,
            files=[File(FILE, len(head) + int(placed.nbytes.sum()), len(head), 0)], entries=placed, layout=shards.layout,
            model=shards.model, names=shards.names, extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        return Destination(
            catalog=catalog, literals={0: [Literal(0, head)]}, finish=lambda written: small.items()
        )


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{CONFIG} of {where} is not valid JSON: {error}", file=CONFIG) from None


def _check_config(config: Any, where: str) -> None:
    """Raise FormatError for what is no configuration of a LoRA adapter."""
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise FormatError(
            f"{CONFIG} of {where} is that of {str(kind)[:40]!r}; only LoRA adapters (peft_type LORA) are read and written",
            file=CONFIG,
        )


def _check_ranks(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], shards: Catalog) -> None:
    """Raise LayoutError where a tensor has another rank than the configuration gives its module.

    A pattern that is a regular expression, not a plain end of a name, may mean any module: then any of its ranks will do.
    """
    rank, patterns = config.get("r"), config.get("rank_pattern") or {}
    if not isinstance(rank, int) or not isinstance(patterns, dict):
        raise FormatError(f"{CONFIG} of {shards.where} gives no rank `r`", file=CONFIG)
    plain = {p: r for p, r in patterns.items() if re.fullmatch(r"[\w.]+", p)}
    free = {r for p, r in patterns.items() if p not in plain}
    experts = shards.model.sizes.get("expert", 1) if shards.model is not None else 0
    for key, shape in shapes.items():
        module, found, _ = key.rpartition(".lora_A.weight")
        if not found:
            continue
        told = next((r for p, r in plain.items() if module == p or module.endswith("." + p)), rank)
        allowed = {n for n in (told, *free) if isinstance(n, int) and n > 0}
        # Experts in one parameter have their ranks in one dimension.
        fits = shape[0] in allowed or any(
            shape[0] == n * experts or (not experts and config.get("target_parameters") and shape[0] % n == 0)
            for n in allowed
        )
        if not fits:
            raise LayoutError(
                f"{key} has shape {shape}, but {CONFIG} gives its module rank {told}: it is that of another adapter",
                tensor=key,
            )
