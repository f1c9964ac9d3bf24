"""The model against Transformers' `ZayaForCausalLM`: logits, gradients, tokens."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.train.zayas import config_of, copy_values, judge_of, logits_of, stage_of

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "one key-value head": {"model__num_key_value_heads": 1},
    "padded vocabulary": {"model__vocab_size": 300},
    "own output layer": {"model__tie_word_embeddings": False},
    "biases everywhere": {"model__attention_bias": True, "model__lm_head_bias": True},
    "longer kernels": {"model__cca_time0": 3, "model__cca_time1": 4},
    "kernels of one": {"model__cca_time0": 1, "model__cca_time1": 1},
}


def _tokens(batch: int, length: int, vocab: int) -> torch.Tensor:
    tokens = torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(1))
    tokens[0, 3] = 0  # the padding token, whose embedding learns nothing from being read
    return tokens


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_gradients_are_those_of_transformers(form: str) -> None:
    config = config_of(**FORMS[form])
    judge, stage = judge_of(config), stage_of(config)
    copy_values(judge, stage)
    tokens = _tokens(3, 17, stage.dims.vocab)

    theirs = judge(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(theirs.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    ours = logits_of(stage, tokens[:, :-1])
    stage.zero_grad()
    stage.loss(stage(tokens[:, :-1]), tokens[:, 1:]).backward()

    assert stage.load[:, -1].sum() > 0, "some tokens skip, so that skipping is compared too"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = dict(judge.named_parameters())
    for name, value in stage.named_parameters():
        assert value.grad is not None, name
        got = value.grad[: len(wanted[name])]
        # fp32 sums over 48 tokens in another order: 1e-5 of the greatest entry, or of 0.1 where terms cancel.
        bound = 1e-5 * float(wanted[name].grad.abs().max().clamp_min(0.1))
        torch.testing.assert_close(
            got, wanted[name].grad, rtol=1e-5, atol=bound, msg=partial("{}: {}".format, name)
        )
        assert not value.grad[len(wanted[name]) :].any(), f"{name}: padding learns nothing"


def test_greedy_tokens_are_those_of_transformers() -> None:
    """Theirs decode with a cache (conv and recurrent states), ours run over all tokens each time."""
    config = config_of(train__seq_len=24)
    judge, stage = judge_of(config), stage_of(config)
    copy_values(judge, stage)
    prompt = _tokens(2, 8, 256)

    theirs = judge.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    ours = prompt
    with torch.no_grad():
        while ours.shape[1] < 24:
            rest = torch.zeros(2, 24 - ours.shape[1], dtype=torch.int64)
            logits = logits_of(stage, torch.cat([ours, rest], 1))
            ours = torch.cat([ours, logits[:, ours.shape[1] - 1].argmax(-1, keepdim=True)], 1)

    assert ours.tolist() == theirs.tolist()


def test_a_skipped_token_gets_nothing_or_its_input_as_configured() -> None:
    """`identity` is the semantics of the original code: the probability times the normed input, with gradients."""
    config = config_of(train__skip="identity", model__num_hidden_layers=1, model__layer_types=["hybrid"])
    stage = stage_of(config)
    layer: Any = stage
    mixture = layer.model.layers[0].mlp
    with torch.no_grad():
        mixture.gate.balancing_biases[-1] = 2.0  # above any probability: all skip
    y = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)

    m, state = stage.mixture(y, None, mixture, None)
    (m * torch.linspace(0, 1, 32)).sum().backward()

    gate, mlp = mixture.gate, mixture.gate.router_mlp
    with torch.no_grad():
        r = F.linear(y, gate.down_proj.weight, gate.down_proj.bias)
        n = F.rms_norm(r, (16,), mlp.norm.weight, stage.dims.eps)
        g = F.gelu(F.linear(F.gelu(F.linear(n, mlp.fc1.weight, mlp.fc1.bias)), mlp.fc2.weight, mlp.fc2.bias))
        p = F.softmax(F.linear(g, mlp.out_proj.weight), -1)[..., -1:]
    torch.testing.assert_close(m, p * y)
    torch.testing.assert_close(state, r)
    assert mlp.out_proj.weight.grad.abs().sum() > 0
    stage.mixture.skip = "zero"
    assert not stage.mixture(y, None, mixture, None)[0].any()


def test_initial_values_do_not_depend_on_names_order_and_give_queries_gradients() -> None:
    """Temperatures start at one: at zero, queries and convolutions would learn nothing at first."""
    config = config_of()
    a, b = stage_of(config), stage_of(config_of(train__seed=1))
    tokens = _tokens(2, 17, 256)

    a.loss(a(tokens[:, :-1]), tokens[:, 1:]).backward()

    here: Any = a
    attention = here.model.layers[0].self_attn
    assert attention.qkv_proj.q_proj.weight.grad.abs().sum() > 0
    assert here.model.layers[0].mlp.gate.balancing_biases.tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]
    assert torch.equal(a.model.embed_tokens.weight, stage_of(config).model.embed_tokens.weight)  # type: ignore
    assert not torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)  # type: ignore
