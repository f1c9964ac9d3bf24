"""Ahead-of-time builds for gfx942, in a fresh process: Triton's compiler and its interpreter exclude each other."""

import os
import subprocess
import sys

import pytest

from ckptkit.kernels import aot
from tests.kernels.forms import needs_triton


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


@needs_triton
def test_every_kernel_builds_for_gfx942_without_a_spill() -> None:
    """The table has each Triton kernel, no spilled register, and no more LDS than a compute unit has."""
    done = python("-m", "ckptkit.kernels.aot", "--allow-missing")

    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines()[1:] if line.strip()]
    figures = [[int(word) for word in line.split()[-5:]] for line in rows]
    assert len(rows) >= 30
    assert all(spilled == 0 for _, _, spilled, _, _ in figures)
    assert all(lds <= aot.LDS_NBYTES and size > 0 for _, _, _, lds, size in figures)
    text = "\n".join(rows)
    for name in (
        "leaf digest",
        "pack",
        "unpack",
        "rmsnorm forward",
        "rmsnorm backward",
        "router MLP",
        "AdamW",
    ):
        assert name in text, name


@needs_triton
def test_a_kernel_that_spills_is_seen() -> None:
    """Eight rows of 4,096 values a program do not fit the registers: the check has something to catch."""
    code = (
        "from dataclasses import replace; from ckptkit.kernels import aot\n"
        "big = next(v for v in aot.variants() if v.label == 'rmsnorm backward, fp32, 4096')\n"
        "print(aot.build_triton(replace(big, arguments={**big.arguments, 'ROWS': 8})).spilled)"
    )

    done = python("-c", code)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.skipif(
    aot.find_clang() is None, reason="there is no clang here: apt-get install clang-19 lld-19"
)
@pytest.mark.parametrize(("name", "kernels"), [("digest", 3), ("rmsnorm", 9)])
def test_hip_sources_build_for_gfx942_without_a_spill(name: str, kernels: int) -> None:
    """By a clang without ROCm."""
    built = aot.build_hip(name, str(aot.find_clang()))

    assert len(built) == kernels
    assert all(not result.spilled and result.code[:4] == b"\x7fELF" for result in built)
