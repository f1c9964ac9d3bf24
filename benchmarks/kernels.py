"""Kernels beside their torch forms, torch.compile, and what the device's memory allows.

    python benchmarks/kernels.py [--out results.json] [--only NAME ...]

Needs a GPU and triton. Times are medians of `triton.testing.do_bench` (device events, the L2 cache cleared before each
run); "graph" times replay a CUDA graph, without launch gaps and with a warm cache. Rates count every byte that must move
once. A line ends with the ratio that docs/kernels.md states a target for.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.testing import do_bench, do_bench_cudagraph

from ckptkit.errors import CkptError
from ckptkit.kernels import adamw, digest, dispatch, newton_schulz, pack, rmsnorm, router

DEVICE = torch.device("cuda")
GIB, GB = 1 << 30, 1e9
RESULTS: dict[str, dict[str, Any]] = {}


def timed(call: Callable[[], Any], rep_ms: int = 60) -> float:
    """Seconds, median, L2 cleared before each run."""
    return float(do_bench(call, warmup=15, rep=rep_ms, return_mode="median")) / 1e3


def replayed(call: Callable[[], Any]) -> float:
    """Seconds, median, as a replayed graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(call, rep=40, return_mode="median")) / 1e3


def attempt(call: Callable[[], Any], clock: Callable[..., float] = timed) -> float | str:
    """Seconds, or why there are none."""
    try:
        call()
        return clock(call)
    except (CkptError, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        return str(error).splitlines()[0][:120]


def compiled(function: Callable[..., Any], *arguments: Any) -> float | str:
    """Time of `torch.compile(function)`, its compilation not counted."""
    torch._dynamo.reset()
    build = torch.compile(function)
    return attempt(partial(build, *arguments))


def told(name: str, nbytes: int, limit: float, **times: float | str) -> None:
    """Records and prints one operation: rates of all forms, and their share of `limit` bytes/s."""
    shares = {form: nbytes / t / limit for form, t in times.items() if isinstance(t, float)}
    RESULTS[name] = {"nbytes": nbytes, "seconds": times, "share_of_limit": shares}
    parts = [f"{form} {share:.1%}" for form, share in shares.items()]
    print(f"{name:<36}", "; ".join(parts), flush=True)


def compared(name: str, ours: str, **times: float | str) -> None:
    """Records and prints one operation: times of all forms, and how much longer the others take than `ours`."""
    mine = times[ours]
    ratios = {f: t / mine for f, t in times.items() if isinstance(t, float) and isinstance(mine, float)}
    RESULTS[name] = {"seconds": times, "times_ours": ratios}
    parts = [f"{form} {t * 1e6:.0f} us" for form, t in times.items() if isinstance(t, float)]
    print(f"{name:<36}", "; ".join(parts), "|", {f: round(r, 2) for f, r in ratios.items()}, flush=True)


@triton.jit
def _read(x, out, SIZE: tl.constexpr, TURNS: tl.constexpr):
    acc = tl.zeros([SIZE], tl.int32)
    x += tl.program_id(0).to(tl.int64) * (SIZE * TURNS)
    for turn in range(TURNS):
        acc ^= tl.load(x + turn * SIZE + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0), tl.max(acc, 0))  # depends on every word, so that every word is read


def limits() -> tuple[float, float]:
    """Bytes/s of a device copy (read and written) and of the fastest way to read found: torch's sums or a plain loop."""
    x = torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE).random_(0, 256)
    y = torch.empty_like(x)
    copy = 2 * x.numel() / timed(lambda: y.copy_(x))
    words, out = x.view(torch.int32), y.view(torch.int32)
    programs = words.numel() // (4096 * 32)
    calls: list[Callable[[], Any]] = [
        lambda: torch.sum(x.view(torch.float32)),
        lambda: torch.sum(x.view(torch.int64)),
        lambda: _read[(programs,)](words, out, 4096, 32, num_warps=8),
    ]
    read = x.numel() / min(timed(call) for call in calls)
    print(f"device copy {copy / GB:.0f} GB/s (read and written), reading {read / GB:.0f} GB/s", flush=True)
    RESULTS["limits"] = {"copy_bytes_per_s": copy, "read_bytes_per_s": read}
    return copy, read


def digests(copy: float, read: float) -> None:
    """Leaf digests of 8, 4 and 1 GiB."""
    data = torch.empty(8 * GIB, dtype=torch.uint8, device=DEVICE).random_(0, 256)
    for gib in (8, 4, 1):
        part = data[: gib * GIB]
        times = {
            form: attempt(partial(digest.leaf_digests, part, backend=form)) for form in ("triton", "hip")
        }
        if (
            gib == 8
        ):  # 1,023 steps one after another; compiled step by step, since the whole would be unrolled
            call = partial(digest.whole_leaf_digests, part.view(-1, digest.LEAF_NBYTES))
            times["torch"] = timed(call, 1)
            plain, digest._stripes = digest._stripes, torch.compile(digest._stripes)
            times["torch.compile, by step"] = attempt(call, partial(timed, rep_ms=1))
            digest._stripes = plain
        told(f"leaf digest, {gib} GiB", part.numel(), read, **times)


def packs(copy: float, read: float) -> None:
    """4,096 tensors of 2 MiB, and 65,536 of 32 KiB, from scattered places; with digests, and back with a check."""
    for count, size, stride in ((4096, 2 << 20, 2 << 20), (65536, 32 << 10, 40 << 10)):
        room = torch.empty(count * stride, dtype=torch.uint8, device=DEVICE).random_(0, 256)
        tensors = [room[i * stride : i * stride + size] for i in range(count)]
        plan = pack.PackPlan(tensors, [i * size for i in range(count)])
        out = torch.empty(plan.nbytes, dtype=torch.uint8, device=DEVICE)
        found = torch.empty(plan.leaf_count, 16, dtype=torch.uint8, device=DEVICE)
        name = f"{count} tensors of {size >> 10} KiB"
        times: dict[str, float | str] = {"triton": timed(partial(pack.pack, plan, out, found))}
        times["torch.cat, no digest"] = timed(partial(torch.cat, tensors, out=out))
        told(f"pack + digest, {name}", 2 * plan.nbytes, copy, **times)
        assert torch.equal(out, torch.cat(tensors)) and bool(pack.unpack(plan, out, found).all())
        call = partial(pack.unpack, plan, out, found)
        told(f"unpack + verify, {name}", 2 * plan.nbytes, copy, triton=timed(call))


def norms(copy: float, read: float) -> None:
    """RMSNorm and residual scaling of 65,536 rows."""
    for d, n in ((2048, 65536), (4096, 32768)):
        hidden = torch.randn(n, d, device=DEVICE, dtype=torch.bfloat16)
        residual, d_merged = torch.randn(n, d, device=DEVICE), torch.randn(n, d, device=DEVICE)
        d_normed = torch.randn_like(hidden)
        vectors = rmsnorm.Vectors(*(torch.randn(d, device=DEVICE, dtype=torch.bfloat16) for _ in range(5)))
        rstd = rmsnorm.forward_torch(hidden, residual, vectors)[2]
        forward = (hidden, residual, vectors)
        backward = (d_merged, d_normed, hidden, residual, vectors, rstd)
        for way, nbytes, arguments in (("forward", 12 * n * d, forward), ("backward", 18 * n * d, backward)):
            operation = f"rmsnorm_residual_{way}"
            times = {
                form: attempt(partial(dispatch.choose(operation, DEVICE, form), *arguments))
                for form in dispatch.backends(operation)
            }
            times["torch.compile"] = compiled(dispatch.choose(operation, DEVICE, "torch"), *arguments)
            told(f"RMSNorm + residual, {way}, {n} x {d}", nbytes, copy, **times)


def optimizers(copy: float, read: float) -> None:
    """AdamW on 268 M parameters in 16 matrices and as many vectors."""
    shapes = [(4096, 4096)] * 16 + [(2048,)] * 16
    hyper = adamw.Hyper(lr=1e-4, step=10)
    for kind, wide in (("bf16 with fp32 masters", False), ("fp32", True)):
        dtype = torch.float32 if wide else torch.bfloat16
        weights = [torch.randn(shape, device=DEVICE) for shape in shapes]
        params = weights if wide else [w.to(dtype) for w in weights]
        grads = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]
        moments = [[torch.rand(shape, device=DEVICE) for shape in shapes] for _ in range(2)]
        table = adamw.AdamWTable(params, grads, moments[0], moments[1], None if wide else weights)
        times: dict[str, float | str] = {
            "triton": timed(partial(adamw.adamw_step, table, hyper)),
            "torch": timed(partial(adamw.adamw_step, table, hyper, backend="torch")),
            "torch.compile": compiled(adamw.adamw_step_torch, table, hyper),
        }
        if wide:
            for p, g in zip(weights, grads, strict=True):
                p.requires_grad_().grad = g
            times["torch fused AdamW"] = timed(torch.optim.AdamW(weights, fused=True).step)
        told(f"AdamW, {kind}", table.nbytes, copy, **times)


def matrices(copy: float, read: float) -> None:
    """Newton–Schulz: a square of 2,048 and of 4,096, 16 experts' squares, and 16 of twice the rows."""
    for shape in ((2048, 2048), (4096, 4096), (16, 2048, 2048), (16, 4096, 2048)):
        u = torch.randn(shape, device=DEVICE)
        forms = {
            "triton": partial(newton_schulz.newton_schulz, u),
            "plain": partial(newton_schulz.newton_schulz_torch, u),
            "baddbmm": partial(newton_schulz.newton_schulz_fused_torch, u),
        }
        name = "Newton–Schulz, " + " x ".join(map(str, shape))
        times: dict[str, float | str] = {form: timed(call, 150) for form, call in forms.items()}
        times["torch.compile"] = compiled(newton_schulz.newton_schulz_torch, u)
        compared(name, "triton", **times)
        compared(name + ", graph", "triton", **{form: replayed(call) for form, call in forms.items()})


def routers(copy: float, read: float) -> None:
    """32,768 and 4,096 tokens, ZAYA1's router: width 256, 17 classes."""
    r, classes, half = 256, 17, torch.bfloat16
    shapes = ((r,), (r, r), (r,), (r, r), (r,), (classes, r))
    parts = [(torch.randn(s, device=DEVICE) / s[-1] ** 0.5).to(half) for s in shapes]
    parts[0] += 1
    weights = router.RouterWeights(*[*parts, torch.randn(classes, device=DEVICE) * 0.1])
    for n in (32768, 4096):
        state = torch.randn(n, r, device=DEVICE, dtype=half)
        times: dict[str, float | str] = {
            "triton": timed(partial(dispatch.choose("route", DEVICE, "triton"), state, weights)),
            "torch": timed(partial(router.route_torch, state, weights)),
            "torch.compile": compiled(router.route_torch, state, weights),
        }
        compared(f"router, {n} tokens", "triton", **times)


PARTS = {f.__name__: f for f in (digests, packs, norms, optimizers, matrices, routers)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where results go as JSON")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    torch.manual_seed(0)
    copy, read = limits()
    for name in given.only:
        start = time.perf_counter()
        PARTS[name](copy, read)
        torch.cuda.empty_cache()
        print(f"  ({name}: {time.perf_counter() - start:.0f} s)", flush=True)
        if given.out:
            about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            about |= {"triton": triton.__version__, "date": time.strftime("%Y-%m-%d")}
            given.out.write_text(json.dumps({**about, "results": RESULTS}, indent=1))


if __name__ == "__main__":
    main()
