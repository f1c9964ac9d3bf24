"""The router against its formulas in fp64, and the order of tokens against NumPy's stable sort.

A choice is right when no class scores better by more than the error of a score. Errors: three layers of R = 32 terms in
fp32, a few 1e-6. With half-precision operands (fp16 here in the interpreter, which has no bf16 products; bf16 on GPUs)
each of three layers rounds activations by 2^-9 (bf16); logits are sums of 32 such terms of size 1, so that
probabilities, whose slope is at most 1/4 a logit, err by some 3 * 2^-9 * sqrt(32) / 4: below 0.02.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ckptkit.errors import UsageError
from ckptkit.kernels.router import EPS, RouterWeights, Routes, route
from tests.kernels.forms import DEVICE, ON_GPU, distance, drawn, forms

every_form = pytest.mark.parametrize("backend", forms("route"))
HALF = torch.bfloat16 if ON_GPU else torch.float16
every_dtype = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 0.02)], ids=["fp32", "half"]
)


def weights(r: int, classes: int, dtype: torch.dtype) -> RouterWeights:
    shapes = [(r, r), (r,), (r, r), (r,), (classes, r)]
    parts = [drawn(*shape, seed=20 + i) * (1.5 / shape[-1] ** 0.5) for i, shape in enumerate(shapes)]
    norm = drawn(r, seed=30) * 0.2 + 1
    parts = [norm, *parts]
    return RouterWeights(*[*(part.to(dtype) for part in parts), drawn(classes, seed=31) * 0.1])


def formula(state: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    """Probabilities, in the dtype of the arguments."""
    x = w[0] * state / (state.square().mean(-1, keepdim=True) + EPS).sqrt()
    x = F.gelu(F.linear(x, w[1], w[2]))
    return F.softmax(F.linear(F.gelu(F.linear(x, w[3], w[4])), w[5]), -1)


def doubles(w: RouterWeights) -> list[torch.Tensor]:
    return [getattr(w, name).double() for name in RouterWeights.__dataclass_fields__]


def check_order(routes: Routes, classes: int) -> None:
    """Order, positions and offsets follow from the choices."""
    choice = routes.choice.cpu().numpy()
    order = np.argsort(choice, kind="stable")
    assert (routes.order.cpu().numpy() == order).all()
    assert (routes.position.cpu().numpy()[order] == np.arange(len(order))).all()
    assert (routes.offsets.cpu().numpy() == np.searchsorted(choice[order], np.arange(classes + 1))).all()


@every_form
@every_dtype
@pytest.mark.parametrize(("n", "r", "classes"), [(1, 32, 17), (70, 32, 17), (600, 48, 5), (300, 32, 16)])
def test_tokens_go_where_they_score_best(
    n: int, r: int, classes: int, dtype: torch.dtype, tolerance: float, backend: str
) -> None:
    """Probability plus bias decides; the weight is the probability alone."""
    w, state = weights(r, classes, dtype), drawn(n, r, seed=1, dtype=dtype)

    routes = route(state, w, backend=backend)

    p = formula(state.double(), doubles(w))
    score = p + w.balancing.double()
    own = routes.choice.long()[:, None]
    assert float((score.max(-1).values - score.gather(1, own)[:, 0]).max()) <= 2 * tolerance
    assert float((routes.weight - p.gather(1, own)[:, 0]).abs().max()) <= tolerance
    check_order(routes, classes)


@every_form
def test_the_bias_chooses_but_does_not_weigh(backend: str) -> None:
    """All tokens go to the class that the bias lifts above every probability, each with its own probability."""
    w, state = weights(32, 17, torch.float32), drawn(40, 32, seed=2)
    w.balancing[:] = 0
    w.balancing[16] = 2

    routes = route(state, w, backend=backend)

    assert (routes.choice == 16).all()
    assert distance(routes.weight, formula(state.double(), doubles(w))[:, 16]) <= 1e-5
    assert routes.offsets.tolist() == [0] * 17 + [40]


@every_form
def test_a_tie_goes_to_the_lowest_class(backend: str) -> None:
    """Zero weights make all classes equal; then every token takes class 0, in order."""
    zeros = [torch.zeros_like(t) for t in doubles(weights(32, 17, torch.float32))]
    w = RouterWeights(*(z.float() for z in zeros))

    routes = route(drawn(20, 32, seed=3), w, backend=backend)

    assert not routes.choice.any() and routes.order.tolist() == list(range(20))


@every_form
def test_gradients_flow_through_the_weight(backend: str) -> None:
    """To the state and to all weights but the bias, as autograd has them for the chosen classes."""
    w, state = weights(32, 17, torch.float32), drawn(50, 32, seed=4).requires_grad_()
    names = [*RouterWeights.__dataclass_fields__][:-1]
    leaves = [getattr(w, name).requires_grad_() for name in names]
    upstream = drawn(50, seed=5)

    routes = route(state, w, backend=backend)
    gradients = torch.autograd.grad(routes.weight, [state, *leaves], upstream)

    doubled = [t.detach().double().requires_grad_() for t in (state, *leaves)]
    chosen = formula(doubled[0], doubled[1:]).gather(1, routes.choice.long()[:, None])[:, 0]
    wanted = torch.autograd.grad(chosen, doubled, upstream.double())
    for name, gradient, want in zip(["state", *names], gradients, wanted, strict=True):
        assert distance(gradient, want) <= 1e-5, name


@every_form
def test_no_tokens_at_all(backend: str) -> None:
    """A rank may have none: all offsets are zero."""
    routes = route(torch.empty(0, 32, device=DEVICE), weights(32, 17, torch.float32), backend=backend)

    assert routes.offsets.tolist() == [0] * 18 and routes.order.shape == (0,)


def test_a_weight_of_another_shape_is_named() -> None:
    """Kernels trust shapes, so that they are checked before."""
    w = weights(32, 17, torch.float32)
    with pytest.raises(UsageError, match=r"fc1 is \(32, 32\), not \(48, 48\)"):
        route(drawn(4, 48, seed=6), RouterWeights(drawn(48, seed=7), *[*vars(w).values()][1:]))
