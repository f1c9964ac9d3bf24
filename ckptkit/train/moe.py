"""The mixture of experts of ZAYA1: its router, which keeps a state over layers, and experts on the ranks of an `ep` group.

    r_l = y Wdn^T + bdn + gamma_l r_(l-1)          the state, handed to the next layer with gradients
    choice, weight = route(r_l)                    MLP, softmax over experts and skip, balancing bias, top-1
    m = weight * Wdown silu(gate) up

Nothing is dropped: a rank sends each token to the rank of its expert and gets the result back. Tokens that chose the skip
expert stay. Shapes: N tokens of this rank, D hidden, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ckptkit.kernels.router import RouterWeights, route
from ckptkit.train.cca import bias
from ckptkit.train.collectives import all_to_all, exchange
from ckptkit.train.dims import Dims
from ckptkit.train.parallel import Parallel


class Mixture:
    """Routing and experts of every layer of a stage: sizes and groups, no weights.

    Args:
        skip: `zero` or `identity`: what a token that chose the skip expert gets.
        kernels: Which form of the router's kernel; None to choose by device.
    """

    def __init__(self, dims: Dims, parallel: Parallel, skip: str, kernels: str | None = None) -> None:
        self.dims, self.ep, self.skip, self.kernels = dims, parallel.ep, skip, kernels

    def __call__(
        self, y: torch.Tensor, state: torch.Tensor | None, w: Any, load: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' output for y [B, S, D], and the router's new state [B, S, R].

        Args:
            y: Normed input.
            state: The router state of the layer before; None in the first.
            w: Weights of the layer's mixture.
            load: int64 [E + 1], to which the number of tokens of each class is added; None to count nothing.
        """
        gate = w.gate
        r = F.linear(y, gate.down_proj.weight, bias(gate.down_proj))
        if state is not None:
            r = r + state * gate.router_states_scale
        mlp = gate.router_mlp
        weights = RouterWeights(
            mlp.norm.weight, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias, mlp.out_proj.weight,
            gate.balancing_biases,
        )  # fmt: skip
        routes = route(r.flatten(0, -2), weights, self.dims.eps, self.kernels)
        counts = routes.offsets.diff().long()
        if load is not None:
            load += counts
        x = Permute.apply(y.flatten(0, -2), routes.order.long(), routes.position.long())
        counts = counts[:-1]
        kept = counts.tolist()
        routed, skipped = x[: sum(kept)], x[sum(kept) :]
        result = [
            self._dispatched(routed, counts, kept, w.experts),
            skipped if self.skip == "identity" else skipped * 0,
        ]
        m = Permute.apply(torch.cat(result), routes.position.long(), routes.order.long())
        m = m * routes.weight[:, None].to(m.dtype)
        return m.view(y.shape), r

    def _dispatched(self, x: torch.Tensor, counts: torch.Tensor, kept: list[int], w: Any) -> torch.Tensor:
        """Experts' output for x, rows of which are sorted by expert; `counts` [E] is how many each has."""
        if self.ep.size == 1:
            return experts(x, kept, w)
        ones = [self.dims.experts // self.ep.size] * self.ep.size
        incoming = exchange(counts, ones, ones, self.ep).view(self.ep.size, -1)  # [from rank, local expert]
        sent = counts.view(self.ep.size, -1).sum(1).tolist()
        received = incoming.sum(1).tolist()
        x = all_to_all(x, sent, received, self.ep)
        # Rows come by rank, and by expert within each; experts want all of theirs together.
        expert = torch.arange(incoming.shape[1], device=x.device).repeat(self.ep.size)
        order = torch.argsort(expert.repeat_interleave(incoming.flatten()), stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        x = Permute.apply(x, order, back)
        x = experts(x, incoming.sum(0).tolist(), w)
        return all_to_all(Permute.apply(x, back, order), received, sent, self.ep)


def experts(x: torch.Tensor, counts: list[int], w: Any) -> torch.Tensor:
    """Each expert's gated MLP on its rows of x [N, D]: the first `counts[0]` are the first expert's, and so on."""
    if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x, w.gate_up_proj.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, w.down_proj.mT, offs=ends)
    results = []
    # unbind: its backward stacks the experts' gradients, where indexing would make a whole stack for each.
    for rows, gate_up, down in zip(
        x.split(counts), w.gate_up_proj.unbind(0), w.down_proj.unbind(0), strict=True
    ):
        gate, up = F.linear(rows, gate_up).chunk(2, -1)
        results.append(F.linear(F.silu(gate) * up, down))
    return torch.cat(results)


class Permute(torch.autograd.Function):
    """Rows in another order. The backward reads by the inverse order, where indexing would add by atomics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (back,) = ctx.saved_tensors
        return gradients[0][back], None, None
