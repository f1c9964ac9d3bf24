"""ZAYA models for the tests: configurations, Transformers' model with values everywhere, ours with the same values."""

from typing import Any

import torch

from ckptkit.core.layouts import Layout
from ckptkit.train.config import Config, override
from ckptkit.train.model import Stage
from ckptkit.train.parallel import Parallel
from ckptkit.train.stages import AnyStage
from ckptkit.train.trainer import bind

SMALL: dict[str, Any] = {
    "model.hidden_size": 32,
    "model.num_hidden_layers": 3,
    "model.head_dim": 8,
    "model.moe_intermediate_size": 24,
    "model.num_experts": 4,
    "model.router_hidden_size": 16,
    "model.layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "model.sliding_window": 5,
    "train.seq_len": 16,
    "train.batch": 4,
    "train.micro_batch": 1,
    "data.synthetic_bytes": 20_000,
}


def config_of(**settings: Any) -> Config:
    """The small configuration, with fields set as `table__field=value`."""
    config = Config.load("zaya1-tiny.toml")
    override(config, {**SMALL, **{name.replace("__", ".", 1): value for name, value in settings.items()}})
    return config


def stage_of(config: Config) -> Stage:
    """Ours, unsharded."""
    return Stage(config, bind(config), Parallel(Layout()))


def judge_of(config: Config, seed: int = 0) -> Any:
    """Transformers' model in fp32, with random values in every vector, and biases that make tokens skip."""
    from transformers import ZayaConfig, ZayaForCausalLM

    fields = {k: v for k, v in config.model.items() if k not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(seed)
    model = ZayaForCausalLM(ZayaConfig(**fields, attn_implementation="eager")).float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value))
            if name.endswith("temp"):
                value.add_(1.0)
            if value.ndim > 1:
                value.mul_(20.0 if ".gate." in name else 4.0)  # so that tokens take different experts
        for name, value in model.named_buffers():
            if name.endswith("balancing_biases"):
                value.copy_(0.1 * torch.randn_like(value))
                value[-1] += 0.15
    return model


def copy_values(judge: Any, stage: AnyStage) -> None:
    """Give ours the judge's values; names are the same, padded rows are zero."""
    theirs = dict(judge.named_parameters()) | dict(judge.named_buffers())
    with torch.no_grad():
        for name, value in stage.state_dict(keep_vars=True).items():
            value.zero_()
            value[: len(theirs[name])].copy_(theirs[name])


def logits_of(stage: Stage, tokens: torch.Tensor) -> torch.Tensor:
    """Ours, without the padded part of the vocabulary."""
    weight, bias = stage.head
    return torch.nn.functional.linear(stage(tokens), weight, bias)[..., : stage.dims.vocab]
