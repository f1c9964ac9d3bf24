"""Residual scaling and RMSNorm in Triton.

A program walks over rows with the five vectors in registers, so that they are read once a program and not once a
row. The backward pass also sums the vectors' gradients over its rows; a second, small launch adds the programs'
sums in a fixed order, so that gradients repeat bit by bit.
"""

import torch

from ckptkit.kernels._triton import tl, triton
from ckptkit.kernels.rmsnorm import EPS, Vectors

# By the width of rows: programs per multiprocessor and a program's shape; measured, see docs/kernels.md. VECTOR is how
# many neighbouring values a thread takes: with 4 (16 bytes of fp32, 8 of bf16) all loads and stores agree and nothing is
# shuffled.
FORWARD = {
    2048: {"PER_SM": 32, "ROWS": 4, "VECTOR": 4, "HOLD": 1, "num_warps": 8},
    4096: {"PER_SM": 32, "ROWS": 4, "VECTOR": 4, "HOLD": 1, "num_warps": 16},
}
BACKWARD = {
    2048: {"PER_SM": 1, "ROWS": 2, "VECTOR": 4, "HOLD": 1, "num_warps": 8},
    4096: {"PER_SM": 1, "ROWS": 1, "VECTOR": 4, "HOLD": 0, "num_warps": 8},
}


@triton.jit
def forward_kernel(
    hidden,  # [n, d]
    residual,  # fp32 [n, d]
    hidden_scale,  # the vectors [d]
    hidden_bias,
    residual_scale,
    residual_bias,
    weight,
    merged,  # out: fp32 [n, d]
    normed,  # out: [n, d], dtype of hidden
    rstd,  # out: fp32 [n]
    n,
    d,
    eps,
    D: tl.constexpr,
    VECTOR: tl.constexpr,
    HOLD: tl.constexpr,  # vectors stay in registers; else they come from the cache for each tile
    ROWS: tl.constexpr,
):
    column = tl.max_contiguous(tl.arange(0, D), [VECTOR])
    inside = column < d
    if HOLD:
        hs = tl.load(hidden_scale + column, mask=inside, other=0).to(tl.float32)
        hb = tl.load(hidden_bias + column, mask=inside, other=0).to(tl.float32)
        rs = tl.load(residual_scale + column, mask=inside, other=0).to(tl.float32)
        rb = tl.load(residual_bias + column, mask=inside, other=0).to(tl.float32)
        w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * d + column[None, :]
        here = (row < n)[:, None] & inside[None, :]
        if not HOLD:
            hs = tl.load(hidden_scale + column, mask=inside, other=0).to(tl.float32)
            hb = tl.load(hidden_bias + column, mask=inside, other=0).to(tl.float32)
            rs = tl.load(residual_scale + column, mask=inside, other=0).to(tl.float32)
            rb = tl.load(residual_bias + column, mask=inside, other=0).to(tl.float32)
            w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        h = tl.load(hidden + at, mask=here, other=0).to(tl.float32)
        r = tl.load(residual + at, mask=here, other=0)
        total = (h + hb[None, :]) * hs[None, :] + (r + rb[None, :]) * rs[None, :]
        tl.store(merged + at, total, mask=here)
        x = tl.where(here, total.to(normed.dtype.element_ty).to(tl.float32), 0)
        scale = 1 / tl.sqrt(tl.sum(x * x, 1) / d + eps)
        y = w[None, :] * (x * scale[:, None]).to(normed.dtype.element_ty).to(tl.float32)
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=here)
        tl.store(rstd + row, scale, mask=row < n)


@triton.jit
def backward_kernel(
    d_merged,  # fp32 [n, d]
    d_normed,  # [n, d], dtype of hidden
    hidden,  # as in the forward pass
    residual,
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    weight,
    rstd,
    d_hidden,  # out: [n, d], dtype of hidden
    d_residual,  # out: fp32 [n, d]
    sums,  # out: fp32 [programs, 4, d]: sums of g, g * hidden, g * residual, d_normed * x, for g = d(stream)
    n,
    d,
    D: tl.constexpr,
    VECTOR: tl.constexpr,
    HOLD: tl.constexpr,  # vectors stay in registers; else they come from the cache for each tile
    ROWS: tl.constexpr,
):
    column = tl.max_contiguous(tl.arange(0, D), [VECTOR])
    inside = column < d
    if HOLD:
        hs = tl.load(hidden_scale + column, mask=inside, other=0).to(tl.float32)
        hb = tl.load(hidden_bias + column, mask=inside, other=0).to(tl.float32)
        rs = tl.load(residual_scale + column, mask=inside, other=0).to(tl.float32)
        rb = tl.load(residual_bias + column, mask=inside, other=0).to(tl.float32)
        w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    sum_g = tl.zeros([D], tl.float32)
    sum_gh = tl.zeros([D], tl.float32)
    sum_gr = tl.zeros([D], tl.float32)
    sum_w = tl.zeros([D], tl.float32)
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + lane
    step = tl.num_programs(0) * ROWS
    at = row[:, None].to(tl.int64) * d + column[None, :]
    here = (row < n)[:, None] & inside[None, :]
    next_h = tl.load(hidden + at, mask=here, other=0)
    next_r = tl.load(residual + at, mask=here, other=0)
    next_dy = tl.load(d_normed + at, mask=here, other=0)
    next_g = tl.load(d_merged + at, mask=here, other=0)
    next_scale = tl.load(rstd + row, mask=row < n, other=0)
    for _ in range(tl.program_id(0) * ROWS, n, step):
        h = next_h.to(tl.float32)
        r = next_r
        dy = next_dy.to(tl.float32)
        g = next_g
        scale = next_scale[:, None]
        old_at = at
        old_here = here
        # The next rows are under way while these are worked on.
        row += step
        at = row[:, None].to(tl.int64) * d + column[None, :]
        here = (row < n)[:, None] & inside[None, :]
        next_h = tl.load(hidden + at, mask=here, other=0)
        next_r = tl.load(residual + at, mask=here, other=0)
        next_dy = tl.load(d_normed + at, mask=here, other=0)
        next_g = tl.load(d_merged + at, mask=here, other=0)
        next_scale = tl.load(rstd + row, mask=row < n, other=0)
        if not HOLD:
            hs = tl.load(hidden_scale + column, mask=inside, other=0).to(tl.float32)
            hb = tl.load(hidden_bias + column, mask=inside, other=0).to(tl.float32)
            rs = tl.load(residual_scale + column, mask=inside, other=0).to(tl.float32)
            rb = tl.load(residual_bias + column, mask=inside, other=0).to(tl.float32)
            w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        total = (h + hb[None, :]) * hs[None, :] + (r + rb[None, :]) * rs[None, :]
        x = total.to(hidden.dtype.element_ty).to(tl.float32) * scale
        sum_w += tl.sum(dy * x.to(hidden.dtype.element_ty).to(tl.float32), 0)
        t = dy * w[None, :]
        g += scale * (t - x * (tl.sum(t * x, 1) / d)[:, None])
        tl.store(d_hidden + old_at, (g * hs[None, :]).to(hidden.dtype.element_ty), mask=old_here)
        tl.store(d_residual + old_at, g * rs[None, :], mask=old_here)
        sum_g += tl.sum(g, 0)
        sum_gh += tl.sum(g * h, 0)
        sum_gr += tl.sum(g * r, 0)
    out = sums + tl.program_id(0).to(tl.int64) * 4 * d + column
    tl.store(out, sum_g, mask=inside)
    tl.store(out + d, sum_gh, mask=inside)
    tl.store(out + 2 * d, sum_gr, mask=inside)
    tl.store(out + 3 * d, sum_w, mask=inside)


@triton.jit
def reduce_kernel(
    sums,  # fp32 [programs, 4, d]
    hidden_scale,
    hidden_bias,
    residual_scale,
    residual_bias,
    out,  # fp32 [5, d], in the order of Vectors
    programs,
    d,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < d
    g = tl.zeros([ROWS, COLUMNS], tl.float32)
    gh = tl.zeros([ROWS, COLUMNS], tl.float32)
    gr = tl.zeros([ROWS, COLUMNS], tl.float32)
    dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < programs)[:, None] & inside[None, :]
        at = sums + row[:, None] * 4 * d + column[None, :]
        g += tl.load(at, mask=here, other=0)
        gh += tl.load(at + d, mask=here, other=0)
        gr += tl.load(at + 2 * d, mask=here, other=0)
        dw += tl.load(at + 3 * d, mask=here, other=0)
    total = tl.sum(g, 0)
    hs = tl.load(hidden_scale + column, mask=inside, other=0).to(tl.float32)
    hb = tl.load(hidden_bias + column, mask=inside, other=0).to(tl.float32)
    rs = tl.load(residual_scale + column, mask=inside, other=0).to(tl.float32)
    rb = tl.load(residual_bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + column, tl.sum(gh, 0) + hb * total, mask=inside)
    tl.store(out + d + column, hs * total, mask=inside)
    tl.store(out + 2 * d + column, tl.sum(gr, 0) + rb * total, mask=inside)
    tl.store(out + 3 * d + column, rs * total, mask=inside)
    tl.store(out + 4 * d + column, tl.sum(dw, 0), mask=inside)


def _programs(device: torch.device, per_sm: int) -> int:
    """How many programs fill the device; in the interpreter any small number does."""
    if device.type != "cuda":
        return 3
    return per_sm * int(torch.cuda.get_device_properties(device).multi_processor_count)


def shape_of(table: dict[int, dict[str, int]], d: int) -> dict[str, int]:
    """The entry of `table` for rows of `d`, with D, their width rounded up; narrow rows take fewer warps."""
    width = triton.next_power_of_2(d)
    limit = next((limit for limit in table if width <= limit), max(table))
    entry = table[limit]
    return {**entry, "D": width, "num_warps": max(entry["num_warps"] * min(width, limit) // limit, 1)}


def forward(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    vectors: Vectors,
    eps: float = EPS,
    tuning: dict[int, dict[str, int]] = FORWARD,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ckptkit.kernels.rmsnorm.forward_torch`."""
    n, d = hidden.shape
    merged, normed = torch.empty_like(residual), torch.empty_like(hidden)
    rstd = torch.empty(n, dtype=torch.float32, device=hidden.device)
    v, shape = vectors, shape_of(tuning, d)
    programs = min(_programs(hidden.device, shape.pop("PER_SM")), n)
    if n:
        forward_kernel[(programs,)](
            hidden,
            residual,
            v.hidden_scale,
            v.hidden_bias,
            v.residual_scale,
            v.residual_bias,
            v.weight,
            merged,
            normed,
            rstd,
            n,
            d,
            eps,
            **shape,
        )
    return merged, normed, rstd


def backward(
    d_merged: torch.Tensor,
    d_normed: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    vectors: Vectors,
    rstd: torch.Tensor,
    tuning: dict[int, dict[str, int]] = BACKWARD,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ckptkit.kernels.rmsnorm.backward_torch`."""
    n, d = hidden.shape
    d_hidden, d_residual = torch.empty_like(hidden), torch.empty_like(residual)
    v, shape = vectors, shape_of(tuning, d)
    programs = min(_programs(hidden.device, shape.pop("PER_SM")), n)
    sums = torch.empty(programs, 4, d, dtype=torch.float32, device=hidden.device)
    out = torch.empty(5, d, dtype=torch.float32, device=hidden.device)
    if n:
        backward_kernel[(programs,)](
            d_merged,
            d_normed,
            hidden,
            residual,
            v.hidden_scale,
            v.hidden_bias,
            v.residual_scale,
            v.residual_bias,
            v.weight,
            rstd,
            d_hidden,
            d_residual,
            sums,
            n,
            d,
            **shape,
        )
    reduce_kernel[(triton.cdiv(d, 32),)](
        sums,
        v.hidden_scale,
        v.hidden_bias,
        v.residual_scale,
        v.residual_bias,
        out,
        programs,
        d,
        ROWS=32,
        COLUMNS=32,
        num_warps=4,
    )
    return d_hidden, d_residual, out
