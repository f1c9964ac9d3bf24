"""AdamW over many tensors in one launch, with fp32 state and, where weights are narrower, fp32 masters.

    m <- m + (1 - beta1) (g - m);  v <- beta2 v + (1 - beta2) g^2
    p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

as `torch.optim.AdamW` has it; g is the gradient times `grad_scale`, a value on the device (clipping needs no
synchronisation). An `AdamWTable` holds the tensors' addresses and is made once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch

CHUNK = 1024  # elements of one program


@dataclass(frozen=True)
class Hyper:
    """One group's settings at one step; `step` counts from 1."""

    lr: float
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    @property
    def rate(self) -> float:
        """lr / (1 - beta1^t)."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """1 / sqrt(1 - beta2^t)."""
        return float((1 - self.beta2**self.step) ** -0.5)


class AdamWTable:
    """Tensors that one launch updates.

    Args:
        params: Weights: all fp32, or all bf16 with `masters`.
        grads: Gradients, same shapes, all of one dtype; they must stay where they are.
        exp_avgs: First moments, fp32.
        exp_avg_sqs: Second moments, fp32.
        masters: fp32 weights, of which `params` are roundings; None where `params` are fp32 themselves.

    Raises:
        UsageError: Lists of unequal lengths, a tensor not contiguous, or dtypes and sizes that do not go together.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.params, self.grads = [p.detach() for p in params], list(grads)
        self.exp_avgs, self.exp_avg_sqs = list(exp_avgs), list(exp_avg_sqs)
        self.masters = None if masters is None else [master.detach() for master in masters]
        weights = self.params if self.masters is None else self.masters
        columns = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, weights]
        if not self.params or len({len(column) for column in columns}) != 1:
            raise UsageError(
                "AdamW needs tensors, each with a gradient and two moments (and a master, or none)"
            )
        for position, row in enumerate(zip(*columns, strict=True)):
            p, g, m, v, w = row
            fits = len({t.numel() for t in row}) == 1 and len({t.device for t in row}) == 1
            fits &= all(t.is_contiguous() for t in row) and {m.dtype, v.dtype, w.dtype} == {torch.float32}
            fits &= p.dtype == self.params[0].dtype and g.dtype == self.grads[0].dtype
            if not fits:
                raise UsageError(
                    f"tensor {position} of shape {tuple(p.shape)}: parameter, gradient, moments and master must be "
                    "contiguous, of one size and device; moments and master fp32; parameters of one dtype, gradients too"
                )
        self.device = self.params[0].device
        self.aligned = all(t.data_ptr() % 16 == 0 for column in columns for t in column)
        sizes = np.array([p.numel() for p in self.params])
        chunks = -(-sizes // CHUNK)
        owner = np.repeat(np.arange(len(sizes)), chunks)
        first = (np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * CHUNK
        # One row a chunk: the five addresses, and how many elements.
        rows = [
            np.array([t.data_ptr() for t in column])[owner] + first * column[0].element_size()
            for column in columns
        ]
        rows.append(np.minimum(sizes[owner] - first, CHUNK))
        self.chunks = torch.from_numpy(np.stack(rows, 1)).to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes that one step must move: gradients read; weights and moments read and written; masters' copies written."""
        total = 0
        for p, g in zip(self.params, self.grads, strict=True):
            copy = 0 if self.masters is None else p.nbytes
            total += g.nbytes + 24 * p.numel() + copy
        return total


def adamw_step(
    table: AdamWTable, hyper: Hyper, grad_scale: torch.Tensor | None = None, backend: str | None = None
) -> None:
    """Updates weights and moments of `table` in place.

    Args:
        table: What to update.
        hyper: With what settings.
        grad_scale: fp32 scalar on the device, by which gradients are multiplied; None for 1.
        backend: See `ckptkit.kernels.dispatch`.
    """
    dispatch.choose("adamw_step", table.device, backend)(table, hyper, grad_scale)


def adamw_step_torch(table: AdamWTable, hyper: Hyper, grad_scale: torch.Tensor | None = None) -> None:
    """`adamw_step` by torch operations, tensor by tensor."""
    weights = table.params if table.masters is None else table.masters
    columns = zip(table.params, table.grads, table.exp_avgs, table.exp_avg_sqs, weights, strict=True)
    for p, g, m, v, w in columns:
        g = g.float() if grad_scale is None else g.float() * grad_scale
        m.lerp_(g.view_as(m), 1 - hyper.beta1)
        v.mul_(hyper.beta2).addcmul_(g.view_as(v), g.view_as(v), value=1 - hyper.beta2)
        denominator = v.sqrt().mul_(hyper.root).add_(hyper.eps)
        w.mul_(1 - hyper.lr * hyper.weight_decay)
        w.addcdiv_(m.view_as(w), denominator.view_as(w), value=-hyper.rate)
        if table.masters is not None:
            p.copy_(w.view_as(p))
