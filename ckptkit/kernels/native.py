"""The `.hip` sources at run time: compiled once by the machine's own compiler, launched through its driver.

One source serves both kinds of GPU: `hipcc` makes a code object of it where torch is a ROCm build, `nvcc` a cubin where it
is a CUDA build. Results are kept in `$XDG_CACHE_HOME/ckptkit/kernels`, named by the digest of source, target and
compiler. Nothing here runs unless a HIP form is asked for by name.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ckptkit.errors import UsageError
from ckptkit.kernels import digest as plain
from ckptkit.kernels.rmsnorm import EPS, Vectors

SOURCES = ("digest", "rmsnorm")
_LEAF_THREADS = 256
_LANES = 16  # lanes that share a leaf, unless there are many leaves; docs/kernels.md has the measurements


def source(name: str) -> str:
    """Text of `NAME.hip`, its header included in place."""
    folder = files("ckptkit.kernels") / "hip"
    text = (folder / f"{name}.hip").read_text()
    return text.replace('#include "device.h"', (folder / "device.h").read_text())


def compiler(device: torch.device) -> tuple[str, list[str]]:
    """The compiler for `device` and its arguments but for input and output.

    Raises:
        UsageError: There is none on this machine.
    """
    found: str | None
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        home = os.environ.get("ROCM_PATH", "/opt/rocm")
        found = shutil.which("hipcc") or shutil.which(f"{home}/bin/hipcc")
        arguments = ["--genco", f"--offload-arch={arch}", "-x", "hip", "-O3", "-std=c++17"]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        found = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
        arguments = ["-cubin", f"-arch=sm_{major}{minor}", "-x", "cu", "-O3", "-std=c++17"]
    if not found:
        raise UsageError("no hipcc or nvcc here: HIP forms need one, Triton and torch forms do not")
    return found, arguments


@cache
def _binary(name: str, device: torch.device) -> bytes:
    program, arguments = compiler(device)
    text = source(name)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.sha256("\0".join([text, version, *arguments]).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptkit" / "kernels"
    done = home / f"{name}-{key}.bin"
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        raw, made = home / f"{name}-{key}.{os.getpid()}.hip", home / f"{name}-{key}.{os.getpid()}.tmp"
        raw.write_text(text)
        try:
            call = [program, *arguments, "-o", str(made), str(raw)]
            result = subprocess.run(call, capture_output=True, text=True, check=False)
            if result.returncode:
                raise UsageError(f"{' '.join(call)} failed:\n{result.stderr.strip()}")
            made.replace(done)  # whole or not at all, whoever else compiles the same
        finally:
            raw.unlink(missing_ok=True)
            made.unlink(missing_ok=True)
    return done.read_bytes()


@cache
def _driver() -> tuple[Any, str]:
    """The driver's library, and the prefix of its functions."""
    if torch.version.hip:
        return ctypes.CDLL("libamdhip64.so"), "hip"
    return ctypes.CDLL("libcuda.so.1"), "cu"


def _check(code: int, what: str) -> None:
    if code:
        raise UsageError(f"the driver answers {code} to {what}")


@cache
def _function(name: str, symbol: str, device: torch.device) -> ctypes.c_void_p:
    library, prefix = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context current, which modules are loaded into
        load = getattr(library, f"{prefix}ModuleLoadData")
        _check(load(ctypes.byref(module), _binary(name, device)), f"loading {name}")
    get = getattr(library, f"{prefix}ModuleGetFunction")
    _check(get(ctypes.byref(function), module, symbol.encode()), f"looking up {symbol}")
    return function


def launch(name: str, symbol: str, device: torch.device, blocks: int, threads: int, *arguments: Any) -> None:
    """Runs `symbol` of `NAME.hip` on the current stream.

    Args:
        name: One of `SOURCES`.
        symbol: The kernel.
        device: Where it runs.
        blocks: Size of the grid.
        threads: Size of a block.
        arguments: Tensors (passed as addresses) or ctypes values, in the kernel's order.
    """
    library, prefix = _driver()
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    call = getattr(library, "hipModuleLaunchKernel" if prefix == "hip" else "cuLaunchKernel")
    function = _function(name, symbol, device)
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        _check(call(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None), f"launching {symbol}")


def leaf_digests(
    data: torch.Tensor, leaf_nbytes: int = plain.LEAF_NBYTES, lanes: int | None = None
) -> torch.Tensor:
    """See `ckptkit.kernels.digest.leaf_digests`. Bytes that begin at no multiple of 16 are copied first."""
    raw = plain.as_bytes(data)
    count = plain.leaf_count(raw.numel(), leaf_nbytes)
    if raw.data_ptr() % 16:
        raw = raw.clone()
    out = torch.empty(count, plain.DIGEST_NBYTES, dtype=torch.uint8, device=raw.device)
    lanes = lanes or _LANES
    if count:
        launch(
            "digest",
            f"leaf_digest_{lanes}",
            raw.device,
            -(-count * lanes // _LEAF_THREADS),
            _LEAF_THREADS,
            raw,
            ctypes.c_uint64(raw.numel()),
            ctypes.c_uint64(leaf_nbytes),
            plain.constants(raw.device),
            out,
        )
    return out


def _rms_kernel(way: str, hidden: torch.Tensor, vectors: Vectors) -> tuple[str, torch.Tensor, int, int]:
    """The kernel's name, the five vectors as fp32 [5, D], how many blocks may run, and threads of a block."""
    d = hidden.shape[1]
    threads = 256 if d <= 2048 else 512
    kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(hidden.dtype)
    if kind is None or d % 4 or d > 4096:
        raise UsageError(
            f"the HIP form of rmsnorm_residual takes bf16 or fp32 rows of at most 4096 values, a multiple of 4; "
            f"not {hidden.dtype} rows of {d}: the triton and torch forms take them"
        )
    table = torch.stack([getattr(vectors, name).float() for name in Vectors.__dataclass_fields__])
    processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    per_processor = 32 if way == "forward" else 1
    blocks = min(hidden.shape[0], processors * per_processor)
    return f"rmsnorm_{way}_{kind}_{threads}", table, blocks, threads


def rmsnorm_residual_forward(
    hidden: torch.Tensor, residual: torch.Tensor, vectors: Vectors, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ckptkit.kernels.rmsnorm.forward_torch`."""
    n, d = hidden.shape
    symbol, table, blocks, threads = _rms_kernel("forward", hidden, vectors)
    merged, normed = torch.empty_like(residual), torch.empty_like(hidden)
    rstd = torch.empty(n, dtype=torch.float32, device=hidden.device)
    sizes = ctypes.c_uint32(n), ctypes.c_uint32(d), ctypes.c_float(eps), ctypes.c_uint32(blocks)
    outputs = (merged, normed, rstd)
    if n:
        launch("rmsnorm", symbol, hidden.device, blocks, threads, hidden, residual, table, *outputs, *sizes)
    return outputs


def rmsnorm_residual_backward(
    d_merged: torch.Tensor,
    d_normed: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    vectors: Vectors,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ckptkit.kernels.rmsnorm.backward_torch`."""
    n, d = hidden.shape
    symbol, table, blocks, threads = _rms_kernel("backward", hidden, vectors)
    d_hidden, d_residual = torch.empty_like(hidden), torch.empty_like(residual)
    sums = torch.empty(blocks, 4, d, dtype=torch.float32, device=hidden.device)
    out = torch.empty(5, d, dtype=torch.float32, device=hidden.device)
    inputs = (d_merged, d_normed, hidden, residual, table, rstd)
    rows, columns, count = ctypes.c_uint32(n), ctypes.c_uint32(d), ctypes.c_uint32(blocks)
    outputs = (d_hidden, d_residual, sums)
    if n:
        sizes = (rows, columns, count)
        launch("rmsnorm", symbol, hidden.device, blocks, threads, *inputs, *outputs, *sizes)
    launch("rmsnorm", "rmsnorm_reduce", hidden.device, -(-d // 64), 64, sums, table, out, count, columns)
    return d_hidden, d_residual, out
