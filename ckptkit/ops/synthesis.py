"""Synthetic checkpoints: random values of any size, written through the same machinery as a reshard."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptkit import models
from ckptkit.core.catalog import ROLES, Catalog, Extras, File
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import Key
from ckptkit.core.schema import OPTIMIZER_ROLES, Model, Tensor
from ckptkit.core.shards import shards
from ckptkit.errors import LayoutError, UsageError
from ckptkit.formats import registry
from ckptkit.ops.preparing import Options, prepare_source
from ckptkit.ops.presets import PRESETS
from ckptkit.ops.random_store import Kind, RandomStore, RandomTensor
from ckptkit.ops.reports import Progress
from ckptkit.ops.resharding import ReshardResult, execute
from ckptkit.ops.sources import Source

__all__ = ["OPTIMIZERS", "PRESETS", "synth"]

OPTIMIZERS = ("muon+adamw", "adamw", "none")

_WEIGHT, _AROUND_ONE = Kind(0.0, 0.02), Kind(1.0, 0.1)
_STATE = {
    "exp_avg": Kind(0.0, 1e-4),
    "exp_avg_sq": Kind(0.0, 1e-4, squared=True),
    "momentum": Kind(0.0, 1e-3),
}


def synth(
    dst: str,
    *,
    model: str = "zaya",
    settings: Mapping[str, Any] | None = None,
    optimizer: str = "muon+adamw",
    layout: str | Layout = "tp=1",
    dtype: str = "bfloat16",
    to: str = "native",
    seed: int = 0,
    step: int = 1000,
    max_shard_size: int = 5_000_000_000,
    threads: int | None = None,
    memory: int = 256 << 20,
    restart: bool = False,
    overwrite: bool = False,
    fingerprint: bool | None = None,
    progress: Progress | None = None,
) -> ReshardResult:
    """Write a random checkpoint: values depend on `seed`, tensor, role and position only, never on layout or format.

    Args:
        model: A model's name (`zaya`, `llama`, ...) or a preset of `PRESETS`.
        settings: Configuration fields over the model's defaults, such as `num_hidden_layers=8`.
        optimizer: `muon+adamw` (each tensor by its schema), `adamw` (all), or `none` (weights only).
        dtype: Of parameters and buffers, except those that stay float32.
        step: Optimizer steps that the checkpoint claims.
        fingerprint: As `reshard` takes it.

    Raises as `reshard`, and UsageError for an unknown model, preset, setting or optimizer.
    """
    began = time.monotonic()
    source = random_source(model, settings or {}, optimizer, dtype, seed, step, to, layout)
    options = Options(
        to=to,
        layout=layout if registry.by_name(to).ranks else None,
        max_shard_size=max_shard_size,
        threads=threads,
        memory=memory,
        restart=restart,
        overwrite=overwrite,
        fingerprint=fingerprint,
    )
    return execute(prepare_source(source, dst, options), progress, began)


def random_source(
    model: str,
    settings: Mapping[str, Any],
    optimizer: str,
    dtype: str,
    seed: int,
    step: int,
    to: str,
    layout: str | Layout,
) -> Source:
    """A checkpoint whose bytes are made while they are read, with the extras that format `to` can hold."""
    bound = _bind(model, settings, dtype)
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}")
    format = registry.by_name(to)
    if optimizer != "none" and not {"master", "exp_avg"} <= set(format.roles):
        raise UsageError(f"{to} holds no optimizer state; give --optimizer none")
    shape = Layout.parse(layout) if isinstance(layout, str) else layout
    if not format.ranks and shape != Layout():
        raise UsageError(f"{to} holds no ranks: leave --layout {shape} out, or write native")
    kinds = {
        tensor.name: "none"
        if tensor.kind == "buffer" or optimizer == "none"
        else _optimizer(tensor, optimizer)
        for tensor in bound.tensors.values()
    }
    weight = dtype_named(dtype)
    held: dict[Key, DType] = {}
    for tensor in bound.tensors.values():
        keeps = tensor.keep_fp32 and weight.itemsize < 4
        held[tensor.name, tensor.kind] = dtype_named("float32") if keeps else weight
        for role in OPTIMIZER_ROLES[kinds[tensor.name]]:
            held[tensor.name, role] = dtype_named("float32")
    extras = Extras()
    if format.extras:
        extras.common["step"] = step
        if optimizer != "none":
            extras.common["groups"] = _groups(bound, kinds, step)
            extras.by_coordinate = _random_states(shape, seed, step)
    catalog, store = _catalog(bound, held, extras, seed, shape)
    return Source(store.url, store, None, catalog)


def _bind(name: str, settings: Mapping[str, Any], dtype: str) -> Model:
    if name not in PRESETS:
        raise UsageError(f"unknown model or preset {name!r}; known: {', '.join(PRESETS)}")
    schema, config = PRESETS[name]
    unknown = [key for key in settings if key not in config]
    if unknown:
        raise UsageError(f"model {name} has no setting {', '.join(unknown)}; it has {', '.join(config)}")
    kind = dtype_named(dtype)
    if kind.kind != "f" or kind.name == "float4_e2m1fn_x2":
        raise UsageError(f"--dtype {dtype}: random values are floats")
    merged = {**config, **settings, "dtype": kind.name}
    if merged.get("layer_types", ()) is None:  # written out, as Transformers does
        merged["layer_types"] = ["hybrid"] * int(merged["num_hidden_layers"])
    try:
        return models.named(schema).bind(merged)
    except LayoutError as error:
        raise UsageError(f"{name} with these settings: {error}") from error


def _optimizer(tensor: Tensor, optimizer: str) -> str:
    return "adamw" if optimizer == "adamw" and tensor.optimizer != "none" else tensor.optimizer


def _groups(model: Model, kinds: Mapping[str, str], step: int) -> list[dict[str, Any]]:
    """Optimizer groups: Muon, AdamW with and without weight decay; those without a tensor are left out."""
    muon = {
        "lr": 0.02,
        "momentum": 0.95,
        "form": "lerp",
        "nesterov": True,
        "ns_steps": 5,
        "weight_decay": 0.1,
    }
    adamw = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}
    groups: list[dict[str, Any]] = [
        {"kind": "muon", "step": step, **muon},
        {"kind": "adamw", "step": step, **adamw, "weight_decay": 0.1},
        {"kind": "adamw", "step": step, **adamw, "weight_decay": 0.0},
    ]
    for group in groups:
        group["tensors"] = [
            name
            for name, tensor in model.tensors.items()
            if kinds[name] == group["kind"]
            and (kinds[name] == "muon" or tensor.decay == (group["weight_decay"] > 0))
        ]
    return [group for group in groups if group["tensors"]]


def _random_states(layout: Layout, seed: int, step: int) -> dict[str, Any]:
    """A counter-based generator's state of each rank, keyed by its coordinate."""
    found = {}
    for rank in range(layout.world):
        coordinate = ",".join(f"{axis}={index}" for axis, index in layout.coordinate(rank).items())
        found[coordinate] = {"philox": {"seed": seed * 1_000_003 + rank, "offset": step}}
    return found


def _catalog(
    model: Model, held: Mapping[Key, DType], extras: Extras, seed: int, layout: Layout
) -> tuple[Catalog, RandomStore]:
    """Every tensor and role whole, in a virtual file of its own. `layout` is the one whose coordinates `extras` have."""
    catalog = shards(
        model.names("canonical"), Layout(), held, model.tensors, where=f"random:{seed}", pad=False
    )
    files: list[File] = []
    tensors: dict[str, RandomTensor] = {}
    entries = catalog.entries
    for local, role_code in zip(entries.local.tolist(), entries.role.tolist(), strict=True):
        name, role = catalog.locals[local].key, ROLES[role_code]
        dtype, size = held[name, role], catalog.locals[local].size
        path = f"{name}/{role}"
        stream = name if role in ("param", "buffer", "master") else path
        tensors[path] = RandomTensor(stream, _kind(model.tensors[name], role), dtype, size)
        files.append(File(path, size * dtype.itemsize))
    entries.file[:] = np.arange(len(files))
    random = Catalog(
        format="random",
        where=catalog.where,
        tensors=model.tensors,
        locals=catalog.locals,
        files=files,
        entries=entries,
        layout=layout,
        model=model,
        extras=extras,
    )
    return random, RandomStore(seed, tensors)


def _kind(tensor: Tensor, role: str) -> Kind:
    """Norms and scales lie around one, as in a trained model; all else is centred on zero."""
    if role in _STATE:
        return _STATE[role]
    scale = len(tensor.shape) == 1 and tensor.kind == "param" and "bias" not in tensor.name
    return _AROUND_ONE if scale else _WEIGHT
