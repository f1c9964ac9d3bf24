"""Collectives that carry gradients. Over a group of one each is the identity, and calls nothing.

`gather` and `reduce_scatter` are each other's backward: what was read by every rank gets the sum of every rank's gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.train.parallel import Group

# Renamed in torch 2.13; the old names warn there, and the new ones are unknown before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_flat(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's `x` one after the other, along a new first axis; without gradients."""
    x = x.contiguous()
    out = x.new_empty(group.size * x.numel())
    _all_gather(out, x.view(-1), group=group.handle)
    return out.view(group.size, *x.shape)


def reduce_scatter_flat(x: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's part of the sum of `x` [size, ...] over the group; without gradients."""
    x = x.contiguous()
    if out is None:
        out = torch.empty_like(x[0])
    _reduce_scatter(out.view(-1), x.view(-1), group=group.handle)
    return out


def gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Every rank's `x` joined along `dim`, in the order of ranks."""
    return x if group.size == 1 else _Gather.apply(x, group, dim)


def reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The sum of every rank's `x`, of which each rank gets its equal part along `dim`."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group, dim)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group of values that every rank then uses in its own way: gradients are summed, too."""
    return x if group.size == 1 else _AllReduce.apply(x, group, True)


def all_reduce_replicated(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group of values that every rank then uses in the same way: the gradient is already whole."""
    return x if group.size == 1 else _AllReduce.apply(x, group, False)


def all_to_all(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
    """Rows of `x` to other ranks: `sent[r]` to rank r, in order; `received[r]` come from it."""
    return x if group.size == 1 else _AllToAll.apply(x, list(sent), list(received), group)


def exchange(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
    """`all_to_all` without gradients."""
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group.handle)
    return out


def _gather_along(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return torch.cat(gather_flat(x, group).unbind(0), dim)


def _scatter_along(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return reduce_scatter_flat(torch.stack(x.chunk(group.size, dim)), group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather_along(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _scatter_along(gradients[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _scatter_along(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gather_along(gradients[0], ctx.group, ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, partial: bool) -> torch.Tensor:
        ctx.group, ctx.partial = group, partial
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group.handle)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d = gradients[0]
        if ctx.partial:
            d = d.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(d, group=ctx.group.handle)
        return d, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: Group
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None
