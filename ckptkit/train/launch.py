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
        return [main(0, "", _device(device, 0), *args)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckptkit.train.trainer"])
    address = f"tcp://127.0.0.1:{_free_port()}"
    workers: dict[Connection, Any] = {}
    for rank in range(world):
        mine, theirs = context.Pipe()
        worker = context.Process(
            target=_work, args=(theirs, main, rank, address, _device(device, rank), args), name=f"rank {rank}"
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
                    good, value = False, StoreError(
                        f"{workers[pipe].name} ended without a word (exit code {code}); others were ended. It was "
                        "killed, perhaps for memory: look at the system's log, and run the same command again to go on"
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


def _work(pipe: Connection, main: Callable[..., Any], rank: int, address: str, device: str, args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, main(rank, address, device, *args)))
    except BaseException as error:  # noqa: BLE001 (told to the parent, which raises it)
        try:
            pipe.send((False, error))
        except Exception:
            pipe.send((False, RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")))
    finally:
        pipe.close()


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank}" if kind == "cuda" else kind


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_devices(device: str, ranks: int) -> None:
    """Raise UsageError where this machine has not a device for each rank."""
    if device == "cuda":
        import torch

        have = torch.cuda.device_count()
        if have < ranks:
            raise UsageError(f"{ranks} ranks need as many GPUs here, there are {have}; use --device cpu, or torchrun")
