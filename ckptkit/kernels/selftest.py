"""Every kernel against its torch form on the machine at hand, with its time: for owners of a GPU we have none of.

    python -m ckptkit.kernels.selftest [--device cuda] [--json]

Each line says operation, form, whether the results agree, the largest error allowed and found, and the time. Forms that
cannot run here are listed with the reason. The exit code is 1 when a form disagrees.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isnan
from typing import Any

from ckptkit.errors import CkptError, UsageError
from ckptkit.kernels import dispatch


@dataclass(frozen=True)
class Check:
    """One form of one operation, as it ran here."""

    operation: str
    backend: str
    passed: bool | None  # None: it cannot run here
    error: float
    allowed: float
    seconds: float
    note: str = ""

    def line(self) -> str:
        """For people."""
        if self.passed is None:
            return f"-     {self.operation:<27} {self.backend:<7} {self.note}"
        word = "ok   " if self.passed else "WRONG"
        figures = f"error {self.error:.1e} of {self.allowed:.1e} allowed, {self.seconds * 1e6:.0f} us"
        return f"{word} {self.operation:<27} {self.backend:<7} {figures}"


def _problems(device: Any) -> Iterator[tuple[str, float, Callable[[Callable[..., Any]], list[Any]]]]:
    """(operation, allowed relative error, how to call a form so that it returns tensors to compare)."""
    import torch

    from ckptkit.kernels import adamw, digest, pack, rmsnorm, router

    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=g).to(device)

    gpu = device.type == "cuda"
    n, d = (4096, 2048) if gpu else (64, 256)
    hidden, residual, vectors = randn(n, d), randn(n, d), rmsnorm.Vectors(*(randn(d) for _ in range(5)))
    rstd = rmsnorm.forward_torch(hidden, residual, vectors)[2]
    upstream = randn(n, d), randn(n, d)
    # fp32 sums of n or d terms err by at most that many roundings.
    yield "rmsnorm_residual_forward", (d + 16) * 2**-24, lambda f: list(f(hidden, residual, vectors))
    back = (*upstream, hidden, residual, vectors, rstd)
    yield "rmsnorm_residual_backward", (n + d + 16) * 2**-24, lambda f: list(f(*back))
    r = 256
    shapes = ((r,), (r, r), (r,), (r, r), (r,), (17, r))
    parts = [randn(*s) / s[-1] ** 0.5 for s in shapes]
    weights = router.RouterWeights(*[*parts, torch.zeros(17, device=device)])
    weights.norm.fill_(1)
    # Choices may differ where two scores are equal to rounding; the sorted weights tell a wrong one all the same.
    state = randn(n, r)
    yield "route", 1e-4, lambda f: [f(state, weights).weight.sort().values]
    matrix = randn(1024, 1024) if gpu else randn(64, 96)
    # Two bf16 iterations differ by their roundings: eight of 2^-8. Triton's interpreter multiplies fp16, not bf16.
    half = torch.bfloat16 if gpu else torch.float16
    yield "newton_schulz", 8 * 2**-8, lambda f: [f(matrix, dtype=half)]

    def adam(f: Callable[..., Any]) -> list[Any]:
        again = torch.Generator().manual_seed(1)
        columns = [torch.rand(4, 100_003, generator=again).to(device) for _ in range(4)]
        table = adamw.AdamWTable(*([c[i].clone() for i in range(4)] for c in columns))
        f(table, adamw.Hyper(lr=1e-3, step=3))
        return [*table.params, *table.exp_avgs, *table.exp_avg_sqs]

    yield "adamw_step", 16 * 2**-24, adam
    data = torch.randint(0, 256, ((64 << 20) + 1001 if gpu else 5000,), dtype=torch.uint8, generator=g).to(
        device
    )
    leaf = digest.LEAF_NBYTES if gpu else 2048
    yield "leaf_digests", 0.0, lambda f: [f(data, leaf)]
    cuts = [0, data.numel() // 3, data.numel() // 2, data.numel()]
    parts = [data[a:b].clone() for a, b in pairwise(cuts)]
    plan = pack.PackPlan(parts, cuts[:-1], leaf_nbytes=leaf)

    def packed(f: Callable[..., Any]) -> list[Any]:
        out = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
        digests = torch.empty(plan.leaf_count, 16, dtype=torch.uint8, device=device)
        f(plan, out, digests)
        return [out, digests]

    yield "pack", 0.0, packed

    def digested(f: Callable[..., Any]) -> list[Any]:
        digests = torch.empty(plan.leaf_count, 16, dtype=torch.uint8, device=device)
        f(plan, digests)
        return [digests]

    yield "digest_in_place", 0.0, digested
    digests = digest.leaf_digests_torch(data, leaf)

    def unpacked(f: Callable[..., Any]) -> list[Any]:
        for part in plan.parts:
            part.zero_()
        good = f(plan, data, digests)
        return [good, *(part.clone() for part in plan.parts)]

    yield "unpack", 0.0, unpacked


def run(device: str | None = None) -> list[Check]:
    """Checks every form of every operation.

    Args:
        device: Where; default: the GPU, where there is one.

    Raises:
        UsageError: torch sees no such device.
    """
    import torch

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as unknown:
        raise UsageError(f"{device!r} is no device of torch: cpu, cuda or cuda:1 are") from unknown
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no GPU here: `--device cpu` checks the torch forms alone")
    checks = []
    for operation, allowed, call in _problems(where):
        want = call(dispatch.choose(operation, where, "torch"))
        for backend in dispatch.backends(operation):
            try:
                form = dispatch.choose(operation, where, backend)
                call(form)  # compiles
                start = _now(where)
                have = call(form)
                seconds = _now(where) - start
            except CkptError as reason:
                note = str(reason).splitlines()[0]
                checks.append(Check(operation, backend, None, 0.0, allowed, 0.0, note))
                continue
            pairs = zip(have, want, strict=True)
            error = max(_error(a, b) for a, b in pairs)
            checks.append(Check(operation, backend, error <= allowed, error, allowed, seconds))
    return checks


def machine() -> dict[str, str]:
    """The GPU's name, or `cpu`, and the build of torch."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, "torch": torch.__version__}


def _now(device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _error(value: Any, expected: Any) -> float:
    """Relative error in the Frobenius norm; of bytes and flags, whether any differs. NaN counts as infinite."""
    if value.dtype in _exact():
        return float(not bool((value == expected).all()))
    error = float((value.double() - expected.double()).norm() / expected.double().norm())
    return float("inf") if isnan(error) else error


def _exact() -> tuple[Any, ...]:
    import torch

    return torch.uint8, torch.bool, torch.int32


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module's description."""
    parser = argparse.ArgumentParser(description="Check every kernel against its torch form on this machine.")
    parser.add_argument("--device", help="default: the GPU, where there is one")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args(arguments)
    checks = run(given.device)
    if given.json:
        print(json.dumps({**machine(), "checks": [asdict(check) for check in checks]}))
    else:
        print(*machine().values())
        for check in checks:
            print(check.line())
    return int(any(check.passed is False for check in checks))


if __name__ == "__main__":
    sys.exit(main())
