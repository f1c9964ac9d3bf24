"""Residual scaling and RMSNorm in one pass, forward and backward: the joint between ZAYA1's half-layers.

    residual' = (hidden + hidden_bias) * hidden_scale + (residual + residual_bias) * residual_scale       fp32
    normed    = weight * cast(x * rsqrt(mean(x^2) + eps)),   x = cast(residual')            in hidden's dtype

The residual stream stays fp32. Sums are fp32 whatever the vectors' dtype: equal to Transformers' ZAYA in fp32, and
within a rounding of it in bf16, where that adds the bias before it promotes.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.kernels import dispatch

EPS = 1e-5


@dataclass(frozen=True)
class Vectors:
    """The five learned vectors [D], in any float dtype."""

    hidden_scale: torch.Tensor
    hidden_bias: torch.Tensor
    residual_scale: torch.Tensor
    residual_bias: torch.Tensor
    weight: torch.Tensor


def rmsnorm_residual(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    vectors: Vectors,
    eps: float = EPS,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges a half-layer's output into the residual stream and normalises it for the next, with gradients.

    Args:
        hidden: Output of attention or MoE, [..., D], bf16 or fp32.
        residual: The stream so far, [..., D], fp32.
        vectors: Scales, biases and the norm's weight.
        eps: Added to the mean square.
        backend: See `ckptkit.kernels.dispatch`.

    Returns:
        The new stream [..., D] in fp32, and its norm [..., D] in the dtype of `hidden`.
    """
    result: Any = _RmsNormResidual.apply(hidden, residual, *_fields(vectors), eps, backend)
    return result[0], result[1]


def _fields(vectors: Vectors) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(vectors, name) for name in Vectors.__dataclass_fields__)


class _RmsNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, residual: torch.Tensor, *rest: Any) -> Any:
        *fields, eps, backend = rest
        shape, vectors = hidden.shape, Vectors(*fields)
        hidden = hidden.reshape(-1, shape[-1]).contiguous()
        residual = residual.reshape(-1, shape[-1]).contiguous()
        form = dispatch.choose("rmsnorm_residual_forward", hidden.device, backend)
        merged, normed, rstd = form(hidden, residual, vectors, eps)
        ctx.save_for_backward(hidden, residual, rstd, *fields)
        ctx.backend = backend
        return merged.view(shape), normed.view(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, residual, rstd, *fields = ctx.saved_tensors
        shape = gradients[0].shape
        d_merged, d_normed = (gradient.reshape(hidden.shape).contiguous() for gradient in gradients)
        form = dispatch.choose("rmsnorm_residual_backward", hidden.device, ctx.backend)
        d_hidden, d_residual, d_vectors = form(d_merged, d_normed, hidden, residual, Vectors(*fields), rstd)
        d_fields = (d.to(field.dtype) for d, field in zip(d_vectors, fields, strict=True))
        return d_hidden.view(shape), d_residual.view(shape), *d_fields, None, None


def _merge(hidden: torch.Tensor, residual: torch.Tensor, vectors: Vectors) -> torch.Tensor:
    v = vectors
    scaled = (hidden.float() + v.hidden_bias.float()) * v.hidden_scale.float()
    return scaled + (residual + v.residual_bias.float()) * v.residual_scale.float()


def forward_torch(
    hidden: torch.Tensor, residual: torch.Tensor, vectors: Vectors, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass by torch operations.

    Args:
        hidden: [N, D].
        residual: [N, D], fp32.
        vectors: See `Vectors`.
        eps: Added to the mean square.

    Returns:
        The new stream (fp32) and its norm (dtype of `hidden`), [N, D]; 1 / rms, fp32 [N], for the backward pass.
    """
    merged = _merge(hidden, residual, vectors)
    x = merged.to(hidden.dtype).float()
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    normed = vectors.weight.float() * (x * rstd[:, None]).to(hidden.dtype).float()
    return merged, normed.to(hidden.dtype), rstd


def backward_torch(
    d_merged: torch.Tensor,
    d_normed: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    vectors: Vectors,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass by torch operations, from the forward pass's inputs; the stream is computed again.

    Args:
        d_merged: Gradient of the new stream, fp32 [N, D].
        d_normed: Gradient of its norm, [N, D] in the dtype of `hidden`.
        hidden: As in the forward pass.
        residual: As in the forward pass.
        vectors: As in the forward pass.
        rstd: From the forward pass.

    Returns:
        Gradients of `hidden` (its dtype) and `residual` (fp32), and of the five vectors, fp32 [5, D].
    """
    v = vectors
    x = _merge(hidden, residual, v).to(hidden.dtype).float() * rstd[:, None]
    dy = d_normed.float()
    t = dy * v.weight.float()
    d = d_merged + rstd[:, None] * (t - x * (t * x).mean(-1, keepdim=True))
    total = d.sum(0)
    d_vectors = torch.stack(
        [
            (d * (hidden.float() + v.hidden_bias.float())).sum(0),
            total * v.hidden_scale.float(),
            (d * (residual + v.residual_bias.float())).sum(0),
            total * v.residual_scale.float(),
            (dy * x.to(hidden.dtype).float()).sum(0),
        ]
    )
    return (d * v.hidden_scale.float()).to(hidden.dtype), d * v.residual_scale.float(), d_vectors
