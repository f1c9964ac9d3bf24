"""Folders of safetensors files with whole tensors, as model hubs have them: reading and writing, whatever the names.

    config.json, tokenizer.json, ...         carried along
    model.safetensors                        or several files and their index (`safetensors_index`)

Nothing marks such a folder as whole: it is when every name of the index lies in its file, every file is covered, and every
tensor of the model is there. Rules of writing are those of Transformers' `save_pretrained` and of
`split_torch_state_dict_into_shards` in huggingface_hub.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import ROLE_CODE, Catalog, Entries, Extras, File, Scaled
from ckptkit.core.destination import Destination, Literal
from ckptkit.core.dtypes import BY_NAME, TABLE
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import CkptError, FormatError
from ckptkit.formats import block_scaled, model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import carried
from ckptkit.formats.safetensors_file import (
    HEADER_LIMIT,
    Header,
    entry_text,
    header_bytes,
    read_header,
)
from ckptkit.formats.safetensors_index import (
    INDEX,
    SINGLE,
    Opened,
    main_file,
    open_folder,
    read_weight_map,
    some,
)
from ckptkit.formats.safetensors_split import check_holds, split
from ckptkit.stores.base import Store

_FLOAT32 = BY_NAME["float32"].code
PARTIAL = "ckptkit.partial"
"""Key of a note, in headers and index, on weights that are a part of a model on purpose."""


class SafetensorsFolder(Format):
    """A folder of safetensors files whose names are those of one family."""

    roles = ("param", "buffer")
    parts = ("base",)
    header_limit: ClassVar[int] = HEADER_LIMIT

    def accepts(self, family: str) -> bool:
        """Whether files with names of this family are of this format."""
        return family == self.names

    def detect(self, store: Store) -> bool:
        start = main_file(store)
        if start is None:
            return False
        try:
            config = model_config.load_config({"config.json": store.read("config.json")}, store.url)
            model = model_of(config, ReadOptions(), store.url)
            if model is None:
                return self.accepts("stored")
            keys = (
                read_weight_map(store, start) if start.endswith(".json") else read_header(store, start).names
            )
            return self.accepts(model.family_of(block_scaled.weights_alone(list(keys))))
        except CkptError:
            return self.accepts("stored")  # reading says what is wrong

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        opened = open_folder(store)
        files: Mapping[str, bytes] = carried(store, opened.warnings)
        config = model_config.read_config(files, options, store.url)
        model = model_of(config, options, store.url)
        scaled: dict[str, Scaled] = {}
        if model is not None or options.dequantize:
            # Canonical tensors are values; what is stored of an unknown model is kept as it is unless values are asked for.
            scaled, headers = block_scaled.find(opened.headers, config)
            opened = replace(opened, headers=headers)
        if scaled:
            files = block_scaled.plain_files(files)
            model = model_of(block_scaled.plain_config(config), options, store.url)
        family = "stored"
        if model is not None:
            family = model.family_of(opened.keys, store.url)
            if not self.accepts(family):
                raise FormatError(
                    f"{store.url} has the names called {family}, which are not those of format {self.name}; leave out --from",
                    format=self.name,
                )
        metadata = opened.headers[0].metadata
        facts: dict[str, Any] = {"warnings": opened.warnings, "metadata": metadata}
        if PARTIAL in metadata:
            facts["partial"] = _partial(opened.headers[0])
        locals_ = (
            _stored(opened) if model is None else _bound(model, family, opened, store.url, "partial" in facts)
        )
        tensors = model.tensors if model is not None else _plain_tensors(locals_)
        number = {item.key: k for k, item in enumerate(locals_)}
        role = [ROLE_CODE[tensors[item.segments[0].tensor].kind] for item in locals_]
        virtual = {name: f"{name} (block-scaled)" for name in scaled if name in number}
        place = {name: len(opened.headers) + k for k, name in enumerate(virtual)}
        rows = [
            (place.get(name, file), number[name], role[number[name]], *stored, locals_[number[name]].size)
            for file, header in enumerate(opened.headers)
            for name, *stored in zip(header.names, header.dtype.tolist(), header.begin.tolist(), strict=True)
            if name in number
        ]
        file, local, role_, dtype_, offset, last = np.asarray(rows, np.int64).reshape(-1, 6).T
        derived = file >= len(opened.headers)
        dtype_, offset = np.where(derived, _FLOAT32, dtype_), np.where(derived, 0, offset)
        regions = {path: scaled[name] for name, path in virtual.items()}
        identities = {path: one.identity(opened.identities.__getitem__) for path, one in regions.items()}
        return Catalog(
            format=self.name,
            where=store.url,
            tensors=tensors,
            locals=locals_,
            files=[
                *(File(header.path, header.size, header.data_start, 0) for header in opened.headers),
                *(File(path, one.nbytes, 0, 0) for path, one in regions.items()),
            ],
            entries=Entries(file, local, role_, dtype_, np.zeros(len(file)), last, offset),
            layout=Layout(),
            model=model,
            names=family,
            extras=Extras(files=files),
            facts=facts,
            identities=opened.identities | identities,
            derived=regions,
        )

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """Whole tensors, split over files in module order, each at most `max_shard_size` (or one tensor)."""
        check_holds(self, self.accepts(shards.names), shards)
        files = split(shards, options.max_shard_size, self.header_limit)
        paths = (
            [SINGLE]
            if len(files) == 1
            else [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
        )
        entries = shards.entries
        order = np.asarray([row for rows in files for row in rows], np.int64)
        placed = entries.take(order)
        placed.file = np.repeat(np.arange(len(files), dtype=np.uint32), [len(rows) for rows in files])
        listed: list[File] = []
        literals: dict[int, Sequence[Literal]] = {}
        weight_map: dict[str, str] = {}
        at = 0
        partial = options.facts.get("partial")
        note = {"format": "pt"} | ({PARTIAL: json.dumps(partial, sort_keys=True)} if partial else {})
        for number, (path, rows) in enumerate(zip(paths, files, strict=True)):
            offset, members = 0, []
            for row in rows:
                item, dtype = shards.locals[entries.local[row]], TABLE[entries.dtype[row]]
                members.append(entry_text(item.key, item.shape, dtype, offset))
                weight_map[item.key] = path
                placed.offset[at] = offset
                offset += item.size * dtype.itemsize
                at += 1
            header = header_bytes(members, note)
            literals[number] = [Literal(0, header)]
            listed.append(File(path, len(header) + offset, len(header), 0))
        small = dict(model_config.small_files(shards, {*paths, INDEX}))
        if len(files) > 1:
            params = entries.role == ROLE_CODE["param"]
            metadata: dict[str, Any] = {
                "total_parameters": int((entries.last - entries.first)[params].sum()),
                "total_size": int(entries.nbytes.sum()),
            } | ({PARTIAL: partial} if partial else {})
            index = json.dumps(
                {"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True, ensure_ascii=False
            )
            small[INDEX] = (index + "\n").encode()  # last: before it nothing says that the shards are all
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=shards.locals, files=listed, entries=placed,
            layout=shards.layout, model=shards.model, names=shards.names, extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        return Destination(catalog=catalog, literals=literals, finish=lambda written: small.items())


def _partial(header: Header) -> Any:
    """What a part of a model is a part of, as its writer noted it."""
    try:
        return json.loads(header.metadata[PARTIAL])
    except (ValueError, RecursionError):
        raise FormatError(f"{header.path}: its note {PARTIAL} is no JSON", file=header.path) from None


def _bound(model: Model, family: str, opened: Opened, where: str, partial: bool) -> list[LocalTensor]:
    """The local tensors of what is stored, which must be what the model has (or, where `partial`, some of it).

    Raises:
        FormatError: names are missing, unknown, or of another shape; lists all three.
    """
    names = model.names(family)
    whole = names.unpadded()
    known = {**whole, **names.copies}
    found: dict[str, LocalTensor] = {}
    unknown, reshaped = [], []
    for header in opened.headers:
        for name, shape in zip(header.names, header.shapes, strict=True):
            item = known.get(name)
            if item is not None and item.shape == shape:
                found[name] = item
            elif item is not None:
                reshaped.append(f"{name} {list(shape)} in {header.path} instead of {list(item.shape)}")
            elif model.schema.is_harmless(name):
                opened.warnings.append(
                    f"{name} in {header.path} is made anew by every library and was left out"
                )
            else:
                unknown.append(name)
    wrong_shape = {text.split(" ")[0] for text in reshaped}
    missing = [
        name
        for name in whole
        if not partial
        and name not in found
        and name not in wrong_shape
        and not model.schema.is_harmless(name)
    ]
    problems = [
        f"{text}: {some(list_)}"
        for text, list_ in (
            ("missing", missing),
            ("of another shape", reshaped),
            ("not of this model", unknown),
        )
        if list_
    ]
    if problems:
        raise FormatError(
            f"{where} does not hold the model of its config.json ({model.schema.id}, names {family}): {'; '.join(problems)}. "
            "Fetch all files again, or give the right --config",
            tensor=(missing or [text.split(" ")[0] for text in reshaped] or unknown)[0],
            missing=missing,
            unknown=unknown,
        )
    return [item for name, item in known.items() if name in found]


def _stored(opened: Opened) -> list[LocalTensor]:
    """Every stored tensor as itself."""
    return [
        LocalTensor(
            name,
            shape,
            (
                Segment(
                    name, Box.whole(shape), tuple(range(len(shape))), (1,) * len(shape), (0,) * len(shape)
                ),
            ),
        )
        for header in opened.headers
        for name, shape in zip(header.names, header.shapes, strict=True)
    ]


def _plain_tensors(locals_: Sequence[LocalTensor]) -> dict[str, Tensor]:
    """Tensors whose axes have no meaning but their position."""
    return {
        item.key: Tensor(item.key, tuple(f"d{d}" for d in range(len(item.shape))), item.shape)
        for item in locals_
    }
