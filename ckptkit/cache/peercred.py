"""Who is at the other end of a Unix socket: user, process, and when that process ends.

A process is told apart from a later one of the same number by its start time. From another PID namespace the number is 0; the process is then
named by the inode of its pidfd, which is unique until the next boot.
"""

import contextlib
import os
import socket
import struct
from dataclasses import dataclass

from ckptkit.cache.messages import Owner
from ckptkit.errors import StoreError

_SO_PEERPIDFD = 77


@dataclass(frozen=True)
class Peer:
    """The process behind a connection. `pidfd` is owned by whoever keeps this."""

    uid: int
    owner: Owner
    pidfd: int


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected. Raises StoreError where the system does not tell enough to know when it has ended."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    pidfd = -1
    with contextlib.suppress(OSError):
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
    try:
        if pid == 0:
            if pidfd < 0 or not _inodes_tell():
                raise StoreError(
                    "the process is in another PID namespace, and this kernel does not tell when it ends; run both in one "
                    "(hostPID, or shareProcessNamespace in one pod)"
                )
            return Peer(uid, Owner(0, os.fstat(pidfd).st_ino), pidfd)
        started = start_time(pid)
        if started is None:
            raise StoreError(f"process {pid} ended while it was asked who it is")
        if pidfd < 0:
            pidfd = os.pidfd_open(pid)
            if start_time(pid) != started:
                raise StoreError(f"process {pid} ended while it was asked who it is")
        return Peer(uid, Owner(pid, started), pidfd)
    except OSError as error:
        _close(pidfd)
        raise StoreError(f"cannot watch process {pid}: {error.strerror}") from error
    except StoreError:
        _close(pidfd)
        raise


def watch(owner: Owner) -> int | None:
    """A pidfd of a process known from a record; None where it has ended. Raises StoreError where that cannot be told."""
    if owner.pid == 0:
        raise StoreError(
            "the process was in another PID namespace; whether it still runs is not known until it connects again"
        )
    try:
        pidfd = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise StoreError(f"cannot watch process {owner.pid}: {error.strerror}") from error
    if start_time(owner.pid) != owner.starttime:
        os.close(pidfd)
        return None
    return pidfd


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _inodes_tell() -> bool:
    """Whether pidfds have inodes of their own; before Linux 6.9 all have the same one."""
    ours, first = os.pidfd_open(os.getpid()), os.pidfd_open(1)
    try:
        return os.getpid() == 1 or os.fstat(ours).st_ino != os.fstat(first).st_ino
    finally:
        os.close(ours)
        os.close(first)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
