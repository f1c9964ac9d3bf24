"""Context parallel: who has which tokens of a sequence, and what attention needs from the others.

A sequence is cut in `2 cp` chunks; rank i has chunks i and `2 cp - 1 - i`, so that every rank attends to equally many
tokens. Keys and values, an eighth of the width of queries in ZAYA1, are gathered; the causal convolutions and the delayed
values need the last rows of the chunk before.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from ckptkit.core.layouts import Layout
from ckptkit.errors import LayoutError
from ckptkit.train.collectives import gather
from ckptkit.train.parallel import Parallel


class Context:
    """The tokens of one rank's group: those of its `cp` coordinate, which its `tp` ranks share.

    Attributes:
        chunks: Which of the sequence's chunks are here, in order.
        length: Tokens of one chunk.
        positions: Position of every token here in the sequence, int64 [tokens].
    """

    def __init__(self, parallel: Parallel, seq_len: int) -> None:
        cp = parallel.cp
        self.cp = cp
        count = 1 if cp.size == 1 else 2
        check(parallel.layout, seq_len)
        self.length = seq_len // (cp.size * count)
        self.chunks = [0] if count == 1 else [cp.index, 2 * cp.size - 1 - cp.index]
        self.positions = torch.cat(
            [torch.arange(g * self.length, (g + 1) * self.length) for g in self.chunks]
        ).to(parallel.device)
        self.tokens = len(self.positions)
        # Gathered chunks come by rank: slot[g] is where chunk g is.
        self.slot = (
            [0]
            if count == 1
            else [min(g, 2 * cp.size - 1 - g) * 2 + (g >= cp.size) for g in range(2 * cp.size)]
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[B, tokens, ...] as [chunks, B, length, ...]."""
        return torch.stack(x.split(self.length, 1)) if len(self.chunks) > 1 else x[None]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes `split`."""
        return torch.cat(x.unbind(0), 1)

    def with_history(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Chunks [chunks, B, length, C] with the `rows` rows before each in front; zeros before the sequence's start."""
        nothing = torch.zeros_like(x[:1, :, :rows])
        if self.cp.size == 1:
            return torch.cat([nothing, x], 2)
        tails = torch.cat([nothing, gather(x[:, :, -rows:], self.cp, 0)])
        before = [0 if g == 0 else 1 + self.slot[g - 1] for g in self.chunks]
        return torch.cat([tails[before], x], 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        """Causal attention of the queries here to all tokens of the sequence before them.

        Args:
            q: [B, tokens, heads, d].
            k: [B, tokens, kv heads, d], and v likewise.
            window: Tokens that one attends to, itself included; 0 for all.

        Returns:
            [B, tokens, heads, d].
        """
        both = torch.stack([k, v])
        if self.cp.size > 1:
            pairs = gather(
                torch.stack(both.split(self.length, 2)), self.cp, 0
            )  # [chunks of all ranks, 2, B, length, ...]
            both = torch.cat(pairs[self.slot].unbind(0), 2)
        keys, values = both.transpose(2, 3)  # [B, kv heads, sequence, d]
        results = []
        for g, part in zip(self.chunks, q.transpose(1, 2).split(self.length, 2), strict=True):
            stop = (g + 1) * self.length
            start = max(0, g * self.length - window + 1) if window else 0
            seen = slice(start, stop)
            mask = self._mask(part, g * self.length, start, stop, window)
            results.append(
                F.scaled_dot_product_attention(
                    part,
                    keys[:, :, seen],
                    values[:, :, seen],
                    attn_mask=mask,
                    is_causal=mask is None,
                    enable_gqa=True,
                )
            )
        return torch.cat(results, 2).transpose(1, 2)

    def _mask(self, q: torch.Tensor, first: int, start: int, stop: int, window: int) -> torch.Tensor | None:
        """Which keys [start, stop) the queries from position `first` on see. None means plain causal."""
        if not window:
            return None if stop - start == self.length else causal_lower_right(self.length, stop - start)
        at = torch.arange(first, stop, device=q.device)[:, None]
        key = torch.arange(start, stop, device=q.device)[None]
        return (key <= at) & (key > at - window)


def check(layout: Layout, seq_len: int) -> None:
    """Raise LayoutError where a sequence cannot be cut for a layout."""
    chunks = 1 if layout.cp == 1 else 2 * layout.cp
    if seq_len % (chunks * layout.tp) or (layout.cp > 1 and seq_len // chunks < 2):
        raise LayoutError(
            f"layout {layout} cannot cut a sequence of {seq_len} tokens: cp={layout.cp} makes {chunks} chunks, which tp="
            f"{layout.tp} shares; make [train] seq_len a multiple of {chunks * layout.tp}"
            + (f", and at least {2 * chunks}" if layout.cp > 1 else "")
        )


def rotary(
    positions: torch.Tensor, theta: float, rotated: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, rotated] of the rotary embedding; pairs are (i, i + rotated / 2)."""
    exponent = torch.arange(0, rotated, 2, dtype=torch.float, device=positions.device) / rotated
    angles = positions[:, None].float() * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dimensions of every head of x [B, tokens, heads, d]."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)
