"""Parts of a reshard as Ray tasks.

Each task is one process that does what `reshard --part K/N` does, on whatever node Ray chooses; state lies in the unfinished folder, so
a task whose worker or node is lost is simply run again by Ray and goes on from there. Ray is imported when it is used: extra `ckptkit[ray]`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.errors import CkptError, InterruptedRunError, StoreError, UsageError

Progress = Callable[[int, int], None]
Work = Callable[[int, int], Mapping[str, Any]]
"""Does part `number` of `count` and gives a plain result. Pickled to the workers."""

RETRIES = 3
"""How often Ray runs a part again whose worker died."""


def run_parts(
    work: Work,
    count: int,
    *,
    done: Callable[[], int] = lambda: 0,
    total: int = 0,
    progress: Progress | None = None,
    cpus: float = 1.0,
    every_s: float = 0.5,
) -> list[Mapping[str, Any]]:
    """Run `work` once for each part, as many at a time as Ray has room for; results in the order of parts.

    Uses the Ray that is initialised; else the cluster of `RAY_ADDRESS`, else starts one on this machine and stops it at the end.

    Args:
        done, total: Bytes that are durable by now, and in all, for `progress`.
        cpus: CPUs that Ray counts for a part.

    Raises:
        UsageError: Ray is not installed.
        CkptError: what a part raised, the first one.
        StoreError: a worker died more than `RETRIES` times.
        InterruptedRunError: KeyboardInterrupt; what is durable is kept.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs Ray: pip install 'ckptkit[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    # Errors of ours are results, so that Ray retries what died, not what cannot be.
    task = ray.remote(num_cpus=cpus, max_retries=RETRIES, retry_exceptions=False)(_contained)
    waiting = {task.remote(work, number, count): number for number in range(1, count + 1)}
    found: dict[int, Mapping[str, Any]] = {}
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=every_s)
            for one in ready:
                number = waiting.pop(one)
                try:
                    result, problem = ray.get(one)
                except ray.exceptions.RayError as lost:
                    raise StoreError(
                        f"the worker of part {number}/{count} was lost {RETRIES + 1} times: {_line(lost)}. Run the same command again"
                    ) from lost
                if problem is not None:
                    raise problem
                found[number] = result
            if progress is not None:
                progress(done(), total)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"interrupted; {done():,} of {total:,} bytes are durable. Run the same command to go on"
        ) from None
    finally:
        for one in waiting:
            ray.cancel(one, force=True)
        if ours:
            ray.shutdown()
        elif waiting:
            time.sleep(every_s)  # so that locks of cancelled workers are free again
    return [found[number] for number in range(1, count + 1)]


def _contained(work: Work, number: int, count: int) -> tuple[Mapping[str, Any] | None, CkptError | None]:
    try:
        return work(number, count), None
    except CkptError as error:
        return None, error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
