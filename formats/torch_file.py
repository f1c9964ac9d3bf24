"""`torch.save` files: one `.pt`, or a folder of them.

    model.pt                            a state dict: weights only
    checkpoint.pt                       {"model": ..., "optimizer": ..., ...}: with training state
    model-00001-of-00003.pt ...         the same, cut; each file holds its part of the same dictionary

Read are also `.pth`, `.bin` and `.ckpt` files under any names: a set numbered `-of-`, one file alone, or several that share no key.
No pickle is executed (`ckptkit.formats.pickles`); files of ours load with `torch.load(weights_only=True)`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np

from ckptkit.core.boxes import row_major_strides
from ckptkit.core.catalog import NAMED_ROLES, ROLE_CODE, ROLES, Catalog, Checksum, Entries, File
from ckptkit.core.destination import Destination, Fixup, Literal
from ckptkit.core.dtypes import TABLE
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import STATE_ROLES
from ckptkit.errors import FormatError, LayoutError, ShardMissingError
from ckptkit.formats import model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import carried
from ckptkit.formats.chunks import Locals, bind_stored, ties
from ckptkit.formats.dcp_state import KEYS, State, read_extras, write_extras
from ckptkit.formats.model_config import small_files
from ckptkit.formats.peft_names import known_names
from ckptkit.formats.plain import to_plain
from ckptkit.formats.standins import Storage, StoredTensor
from ckptkit.formats.stored_keys import SLOT_OF, Keys, sort_keys
from ckptkit.formats.torch_state import Path, flatten, key_of, name_numbered, unflatten
from ckptkit.formats.torch_zip import Archive, file_checksums, open_archive
from ckptkit.formats.torch_zip_writer import skeleton
from ckptkit.stores.base import Store

_FILE = re.compile(r"(?P<stem>.+?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.(?:pt|pth|bin|ckpt)")
_FIRST = ("checkpoint", "model", "pytorch_model", "consolidated")
"""Names of what holds the model, where several files could."""
_ASIDE = ("optimizer", "scheduler", "training_args", "scaler")


class TorchFormat(Format):
    """Whole tensors under the names of the state; with a model, those of Transformers."""

    name: ClassVar[str] = "torch"
    names: ClassVar[str] = "transformers"
    any_names: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = NAMED_ROLES
    extras: ClassVar[bool] = True

    def detect(self, store: Store) -> bool:
        return any(_FILE.fullmatch(path) and "/" not in path for path in store.files())

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        warnings: list[str] = []
        paths = _files(store, warnings)
        with ExitStack() as stack:
            archives = {path: open_archive(stack.enter_context(store.open(path)), path) for path in paths}
            return self._catalog(store, options, archives, warnings)

    def _catalog(
        self, store: Store, options: ReadOptions, archives: Mapping[str, Archive], warnings: list[str]
    ) -> Catalog:
        paths = list(archives)
        leaves, home = _union(archives, warnings)
        files = carried(store, warnings)
        model = model_of(model_config.read_config(files, options, store.url), options, store.url)
        keyed = {key_of(path): path for path in leaves}
        known = known_names(model, keyed) if model is not None else set()
        held = {key: leaf for key, path in keyed.items() if isinstance(leaf := leaves[path], StoredTensor)}
        keys = sort_keys(held, (key for key in keyed if key not in held), keyed, known)
        stored = {(name, "param"): key for name, key in keys.weights.items()} | keys.state
        shapes = {name: held[key].shape for (name, _), key in stored.items()}
        bound = bind_stored(model, shapes, store.url, warnings)
        keys.rename(bound.renamed)
        stored = {(bound.renamed.get(name, name), role): key for (name, role), key in stored.items()}
        if keys.unknown:
            warnings.append(
                f"{len(keys.unknown)} optimizer tensors of unknown meaning were left out, such as {keys.unknown[0]}"
            )
        locals_ = Locals()
        table = []
        for (name, role), key in stored.items():
            if name not in bound.locals:
                continue
            tensor, item, path = held[key], bound.locals[name], home[keyed[key]]
            strides = None if tensor.contiguous else tensor.strides
            local, first, last = locals_.chunk(item, (0,) * len(tensor.shape), tensor.shape, strides)
            code = ROLE_CODE[bound.tensors[item.segments[0].tensor].kind if role == "param" else role]
            offset = archives[path].place(tensor) if tensor.size else 0
            table.append((paths.index(path), local, code, tensor.dtype.code, first, last, offset))
        columns = np.asarray(table, np.int64).reshape(-1, 7).T
        values = _plain(keys, keyed, leaves, home, archives)
        extras, origin = read_extras(values, keyed, keys, bound.locals, warnings)
        extras.files = files
        return Catalog(
            format=self.name, where=store.url, tensors=bound.tensors, locals=locals_.items,
            files=[File(path, store.size(path), 0, 0) for path in paths], entries=Entries(*columns), layout=Layout(),
            model=bound.model, names=bound.family, extras=extras, facts={**origin.facts, "warnings": warnings},
            identities={path: store.identity(path) for path in paths},
        )  # fmt: skip

    def checksums(self, store: Store, catalog: Catalog) -> Iterator[Checksum]:
        return file_checksums(store, (file.path for file in catalog.files))

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """Whole tensors in as few files as `max_shard_size` allows, weights first."""
        entries = shards.entries
        sizes = np.asarray([item.size for item in shards.locals], np.int64)
        if shards.layout is not None and shards.layout.world != 1:
            raise LayoutError(
                f"format torch holds whole tensors, not those of {shards.layout.world} ranks; leave out --layout"
            )
        if len(entries) and (entries.first.any() or (entries.last != sizes[entries.local]).any()):
            raise LayoutError("format torch holds whole tensors, not runs of them")
        state = _state(shards, options.facts)
        placed = entries.take(np.lexsort((entries.local, entries.role)))
        groups = _groups(placed.nbytes, options.max_shard_size)
        tied = {original: name for name, original in ties(shards).items()}
        stem = "checkpoint" if state is not None else "model"
        files: list[File] = []
        literals: dict[int, Sequence[Literal]] = {}
        fixups: dict[int, Sequence[Fixup]] = {}
        for number, rows in enumerate(groups):
            leaves: list[tuple[Path, Any]] = []
            for storage, row in enumerate(rows):
                leaves += _leaves(shards, placed, row, storage, state, tied)
            if state is not None and number == 0:
                leaves += [(path, scalar) for _, path, scalar in state.scalars]
                leaves += [(path, value) for _, path, value in state.objects]
            made = skeleton(unflatten(leaves), [int(placed.nbytes[row]) for row in rows])
            path = f"{stem}.pt" if len(groups) == 1 else f"{stem}-{number + 1:05d}-of-{len(groups):05d}.pt"
            placed.file[rows] = number
            placed.offset[rows] = made.data
            files.append(File(path, made.size, 0, 0))
            literals[number], fixups[number] = made.literals, made.fixups
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=shards.locals, files=files, entries=placed,
            layout=shards.layout, model=shards.model, names=shards.names, extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        small = dict(small_files(shards, {file.path for file in files}))
        return Destination(
            catalog=catalog, literals=literals, fixups=fixups, finish=lambda written: small.items()
        )


def _files(store: Store, warnings: list[str]) -> list[str]:
    """The files to read: a numbered set, one by its name, or all.

    Raises:
        ShardMissingError: a set is not complete, or there is no file.
    """
    sets: dict[tuple[str, str], list[str]] = {}
    for path in store.files():
        match = _FILE.fullmatch(path)
        if match is not None and "/" not in path:
            sets.setdefault((match["stem"], match["count"] or ""), []).append(path)
    if not sets:
        raise ShardMissingError(f"{store.url} has no .pt, .pth, .bin or .ckpt file", file=store.url)
    chosen = [key for stem in _FIRST for key in sets if key[0] == stem][:1]
    if not chosen:
        chosen = [key for key in sets if not key[0].startswith(_ASIDE)] or list(sets)
        if any(count for _, count in chosen) and len(chosen) > 1:
            raise FormatError(
                f"{store.url} has several sets of files ({', '.join(stem for stem, _ in chosen)}); keep one in a folder of its own",
                file=store.url,
            )
    aside = [path for key, paths in sets.items() if key not in chosen for path in paths]
    if aside:
        warnings.append(f"{', '.join(aside[:5])} belong to no set that was read")
    found = []
    for stem, count in chosen:
        paths = sorted(sets[stem, count])
        if count and len(paths) != int(count):
            there = {int(match["number"]) for path in paths if (match := _FILE.fullmatch(path))}
            missing = min(set(range(1, int(count) + 1)) - there, default=0)
            raise ShardMissingError(
                f"{store.url} has {len(paths)} of {int(count)} files of {stem}: number {missing} is missing. Fetch it again",
                file=f"{stem}-{missing:05d}-of-{count}",
            )
        found += paths
    return found


def _union(archives: Mapping[str, Archive], warnings: list[str]) -> tuple[dict[Path, Any], dict[Path, str]]:
    """Leaves of all files by path, and each one's file. Raises FormatError for a tensor that is in two."""
    leaves: dict[Path, Any] = {}
    home: dict[Path, str] = {}
    for file, archive in archives.items():
        value = archive.value
        if not isinstance(value, dict):
            raise FormatError(
                f"{file} holds a {type(value).__name__}, not a dictionary of tensors", file=file
            )
        for path, leaf in flatten(name_numbered(value, warnings), file).items():
            if path in leaves and isinstance(leaf, StoredTensor):
                raise FormatError(
                    f"{key_of(path)} is in {home[path]} and in {file}: they are no parts of one checkpoint",
                    file=file,
                )
            leaves.setdefault(path, leaf)
            home.setdefault(path, file)
    return leaves, home


def _plain(
    keys: Keys,
    keyed: Mapping[str, Path],
    leaves: Mapping[Path, Any],
    home: Mapping[Path, str],
    archives: Mapping[str, Archive],
) -> dict[str, Any]:
    """Everything that is neither weight nor moment, as plain JSON."""
    found = {}
    for key in keys.extras:
        path = keyed[key]
        found[key] = to_plain(leaves[path], archives[home[path]].content)
    return found


def _state(shards: Catalog, facts: Mapping[str, Any]) -> State | None:
    """Training state beside the tensors, or None where there is none: then the file is a plain state dict."""
    extras = shards.extras
    roles = {ROLES[code] for code in np.unique(shards.entries.role)}
    others = (set(extras.common) - {KEYS}, extras.by_coordinate, extras.by_sample, facts.get("partial"))
    if not (roles & set(STATE_ROLES) or any(others)):
        return None
    by_exp_avg = shards.entries.local[shards.entries.role == ROLE_CODE["exp_avg"]]
    trained = {shards.locals[int(k)].key for k in np.unique(by_exp_avg)}
    return write_extras(shards, {item.key: item for item in shards.locals}, trained, facts)


def _leaves(
    shards: Catalog, entries: Entries, row: int, storage: int, state: State | None, tied: Mapping[str, str]
) -> list[tuple[Path, StoredTensor]]:
    """One tensor by its path in the nested state; a weight that is tied has a second name for the same storage."""
    item, dtype = shards.locals[int(entries.local[row])], TABLE[entries.dtype[row]]
    strides = row_major_strides(tuple(max(n, 1) for n in item.shape))
    held = StoredTensor(
        Storage(str(storage), dtype, item.size * dtype.itemsize), dtype, 0, item.shape, strides
    )
    role = ROLES[entries.role[row]]
    if role in STATE_ROLES:
        assert state is not None
        return [(state.convention.state(item.key, SLOT_OF[role])[1], held)]
    names = [item.key, *([tied[item.key]] if item.key in tied else [])]
    return [((name,) if state is None else state.convention.weight(name)[1], held) for name in names]


def _groups(nbytes: np.ndarray, largest: int) -> list[list[int]]:
    """Rows of each file, in order; one that is larger than `largest` has a file of its own."""
    groups: list[list[int]] = [[]]
    room = largest
    for row, size in enumerate(nbytes.tolist()):
        if groups[-1] and size > room:
            groups.append([])
            room = largest
        groups[-1].append(row)
        room -= size
    return groups
