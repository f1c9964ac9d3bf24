"""Residual scaling and RMSNorm against the formulas in fp64, and their gradients against autograd's.

Tolerances are Frobenius-norm ratios. In fp32 a row's mean square adds D squares and a vector's gradient N rows; each sum
errs by at most the number of its terms times 2^-24, a few operations add as much each: (N + D + 16) 2^-24.
In bf16 three roundings lie on the longest way (the stream's cast, the normalised value, the output), each at most
2^-9; Triton's interpreter truncates instead, 2^-8 each: 3 * 2^-8.
"""

import pytest
import torch

from ckptkit.kernels import dispatch
from ckptkit.kernels.rmsnorm import EPS, Vectors, rmsnorm_residual
from tests.kernels.forms import distance, drawn, forms

every_form = pytest.mark.parametrize("backend", forms("rmsnorm_residual_forward"))
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
every_shape = pytest.mark.parametrize(("n", "d"), [(1, 32), (7, 96), (9, 256), (5, 2048), (3, 2052)])


def tolerance(dtype: torch.dtype, n: int, d: int) -> float:
    return 3 * 2**-8 if dtype == torch.bfloat16 else (n + d + 16) * 2**-24


def inputs(n: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A half-layer's output, the stream, and the vectors: scales and weight around 1, biases around 0."""
    vectors = [drawn(d, seed=10 + i) * 0.3 + (1 if i in (0, 2, 4) else 0) for i in range(5)]
    return drawn(n, d, seed=1, dtype=dtype), drawn(n, d, seed=2) * 2, [v.to(dtype) for v in vectors]


def formula(
    h: torch.Tensor, r: torch.Tensor, vectors: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in the dtype of its arguments."""
    hs, hb, rs, rb, w = vectors
    merged = (h + hb) * hs + (r + rb) * rs
    return merged, w * merged / (merged.square().mean(-1, keepdim=True) + EPS).sqrt()


@every_form
@every_dtype
@every_shape
def test_forward_is_the_formula(n: int, d: int, dtype: torch.dtype, backend: str) -> None:
    """The stream in fp32, its norm in the input's dtype."""
    h, r, vectors = inputs(n, d, dtype)
    form = dispatch.choose("rmsnorm_residual_forward", h.device, backend)

    merged, normed, rstd = form(h, r, Vectors(*vectors), EPS)

    want_merged, want_normed = formula(h.double(), r.double(), [v.double() for v in vectors])
    assert merged.dtype == torch.float32 and normed.dtype == dtype
    assert distance(merged, want_merged) <= 8 * 2**-24  # four operations, all fp32, in either dtype
    assert distance(normed, want_normed) <= tolerance(dtype, n, d)
    want_rstd = (want_merged.square().mean(-1) + EPS).rsqrt()
    assert distance(rstd, want_rstd) <= tolerance(dtype, n, d)


@every_form
@every_dtype
@every_shape
def test_gradients_are_those_of_the_formula(n: int, d: int, dtype: torch.dtype, backend: str) -> None:
    """All seven inputs, when both results are used."""
    h, r, vectors = inputs(n, d, dtype)
    leaves = [t.requires_grad_() for t in (h, r, *vectors)]
    d_merged, d_normed = drawn(n, d, seed=3), drawn(n, d, seed=4, dtype=dtype)

    results = rmsnorm_residual(leaves[0], leaves[1], Vectors(*leaves[2:]), backend=backend)
    gradients = torch.autograd.grad(results, leaves, [d_merged, d_normed])

    doubles = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.autograd.grad(
        formula(doubles[0], doubles[1], doubles[2:]), doubles, [d_merged.double(), d_normed.double()]
    )
    for leaf, gradient, want in zip(leaves, gradients, wanted, strict=True):
        assert gradient.dtype == leaf.dtype
        assert distance(gradient, want) <= tolerance(dtype, n, d)


@every_form
def test_leading_axes_are_kept(backend: str) -> None:
    """[batch, sequence, D] goes in and comes out."""
    h, r, vectors = inputs(6, 32, torch.float32)

    merged, normed = rmsnorm_residual(h.view(2, 3, 32), r.view(2, 3, 32), Vectors(*vectors), backend=backend)

    want, _ = rmsnorm_residual(h, r, Vectors(*vectors), backend="torch")
    assert normed.shape == (2, 3, 32) and distance(merged.view(6, 32), want) <= 8 * 2**-24


@every_form
def test_no_rows_at_all(backend: str) -> None:
    """A rank may have no tokens: gradients of the vectors are then zero, not what memory held."""
    h, r, vectors = inputs(0, 32, torch.float32)
    leaves = [t.requires_grad_() for t in (h, r, *vectors)]

    merged, normed = rmsnorm_residual(h, r, Vectors(*leaves[2:]), backend=backend)
    gradients = torch.autograd.grad((merged.sum() + normed.sum()), leaves)

    assert merged.shape == normed.shape == (0, 32)
    assert all(not gradient.any() for gradient in gradients)


@every_form
def test_the_same_input_gives_the_same_bits(backend: str) -> None:
    """Sums over rows are added in a fixed order."""
    h, r, vectors = inputs(50, 64, torch.float32)
    backward = dispatch.choose("rmsnorm_residual_backward", h.device, backend)
    rstd = formula(h, r, vectors)[0].square().mean(-1).add(EPS).rsqrt()

    first, second = (backward(r, h, h, r, Vectors(*vectors), rstd)[2] for _ in range(2))

    assert torch.equal(first, second)
