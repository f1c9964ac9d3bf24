"""Compiles every kernel for gfx942 (MI300X) ahead of time, without a GPU, and reports what each one takes.

    python -m ckptkit.kernels.aot [--out FOLDER]

Triton kernels need triton; `.hip` sources need a clang with the AMDGPU target and lld (`clang-19`, `lld-19` of Debian, or
what `CKPTKIT_CLANG` names), but no ROCm: they include no header of it. For each kernel the table shows vector and
scalar registers, spilled registers and LDS bytes. The exit code is 1 when any kernel spills, and 2 when a compiler is
absent (`--allow-missing` makes that a note). `--out` keeps the code objects.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.kernels.dispatch import INSTALLED

TARGET = "gfx942"
WAVE = 64
LDS_NBYTES = 64 << 10  # of one compute unit


@dataclass(frozen=True)
class Built:
    """One kernel as compiled."""

    name: str
    vector_registers: int
    scalar_registers: int
    spilled: int
    lds_nbytes: int
    code: bytes

    def row(self) -> str:
        """One line of the table."""
        return (
            f"{self.name:<44} {self.vector_registers:>5} {self.scalar_registers:>5} "
            f"{self.spilled:>6} {self.lds_nbytes:>6} {len(self.code):>8}"
        )


HEADER = f"{'kernel, ' + TARGET:<44} {'VGPR':>5} {'SGPR':>5} {'spills':>6} {'LDS':>6} {'bytes':>8}"


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments (strings; `:16` marks addresses and sizes that 16 divides) and the
    values of its constants, as the launchers of this package call it."""

    label: str
    module: str
    kernel: str
    arguments: dict[str, Any]
    options: dict[str, int]


def _each(kind: str, names: str) -> dict[str, Any]:
    """One type for several arguments."""
    return dict.fromkeys(names.split(), kind)


def _leaf_variants() -> Iterator[Variant]:
    t = import_module("ckptkit.kernels.digest_triton")
    flat, leaves, blocks, nowhere = t.FLAT.value, t.LEAVES.value, t.BLOCKS.value, t.NOWHERE.value
    modes = {
        "leaf digest": (flat, nowhere, True, False, t.DIGEST),
        "digest in place, whole leaves": (leaves, nowhere, False, False, t.DIGEST),
        "digest in place, ragged leaves": (blocks, nowhere, False, False, t.DIGEST),
        "pack, whole leaves": (leaves, flat, False, False, t.PACK),
        "pack, ragged leaves": (blocks, flat, False, False, t.PACK),
        "unpack, whole leaves": (flat, leaves, False, True, t.PACK),
        "unpack, ragged leaves": (flat, blocks, False, True, t.PACK),
    }
    for label, (src, dst, every, check, tuning) in modes.items():
        arguments = _each("i64:16", "src dst") | {"nbytes": "i64", "leaf_nbytes": "i32:16"}
        arguments |= _each("*i64:16", "src_table dst_table consts digests")
        arguments |= {"leaves": "*i32:16", "good": "*u8:16", "GROUP": tuning["GROUP"]}
        arguments |= {"SRC": src, "DST": dst, "EVERY": every, "CHECK": check}
        yield Variant(label, "digest_triton", "leaf_kernel", arguments, {"num_warps": tuning["num_warps"]})
    for width, kind in {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}.items():
        arguments = _each("*i64:16", "src_table dst_table") | {"sizes": "*i32:16", "width": kind}
        arguments |= {"WIDTH": width, "LANES": 1024 // width}
        label = f"pack, fragments of {width} B"
        yield Variant(label, "digest_triton", "fragment_kernel", arguments, {"num_warps": 1})


def _rmsnorm_variants() -> Iterator[Variant]:
    t = import_module("ckptkit.kernels.rmsnorm_triton")
    for kind in ("bf16", "fp32"):
        scales = _each(f"*{kind}:16", "hidden_scale hidden_bias residual_scale residual_bias")
        inputs = scales | {"weight": f"*{kind}:16", "hidden": f"*{kind}:16", "residual": "*fp32:16"}
        inputs |= {"rstd": "*fp32:16", "n": "i32", "d": "i32:16"}
        for d in (2048, 4096):
            shape = t.shape_of(t.FORWARD, d)
            del shape["PER_SM"]
            options = {"num_warps": shape.pop("num_warps")}
            arguments = inputs | {"merged": "*fp32:16", "normed": f"*{kind}:16", "eps": "fp32"} | shape
            yield Variant(
                f"rmsnorm forward, {kind}, {d}", "rmsnorm_triton", "forward_kernel", arguments, options
            )
            shape = t.shape_of(t.BACKWARD, d)
            del shape["PER_SM"]
            options = {"num_warps": shape.pop("num_warps")}
            arguments = inputs | _each(f"*{kind}:16", "d_normed d_hidden") | shape
            arguments |= _each("*fp32:16", "d_merged d_residual sums")
            yield Variant(
                f"rmsnorm backward, {kind}, {d}", "rmsnorm_triton", "backward_kernel", arguments, options
            )
        arguments = scales | _each("*fp32:16", "sums out") | {"programs": "i32", "d": "i32:16"}
        arguments |= {"ROWS": 32, "COLUMNS": 32}
        yield Variant(
            f"rmsnorm reduce, {kind}", "rmsnorm_triton", "reduce_kernel", arguments, {"num_warps": 4}
        )


def _router_variants() -> Iterator[Variant]:
    t = import_module("ckptkit.kernels.router_triton")
    for kind in ("bf16", "fp32"):
        constants = t.constants(kind == "fp32", 256, 17, t.MLP_HIP)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        arguments = _each(f"*{kind}:16", "state norm fc1 fc1_bias fc2 fc2_bias out") | constants
        arguments |= {"balancing": "*fp32:16", "choice": "*i32:16", "weight": "*fp32:16", "counts": "*i32:16"}
        arguments |= {"n": "i32", "r": "i32:16", "classes": "i32", "eps": "fp32"}
        yield Variant(f"router MLP, {kind}", "router_triton", "mlp_kernel", arguments, options)
    arguments = _each("*i32:16", "choice counts order position offsets") | _each("i32", "n tiles classes")
    arguments |= {"CLASSES": 32, "TILE": t.MLP_HIP["TOKENS"], "TOKENS": t.SCATTER_TOKENS, "ROWS": 64}
    yield Variant("router scatter", "router_triton", "scatter_kernel", arguments, {"num_warps": 8})


def _matrix_variants() -> Iterator[Variant]:
    t = import_module("ckptkit.kernels.newton_schulz_triton")
    module = "newton_schulz_triton"
    arguments = {"u": "*fp32:16", "sums": "*fp32:16", "size": "i32:16", "CHUNK": t._NORM_CHUNK, "CHUNKS": 8}
    yield Variant("Newton–Schulz norm", module, "norm_kernel", arguments, {"num_warps": 8})
    for transpose in (False, True):
        arguments = {"u": "*fp32:16", "sums": "*fp32:16", "out": "*bf16:16"}
        arguments |= _each("i32:16", "rows columns parts") | {"eps": "fp32"}
        arguments |= {"TRANSPOSE": transpose, "PARTS": 256, "TILE": t._TILE}
        label = f"Newton–Schulz cast{', transposing' * transpose}"
        yield Variant(label, module, "scale_kernel", arguments, {"num_warps": 4})
    for even in (True, False):
        size, what = ("i32:16", "") if even else ("i32", ", any size")
        shape = dict(t.SYMMETRIC_HIP)
        options = {name: shape.pop(name) for name in ("num_warps", "num_stages")}
        for add in (False, True):
            arguments = _each("*bf16:16", "p c out") | _each(size, "m k") | _each("fp32", "alpha beta shift")
            arguments |= {"ADD": add, "EVEN": even, **shape}
            yield Variant(
                f"symmetric half{', sum' * add}{what}", module, "symmetric_kernel", arguments, options
            )


def _adamw_variants() -> Iterator[Variant]:
    t = import_module("ckptkit.kernels.adamw_triton")
    for kind, master in (("fp32", False), ("bf16", True)):
        arguments = {"chunks": "*i64:16", "grad_scale": "*fp32:16"} | _each(f"*{kind}:16", "param grad")
        arguments |= _each("fp32", "keep rate root beta1 beta2 rest2 eps")
        arguments |= {"SCALED": True, "MASTER": master, "ALIGN": 16, "CHUNK": t.CHUNK}
        yield Variant(f"AdamW, {kind}", "adamw_triton", "adamw_kernel", arguments, t.TUNING)


def variants() -> Iterator[Variant]:
    """Every Triton kernel in every form that launchers use at the sizes of ZAYA1."""
    makers: tuple[Callable[[], Iterator[Variant]], ...] = (
        _leaf_variants,
        _rmsnorm_variants,
        _router_variants,
        _matrix_variants,
        _adamw_variants,
    )
    for maker in makers:
        yield from maker()


def build_triton(variant: Variant) -> Built:
    """Compiles one variant for gfx942.

    Raises:
        UsageError: triton is not installed.
    """
    if not INSTALLED:
        raise UsageError("triton is not installed: pip install -r requirements-kernels.lock")
    from triton import compile as compile_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"ckptkit.kernels.{variant.module}"), variant.kernel)
    signature, constants, attributes = {}, {}, {}
    if set(variant.arguments) != set(kernel.arg_names):
        difference = set(variant.arguments) ^ set(kernel.arg_names)
        raise UsageError(f"{variant.kernel} and its list of arguments differ in {sorted(difference)}")
    for position, name in enumerate(kernel.arg_names):
        value = variant.arguments[name]
        if (
            isinstance(value, str)
            and value.partition(":")[0].lstrip("*")[:1] in "iufb"
            and name != "PRECISION"
        ):
            signature[name], _, divisor = value.partition(":")
            if divisor:
                attributes[(position,)] = [["tt.divisibility", int(divisor)]]
        else:
            signature[name], constants[(position,)] = "constexpr", value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    built = compile_triton(source, target=GPUTarget("hip", TARGET, WAVE), options=variant.options)
    text = built.asm["amdgcn"]

    def figure(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if found is None:
            raise UsageError(f"the compiler reports no {key} for {variant.label}")
        return int(found[1])

    return Built(
        variant.label,
        figure("vgpr_count"),
        figure("sgpr_count"),
        figure("vgpr_spill_count") + figure("sgpr_spill_count"),
        int(built.metadata.shared),  # Triton's LDS is allotted at the launch; the object's own figure says 0
        built.asm["hsaco"],
    )


def find_clang() -> str | None:
    """A clang that may know AMD GPUs: `CKPTKIT_CLANG`, else the newest of `clang-22` to `clang-17`, else `clang`."""
    named = os.environ.get("CKPTKIT_CLANG")
    names = [named] if named else [*(f"clang-{version}" for version in range(22, 16, -1)), "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def build_hip(name: str, clang: str) -> list[Built]:
    """Compiles `NAME.hip` for gfx942 with a bare clang; one result a kernel.

    Raises:
        UsageError: clang fails; the message has its errors.
    """
    from ckptkit.kernels.native import source

    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder, f"{name}.hip"), Path(folder, f"{name}.hsaco")
        text.write_text(source(name))
        flags = ["-x", "hip", f"--offload-arch={TARGET}", "--offload-device-only", "--no-gpu-bundle-output"]
        flags += ["-nogpulib", "-nogpuinc", "-O3", "-std=c++17", "-Rpass-analysis=kernel-resource-usage"]
        call = [clang, *flags, "-c", str(text), "-o", str(out)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line)
            raise UsageError(f"{' '.join(call)} failed:\n{errors or done.stderr}")
        code = out.read_bytes()
    results = []
    for part in done.stderr.split("Function Name: ")[1:]:
        figures = {key: int(value) for key, value in re.findall(r"remark:\s+(.+?): (\d+) \[", part)}
        results.append(
            Built(
                f"{name}.hip {part.split()[0]}",
                figures["VGPRs"] + figures.get("AGPRs", 0),
                figures.get("TotalSGPRs", figures.get("SGPRs", 0)),
                figures["SGPRs Spill"] + figures["VGPRs Spill"],
                figures["LDS Size [bytes/block]"],
                code,
            )
        )
    return results


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module's description."""
    parser = argparse.ArgumentParser(description="Compile all kernels for gfx942; a spill fails.")
    parser.add_argument("--out", type=Path, help="folder for the code objects")
    parser.add_argument("--allow-missing", action="store_true", help="go on without triton or clang")
    given = parser.parse_args(arguments)
    from ckptkit.kernels.native import SOURCES

    built: list[Built] = []
    missing = []
    print(HEADER)
    for variant in variants() if INSTALLED else ():
        built.append(build_triton(variant))
        print(built[-1].row(), flush=True)
    clang = find_clang()
    for name in SOURCES if clang else ():
        for result in build_hip(name, str(clang)):
            built.append(result)
            print(result.row(), flush=True)
    if not INSTALLED:
        missing.append("triton (pip install -r requirements-kernels.lock)")
    if not clang:
        missing.append("clang with AMDGPU (apt-get install clang-19 lld-19)")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        for result in built:
            name = re.sub(r"[^\w.]+", "-", result.name.split(".hip ")[0])
            (given.out / f"{name}.{TARGET}.hsaco").write_bytes(result.code)
    spilled = [result.name for result in built if result.spilled]
    for name in spilled:
        print(f"spills registers: {name}", file=sys.stderr)
    for name in missing:
        print(f"not compiled, absent here: {name}", file=sys.stderr)
    if spilled:
        return 1
    return 2 if missing and not given.allow_missing else 0


if __name__ == "__main__":
    sys.exit(main())
