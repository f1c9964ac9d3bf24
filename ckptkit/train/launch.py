"""Starting the ranks of a run: processes of this machine, or one that torchrun started.

Workers are forked from a server that has imported torch once. What a worker raises is raised here; when one ends badly, the
others are ended.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from ckptkit.errors import CkptError, StoreError, UsageError

GRACE_S = 20.0
"""How long other ranks may take to end by themselves after one has failed."""


def launch(main: Callable[..., Any], world: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Run `main(rank, address, device, *args)` on `world` processes of this machine; what they return, by rank.

    With one rank it is called here. SIGINT is the workers' to handle; SIGTERM is passed on to them.

    Args:
        main: A function of a module; it, its arguments and results must pickle.
        world: Number of ranks.
        device: `cpu`, or `cuda` for one device each.

    Raises:
        CkptError: what a rank raised; of several the first.
        StoreError: a rank ended without a word (killed, out of memory).
    """
    if world == 1:
        return [main(0, "", device_of(device, 0), *args)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckptkit.train.trainer"])
    address = f"tcp://127.0.0.1:{_free_port()}"
    workers: dict[Connection, Any] = {}
    for rank in range(world):
        mine, theirs = context.Pipe()
        worker = context.Process(
            target=_work,
            args=(theirs, main, rank, address, device_of(device, rank), args),
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
    """Results of workers; signals are theirs to handle, and a SIGTERM that only this process got is passed on."""
    order = list(workers)
    results: dict[Connection, Any] = {}
    failure: BaseException | None = None
    deadline = float("inf")
    waiting = set(order)
    try:
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, min(deadline - time.monotonic(), 3600.0)))
            if not ready and time.monotonic() >= deadline:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                waiting.discard(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    workers[pipe].join(10)
                    code = workers[pipe].exitcode
                    good, value = (
                        False,
                        StoreError(
                            f"{workers[pipe].name} ended without a word (exit code {code}); others were ended. It was "
                            "killed, perhaps for memory: look at the system's log, and run the same command again to go on"
                        ),
                    )
                if good:
                    results[pipe] = value
                elif failure is None or (isinstance(value, CkptError) and not isinstance(failure, CkptError)):
                    failure = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    finally:
        for worker in workers.values():
            worker.join(0 if waiting else 30)
            if worker.is_alive():
                worker.terminate()
                worker.join(5)
            if worker.is_alive():
                worker.kill()
    if failure is not None:
        raise failure
    return [results[pipe] for pipe in order]


def _work(
    pipe: Connection, main: Callable[..., Any], rank: int, address: str, device: str, args: tuple[Any, ...]
) -> None:
    try:
        pipe.send((True, main(rank, address, device, *args)))
    except BaseException as error:  # noqa: BLE001 (told to the parent, which raises it)
        try:
            pipe.send((False, error))
        except Exception:  # noqa: BLE001 (an error that does not pickle)
            pipe.send((False, RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")))
    finally:
        pipe.close()


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
