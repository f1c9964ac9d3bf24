"""The two ends of the model, cut along the vocabulary: embedding and cross-entropy.

Rows past the vocabulary (padding, so that ranks have equal parts) are never looked up and get no probability.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ckptkit.train.collectives import all_reduce_replicated, gather, reduce_scatter
from ckptkit.train.dims import Dims
from ckptkit.train.parallel import Parallel


def embed(tokens: torch.Tensor, weight: torch.Tensor, dims: Dims, parallel: Parallel) -> torch.Tensor:
    """Embeddings [B, S, D] of this rank's share of `tokens` int64 [B, T], which all `tp` ranks have; `weight` is a part."""
    rows = len(weight)
    at = tokens - parallel.tp.index * rows
    pad = dims.pad_token - parallel.tp.index * rows
    inside = (at >= 0) & (at < rows)
    x = F.embedding(at.clamp(0, rows - 1), weight, pad if 0 <= pad < rows else None)
    return x if parallel.tp.size == 1 else reduce_scatter(x * inside[..., None].to(x.dtype), parallel.tp, 1)


def cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dims: Dims,
    parallel: Parallel,
) -> torch.Tensor:
    """The summed cross-entropy of `targets` int64 [B, T] given normed h [B, S, D]: fp32, the same on every `tp` rank."""
    h = gather(h, parallel.tp, 1)
    logits = F.linear(h, weight, bias).float().flatten(0, 1)
    targets = targets.flatten()
    rows = len(weight)
    first = parallel.tp.index * rows
    real = min(max(dims.vocab - first, 0), rows)
    if parallel.tp.size == 1:
        return F.cross_entropy(logits[:, :real], targets, reduction="sum")
    if real < rows:
        padding = torch.arange(rows, device=logits.device) >= real
        logits = logits.masked_fill(padding, float("-inf"))
    most: Any = logits.detach().amax(1).clamp_min(torch.finfo(torch.float32).min)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=parallel.tp.handle)
    logits = logits - most[:, None]
    at = targets - first
    inside = (at >= 0) & (at < rows)
    mine = logits.gather(1, at.clamp(0, rows - 1)[:, None])[:, 0]
    mine = torch.where(inside, mine, torch.zeros_like(mine))
    parts = torch.stack([logits.exp().sum(1), mine])
    total, chosen = all_reduce_replicated(parts, parallel.tp)
    return (total.log() - chosen).sum()
