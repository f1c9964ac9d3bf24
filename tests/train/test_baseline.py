"""The Mixtral-style baseline: Transformers' model, its gradients, and a few steps of training."""

from functools import partial
from typing import Any

import pytest
import torch

from ckptkit.core.layouts import Layout
from ckptkit.errors import LayoutError
from ckptkit.train.baseline import Baseline
from ckptkit.train.config import Config
from ckptkit.train.parallel import Parallel
from ckptkit.train.trainer import Trainer, bind

CONFIG: dict[str, Any] = {
    "model": {
        "base": "mixtral-tiny", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "num_local_experts": 8, "router_aux_loss_coef": 0.02,
    },
    "train": {"seq_len": 16, "batch": 4, "micro_batch": 2, "steps": 30},
    "data": {"synthetic_bytes": 20_000},
}  # fmt: skip


def test_logits_and_gradients_are_those_of_transformers() -> None:
    """In fp32 to 1e-5, the balancing loss included."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = Config.from_table(CONFIG)
    fields = {k: v for k, v in config.model.items() if k not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(0)
    judge = (
        MixtralForCausalLM(MixtralConfig(**fields, attn_implementation="eager", output_router_logits=True))
        .float()
        .train()
    )
    ours = Baseline(config, bind(config), Parallel(Layout()))
    theirs = dict(judge.named_parameters())
    with torch.no_grad():
        for value in judge.parameters():
            value.mul_(4.0) if value.ndim > 1 else value.add_(0.1 * torch.randn_like(value))
        for name, value in ours.named_parameters():
            value.copy_(theirs[name])
    tokens = torch.randint(0, 256, (2, 16))

    result = judge(tokens, labels=tokens)
    h = ours(tokens)
    logits = torch.nn.functional.linear(h, ours.head[0])
    torch.testing.assert_close(logits, result.logits, rtol=1e-5, atol=1e-5)

    # Theirs shifts labels by one and averages; the last position has none.
    loss = ours.loss(h[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    torch.testing.assert_close(loss, result.loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    result.loss.backward()
    for name, value in ours.named_parameters():
        torch.testing.assert_close(value.grad, theirs[name].grad, rtol=1e-4, atol=1e-6, msg=partial("{}: {}".format, name))  # fmt: skip


def test_its_loss_falls_and_its_load_is_counted() -> None:
    """The same trainer as ZAYA1's."""
    trainer = Trainer(Config.from_table(CONFIG), Parallel(Layout()))

    results = [trainer.step() for _ in range(30)]

    assert results[-1].loss < results[0].loss - 1
    assert results[0].load.sum().item() == 2 * 2 * 4 * 16  # two layers, two experts a token
    assert not results[0].load[:, -1].any()


def test_a_layout_that_cuts_it_is_refused() -> None:
    """By name, before anything is made."""
    config = Config.from_table(CONFIG)
    parallel = Parallel(Layout())
    parallel.layout = Layout.parse("tp=2")

    with pytest.raises(LayoutError, match="use dp and zero"):
        Baseline(config, bind(config), parallel)
