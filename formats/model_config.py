"""config.json: read for the model's sizes, and written in the terms of the names it will lie beside."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ckptkit.core.catalog import ROLE_CODE, Catalog
from ckptkit.core.dtypes import TABLE
from ckptkit.errors import CkptError, FormatError, LayoutError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.carried import check_names

NAME = "config.json"
_PLAIN_FLOATS = ("float64", "float32", "float16", "bfloat16")


def load_config(files: Mapping[str, bytes], where: str) -> dict[str, Any] | None:
    """The configuration among carried files, or None. Raises FormatError where it is no JSON object."""
    if NAME not in files:
        return None
    try:
        found = json.loads(files[NAME])
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{NAME} of {where} is not valid JSON: {error}. Fetch it again", file=NAME
        ) from None
    if not isinstance(found, dict):
        raise FormatError(f"{NAME} of {where} holds no object of fields", file=NAME)
    return found


def config_bytes(shards: Catalog) -> bytes | None:
    """config.json for `shards`, in the terms of its names; None where nothing is known.

    The carried file is kept to the byte where it says the same already. Its `dtype` (or `torch_dtype`) becomes the dtype of most
    parameters, unless that is no plain float type or weights are quantised.

    Raises:
        CkptError: the model cannot be described in these terms.
    """
    given = load_config(shards.extras.files, shards.where)
    config = given
    if shards.model is not None:
        known = shards.model.schema.configs
        if known and shards.names not in known:
            raise LayoutError(
                f"{shards.model.schema.id} has no configuration in terms of {shards.names}, so that nothing could load it; it has "
                f"them for {', '.join(known)}"
            )
        config = known[shards.names](shards.model.config) if known else dict(shards.model.config)
        _check_written(config, shards)
    if config is None:
        return None
    main = _main_dtype(shards)
    for name in ("dtype", "torch_dtype"):
        if main and isinstance(config.get(name), str) and "quantization_config" not in config:
            config = {**config, name: main}
    if config == given:
        return shards.extras.files[NAME]
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def small_files(shards: Catalog, taken: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Files to write beside the weights, config.json in the terms of their names. None may be called as in `taken`."""
    files = shards.extras.files
    check_names(files, taken)
    config = config_bytes(shards)
    if config is not None:
        yield NAME, config
    for name in files:
        if name != NAME:
            yield name, files[name]


def _check_written(config: Mapping[str, Any], shards: Catalog) -> None:
    """Raise FormatError, before anything is written, where a configuration would not be read back as the same model."""
    assert shards.model is not None
    model = shards.model.base
    try:
        again = model.schema.bind(config)
    except CkptError as error:
        raise FormatError(
            f"{NAME} in the terms of {shards.names} would not be read again: {error}. Complete the source's configuration, or "
            "give one with --config",
            file=NAME,
        ) from error
    if (again.sizes, again.flags) != (model.sizes, model.flags):
        raise FormatError(
            f"{NAME} in the terms of {shards.names} would describe another model: {again.sizes} instead of {model.sizes}",
            file=NAME,
        )


def _main_dtype(shards: Catalog) -> str:
    """The plain float type that holds most bytes of parameters; empty where another type does."""
    entries = shards.entries
    params = entries.role == ROLE_CODE["param"]
    nbytes = np.bincount(entries.dtype[params], entries.nbytes[params], len(TABLE))
    name = TABLE[int(nbytes.argmax())].name
    return name if nbytes.any() and name in _PLAIN_FLOATS else ""


def read_config(files: Mapping[str, bytes], options: ReadOptions, where: str) -> Mapping[str, Any] | None:
    """What the user says, else the configuration among carried files."""
    return options.config if options.config is not None else load_config(files, where)
