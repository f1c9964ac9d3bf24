"""The router of ZAYA1 from its state to dispatch indices: MLP, balancing bias, top-1 of experts and skip.

    g = W3 gelu(W2 gelu(W1 RMSNorm(r) + b1) + b2);  p = softmax(g), fp32
    e = argmax(p + beta);  weight = p[e]                 beta chooses, and takes no part in the weight

The last class is the skip expert where the model has one; here it is a class like the others. Tokens are then
ordered by class, stably, so that an expert's tokens lie together: `order[offsets[e] : offsets[e + 1]]`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch

EPS = 1e-5


@dataclass(frozen=True)
class RouterWeights:
    """Weights of a router of state width R with C classes; all of the state's dtype but `balancing`."""

    norm: torch.Tensor  # [R]
    fc1: torch.Tensor  # [R, R]
    fc1_bias: torch.Tensor  # [R]
    fc2: torch.Tensor  # [R, R]
    fc2_bias: torch.Tensor  # [R]
    out: torch.Tensor  # [C, R]
    balancing: torch.Tensor  # fp32 [C]: beta


class Routes(NamedTuple):
    """Where N tokens go."""

    choice: torch.Tensor  # int32 [N]: class of each token
    weight: torch.Tensor  # fp32 [N]: its probability; carries the gradient
    order: torch.Tensor  # int32 [N]: tokens sorted by class, stably
    position: torch.Tensor  # int32 [N]: place of each token in `order`
    offsets: torch.Tensor  # int32 [C + 1]: where each class begins in `order`


def route(
    state: torch.Tensor, weights: RouterWeights, eps: float = EPS, backend: str | None = None
) -> Routes:
    """Routes tokens, with gradients from `weight` to the state and all weights but `balancing`.

    Args:
        state: Router state r, [N, R]; its projection and depth averaging are the caller's.
        weights: See `RouterWeights`; contiguous.
        eps: Of the norm.
        backend: See `ckptkit.kernels.dispatch`.

    Raises:
        UsageError: Shapes do not fit together.
    """
    r, classes = state.shape[1], weights.out.shape[0]
    shapes = {"norm": (r,), "fc1": (r, r), "fc1_bias": (r,), "fc2": (r, r), "fc2_bias": (r,)}
    shapes |= {"out": (classes, r), "balancing": (classes,)}
    for name, shape in shapes.items():
        if getattr(weights, name).shape != shape:
            raise UsageError(f"router weight {name} is {tuple(getattr(weights, name).shape)}, not {shape}")
    fields = tuple(getattr(weights, name) for name in RouterWeights.__dataclass_fields__)
    result: Any = _Route.apply(state, *fields, eps, backend)
    return Routes(*result)


class _Route(torch.autograd.Function):
    """Backward computes the probabilities again, with matmuls that torch does well; only forward is fused."""

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, *rest: Any) -> Any:
        *fields, eps, backend = rest
        form = dispatch.choose("route", state.device, backend)
        routes = form(state.contiguous(), RouterWeights(*fields), eps)
        ctx.save_for_backward(state, routes.choice, *fields)
        ctx.eps = eps
        ctx.mark_non_differentiable(routes.choice, routes.order, routes.position, routes.offsets)
        return tuple(routes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state, choice, *fields = ctx.saved_tensors
        inputs = [tensor.detach().requires_grad_() for tensor in (state, *fields[:-1])]
        with torch.enable_grad():
            weights = RouterWeights(*[*inputs[1:], fields[-1]])
            p = probabilities(inputs[0], weights, ctx.eps)
            weight = p.gather(1, choice[:, None].long())[:, 0]
        return *torch.autograd.grad(weight, inputs, gradients[1]), None, None, None


def probabilities(state: torch.Tensor, weights: RouterWeights, eps: float = EPS) -> torch.Tensor:
    """Softmax over classes, fp32 [N, C], by torch operations in the dtype of `state`."""
    x = state.float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(state.dtype) * weights.norm
    x = F.gelu(F.linear(x, weights.fc1, weights.fc1_bias))
    x = F.gelu(F.linear(x, weights.fc2, weights.fc2_bias))
    return F.softmax(F.linear(x, weights.out).float(), dim=-1)


def route_torch(state: torch.Tensor, weights: RouterWeights, eps: float = EPS) -> Routes:
    """`route` by torch operations, forward only."""
    p = probabilities(state, weights, eps)
    choice = (p + weights.balancing).argmax(-1)
    weight = p.gather(1, choice[:, None])[:, 0]
    order = torch.argsort(choice, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    counts = (choice[:, None] == torch.arange(p.shape[1], device=p.device)).sum(0)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    return Routes(choice.int(), weight, order.int(), position.int(), offsets.int())
