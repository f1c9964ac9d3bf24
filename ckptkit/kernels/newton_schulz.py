"""Muon's orthogonalisation: five Newton–Schulz steps on a matrix, or a stack of them, in bf16.

    X = u / max(|u|, 1e-7), transposed where it has more rows than columns
    five times:  A = X X^T;  X <- a X + (b A + c A^2) X            (a, b, c) = (3.4445, -4.7750, 2.0315)

A and A^2 are symmetric, so that a kernel computes the tiles on and under the diagonal and mirrors them: a square
matrix then takes 4 n^3 operations a step instead of 6 n^3. The rule is that of Keller Jordan's Muon and of
`torch.optim.Muon`.
"""

import torch

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
STEPS = 5


def newton_schulz(
    update: torch.Tensor,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> torch.Tensor:
    """Brings the singular values of every matrix of `update` near 1.

    Args:
        update: [..., rows, columns], any float dtype.
        steps: How many steps.
        coefficients: a, b and c above.
        eps: Least norm that a matrix is divided by.
        dtype: Of the products' operands and of the result; sums are fp32.
        backend: See `ckptkit.kernels.dispatch`.

    Returns:
        Shape of `update`, in `dtype`. Rows and columns may have another order of strides.

    Raises:
        UsageError: `update` has fewer than two axes.
    """
    if update.ndim < 2:
        raise UsageError(f"Newton–Schulz is for matrices, not for a tensor of shape {tuple(update.shape)}")
    form = dispatch.choose("newton_schulz", update.device, backend)
    result: torch.Tensor = form(update, steps, coefficients, eps, dtype)
    return result


def prepare(update: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """`update` divided by its norms, wide, contiguous, [matrices, rows, columns] in `dtype`."""
    wide = update if update.shape[-2] <= update.shape[-1] else update.mT
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True, dtype=torch.float32).clamp_(min=eps)
    x = torch.empty(wide.shape, dtype=dtype, device=update.device)
    torch.div(wide.float(), norm, out=x)
    return x.view(-1, *wide.shape[-2:])


def restore(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undoes the shape of `prepare`."""
    if shape[-2] <= shape[-1]:
        return x.view(shape)
    return x.view(*shape[:-2], shape[-1], shape[-2]).mT


def newton_schulz_torch(
    update: torch.Tensor,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The plain matmul form."""
    a, b, c = coefficients
    x = prepare(update, eps, dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return restore(x, update.shape)


def newton_schulz_fused_torch(
    update: torch.Tensor,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The matmul form with the sums inside the products (`baddbmm`), as `torch.optim.Muon` has it: a second yardstick."""
    a, b, c = coefficients
    x = prepare(update, eps, dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return restore(x, update.shape)
