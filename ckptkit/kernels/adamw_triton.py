"""Multi-tensor AdamW in Triton: one program a chunk, found through a table of addresses."""

import torch

from ckptkit.kernels._triton import tl, triton
from ckptkit.kernels.adamw import CHUNK, AdamWTable, Hyper

TUNING = {"num_warps": 4}


@triton.jit
def adamw_kernel(
    chunks,  # int64 [programs, 6]: addresses of parameter, gradient, two moments, weight; elements
    param,  # pointers whose types say the dtypes of parameter and gradient
    grad,
    grad_scale,  # fp32 [1], read where SCALED
    keep,  # 1 - lr * weight_decay
    rate,  # lr / (1 - beta1^t)
    root,  # 1 / sqrt(1 - beta2^t)
    beta1,  # as fp32 roundings of 1 - beta, which is small and must not lose its digits
    beta2,
    rest2,
    eps,
    SCALED: tl.constexpr,
    MASTER: tl.constexpr,  # the weight is another tensor than the parameter
    ALIGN: tl.constexpr,  # what divides all addresses
    CHUNK: tl.constexpr,
):
    row = chunks + tl.program_id(0).to(tl.int64) * 6
    single = tl.pointer_type(tl.float32)
    p_at = tl.multiple_of(tl.load(row).to(param.dtype), [ALIGN])
    g_at = tl.multiple_of(tl.load(row + 1).to(grad.dtype), [ALIGN])
    m_at = tl.multiple_of(tl.load(row + 2).to(single), [ALIGN])
    v_at = tl.multiple_of(tl.load(row + 3).to(single), [ALIGN])
    w_at = tl.multiple_of(tl.load(row + 4).to(single), [ALIGN])
    size = tl.load(row + 5).to(tl.int32)
    i = tl.max_contiguous(tl.arange(0, CHUNK), [4])  # 16 bytes of fp32, 8 of bf16: one layout for all
    if size == CHUNK:  # no masks: loads stay 16 bytes wide
        g = tl.load(g_at + i).to(tl.float32)
        m = tl.load(m_at + i)
        v = tl.load(v_at + i)
        w = tl.load(w_at + i)
    else:
        here = i < size
        g = tl.load(g_at + i, mask=here, other=0).to(tl.float32)
        m = tl.load(m_at + i, mask=here, other=0)
        v = tl.load(v_at + i, mask=here, other=0)
        w = tl.load(w_at + i, mask=here, other=0)
    if SCALED:
        g *= tl.load(grad_scale)
    m += (g - m) * beta1
    v = v * beta2 + g * g * rest2
    w = w * keep - rate * (m / (tl.sqrt(v) * root + eps))
    if size == CHUNK:
        tl.store(m_at + i, m)
        tl.store(v_at + i, v)
        tl.store(w_at + i, w)
        if MASTER:
            tl.store(p_at + i, w.to(param.dtype.element_ty))
    else:
        here = i < size
        tl.store(m_at + i, m, mask=here)
        tl.store(v_at + i, v, mask=here)
        tl.store(w_at + i, w, mask=here)
        if MASTER:
            tl.store(p_at + i, w.to(param.dtype.element_ty), mask=here)


def adamw_step(
    table: AdamWTable,
    hyper: Hyper,
    grad_scale: torch.Tensor | None = None,
    tuning: dict[str, int] = TUNING,
) -> None:
    """See `ckptkit.kernels.adamw.adamw_step`."""
    if not len(table.chunks):
        return
    adamw_kernel[(len(table.chunks),)](
        table.chunks,
        table.params[0],
        table.grads[0],
        table.exp_avgs[0] if grad_scale is None else grad_scale,
        1 - hyper.lr * hyper.weight_decay,
        hyper.rate,
        hyper.root,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.eps,
        SCALED=grad_scale is not None,
        MASTER=table.masters is not None,
        ALIGN=16 if table.aligned else 4,
        CHUNK=CHUNK,
        **tuning,
    )
