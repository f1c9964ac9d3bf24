"""Starting the ranks of a run: processes of this machine, or one that torchrun started.

Workers are forked from a server that has imported torch once. What a worker raises is raised here; when one ends badly, the
others are ended.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from ckptkit.errors import CkptError, InterruptedRunError, StoreError, UsageError

GRACE_S = 20.0
"""How long other ranks may take to end by themselves after one has failed."""


def launch(
    main: Callable[..., Any], world: int, *args: Any, device: str = "cpu", preload: Sequence[str] = ()
) -> list[Any]:
    """Run `main(rank, address, device, *args)` on `world` processes of this machine; what they return, by rank.

    With one rank it is called here. SIGINT and SIGTERM are the workers' to handle; a second one ends them.

    Args:
        main: A function of a module; it, its arguments and results must pickle.
        world: Number of ranks.
        device: `cpu`, or `cuda` for one device each.
        preload: Modules that take long to import, for the server that workers are forked from; heeded by the first call.

    Raises:
        CkptError: what a rank raised; of several the first.
        StoreError: a rank ended without a word (killed, out of memory).
    """
    if world == 1:
        return [main(0, "", device_of(device, 0), *args)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckptkit.train.loop", *preload])
    # They meet in a file: a port that is free now may be another process's before rank 0 listens on it.
    with tempfile.TemporaryDirectory(prefix="ckptkit-", ignore_cleanup_errors=True) as folder:
        workers: dict[Connection, Any] = {}
        for rank in range(world):
            mine, theirs = context.Pipe()
            worker = context.Process(
                target=_work,
                args=(theirs, main, rank, f"file://{folder}/meeting", device_of(device, rank), args),
                name=f"rank {rank}",
            )
            worker.start()
            theirs.close()
            workers[mine] = worker
        return _collect(workers)


def under_torchrun() -> tuple[int, int, int] | None:
    """`(rank, world, local rank)` where torchrun started this process, else None."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(name in os.environ for name in names):
        return None
    rank, world, local = (int(os.environ[name]) for name in names)
    return rank, world, local


def _collect(workers: dict[Connection, Any]) -> list[Any]:
    """Results of workers, by rank. Raises what a worker raised first, once the others have ended."""
    results: dict[Connection, Any] = {}
    failure: BaseException | None = None
    deadline = float("inf")
    waiting = set(workers)
    with _signals_passed_on(list(workers.values())) as asked:
        try:
            while waiting and time.monotonic() < deadline:
                for pipe in wait(list(waiting), timeout=min(deadline - time.monotonic(), 1.0)):
                    assert isinstance(pipe, Connection)
                    waiting.discard(pipe)
                    good, value = _answer(pipe, workers[pipe], bool(asked))
                    if good:
                        results[pipe] = value
                        continue
                    # Ranks that lost another one report that; the rank that failed knows why.
                    if failure is None or (
                        isinstance(value, CkptError) and not isinstance(failure, CkptError)
                    ):
                        failure = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            for pipe, worker in workers.items():
                worker.join(0 if pipe in waiting else GRACE_S)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    if failure is not None:
        raise failure
    return [results[pipe] for pipe in workers]


def _answer(pipe: Connection, worker: Any, asked: bool) -> tuple[bool, Any]:
    """Whether a worker was done well, and its result or error."""
    try:
        return pipe.recv()
    except EOFError:
        worker.join(GRACE_S)
        if asked and worker.exitcode in (-signal.SIGTERM, -signal.SIGINT):
            return False, InterruptedRunError(
                "interrupted; stopped before training began: nothing was changed"
            )
        return False, StoreError(
            f"{worker.name} ended without a word (exit code {worker.exitcode}), and the run with it. It was killed, perhaps "
            "for want of memory: look at the system's log, and run the same command again to go on"
        )


@contextmanager
def _signals_passed_on(workers: list[Any]) -> Iterator[list[float]]:
    """Ask workers to stop on SIGINT and SIGTERM, which a terminal may have sent them, too; kill them at the next after 1 s."""
    first: list[float] = []

    def handle(number: int, frame: Any) -> None:
        again = bool(first) and time.monotonic() - first[0] > 1.0
        first.append(time.monotonic())
        for worker in (w for w in workers if w.is_alive()):
            worker.kill() if again else worker.terminate()
        if again:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: whoever embeds this handles signals
        before.clear()
    try:
        yield first
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


def _work(
    pipe: Connection, main: Callable[..., Any], rank: int, address: str, device: str, args: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where ranks reach each other beside the file they met in
    try:
        pipe.send((True, main(rank, address, device, *args)))
    except BaseException as error:  # noqa: BLE001 (told to the parent, which raises it)
        if not isinstance(error, CkptError):
            error.add_note(f"On rank {rank}:\n{''.join(traceback.format_tb(error.__traceback__))}")
        try:
            pipe.send((False, error))
        except Exception:  # noqa: BLE001 (an error that does not pickle)
            pipe.send((False, RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")))
    finally:
        pipe.close()


def _end_with_parent() -> None:
    """Stop, as if asked to, when the launcher is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def device_of(kind: str, local: int) -> str:
    """The device of the `local`th rank of a machine."""
    return f"cuda:{local}" if kind == "cuda" else kind


def device_kind(device: str, ranks: int) -> str:
    """`cpu` or `cuda` for so many ranks on this machine. Raises UsageError where there are not enough devices."""
    if device == "cpu":
        return device
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have >= ranks:
        return "cuda"
    if device == "auto":
        return "cpu"
    raise UsageError(
        f"{ranks} ranks need as many GPUs here, there are {have}; use --device cpu, or torchrun on more nodes"
    )
