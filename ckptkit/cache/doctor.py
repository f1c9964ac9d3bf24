"""What the daemon needs of a node, looked at one by one. Nothing is changed but a file that is written and removed in durable storage."""

import os
import platform
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptkit.cache.certs import days_left
from ckptkit.cache.config import CacheConfig
from ckptkit.cache.limits import memory, reserve
from ckptkit.cache.peercred import peer_of
from ckptkit.errors import CkptError
from ckptkit.stores.shared import shared_folder
from ckptkit.stores.system import MEMORY_FILE_SYSTEMS, file_system

_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One check: `ok`, `warning` (works, but) or `error` (does not work), in a line."""

    level: str
    name: str
    text: str


def examine(config: CacheConfig) -> list[Finding]:
    """All checks of a node for a configuration. A check that cannot be made is a warning."""
    found: list[Finding] = []
    for check in (
        _kernel,
        _folder,
        _swap,
        _huge_pages,
        _numa,
        _memory,
        _cgroup,
        _descriptors,
        _address,
        _certificates,
        _storage,
    ):
        try:
            found += check(config)
        except (OSError, CkptError, ValueError) as error:
            found.append(Finding("warning", check.__name__.strip("_"), f"cannot be checked: {error}"))
    return found


Check = Callable[[CacheConfig], Iterator[Finding]]


def _kernel(config: CacheConfig) -> Iterator[Finding]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(peer_of(ours).pidfd)
            ours.getsockopt(socket.SOL_SOCKET, 77)
            yield Finding(
                "ok", "kernel", f"{platform.release()}: tells when the process behind a socket ends"
            )
        except OSError:
            yield Finding(
                "warning",
                "kernel",
                f"{platform.release()} has no SO_PEERPIDFD (6.5): ranks in another PID namespace are refused; use hostPID",
            )


def _folder(config: CacheConfig) -> Iterator[Finding]:
    at = config.folder
    while not os.path.exists(at):
        at = os.path.dirname(at)
    kind = file_system(at)
    if kind not in MEMORY_FILE_SYSTEMS:
        yield Finding(
            "error", "root", f"{at} is on {kind or 'a disk'}, not on tmpfs: saves would wait for it"
        )
        return
    found = os.statvfs(at)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    yield Finding("ok", "root", f"{at} is on {kind}: {size / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free")
    if config.slots.budget and config.slots.budget > size:
        yield Finding(
            "error",
            "root",
            f"slots.budget is {config.slots.budget / _GIB:.1f} GiB, more than the tmpfs has; mount it with size=",
        )
    if at.startswith("/dev/shm"):
        yield Finding(
            "warning", "root", "it shares /dev/shm with others, who may fill it; a mount of its own is safer"
        )


def _swap(config: CacheConfig) -> Iterator[Finding]:
    with open("/proc/swaps") as file:
        swaps = len(file.readlines()) - 1
    if swaps and not _mounted_with(config.folder, "noswap"):
        yield Finding(
            "warning",
            "swap",
            "is on: slots may be swapped out; turn it off, or mount the tmpfs with noswap (Linux 6.4)",
        )
    else:
        yield Finding("ok", "swap", "slots stay in memory")


def _huge_pages(config: CacheConfig) -> Iterator[Finding]:
    mode = _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if mode in ("always", "within_size", "force"):
        yield Finding(
            "warning",
            "huge pages",
            f"shmem_enabled is {mode}: the kernel may merge pages of registered memory; use never or advise",
        )
    else:
        yield Finding("ok", "huge pages", f"shmem_enabled is {mode or 'absent'}")


def _numa(config: CacheConfig) -> Iterator[Finding]:
    nodes = [
        name
        for name in os.listdir("/sys/devices/system/node")
        if name.startswith("node") and name[4:].isdigit()
    ]
    balancing = _read("/proc/sys/kernel/numa_balancing")
    if len(nodes) > 1 and balancing not in ("", "0"):
        yield Finding(
            "warning",
            "numa",
            "numa_balancing is on: it unmaps pages of registered memory; set kernel.numa_balancing=0",
        )
    else:
        yield Finding(
            "ok",
            "numa",
            f"{len(nodes)} node{'s' * (len(nodes) != 1)}, balancing {'on' if balancing not in ('', '0') else 'off'}",
        )


def _memory(config: CacheConfig) -> Iterator[Finding]:
    now = memory()
    keep = reserve(config, now.total)
    text = f"{now.available / _GIB:.1f} of {now.total / _GIB:.1f} GiB available, {keep / _GIB:.1f} GiB are kept free"
    yield Finding("ok" if now.available > keep else "error", "memory", text)


def _cgroup(config: CacheConfig) -> Iterator[Finding]:
    left = memory().cgroup
    if left is None:
        yield Finding("ok", "cgroup", "has no limit of memory")
    elif config.slots.budget and left < config.slots.budget + 4 * _GIB:
        yield Finding(
            "error",
            "cgroup",
            f"{left / _GIB:.1f} GiB are left, less than slots.budget + 4 GiB; raise memory.max",
        )
    else:
        yield Finding("ok", "cgroup", f"{left / _GIB:.1f} GiB are left below memory.max")


def _descriptors(config: CacheConfig) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * config.limits.connections // 8 + config.limits.clients + 256
    if soft < needed:
        yield Finding(
            "warning",
            "descriptors",
            f"ulimit -n is {soft}; {needed} let all connections of the configuration in",
        )
    else:
        yield Finding("ok", "descriptors", f"ulimit -n is {soft}")


def _address(config: CacheConfig) -> Iterator[Finding]:
    name = config.advertise.rpartition(":")[0] if config.advertise.count(":") == 1 else config.advertise
    try:
        found = sorted({str(item[4][0]) for item in socket.getaddrinfo(name.strip("[]"), None)})
    except OSError as error:
        yield Finding(
            "error",
            "address",
            f"{name} has no address ({error.strerror}); set advertise to one that peers reach",
        )
        return
    if not config.loopback and all(address.startswith("127.") or address == "::1" for address in found):
        yield Finding(
            "error",
            "address",
            f"{name} is {', '.join(found)} here: peers would reach themselves; set advertise",
        )
    else:
        yield Finding("ok", "address", f"peers reach this node as {name} ({', '.join(found)})")


def _certificates(config: CacheConfig) -> Iterator[Finding]:
    if config.tls.mode != "all":
        yield Finding("warning", "tls", "is off: for tests on loopback only")
        return
    from ckptkit.cache.door import server_context
    from ckptkit.cache.fetch import client_context

    for make in (server_context, client_context):
        make(config.tls.ca, config.tls.cert, config.tls.key)
    for path in (config.tls.cert, config.tls.ca):
        days = days_left(path)
        level = "error" if days < 0 else "warning" if days < 14 else "ok"
        yield Finding(level, "tls", f"{path} is valid for {days:.0f} days")
    mode = os.stat(config.tls.key).st_mode
    if mode & 0o077:
        yield Finding("error", "tls", f"{config.tls.key} can be read by others; chmod 600")


def _storage(config: CacheConfig) -> Iterator[Finding]:
    if not config.drain.url:
        yield Finding("warning", "storage", "drain.url is empty: nothing outlives the loss of a whole clique")
        return
    folder = shared_folder(f"{config.drain.url.rstrip('/')}/{config.job}")
    probe = f".probe-{os.getpid()}"
    content = struct.pack("<Q", os.getpid())
    try:
        folder.write_small(probe, content)
        same = folder.read(probe) == content
        folder.remove(probe)
    except CkptError as error:
        yield Finding("error", "storage", str(error))
    else:
        yield Finding("ok" if same else "error", "storage", f"{folder.url} is written, read and removed from")
    finally:
        folder.close()


def _mounted_with(path: str, option: str) -> bool:
    best: tuple[int, bool] = (-1, False)
    with open("/proc/self/mounts") as file:
        for line in file:
            _, where, _, options = line.split()[:4]
            if (path + "/").startswith(where.rstrip("/") + "/") and len(where) > best[0]:
                best = len(where), option in options.split(",")
    return best[1]


def _chosen(path: str) -> str:
    """The word in brackets of a file of choices."""
    text = _read(path)
    return text.partition("[")[2].partition("]")[0]


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
