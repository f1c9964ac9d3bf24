"""The optimizer against torch's own: AdamW and Muon on Transformers' model."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ckptkit.core.layouts import Layout
from ckptkit.train.config import OptimizerTable
from ckptkit.train.optim import rate
from ckptkit.train.parallel import Parallel
from ckptkit.train.trainer import Trainer
from tests.train.zayas import config_of, copy_values, judge_of


class _Reference:
    """Transformers' model with torch.optim.AdamW and torch.optim.Muon; experts' stacks are split, since Muon takes matrices."""

    def __init__(self, judge: Any, trainer: Trainer) -> None:
        self.judge, self.trainer = judge, trainer
        t = trainer.config.optimizer
        kinds = {key: item.tensor for key, item in trainer.stage.holds.items()}
        self.slices: list[tuple[torch.nn.Parameter, torch.nn.Parameter, int]] = []
        muon: list[torch.nn.Parameter] = []
        decay: list[torch.nn.Parameter] = []
        plain: list[torch.nn.Parameter] = []
        for name, value in judge.named_parameters():
            if kinds[name].optimizer == "muon" and value.ndim == 3:
                for e in range(len(value)):
                    part = torch.nn.Parameter(value.data[e])  # shares memory with the stack
                    self.slices.append((part, value, e))
                    muon.append(part)
            elif kinds[name].optimizer == "muon":
                muon.append(value)
            else:
                (decay if kinds[name].decay else plain).append(value)
        groups = [{"params": decay, "weight_decay": t.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=t.adamw_lr, betas=(t.beta1, t.beta2), eps=t.eps)
        self.muon = torch.optim.Muon(
            muon,
            lr=t.muon_lr,
            weight_decay=t.muon_weight_decay,
            momentum=t.muon_momentum,
            adjust_lr_fn=t.muon_adjust,
        )
        self.rates = [(group, group["lr"]) for o in (self.adamw, self.muon) for group in o.param_groups]

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, number: int) -> tuple[float, float]:
        t = self.trainer.config
        for group, lr in self.rates:
            group["lr"] = lr * rate(number, t.optimizer, t.train.steps)
        self.judge.zero_grad()
        logits = self.judge(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.judge.parameters(), t.optimizer.clip)
        for part, stack, e in self.slices:
            part.grad = stack.grad[e]  # type: ignore[index]
        self.adamw.step()
        self.muon.step()
        return loss.item(), norm.item()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_five_steps_are_those_of_transformers_and_torch_optimizers(
    adjust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and norm of the gradient of every step, and all weights in the end.

    torch's Muon rounds to bfloat16, which moves small singular values at random; here both work in fp32.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    config = config_of(
        optimizer__muon_adjust=adjust,
        optimizer__muon_lr=2e-3,
        optimizer__warmup=2,
        balance__mode="none",
        train__batch=4,
        train__steps=8,
    )
    trainer = Trainer(config, Parallel(Layout()))
    judge = judge_of(config)
    copy_values(judge, trainer.stage)
    reference = _Reference(judge, trainer)
    twin = Trainer(config, Parallel(Layout())).loader

    for number in range(5):
        tokens, targets = twin.next(0, 1, trainer.stage.context.positions)
        loss, norm = reference.step(tokens, targets, number)
        result = trainer.step()
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.norm == pytest.approx(norm, rel=1e-4)

    t = config.optimizer
    wanted = dict(judge.named_parameters())
    for name, value in trainer.stage.named_parameters():
        # Both divide by what may be small (root of the second moment, norm of the gradient): a rounding of the gradient
        # is then a part of a step.
        lr = t.adamw_lr if trainer.stage.holds[name].tensor.optimizer == "adamw" else t.muon_lr
        bound = 0.02 * lr
        torch.testing.assert_close(
            value.detach(), wanted[name].detach(), rtol=0, atol=bound, msg=partial("{}: {}".format, name)
        )


def test_muon_is_exact_where_newton_schulz_is_not_rounded() -> None:
    """One step in fp32 against the rule written out in fp64, on every matrix."""
    config = config_of(optimizer__clip=0.0, optimizer__warmup=0, balance__mode="none", train__steps=8)
    trainer = Trainer(config, Parallel(Layout()))
    before = {name: value.detach().clone() for name, value in trainer.stage.named_parameters()}

    trainer.step()

    t = config.optimizer
    for name, value in trainer.stage.named_parameters():
        if trainer.stage.holds[name].tensor.optimizer != "muon":
            continue
        g = trainer.optimizer.grads[name].double()
        momentum = (1 - t.muon_momentum) * g
        x = (1 - t.muon_momentum) * g + t.muon_momentum * momentum
        rows, columns = x.shape[-2:]
        x = x if rows <= columns else x.mT
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x if rows <= columns else x.mT
        lr = t.muon_lr
        wanted = before[name] * (1 - lr * t.muon_weight_decay) - lr * math.sqrt(max(1, rows / columns)) * x
        torch.testing.assert_close(
            value.detach(), wanted.float(), rtol=0, atol=1e-4 * lr, msg=partial("{}: {}".format, name)
        )


def test_rates_warm_up_and_decay() -> None:
    table = OptimizerTable(warmup=4, min_ratio=0.1)

    ratios = [rate(step, table, 104) for step in range(105)]

    assert ratios[:4] == [0.25, 0.5, 0.75, 1.0]
    assert ratios[4] == 1.0
    assert ratios[54] == pytest.approx(0.55)
    assert ratios[104] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(ratios[4:]))
    assert rate(99, OptimizerTable(decay="constant"), 100) == 1.0
