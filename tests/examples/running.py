"""Starts an example as a user does, by torchrun; kills it in the middle, or lets it end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, EVERY = 60, 10  # as the examples have them
DEADLINE_S = 300.0  # for one start, on a machine that does much else


@dataclass(frozen=True)
class Start:
    """How an example is started: on how many ranks, with which options. No ranks: without torchrun."""

    ranks: int
    options: tuple[str, ...] = ()

    def command(self, example: str, run: Path) -> list[str]:
        program = [str(EXAMPLES / f"{example}.py"), str(run), *self.options]
        if not self.ranks:
            return [sys.executable, *program]
        how = [
            "--nproc-per-node",
            str(self.ranks),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(_port()),
        ]
        return [sys.executable, "-m", "torch.distributed.run", *how, *program]


def killed_and_continued(
    example: str, first: Start, others: list[Start], root: Path, seed: int
) -> list[float]:
    """Kill a run in the middle, go on in the same layout and in others; each against the undisturbed run.

    In the same layout losses must be equal bit for bit. For each other one the largest relative difference of a loss is given.
    """
    undisturbed = finished(example, first, root / "undisturbed")
    assert list(undisturbed) == list(range(1, STEPS + 1))
    last = Random(seed).choice([n for n in range(25, 45) if n % EVERY])

    before = killed(example, first, root / "run", last)
    assert before == {step: undisturbed[step] for step in before}, "two runs of one layout differ"

    found = []
    for number, start in enumerate([first, *others]):
        run = root / f"run-{number}"
        shutil.copytree(root / "run", run)
        after = finished(example, start, run)
        begins = min(after)
        assert 1 < begins <= max(before) + 1, (
            f"{start} began at step {begins}; the run was killed after {max(before)}"
        )
        assert list(after) == list(range(begins, STEPS + 1))
        if start == first:
            assert after == {step: undisturbed[step] for step in after}
        else:
            found.append(max(abs(loss / undisturbed[step] - 1) for step, loss in after.items()))
    print(
        f"{example}: killed after step {max(before)}; "
        + ", ".join(f"{s}: {e:.1e}" for s, e in zip(others, found, strict=True))
    )
    return found


def finished(example: str, start: Start, run: Path) -> dict[int, float]:
    """Losses of a run that ends by itself, by step."""
    with _started(example, start, run) as (process, lines):
        losses = dict(lines)
        code = process.wait()
        assert code == 0, f"{start} ended with {code}:\n{_log(run)}"
        assert losses, f"{start} did not train:\n{_log(run)}"
    return losses


def killed(example: str, start: Start, run: Path, last: int) -> dict[int, float]:
    """Losses of a run up to the moment when all its processes are killed, at step `last` or a few later, when a step is whole."""
    losses = {}
    with _started(example, start, run) as (process, lines):
        for step, loss in lines:
            losses[step] = loss
            if step == last:
                break
        until = time.monotonic() + DEADLINE_S
        while not list(run.glob("step-*/manifest.json")) and time.monotonic() < until:
            time.sleep(0.01)
        assert process.poll() is None, f"{start} ended before it was killed:\n{_log(run)}"
        _kill(process)
    return losses


@contextlib.contextmanager
def _started(
    example: str, start: Start, run: Path
) -> Iterator[tuple["subprocess.Popen[bytes]", Iterator[tuple[int, float]]]]:
    """An example that runs, and the lines that it prints.

    Its output goes through a socket with room for a few lines: who prints waits for who reads, so that the program is not far
    beyond the step that was read last.
    """
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least
    ours.settimeout(DEADLINE_S)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CKPTKIT_CACHE": "off"}
    with ours, _errors(run).open("wb") as errors:
        process = subprocess.Popen(
            start.command(example, run),
            stdout=theirs.fileno(),
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        try:
            yield process, _losses(ours)
        finally:
            _kill(process)


def _losses(end: socket.socket) -> Iterator[tuple[int, float]]:
    with end.makefile("rb") as file:
        for line in file:
            step, _, loss = line.decode().partition(" ")
            if step.isdigit():  # frameworks print, too
                yield int(step), float(loss)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to a process and everything that it started (torchrun's ranks are sessions of their own)."""
    if process.poll() is None:
        tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _errors(run: Path) -> Path:
    return run.with_name(f"{run.name}.stderr")


def _log(run: Path) -> str:
    return _errors(run).read_text(errors="replace")[-3000:]


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
