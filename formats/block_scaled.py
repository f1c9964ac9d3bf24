"""Block-scaled weights: `X` in float8 with `X_scale_inv`, one scale a block of 128 × 128, as DeepSeek-V3 and others are published.

They are read as derived regions of float32 (`ckptkit.core.catalog.Scaled`), and never written. The size of a block comes from
`quantization_config.weight_block_size` of config.json. Scales of whole tensors or rows (`weight_scale`) are another scheme, and
stay what they are: tensors of their own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptkit.core.catalog import Scaled
from ckptkit.core.dtypes import TABLE
from ckptkit.errors import FormatError
from ckptkit.formats.safetensors_file import Header

SUFFIX = "_scale_inv"
_NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_CONFIG = "quantization_config"


@dataclass(frozen=True)
class _Place:
    header: Header
    row: int

    @property
    def where(self) -> tuple[str, int]:
        return self.header.path, self.header.data_start + int(self.header.begin[self.row])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.header.shapes[self.row]

    @property
    def dtype(self) -> int:
        return int(self.header.dtype[self.row])


def weights_alone(names: Sequence[str]) -> list[str]:
    """Names without those of scales that belong to one of them."""
    known = set(names)
    return [name for name in names if not (name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in known)]


def find(
    headers: Sequence[Header], config: Mapping[str, Any] | None
) -> tuple[dict[str, Scaled], list[Header]]:
    """Block-scaled weights by name, and the headers without their scales.

    Raises:
        FormatError: a scale has no shape or type that its weight could have; names both.
    """
    places = {name: _Place(h, row) for h in headers for row, name in enumerate(h.names)}
    block = _block(config)
    found: dict[str, Scaled] = {}
    for name, place in places.items():
        scale = places.get(name + SUFFIX)
        if scale is None or TABLE[place.dtype].name not in _NARROW:
            continue
        shape = place.shape
        expected = (
            (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])) if len(shape) > 1 else ()
        )
        if scale.shape != expected or TABLE[scale.dtype].name not in _SCALES:
            raise FormatError(
                f"{name + SUFFIX} in {scale.header.path} is {TABLE[scale.dtype]} {list(scale.shape)}, but {name} {list(shape)} in blocks of "
                f"{block[0]} × {block[1]} has scales {list(expected)}; is {_CONFIG}.weight_block_size right?",
                tensor=name,
                file=scale.header.path,
            )
        found[name] = Scaled(place.where, place.dtype, shape, scale.where, scale.dtype, expected, block)
    gone = {name + SUFFIX for name in found}
    return found, [_without(header, gone) for header in headers]


def plain_config(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A configuration that does not call the weights quantised."""
    return None if config is None else {name: value for name, value in config.items() if name != _CONFIG}


def plain_files(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Carried files with such a config.json."""
    if "config.json" not in files:
        return files
    config = json.loads(files["config.json"])
    text = json.dumps(plain_config(config), indent=2, ensure_ascii=False) + "\n"
    return files if _CONFIG not in config else {**files, "config.json": text.encode()}


def _block(config: Mapping[str, Any] | None) -> tuple[int, int]:
    quantization = (config or {}).get(_CONFIG)
    given = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if given is None:
        return 128, 128
    if not (isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)):
        raise FormatError(
            f"config.json: {_CONFIG}.weight_block_size is {given!r}, not two sizes", file="config.json"
        )
    return given[0], given[1]


def _without(header: Header, gone: set[str]) -> Header:
    keep = [row for row, name in enumerate(header.names) if name not in gone]
    if len(keep) == len(header.names):
        return header
    rows = np.asarray(keep, np.int64)
    return replace(
        header,
        names=[header.names[k] for k in keep],
        shapes=[header.shapes[k] for k in keep],
        dtype=header.dtype[rows],
        begin=header.begin[rows],
    )
