"""Compressed convolutional attention (CCA, arXiv 2510.04476) as ZAYA1 has it.

Queries and keys of the compressed width pass a depthwise and a per-head causal convolution, keep their means as a residual,
and are normalised to length sqrt(d), keys with a learned temperature. Half of the value heads see the current token, half
the one before.

Under tensor parallelism a rank has its heads of all this. With more ranks than key-value heads, a key-value head is on several
ranks, each with some of its query heads; the mean over a head's queries is then summed over those ranks.

Shapes: B batch, T tokens of this cp coordinate, S tokens of this rank, D hidden, d of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ckptkit.train.collectives import all_reduce, gather, reduce_scatter
from ckptkit.train.context import Context, rotary, rotate
from ckptkit.train.dims import Dims
from ckptkit.train.parallel import Parallel


class Attention:
    """The attention of every layer of a stage: sizes, groups and rotary tables, no weights."""

    def __init__(self, dims: Dims, parallel: Parallel, context: Context, dtype: torch.dtype) -> None:
        self.dims, self.context, self.tp = dims, context, parallel.tp
        tp = parallel.tp.size
        self.heads = dims.heads // tp
        self.kv_heads = max(1, dims.kv_heads // tp)
        self.first_kv = parallel.tp.index * dims.kv_heads // tp
        shared = max(1, tp // dims.kv_heads)  # ranks that have the same key-value head
        self.same_kv = parallel.neighbours(shared)
        self.tables = {
            theta: rotary(context.positions, theta, dims.rotary, dtype) for theta in sorted(set(dims.thetas))
        }

    def __call__(self, x: torch.Tensor, w: Any, layer: int) -> torch.Tensor:
        """Attention of x [B, S, D] with the weights `w` of `layer`; returns [B, S, D]."""
        dims, heads, kv = self.dims, self.heads, self.kv_heads
        x = gather(x, self.tp, 1)
        b, t, _ = x.shape
        p = w.qkv_proj
        q0, k0 = F.linear(x, p.q_proj.weight, bias(p.q_proj)), F.linear(x, p.k_proj.weight, bias(p.k_proj))
        c = torch.cat([q0, k0], -1)
        late, delayed = self._values(x, p.v_proj_current, 0), self._values(x, p.v_proj_delayed, 1)
        taps0, taps1 = p.conv_qk_depthwise.weight.shape[-1], p.conv_qk_grouped.weight.shape[-1]
        history = taps0 + taps1 - 2
        rows = max(history, 1)
        known = self.context.with_history(self.context.split(torch.cat([c, delayed], -1)), rows)
        z = self._convolve(
            known[:, :, rows - history :, : c.shape[-1]], p.conv_qk_depthwise, p.conv_qk_grouped
        )
        z = self.context.join(z)
        delayed = self.context.join(known[:, :, rows - 1 : -1, c.shape[-1] :])
        if (
            (start := bias(p.v_proj_delayed)) is not None
            and self.context.chunks[0] == 0
            and delayed.shape[-1]
        ):
            # Before the first token there is a projection of zeros: the bias.
            first = start[self._rows(1)].expand(b, 1, -1)
            delayed = torch.cat([first, delayed[:, 1:]], 1)
        v = torch.cat([late, delayed], -1).view(b, t, kv, dims.head_dim)

        q0, k0 = q0.view(b, t, kv, -1, dims.head_dim), k0.view(b, t, kv, 1, dims.head_dim)
        mean = all_reduce(q0.sum(3), self.same_kv) / (dims.heads // dims.kv_heads)
        q = z[..., : heads * dims.head_dim].view(q0.shape) + (q0 + k0) * 0.5
        k = z[..., heads * dims.head_dim :].view(v.shape) + (mean + k0[:, :, :, 0]) * 0.5
        cos, sin = self.tables[dims.thetas[layer]]
        q = rotate(_unit(q).view(b, t, heads, dims.head_dim), cos, sin)
        k = rotate(_unit(k) * w.qk_norm.temp[:, None], cos, sin)
        a = self.context.attend(q, k, v, dims.windows[layer])
        out = reduce_scatter(F.linear(a.reshape(b, t, -1), w.o_proj.weight), self.tp, 1)
        extra = bias(w.o_proj)
        return out if extra is None else out + extra

    def _rows(self, half: int) -> slice:
        """Rows of a value projection that this rank's heads see; half 0 is the current, 1 the delayed token.

        Value channels are those of the current token, then those of the delayed; heads are cut from both in a row.
        """
        width = self.dims.kv_heads * self.dims.head_dim // 2
        first = self.first_kv * self.dims.head_dim - half * width
        return slice(
            min(max(first, 0), width), min(max(first + self.kv_heads * self.dims.head_dim, 0), width)
        )

    def _values(self, x: torch.Tensor, projection: Any, half: int) -> torch.Tensor:
        rows, extra = self._rows(half), bias(projection)
        return F.linear(x, projection.weight[rows], None if extra is None else extra[rows])

    def _convolve(self, c: torch.Tensor, depthwise: Any, grouped: Any) -> torch.Tensor:
        """Both convolutions of c [chunks, B, length + history, channels]; the history is used up.

        Between them nothing is padded: before a sequence's start the depthwise one sees zeros and gives its bias.
        """
        d = self.dims.head_dim
        taps = depthwise.weight.shape[-1]
        length = c.shape[2] - taps + 1
        u = depthwise.bias
        for tap in range(taps):
            u = u + c[:, :, tap : tap + length] * depthwise.weight[:, 0, tap]
        taps = grouped.weight.shape[-1]
        length = length - taps + 1
        u = u.unflatten(-1, (-1, d))
        filters = grouped.weight.view(-1, d, d, taps)
        z = grouped.bias.view(-1, d)
        for tap in range(taps):
            z = z + torch.einsum("nbthi,hoi->nbtho", u[:, :, tap : tap + length], filters[..., tap])
        return z.flatten(-2)


def bias(module: Any) -> torch.Tensor | None:
    """The bias of a linear layer, None where the model has none."""
    return getattr(module, "bias", None)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x with its last axis brought to length sqrt(d)."""
    return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).eps))
