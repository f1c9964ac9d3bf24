"""Newton–Schulz: symmetric products against fp64, whole runs against the iteration in fp64.

Triton's interpreter has no bf16 products, so that fp16 stands for it on the CPU: the kernels are the same.
"""

import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.kernels.newton_schulz import COEFFICIENTS, STEPS, newton_schulz, newton_schulz_fused_torch
from tests.kernels.forms import DEVICE, ON_GPU, distance, drawn, forms, needs_triton

every_form = pytest.mark.parametrize("backend", forms("newton_schulz"))
HALF = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = 2 * sum(map(abs, COEFFICIENTS)) * (2**-9 if ON_GPU else 2**-10)
ROUNDING = 2**-9 if ON_GPU else 2**-10  # the interpreter truncates to fp16: twice its usual 2^-11


def formula(u: torch.Tensor) -> torch.Tensor:
    """The iteration, in fp64."""
    a, b, c = COEFFICIENTS
    x = u.double() / torch.linalg.matrix_norm(u.double(), keepdim=True)
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if u.shape[-2] <= u.shape[-1] else x.mT


SHAPES = [(32, 48), (100, 40), (3, 24, 32), (2, 1, 40, 24), (130, 64)]
BIG = (
    [(2048, 2048), (1024, 2048), (4096, 2048), (3, 256, 512), (16, 384, 128), (2000, 1000)] if ON_GPU else []
)


@every_form
@pytest.mark.parametrize("shape", SHAPES + BIG, ids=str)
def test_results_are_those_of_the_iteration(shape: tuple[int, ...], backend: str) -> None:
    """Wide, tall, stacked, and of any size.

    A step adds three terms whose sizes are up to |a|, |b| and |c| times that of the result, each rounded; errors of
    five steps add as roots of squares, to about twice that of one.
    """
    u = drawn(*shape, seed=1)

    x = newton_schulz(u, dtype=HALF, backend=backend)

    assert x.shape == u.shape and x.dtype == HALF
    assert distance(x, formula(u)) <= TOLERANCE


@every_form
def test_singular_values_come_near_one(backend: str) -> None:
    """What Muon wants of it: the coefficients bring all but the smallest into [0.6, 1.3]."""
    u = drawn(24, 64, seed=2)

    values = torch.linalg.svdvals(newton_schulz(u, dtype=HALF, backend=backend).float())

    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


@every_form
def test_a_zero_matrix_stays_zero(backend: str) -> None:
    """The norm is at least eps: no division by zero for a parameter without gradient."""
    assert not newton_schulz(torch.zeros(16, 32, device=DEVICE), dtype=HALF, backend=backend).any()


@every_form
def test_the_scale_of_the_update_does_not_matter(backend: str) -> None:
    """Each matrix of a stack is divided by its own norm."""
    u = drawn(2, 16, 32, seed=3)
    scaled = u * torch.tensor([8.0, 0.125], device=DEVICE)[:, None, None]

    x, y = (newton_schulz(v, dtype=HALF, backend=backend) for v in (u, scaled))

    assert torch.equal(x, y)  # powers of two change no digit


def test_the_second_yardstick_computes_the_same() -> None:
    """The form with `baddbmm` is what the kernels are timed beside, too."""
    u = drawn(24, 64, seed=4)

    assert distance(newton_schulz_fused_torch(u, dtype=HALF), formula(u)) <= TOLERANCE


def test_vectors_are_refused() -> None:
    """Muon is for matrices."""
    with pytest.raises(UsageError, match=r"not for a tensor of shape \(4,\)"):
        newton_schulz(torch.zeros(4, device=DEVICE))


@needs_triton
@pytest.mark.parametrize("size", [(1, 64, 64), (2, 96, 64), (1, 70, 50)] + [(1, 2048, 512)] * ON_GPU, ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_half_of_a_symmetric_product_is_all_of_it(size: tuple[int, int, int], add: bool) -> None:
    """alpha p p^T + beta c + shift I, bitwise symmetric; one rounding of the result, fp32 sums of k terms inside."""
    from ckptkit.kernels.newton_schulz_triton import SYMMETRIC, Operand, symmetric

    stack, m, k = size
    p = drawn(stack, m, k, seed=5, dtype=HALF)
    c = drawn(stack, m, m, seed=6, dtype=HALF)
    c = c + c.mT
    out = Operand(torch.full((stack, m, m), torch.nan, dtype=HALF, device=DEVICE))
    tuning = SYMMETRIC if ON_GPU else {"BLOCK": 32, "DEPTH": 16}  # several tiles even of small matrices

    symmetric(Operand(p), Operand(c) if add else None, out, 0.5, 0.25 * add, 3.0 * add, tuning)

    want = 0.5 * p.double() @ p.double().mT
    if add:
        want += 0.25 * c.double() + 3 * torch.eye(m, device=DEVICE)
    assert torch.equal(out.x, out.x.mT)
    assert distance(out.x, want) <= 1.5 * ROUNDING
