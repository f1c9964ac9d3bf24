"""Synthetic checkpoints: random values of any size, written through the same machinery as a reshard."""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.layouts import Layout
from ckptkit.ops.reports import Progress
from ckptkit.ops.resharding import ReshardResult

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {}
"""Name to a model and its settings, for example `zaya-tiny`, `zaya-8b`."""


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
    progress: Progress | None = None,
) -> ReshardResult:
    """Write a random checkpoint: values depend on `seed`, tensor, role and position only, never on layout or format.

    Args:
        model: A model's name (`zaya`, `llama`, ...) or a preset of `PRESETS`.
        settings: Configuration fields over the model's defaults, such as `num_hidden_layers=8`.
        optimizer: `muon+adamw` (each tensor by its schema), `adamw` (all), or `none` (weights only).
        dtype: Of parameters and buffers, except those that stay float32.
        step: Optimizer steps that the checkpoint claims.

    Raises as `reshard`, and UsageError for an unknown model, preset, setting or optimizer.
    """
    raise NotImplementedError
