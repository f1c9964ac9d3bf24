"""Modules: the parameters and buffers of a model as holdings.

What a tensor is in the global model comes from the tensor itself: DTensors say their placements, everything else is
whole (plain modules, DDP). Names are those of the module tree without what wrappers add to them.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit import models
from ckptkit.core.schema import Model
from ckptkit.errors import CkptError, UsageError
from ckptkit.hooks.holdings import Holding, Places, box_of, shard_of

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""Modules that wrappers put between a model and its parts."""

_SHELLS = ("DistributedDataParallel", "DataParallel")
"""Wrappers whose only child is called `module`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A parameter or buffer in a module tree, and the table of the module that holds it."""

    name: str
    tensor: torch.Tensor
    owner: MutableMapping[str, Any]
    key: str
    is_param: bool


def tensors_of(modules: Sequence[torch.nn.Module]) -> list[Found]:
    """Every parameter and persistent buffer, each once, by its first name.

    Raises UsageError where two modules have different tensors of one name.
    """
    found: dict[str, Found] = {}
    seen: set[int] = set()
    for root in modules:
        for one in _walk(root, ""):
            if id(one.tensor) in seen:  # tied weights, shared modules
                continue
            seen.add(id(one.tensor))
            if one.name in found:
                raise UsageError(
                    f"two tensors are called {one.name}; give chunks of a model names of their own (placement= with rename=)",
                    tensor=one.name,
                )
            found[one.name] = one
    return list(found.values())


def _walk(module: torch.nn.Module, prefix: str) -> Iterator[Found]:
    shell = type(module).__name__ in _SHELLS
    skipped = module._non_persistent_buffers_set
    tables: tuple[tuple[MutableMapping[str, Any], bool], ...] = (
        (module._parameters, True),
        (module._buffers, False),
    )
    for table, is_param in tables:
        for key, tensor in table.items():
            if tensor is not None and not (not is_param and key in skipped):
                yield Found(prefix + key, tensor, table, key, is_param)
    for key, child in module._modules.items():
        if child is not None:
            hidden = key in _WRAPPERS or (shell and key == "module")
            yield from _walk(child, prefix if hidden else f"{prefix}{key}.")


def model_of(modules: Sequence[torch.nn.Module]) -> Model | None:
    """The model that a module's own configuration describes (Transformers), where a schema fits it."""
    for module in modules:
        while type(module).__name__ in _SHELLS or any(name in module._modules for name in _WRAPPERS):
            inner = next(
                (module._modules.get(name) for name in ("module", *_WRAPPERS) if module._modules.get(name)),
                None,
            )
            if inner is None:
                break
            module = inner
        config: Any = getattr(module, "config", None)
        plain = config.to_dict() if hasattr(config, "to_dict") else config
        if isinstance(plain, Mapping):
            schema = models.find(plain)
            try:
                return schema.bind(plain) if schema is not None else None
            except CkptError:
                return None
    return None


def module_holdings(found: Sequence[Found], places: Places, ema: Mapping[str, torch.Tensor]) -> list[Holding]:
    """Parameters and buffers, then the averages of parameters, as holdings."""
    holdings: list[Holding] = []
    by_name: dict[str, Holding] = {}
    for one in found:
        check_kind(one.name, one.tensor)
        local, first, last = places.place(one.name, *box_of(one.tensor, one.name))
        shard = shard_of(one.tensor)
        # Without a schema nobody can tell a buffer in a file from a parameter, so they are called alike.
        role = places.tensors[local.segments[0].tensor].kind if local.segments else "param"
        holding = Holding(
            one.name, local, first, last, role, tuple(shard.shape), shard.dtype, shard.device, shard,
            fenced=one.is_param, owner=one.owner, key=one.key, item=one.tensor,
        )  # fmt: skip
        holdings.append(holding)
        by_name[one.name] = holding
    for name, tensor in ema.items():
        like = by_name.get(name)
        if like is None:
            raise UsageError(f"ema holds {name}, which the model does not", tensor=name)
        shard = shard_of(tensor)
        if tuple(shard.shape) != like.shape:
            raise UsageError(
                f"the average of {name} has shape {tuple(shard.shape)}, not {like.shape}", tensor=name
            )
        holdings.append(
            Holding(
                name, like.local, like.first, like.last, "ema", like.shape, shard.dtype, shard.device, shard, fenced=False
            )
        )  # fmt: skip
    return holdings


def ema_tensors(
    ema: torch.nn.Module | Mapping[str, torch.Tensor] | None, names: set[str]
) -> dict[str, torch.Tensor]:
    """The averages by parameter name. `AveragedModel` keeps its copy below `module`."""
    if ema is None:
        return {}
    if isinstance(ema, torch.nn.Module):
        listed = {one.name: one.tensor for one in tensors_of([ema]) if one.is_param}
        if not listed.keys() & names:
            listed = {name.removeprefix("module."): tensor for name, tensor in listed.items()}
        return {name: tensor for name, tensor in listed.items() if name in names}
    return dict(ema)


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for tensors whose bytes are no plain array."""
    shard = getattr(tensor, "_local_tensor", tensor)
    if tensor.is_meta:
        raise UsageError(
            f"{name} is on the meta device: it has no values yet. Materialise the model, then register it",
            tensor=name,
        )
    if shard.layout is not torch.strided or shard.is_quantized:
        raise UsageError(
            f"{name} is {shard.layout}, not a plain array; checkpoints hold plain arrays", tensor=name
        )


def mesh_of(found: Sequence[Found]) -> Any:
    """The device mesh of the first DTensor, or None."""
    return next((one.tensor.device_mesh for one in found if hasattr(one.tensor, "device_mesh")), None)
