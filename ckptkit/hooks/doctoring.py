"""The doctor: what of a machine matters for saving, each line ok or with the reason why not. Nothing is changed."""

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ckptkit.cache.durable import DurableRun
from ckptkit.errors import CkptError
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.device import copy_rate
from ckptkit.hooks.targets import probe

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line. `state` is `ok`, `warning` or `fault`; `why` says what follows and what to do."""

    name: str
    state: str
    value: str
    why: str = ""

    def line(self) -> str:
        """For people."""
        return f"{self.state:7} {self.name}: {self.value}" + (f". {self.why}" if self.why else "")


def examine(url: str | None = None, root: Path = Path("/")) -> list[Finding]:
    """Look at this machine, and try the URL of a run where one is given.

    Args:
        root: Where `proc`, `sys` and `dev` are; for tests.
    """
    found = [*software(), *devices(root), *memory(root)]
    found += _tried("copy", copies)
    if url is not None:
        found += _tried("url", lambda: storage(url))
    return found


def _tried(name: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What an examination finds; what it raises is a fault of the thing examined."""
    try:
        return list(look())
    except (CkptError, OSError, RuntimeError) as error:
        return [Finding(name, "fault", (str(error).splitlines() or [type(error).__name__])[0])]


def software() -> Iterator[Finding]:
    """Torch, its runtime and Triton, and who installed them."""
    build = (
        f"HIP {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU only"
    )
    yield Finding("torch", "ok", f"{torch.__version__} ({build}), {_installer('torch')}")
    names = [
        name for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm") if _version(name)
    ]
    if len(names) > 1:
        why = "two packages bring the module triton, and the one installed last wins; keep the one that came with torch"
        yield Finding("triton", "warning", ", ".join(f"{name} {_version(name)}" for name in names), why)
    elif names:
        yield Finding("triton", "ok", f"{names[0]} {_version(names[0])}, {_installer(names[0])}")
    else:
        on_gpu = torch.cuda.is_available()
        why = (
            "digests and packing fall back to torch operations, which are far slower on a GPU"
            if on_gpu
            else ""
        )
        yield Finding("triton", "warning" if on_gpu else "ok", "not installed", why)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _installer(name: str) -> str:
    try:
        text = metadata.distribution(name).read_text("INSTALLER")
    except metadata.PackageNotFoundError:
        return "not installed as a package"
    return f"installed by {text.strip()}" if text and text.strip() else "installer unknown"


def devices(root: Path) -> Iterator[Finding]:
    """Devices, their partition, and settings of copy engines and queues."""
    if not torch.cuda.is_available():
        yield Finding("device", "ok", "none that torch sees; saves copy from host memory")
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield Finding("device", "ok", f"cuda:{number} {about.name}, {about.total_memory / GIB:.0f} GiB")
    for path in sorted((root / "sys/class/drm").glob("card*/device/current_compute_partition")):
        mode = _text(path)
        yield Finding(
            "partition",
            "ok",
            f"{path.parts[-3]} {mode}, memory {_text(path.with_name('current_memory_partition')) or 'unknown'}",
        )
    sdma = os.environ.get("HSA_ENABLE_SDMA")
    if torch.version.hip:
        bad = sdma == "0"
        why = "copies run on compute units and slow the training; unset HSA_ENABLE_SDMA" if bad else ""
        yield Finding("copy engines", "warning" if bad else "ok", f"HSA_ENABLE_SDMA={sdma or 'unset'}", why)
        queues = os.environ.get("GPU_MAX_HW_QUEUES")
        few = queues is not None and queues.isdigit() and int(queues) < 3
        why = "a copy may wait behind a kernel: copies, packing and training want a queue each" if few else ""
        yield Finding(
            "hardware queues", "warning" if few else "ok", f"GPU_MAX_HW_QUEUES={queues or 'unset'}", why
        )
    else:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        one = connections == "1"
        why = (
            "with one queue a copy may wait behind kernels that were enqueued before it (Megatron asks for 1)"
            if one
            else ""
        )
        yield Finding(
            "hardware queues",
            "warning" if one else "ok",
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections or 'unset'}",
            why,
        )


def memory(root: Path) -> Iterator[Finding]:
    """What the kernel does to memory that a device copies into, and how much there may be."""
    balancing = _text(root / "proc/sys/kernel/numa_balancing")
    if balancing:
        on = balancing != "0"
        why = (
            "the kernel unmaps pages to see who uses them, which stalls registered memory; set kernel.numa_balancing=0"
            if on
            else ""
        )
        yield Finding("NUMA balancing", "warning" if on else "ok", "on" if on else "off", why)
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if huge:
        chosen = huge.partition("[")[2].partition("]")[0] or huge
        why = (
            "pages of slots may be moved and merged while they are registered"
            if chosen in ("always", "force")
            else ""
        )
        yield Finding("huge pages of shared memory", "warning" if why else "ok", chosen, why)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY and soft < GIB
    why = (
        "registering buffers may fail, and copies then bounce; raise `ulimit -l`"
        if limited and torch.cuda.is_available()
        else ""
    )
    value = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
    yield Finding("locked memory", "warning" if why else "ok", value, why)
    total = _meminfo(root, "MemTotal")
    limit = _cgroup_limit(root)
    if limit is not None and total and limit < total:
        why = "buffers and slots count towards it" if limit < total // 2 else ""
        yield Finding(
            "cgroup memory", "warning" if why else "ok", f"{limit / GIB:.1f} of {total / GIB:.1f} GiB", why
        )
    elif total:
        yield Finding(
            "memory", "ok", f"{total / GIB:.1f} GiB, {_meminfo(root, 'MemAvailable') / GIB:.1f} available"
        )
    try:
        system = os.statvfs(root / "dev/shm")
        free = system.f_bavail * system.f_frsize
        small = free < GIB
        why = (
            "the node cache's slots need room for several copies of a rank's state; mount a tmpfs for it"
            if small
            else ""
        )
        yield Finding("/dev/shm", "warning" if small else "ok", f"{free / GIB:.1f} GiB free", why)
    except OSError as error:
        yield Finding("/dev/shm", "warning", error.strerror or "missing", "the node cache needs a tmpfs")
    if _meminfo(root, "SwapTotal"):
        why = "slots may be swapped out; give the cache's tmpfs the option noswap, where the kernel has it"
        yield Finding("swap", "warning", f"{_meminfo(root, 'SwapTotal') / GIB:.1f} GiB", why)


def copies() -> Iterator[Finding]:
    """Registration and the rate from the device to the host, as measured now."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = HostBuffer.own(128 << 20)
    try:
        mode = buffer.register(device)
        why = (
            ""
            if mode == "registered"
            else "host memory cannot be registered, so copies bounce through pinned buffers at about half the rate"
        )
        yield Finding("registration", "ok" if mode == "registered" else "warning", mode, why)
        rate = copy_rate(device, buffer)
        slow = rate < 10e9
        why = (
            "far below what PCIe 4 and later links give (25 to 55); look at the link's width and the NUMA node"
            if slow
            else ""
        )
        yield Finding("device to host", "warning" if slow else "ok", f"{rate / 1e9:.1f} GB/s", why)
    finally:
        buffer.close()


def storage(url: str) -> Iterator[Finding]:
    """Whether a run's URL can be written, and what is there."""
    run = DurableRun(url)
    try:
        probe(run)
        names = run.names()
        newest = f", the newest {names[-1]}" if names else ""
        yield Finding("url", "ok", f"{url} can be written; it holds {len(names)} step folders{newest}")
    finally:
        run.close()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _meminfo(root: Path, name: str) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_limit(root: Path) -> int | None:
    """The memory that this process's cgroup may have, or None where it is not limited."""
    group = _text(root / "proc/self/cgroup").rpartition("::")[2].partition("\n")[0].lstrip("/")
    for path in (
        root / "sys/fs/cgroup" / group / "memory.max",
        root / "sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        text = _text(path)
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def as_dict(found: list[Finding]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [{"name": f.name, "state": f.state, "value": f.value, "why": f.why} for f in found]
