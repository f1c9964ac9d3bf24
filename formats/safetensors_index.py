"""The weight files of a folder: which there are, and whether index and headers say the same.

    model.safetensors                        one file, or
    model-00001-of-00003.safetensors ...     several, and
    model.safetensors.index.json             {"metadata": {total_size, total_parameters}, "weight_map": {name: file}}

Other stems and variants (`diffusion_pytorch_model`, `model.fp16`) are read where there is one index or one file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import FormatError, ShardMissingError, UnsafeError
from ckptkit.formats.safetensors_file import Header, read_headers
from ckptkit.stores.base import Store

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LISTED = 5


@dataclass(frozen=True)
class Opened:
    """The headers of one folder, and what was strange about it."""

    headers: list[Header]
    identities: dict[str, str]
    warnings: list[str]

    @property
    def keys(self) -> Iterator[str]:
        return (name for header in self.headers for name in header.names)


def main_file(store: Store) -> str | None:
    """The index, or the single file, or None: what a reader starts from."""
    for name in (INDEX, SINGLE):
        if store.exists(name):
            return name
    root = [path for path in store.files() if "/" not in path]
    indexes = [path for path in root if path.endswith(".safetensors.index.json")]
    if len(indexes) == 1:
        return indexes[0]
    shards = [path for path in root if path.endswith(".safetensors")]
    return shards[0] if len(shards) == 1 and not indexes else None


def open_folder(store: Store) -> Opened:
    """Headers of all shards, compared with the index both ways.

    Raises:
        ShardMissingError: the index names a file that is absent, or there is no weight file.
        UnsafeError: the index names a file outside the folder.
        FormatError: a header is bad; a name is not in the file that the index says, or in none or several.
    """
    start = main_file(store)
    warnings: list[str] = []
    if start is None:
        raise _nothing_here(store)
    if not start.endswith(".json"):
        identities = {start: store.identity(start)}
        headers = read_headers(store, [start])
        _note_strays(store, {start}, warnings)
        return Opened(headers, identities, warnings)
    weight_map = read_weight_map(store, start)
    paths = sorted(set(weight_map.values()))
    _check_there(store, start, weight_map, paths)
    identities = {path: store.identity(path) for path in paths}
    headers = read_headers(store, paths)
    _compare(store.url, start, weight_map, headers)
    _note_strays(store, set(paths), warnings)
    return Opened(headers, identities, warnings)


def _check_there(store: Store, index: str, weight_map: Mapping[str, str], paths: Sequence[str]) -> None:
    """Raise ShardMissingError for files that the index names and that are not there."""
    missing = []
    for path in paths:
        try:
            store.size(path)
        except ShardMissingError:
            missing.append(path)
    if missing:
        count = sum(1 for path in weight_map.values() if path == missing[0])
        more = f" ({len(missing)} of {len(paths)} files are missing)" if len(missing) > 1 else ""
        raise ShardMissingError(
            f"{missing[0]} is missing from {store.url}: {index} says that it holds {count} tensors{more}. Fetch it again",
            file=missing[0],
        )


def _nothing_here(store: Store) -> FormatError:
    files = [path for path in store.files() if "/" not in path]
    shards = [path for path in files if path.endswith(".safetensors")]
    if shards:
        return ShardMissingError(
            f"{store.url} has {len(shards)} safetensors files ({some(shards)}) but no {INDEX}, so that it is not known whether "
            "they are all, and whether they belong together. Fetch the index",
            file=INDEX,
        )
    pickles = [path for path in files if path.endswith((".bin", ".pt", ".pth"))]
    hint = (
        f"; {some(pickles)} are pickles of torch, which another format reads (leave out --from)"
        if pickles
        else ""
    )
    return ShardMissingError(
        f"{store.url} has neither {SINGLE} nor {INDEX} (it has {some(files)}){hint}", file=SINGLE
    )


def read_weight_map(store: Store, path: str) -> dict[str, str]:
    """`weight_map` of an index: name to file.

    Raises:
        FormatError: it is no valid index.
        UnsafeError: it names a file outside the folder.
    """
    plain = load_json(store, path)
    found = plain.get("weight_map") if isinstance(plain, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{path} in {store.url} has no weight_map from names to files", file=path)
    if not found:
        raise FormatError(f"{path} in {store.url} lists no tensor", file=path)
    for name, file in found.items():
        if "/" in file or "\\" in file or file in (".", "..") or "\0" in file:
            raise UnsafeError(
                f"{path} in {store.url} says that {name} lies in {file!r}, which is no file of this folder. Nothing was read; "
                "do not trust this checkpoint before you know why",
                file=path,
                tensor=name,
            )
        if not file.endswith(".safetensors"):
            raise FormatError(
                f"{path} in {store.url} says that {name} lies in {file!r}, no safetensors file", file=path
            )
    return found


def load_json(store: Store, path: str) -> Any:
    """A small JSON file, without duplicate keys and NaN. Raises FormatError that names it."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    def refuse(text: str) -> float:
        raise ValueError(f"{text} is no JSON value")

    try:
        return json.loads(store.read(path), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path} in {store.url} is not valid JSON: {error}. Fetch it again", file=path
        ) from None


def _compare(where: str, index: str, weight_map: Mapping[str, str], headers: Sequence[Header]) -> None:
    """Index and headers must say the same, both ways."""
    held = {(name, header.path) for header in headers for name in header.names}
    said = set(weight_map.items())
    absent = sorted(said - held)
    if absent:
        name, path = absent[0]
        raise FormatError(
            f"{index} in {where} says that {path} holds {some([n for n, p in absent if p == path])}, but its header does not"
            f"{f' ({len(absent)} names in all)' if len(absent) > 1 else ''}. Index and shards are not of one checkpoint: fetch both again",
            file=path,
            tensor=name,
        )
    unsaid = sorted(held - said)
    if unsaid:
        name, path = unsaid[0]
        raise FormatError(
            f"{path} in {where} holds {some([n for n, p in unsaid if p == path])}, which {index} "
            f"{'puts in ' + weight_map[name] if name in weight_map else 'does not know'}. Index and shards are not of one "
            "checkpoint: fetch both again",
            file=path,
            tensor=name,
        )


def _note_strays(store: Store, known: set[str], warnings: list[str]) -> None:
    for path in store.files():
        if "/" not in path and path.endswith(".safetensors") and path not in known:
            warnings.append(f"{path} belongs to no index and was left out")


def some(names: Iterable[str]) -> str:
    """The first few of some names."""
    listed = list(names)
    return (
        ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")
        or "nothing"
    )
