"""The catalog of a native checkpoint from its rank files alone: for an index that is missing, and for repair."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckptkit.core.catalog import ROLE_CODE, Entries
from ckptkit.core.schema import Tensor
from ckptkit.errors import CkptError, FormatError
from ckptkit.formats.native_columns import Columns, Parts, plain_strides
from ckptkit.formats.native_header import VERSION
from ckptkit.formats.native_index import check
from ckptkit.formats.safetensors_file import Header, read_headers
from ckptkit.stores.base import Store

_Row = tuple[int, int, int, int, int, int, int]
"""File, local tensor, role, dtype, first, last, offset."""


def columns_of_ranks(store: Store, paths: Sequence[str]) -> Columns:
    """The columns that the rank files' headers describe; equal to those of the index.

    Args:
        paths: The files of all ranks, in order.

    Raises:
        FormatError: a header does not describe a rank of the same checkpoint as the others; names file and tensor.
        ShardMissingError: a file is absent.
    """
    headers = read_headers(store, paths)
    tensors: dict[int, tuple[str, Any]] = {}
    locals_: dict[int, tuple[str, Any]] = {}
    rows: list[_Row] = []
    common: dict[str, Any] = {}
    for number, header in enumerate(headers):
        plain = rank_metadata(header)
        ours = {name: plain.get(name) for name in ("world", "layout", "names", "schema")}
        common = common or ours
        if plain.get("rank") != number or ours != common or ours["world"] != len(paths):
            raise FormatError(
                f"{header.path} says it is rank {plain.get('rank')} of {ours}, but {paths[0]} is one of {common}: they belong to "
                "different checkpoints",
                file=header.path,
            )
        try:
            _collect(tensors, plain["tensors"], header.path)
            _collect(locals_, plain["locals"], header.path)
            rows += _rows(number, header, plain["locals"], plain["runs"])
        except CkptError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"{header.path}: its metadata does not make sense ({error!r})", file=header.path
            ) from None
    try:
        return _assemble(headers, tensors, locals_, rows)
    except CkptError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise FormatError(
            f"{store.url}: headers of its rank files do not fit together ({error})", file=paths[0]
        ) from None


def rank_metadata(header: Header) -> dict[str, Any]:
    """`__metadata__["ckptkit"]` of a rank file. Raises FormatError where there is none, or of an unknown version."""
    text = header.metadata.get("ckptkit")
    if text is None:
        raise FormatError(
            f"{header.path} is a plain safetensors file, not a rank of a native checkpoint (no ckptkit metadata)",
            file=header.path,
        )
    try:
        plain = json.loads(text)
        version = plain["version"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise FormatError(
            f"{header.path}: its ckptkit metadata is no JSON object ({error})", file=header.path
        ) from None
    if version != VERSION:
        raise FormatError(
            f"{header.path} has version {version}; this ckptkit reads {VERSION}. Update ckptkit",
            file=header.path,
        )
    return dict(plain)


def _collect(known: dict[int, tuple[str, Any]], found: Mapping[str, Any], path: str) -> None:
    for name, item in found.items():
        if known.setdefault(item["n"], (name, item)) != (name, item):
            raise FormatError(
                f"{path} describes {name} otherwise than an earlier rank file does", file=path, tensor=name
            )


def _rows(number: int, header: Header, locals_: Mapping[str, Any], runs: Mapping[str, int]) -> Iterator[_Row]:
    offsets, dtypes = header.begin.tolist(), header.dtype.tolist()
    for name, shape, offset, dtype in zip(header.names, header.shapes, offsets, dtypes, strict=True):
        key, _, role = name.rpartition("/")
        if key == "__pad" and role.isdigit():
            continue
        code = ROLE_CODE.get(role.partition("#")[0])
        item = locals_.get(key)
        if code is None or item is None:
            raise FormatError(
                f"{header.path}: {name!r} is no tensor and role that its metadata knows",
                file=header.path,
                tensor=name,
            )
        size = int(np.prod(shape, dtype=np.int64))
        first = runs.get(name)
        if first is None:
            expected = item["shape"]
            if list(shape) != (expected or [1] * len(shape)) or (expected and len(shape) != len(expected)):
                raise FormatError(
                    f"{header.path}: {name!r} has shape {list(shape)}, its metadata says {expected}",
                    file=header.path,
                    tensor=name,
                )
        yield number, item["n"], code, dtype, first or 0, (first or 0) + size, offset


def _assemble(
    headers: Sequence[Header],
    tensors: Mapping[int, tuple[str, Any]],
    locals_: Mapping[int, tuple[str, Any]],
    rows: Sequence[_Row],
) -> Columns:
    listed = [_tensor(*tensors[n]) for n in range(len(tensors))]
    numbers = {tensor.name: n for n, tensor in enumerate(listed)}
    width = max((len(tensor.shape) for tensor in listed), default=0)
    local, tensor_of, offsets, starts, stops, strides = [], [], [], [], [], []
    for n in range(len(locals_)):
        for part in locals_[n][1]["of"]:
            name, start, stop = part[:3]
            offset, steps = part[3:] if len(part) > 3 else (0, plain_strides(start, stop))
            fill = width - len(listed[numbers[name]].shape)
            local.append(n)
            tensor_of.append(numbers[name])
            offsets.append(offset)
            starts.append([*start, *[0] * fill])
            stops.append([*stop, *[1] * fill])
            strides.append([*steps, *[0] * fill])
    table = np.asarray(rows, np.int64).reshape(-1, 7)
    boxes = (np.asarray(column, np.int64).reshape(len(local), width) for column in (starts, stops, strides))
    columns = Columns(
        listed,
        [locals_[n][0] for n in range(len(locals_))],
        [tuple(locals_[n][1]["shape"]) for n in range(len(locals_))],
        Parts(
            np.asarray(local, np.uint32),
            np.asarray(tensor_of, np.uint32),
            np.asarray(offsets, np.int64),
            *boxes,
        ),
        np.arange(len(headers), dtype=np.int64),
        np.asarray([header.size for header in headers], np.int64),
        np.asarray([header.data_start for header in headers], np.int64),
        Entries(*(table[:, column] for column in range(7))),
    )
    check(columns)
    return columns


def _tensor(name: str, item: Mapping[str, Any]) -> Tensor:
    flags = {flag: value for flag, value in item.items() if flag not in ("n", "axes", "shape")}
    return Tensor(name, tuple(item["axes"]), tuple(item["shape"]), **flags)
