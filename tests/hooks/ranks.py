"""Ranks of a run as processes on this machine, over gloo: forked from a server that has torch loaded, so that they start at once."""

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel",
     "ckptkit.hooks.checkpointer"]
)  # fmt: skip


def run_ranks(
    world: int, job: Callable[..., Any], *args: Any, group: bool = True, timeout_s: float = 120.0
) -> list[Any]:
    """Call `job(rank, world, *args)` in `world` processes; gives what each returns.

    Raises AssertionError with the first rank's traceback where one raises or does not end in time.
    """
    rendezvous = f"/tmp/ckptkit-test-{os.getpid()}-{id(object()):x}-{os.urandom(4).hex()}"
    running, ends = [], []
    for rank in range(world):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_main, args=(theirs, rank, world, rendezvous if group else "", job, args), daemon=True
        )
        process.start()
        theirs.close()
        running.append(process)
        ends.append(mine)
    results: dict[int, Any] = {}
    try:
        left = list(ends)
        while left:
            ready = wait(left, timeout_s)
            assert ready, f"ranks {[ends.index(e) for e in left]} did not end within {timeout_s} s"
            for end in ready:
                assert isinstance(end, Connection)
                rank = ends.index(end)
                left.remove(end)
                try:
                    good, value = end.recv()
                except EOFError:
                    good, value = None, f"rank {rank} ended with code {running[rank].exitcode}"
                results[rank] = (good, value)
        for rank in range(world):
            good, value = results[rank]
            assert good is not False, f"rank {rank}:\n{value}"
        return [torch.load(io.BytesIO(results[rank][1]), weights_only=False) for rank in range(world)]
    finally:
        for process in running:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        if os.path.exists(rendezvous):
            os.unlink(rendezvous)


def _main(
    end: Connection, rank: int, world: int, rendezvous: str, job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        if rendezvous:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        value = job(rank, world, *args)
        data = io.BytesIO()
        torch.save(value, data)
        end.send((True, data.getvalue()))
        if rendezvous:
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (raised again where the ranks were started)
        end.send((False, traceback.format_exc()))
    finally:
        end.close()
        os._exit(0)
