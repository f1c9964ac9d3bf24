"""AdamW over many tensors against `torch.optim.AdamW` in fp64.

An fp32 update does some ten operations a step on each value, each of which errs by at most 2^-24 of what it handles;
after five steps 50 * 2^-24 of the value's size, 3e-6.
"""

import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.kernels.adamw import AdamWTable, Hyper, adamw_step
from tests.kernels.forms import DEVICE, distance, drawn, forms

every_form = pytest.mark.parametrize("backend", forms("adamw_step"))
SHAPES = [(1024,), (3, 5), (40, 60), (1,), (2048,), (1025,)]
SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
STEPS = 5
CLOSE = 50 * 2**-24


def gradients(step: int) -> list[torch.Tensor]:
    return [drawn(*shape, seed=100 * step + i) for i, shape in enumerate(SHAPES)]


def reference(params: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Where torch's optimizer ends, in fp64."""
    doubles = [p.double().clone().requires_grad_() for p in params]
    lr, beta1, beta2, eps, decay = SETTINGS.values()
    optimizer = torch.optim.AdamW(doubles, lr, (beta1, beta2), eps, decay)
    for step in range(1, STEPS + 1):
        for p, g in zip(doubles, gradients(step), strict=True):
            p.grad = g.double() * scale
        optimizer.step()
    return [p.detach() for p in doubles]


def table_of(params: list[torch.Tensor], masters: list[torch.Tensor] | None = None) -> AdamWTable:
    zeros = [[torch.zeros(p.shape, device=DEVICE) for p in params] for _ in range(3)]
    return AdamWTable(params, zeros[0], zeros[1], zeros[2], masters)


def run(table: AdamWTable, backend: str, scale: torch.Tensor | None = None) -> None:
    for step in range(1, STEPS + 1):
        for held, g in zip(table.grads, gradients(step), strict=True):
            held.copy_(g)
        adamw_step(table, Hyper(step=step, **SETTINGS), scale, backend)


@every_form
def test_five_steps_are_those_of_torch(backend: str) -> None:
    """Tensors of one chunk, of several, of a value more than one, and of a single value."""
    params = [drawn(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    want = reference(params, 1)

    run(table_of(params), backend)

    assert max(distance(p, w) for p, w in zip(params, want, strict=True)) <= CLOSE


@every_form
def test_gradients_are_scaled_on_the_device(backend: str) -> None:
    """Clipping needs no value on the host."""
    params = [drawn(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    want = reference(params, 0.25)

    run(table_of(params), backend, torch.tensor(0.25, device=DEVICE))

    assert max(distance(p, w) for p, w in zip(params, want, strict=True)) <= CLOSE


@every_form
def test_bf16_weights_are_roundings_of_their_masters(backend: str) -> None:
    """Masters take the update; what the model uses is cast from them (truncated, in Triton's interpreter)."""
    masters = [drawn(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    want = reference(masters, 1)
    params = [m.bfloat16() for m in masters]

    run(table_of(params, masters), backend)

    assert max(distance(m, w) for m, w in zip(masters, want, strict=True)) <= CLOSE
    for p, m in zip(params, masters, strict=True):
        assert ((p.float() - m).abs() <= m.abs() * 2**-7).all()


@every_form
def test_tensors_that_begin_anywhere(backend: str) -> None:
    """ZeRO's ranges cut where they cut: addresses that 4 divides and 16 does not."""
    whole = [
        drawn(shape[0] * (shape[1] if len(shape) > 1 else 1) + 1, seed=i) for i, shape in enumerate(SHAPES)
    ]
    params = [w[1:].view(shape) for w, shape in zip(whole, SHAPES, strict=True)]
    want = reference(params, 1)

    run(table_of(params), backend)

    assert max(distance(p, w) for p, w in zip(params, want, strict=True)) <= CLOSE


def test_moments_must_be_fp32() -> None:
    """The message says which tensor."""
    good, bad = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="tensor 1 of shape"):
        AdamWTable([good, good], [good, good], [good, bad], [good, good])


def test_lists_must_be_of_one_length() -> None:
    """A forgotten state would shift all others."""
    one = torch.zeros(4, device=DEVICE)
    with pytest.raises(UsageError, match="each with a gradient and two moments"):
        AdamWTable([one, one], [one], [one, one], [one, one])
