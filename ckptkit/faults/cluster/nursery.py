"""A process that has imported everything and forks daemons and ranks on demand: real processes, that start in milliseconds.

The caller's side is `Nursery`; `Child` is what `subprocess.Popen` would be.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.faults.cluster import rank
from ckptkit.faults.inject.program import VARIABLE, install

_FDS = 3
PRELOAD = (
    "ckptkit.cli.main", "ckptkit.cli.cache", "ckptkit.cli.cache_serve", "ckptkit.cache.daemon", "importlib.metadata",
    "numpy.ma", "numpy.random",
)  # fmt: skip
"""What daemons and ranks import, also what they import late: half of the time of a rank that lives for a few saves."""


class Child:
    """A forked process."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout_s: float = 60.0) -> int:
        until = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The forking process, and requests to it. One for this process: `Nursery.shared()`.

    Args:
        program: Module to run with its arguments, which calls `main`; children are what it is.
    """

    _one: "Nursery | None" = None

    def __init__(self, *program: str) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *(program or ("ckptkit.faults.cluster.nursery",)), str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()
        self._sock = ours
        self._data = b""

    @classmethod
    def shared(cls) -> "Nursery":
        if cls._one is None:
            cls._one = cls()
            atexit.register(cls.fresh)
        return cls._one

    @classmethod
    def use(cls, *program: str) -> None:
        """Let the shared one be another program."""
        cls.fresh()
        cls._one = cls(*program)
        atexit.register(cls.fresh)

    @classmethod
    def fresh(cls) -> None:
        """End the shared one; the next has today's environment."""
        if cls._one is not None:
            cls._one.close()
            cls._one = None

    def start(
        self,
        kind: str,
        arguments: Sequence[str],
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Fork a `daemon` or a `rank`; `environment` is added to its own, with the faults of `inject.program` in it."""
        request = {"start": kind, "arguments": list(arguments), "environment": dict(environment or {})}
        return Child(self, self.ask(request, (stdin, stdout, stderr))["pid"])

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        if fds:
            socket.send_fds(self._sock, [line], list(fds))
        else:
            self._sock.sendall(line)
        while b"\n" not in self._data:
            data = self._sock.recv(1 << 16)
            if not data:
                raise RuntimeError("the nursery has ended")
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


def main() -> None:
    """The forking side: one request after the other, until the caller's side closes."""
    for name in PRELOAD:  # so that the forked need not
        importlib.import_module(name)
    gc.freeze()  # else the first collection of each of the forked writes to, and so copies, every page of these

    sock = socket.socket(fileno=int(sys.argv[-1]))
    codes: dict[int, int | None] = {}
    data = b""
    fds: list[int] = []
    while True:
        more, new, _, _ = socket.recv_fds(sock, 1 << 16, 16)
        if not more:
            break
        data, fds = data + more, fds + list(new)
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            request = json.loads(line)
            if "start" in request:
                given, fds = fds[:_FDS], fds[_FDS:]
                pid = os.fork()
                if pid == 0:
                    sock.close()
                    _become(request["start"], request["arguments"], given, request["environment"])
                for fd in given:
                    os.close(fd)
                codes[pid] = None
                answer: dict[str, Any] = {"pid": pid}
            else:
                pid = request["poll"]
                if codes[pid] is None:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    codes[pid] = os.waitstatus_to_exitcode(status) if done else None
                answer = {"code": codes[pid]}
            sock.sendall(json.dumps(answer).encode() + b"\n")
    for pid, code in codes.items():
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _become(kind: str, arguments: list[str], fds: list[int], environment: dict[str, str]) -> None:
    """Turn the forked process into what it should be; never returns."""
    code = 1
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
            os.close(fd)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w")  # noqa: SIM115
        os.environ.update(environment)
        if VARIABLE in environment:
            install(environment[VARIABLE])
        if kind == "daemon":
            sys.argv = ["ckptkit", "cache", "serve", *arguments]
            runpy.run_module("ckptkit", run_name="__main__", alter_sys=True)
        else:
            sys.argv = [kind, *arguments]
            rank.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
