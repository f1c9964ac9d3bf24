"""From a checkpoint's configuration to its model."""

from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit import models
from ckptkit.core.adapters import ranks_of, with_adapters
from ckptkit.core.schema import Model, Schema, Tensor
from ckptkit.errors import CkptError, FormatError
from ckptkit.formats.base import ReadOptions


def bind(
    schema_id: str | None,
    config: Mapping[str, Any] | None,
    stored: Iterable[Tensor],
    options: ReadOptions,
    where: str,
    warnings: list[str],
) -> Model | None:
    """The model that a checkpoint with canonical tensors says it holds, or None where its schema is not known here.

    Raises:
        FormatError: the model has other tensors than the checkpoint; names the first.
    """
    config = options.config or config
    schema = options.model or (_known(schema_id) if schema_id is not None else None)
    if schema_id is not None and schema is None:
        warnings.append(
            f"the model {schema_id} is not known here: only layouts that need no model can be made"
        )
    if schema is None or config is None:
        return None
    stored = list(stored)
    try:
        model = with_adapters(schema.bind(config), ranks_of((tensor.name, tensor.axes) for tensor in stored))
    except CkptError as error:
        raise FormatError(f"{where}: the configuration does not fit: {error}", **error.facts) from error
    for tensor in stored:
        if "@" in tensor.name:  # optimizer state that no model knows (the role `state`)
            continue
        ours = model.tensors.get(tensor.name)
        if ours is None or (ours.axes, ours.shape) != (tensor.axes, tensor.shape):
            has = (
                f"no such tensor in {schema.id}"
                if ours is None
                else f"{schema.id} has {ours.axes} {ours.shape}"
            )
            raise FormatError(
                f"{where} stores {tensor.name} with axes {tensor.axes} and shape {tensor.shape}, but {has} for its "
                "configuration; give the right --model and --config",
                tensor=tensor.name,
            )
    return model


def _known(schema_id: str) -> Schema | None:
    schema = models.schemas().get(schema_id.split("@")[0])
    return schema if schema is not None and schema.id == schema_id else None


def model_of(config: Mapping[str, Any] | None, options: ReadOptions, where: str) -> Model | None:
    """The model of a configuration file (or of what the user says instead), or None where no schema covers it.

    Raises:
        FormatError: the configuration makes no sense for its model.
    """
    config = options.config or config
    if config is None:
        if options.model is not None:
            raise FormatError(
                f"{where} has no config.json, so {options.model.id} has no sizes; give one with --config"
            )
        return None
    schema = options.model or models.find(config)
    if schema is None:
        return None
    try:
        return schema.bind(config)
    except CkptError as error:
        raise FormatError(
            f"{where}: config.json does not fit: {error}", file="config.json", **error.facts
        ) from error
