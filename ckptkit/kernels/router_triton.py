"""The router in two Triton launches: MLP to choice with counts per tile, then a stable scatter.

The first keeps a tile of tokens on chip through all three layers: the hidden units of layer 1 are made CHUNK at a
time and spent at once on layer 2, so that neither layer's activations are ever sliced or stored. The second adds up
the tiles' counts itself; no atomics, so that the order is the same every time.
"""

from typing import Any

import torch

from ckptkit.kernels._triton import tl, triton
from ckptkit.kernels.router import EPS, RouterWeights, Routes

MLP = {"TOKENS": 128, "CHUNK": 64, "num_warps": 8, "num_stages": 1}
MLP_HIP = {"TOKENS": 64, "CHUNK": 32, "num_warps": 4, "num_stages": 1}
SCATTER_TOKENS = 256


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def mlp_kernel(
    state,  # [n, r]
    norm,  # weights, see RouterWeights
    fc1,
    fc1_bias,
    fc2,
    fc2_bias,
    out,
    balancing,  # fp32 [classes]
    choice,  # out: int32 [n]
    weight,  # out: fp32 [n]
    counts,  # out: int32 [tiles, CLASSES]
    n,
    r,
    classes,
    eps,
    R: tl.constexpr,  # r and classes, rounded up to powers of two
    CLASSES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,  # of dots: "ieee" for fp32 states
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    unit = tl.arange(0, R)
    kind = state.dtype.element_ty
    known = unit < r
    live = token < n
    here = live[:, None] & known[None, :]
    x = tl.load(state + token[:, None].to(tl.int64) * r + unit[None, :], mask=here, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / r + eps)
    gain = tl.load(norm + unit, mask=known, other=0).to(tl.float32)
    x = ((x * scale[:, None]).to(kind).to(tl.float32) * gain[None, :]).to(kind)
    hidden = tl.zeros([TOKENS, R], tl.float32)
    for first in range(0, R, CHUNK):
        part = first + tl.arange(0, CHUNK)
        real = part < r
        # [R, CHUNK]: the transpose of rows `part` of fc1; and [CHUNK, R]: that of columns `part` of fc2.
        w1 = tl.load(fc1 + part[None, :] * r + unit[:, None], mask=real[None, :] & known[:, None], other=0)
        w2 = tl.load(fc2 + unit[None, :] * r + part[:, None], mask=real[:, None] & known[None, :], other=0)
        bias = tl.load(fc1_bias + part, mask=real, other=0).to(tl.float32)
        a = tl.dot(x, w1, input_precision=PRECISION) + bias[None, :]
        hidden = tl.dot(_gelu(a).to(kind), w2, hidden, input_precision=PRECISION)
    bias = tl.load(fc2_bias + unit, mask=known, other=0).to(tl.float32)
    hidden = _gelu(hidden + bias[None, :])
    label = tl.arange(0, CLASSES)
    real = label < classes
    w3 = tl.load(out + label[None, :] * r + unit[:, None], mask=real[None, :] & known[:, None], other=0)
    logits = tl.dot(hidden.to(kind), w3, input_precision=PRECISION)
    logits = tl.where(real[None, :], logits, float("-inf"))
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    beta = tl.load(balancing + label, mask=real, other=float("-inf"))
    best = tl.argmax(p + beta[None, :], 1, tie_break_left=True)
    chosen = (label[None, :] == best[:, None]) & live[:, None]
    tl.store(choice + token, best, mask=live)
    tl.store(weight + token, tl.sum(tl.where(chosen, p, 0.0), 1), mask=live)
    tl.store(counts + tl.program_id(0) * CLASSES + label, tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def scatter_kernel(
    choice,  # int32 [n]
    counts,  # int32 [tiles, CLASSES], for tiles of TILE tokens
    order,  # out: int32 [n]
    position,  # out: int32 [n]
    offsets,  # out: int32 [classes + 1]
    n,
    tiles,
    classes,
    CLASSES: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,  # a multiple of TILE
    ROWS: tl.constexpr,  # rows of `counts` added at once
):
    label = tl.arange(0, CLASSES)
    mine = tl.program_id(0) * (TOKENS // TILE)  # tiles before this program's tokens
    total = tl.zeros([ROWS, CLASSES], tl.int32)
    before = tl.zeros([ROWS, CLASSES], tl.int32)
    for first in range(0, tiles, ROWS):
        row = first + tl.arange(0, ROWS)
        block = tl.load(
            counts + row[:, None] * CLASSES + label[None, :], mask=(row < tiles)[:, None], other=0
        )
        total += block
        before += tl.where((row < mine)[:, None], block, 0)
    sizes = tl.sum(total, 0)
    ends = tl.cumsum(sizes, 0)
    base = ends - sizes + tl.sum(before, 0)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < n
    own = tl.load(choice + token, mask=live, other=-1)
    mark = (label[None, :] == own[:, None]).to(tl.int32)
    place = tl.cumsum(mark, 0) - 1 + base[None, :]
    place = tl.sum(tl.where(mark > 0, place, 0), 1)
    tl.store(order + place, token, mask=live)
    tl.store(position + token, place, mask=live)
    if tl.program_id(0) == 0:
        tl.store(offsets + 1 + label, ends, mask=label < classes)
        tl.store(offsets + label, ends * 0, mask=label == 0)


def constants(fp32: bool, r: int, classes: int, tuning: dict[str, int]) -> dict[str, Any]:
    """The constants and options of `mlp_kernel` for states of width `r`."""
    width = max(16, triton.next_power_of_2(r))
    options: dict[str, Any] = dict(tuning)
    if fp32:  # operands of twice the size: tiles of half the size
        options |= {"TOKENS": 32, "CHUNK": 32, "num_stages": 1}
    options["CHUNK"] = min(options["CHUNK"], width)
    labels = max(16, triton.next_power_of_2(classes))
    tokens, chunk = options.pop("TOKENS"), options.pop("CHUNK")
    shape = {"R": width, "CLASSES": labels, "TOKENS": tokens, "CHUNK": chunk}
    return {**shape, "PRECISION": "ieee" if fp32 else "tf32", **options}


def route(
    state: torch.Tensor, weights: RouterWeights, eps: float = EPS, tuning: dict[str, int] | None = None
) -> Routes:
    """See `ckptkit.kernels.router.route`; forward only."""
    (n, r), classes, w = state.shape, weights.out.shape[0], weights
    tuning = tuning or (MLP_HIP if torch.version.hip else MLP)
    options = constants(state.dtype == torch.float32, r, classes, tuning)
    tiles = triton.cdiv(n, options["TOKENS"])
    whole: dict[str, Any] = {"dtype": torch.int32, "device": state.device}
    choice, order, position = (torch.empty(n, **whole) for _ in range(3))
    weight = torch.empty(n, dtype=torch.float32, device=state.device)
    counts = torch.empty(tiles, options["CLASSES"], **whole)
    offsets = torch.zeros(classes + 1, **whole)
    if n:
        mlp_kernel[(tiles,)](
            state,
            w.norm,
            w.fc1,
            w.fc1_bias,
            w.fc2,
            w.fc2_bias,
            w.out,
            w.balancing,
            choice,
            weight,
            counts,
            n,
            r,
            classes,
            eps,
            **options,
        )
        scatter_kernel[(triton.cdiv(n, SCATTER_TOKENS),)](
            choice,
            counts,
            order,
            position,
            offsets,
            n,
            tiles,
            classes,
            CLASSES=options["CLASSES"],
            TILE=options["TOKENS"],
            TOKENS=SCATTER_TOKENS,
            ROWS=64,
            num_warps=8,
        )
    return Routes(choice, weight, order, position, offsets)
