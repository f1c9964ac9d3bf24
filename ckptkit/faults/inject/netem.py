"""Faults of a whole network namespace, by tc: delay, loss and rate on its loopback, or the link down.

Processes that run in one `Namespace` have a network of their own, which nothing else sees. Needs the right to make user and network
namespaces; delay and loss also need the kernel's netem, which small kernels lack (`has_netem`). Where either is missing use
`network.Proxy`.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ckptkit.errors import UsageError

TC = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "tc"


class Namespace:
    """A network namespace, kept alive by a process of ours. Its loopback is up.

    Raises UsageError where namespaces are not allowed.
    """

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "-rn", "sh", "-c", "ip link set lo up && echo up && exec sleep 86400"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline().strip() != "up":
            said = self._keeper.communicate()[1].strip()
            raise UsageError(f"network namespaces are not allowed here: {said}")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """A command line that runs `arguments` in the namespace."""
        enter = ["nsenter", "-t", str(self._keeper.pid), "-U", "-n", "--preserve-credentials", "--"]
        return [*enter, *arguments]

    def shape(
        self, *, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0, rate: float = 0.0
    ) -> None:
        """From now on; without arguments: heal.

        Args:
            loss: Share of packets.
            rate: Bytes a second.

        Raises UsageError where the kernel cannot do it.
        """
        self._tc("del", check=False)
        if delay_s or loss or jitter_s:
            shaped = ["netem"]
            if delay_s or jitter_s:
                shaped += ["delay", f"{delay_s * 1e3:g}ms", f"{jitter_s * 1e3:g}ms"]
            if loss:
                shaped += ["loss", f"{100 * loss:g}%"]
            if rate:
                shaped += ["rate", f"{8 * rate:.0f}bit"]
            self._tc("add", *shaped)
        elif rate:
            burst = max(round(rate / 50), 70_000)  # bytes; a packet of loopback is up to 64 KiB
            self._tc("add", "tbf", "rate", f"{8 * rate:.0f}bit", "burst", str(burst), "latency", "500ms")

    def partition(self, down: bool = True) -> None:
        """Take the link down, or up again."""
        self._run(["ip", "link", "set", "lo", "down" if down else "up"])

    def close(self) -> None:
        self._keeper.send_signal(signal.SIGKILL)
        self._keeper.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tc(self, action: str, *shaped: str, check: bool = True) -> None:
        self._run([TC, "qdisc", action, "dev", "lo", "root", *shaped], check=check)

    def _run(self, arguments: Sequence[str], check: bool = True) -> None:
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise UsageError(f"{' '.join(arguments)}: {done.stderr.strip()}")


def has_netem() -> bool:
    """Whether delay and loss work here."""
    try:
        with Namespace() as namespace:
            namespace.shape(delay_s=0.001)
    except (UsageError, OSError):
        return False
    return True
