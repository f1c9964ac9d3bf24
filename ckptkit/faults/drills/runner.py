"""Running drills: one with one seed, or many, a few at a time.

Each runs in a folder of its own, on tmpfs where there is room, since it stands for the memory of nodes.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.faults.cluster.nodes import Failed
from ckptkit.faults.drills.base import Drill, chosen
from ckptkit.faults.drills.light import Light
from ckptkit.faults.drills.verdict import NotHereError, Verdict

ROOM = 2 << 30
"""Bytes that must be free on tmpfs for drills to use it."""


def run_drill(drill: Drill, seed: int, shared: str | None = None) -> Verdict:
    """Run one drill with one seed. Whatever happens is in the verdict; nothing is raised but interrupts.

    Args:
        shared: Folder for what drills share: undisturbed runs. Made and removed here unless given.
    """
    with folder() as base, folder() as own:
        stage = _stage(drill, seed, base, Path(shared or own))
        try:
            with stage:
                drill.run(stage)
                stage.finish()
        except NotHereError as error:
            stage.verdict.skipped = str(error)
        except (Failed, CkptError, TimeoutError) as error:
            stage.verdict.findings.append(str(error).partition("\n")[0])
            stage.verdict.error = f"{error}"
        except Exception as error:  # noqa: BLE001  (a fault of the drill itself is a finding, too)
            stage.verdict.findings.append(f"the drill ended with {type(error).__name__}: {error}")
            stage.verdict.error = traceback.format_exc()
        stage.clock.end()
        stage.verdict.findings = [_anywhere(text, base) for text in stage.verdict.findings]
        stage.verdict.error = _anywhere(stage.verdict.error, base)
        return stage.verdict


def _anywhere(text: str, folder: Path) -> str:
    """A text without the places that files have on this machine: a report is for others, too."""
    package = Path(ckptkit.__file__).parent
    return (
        text.replace(str(folder), "DRILL").replace(str(package), package.name).replace(sys.prefix, "PYTHON")
    )


def _stage(drill: Drill, seed: int, base: Path, shared: Path) -> Any:
    if drill.kind == "light":
        return Light(drill, seed, base)
    from ckptkit.faults.drills.training import Training

    return Training(drill, seed, base, shared)


def run_all(
    jobs: Iterable[tuple[Drill, int]],
    *,
    parallel: int = 2,
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run many, in processes of their own; the verdicts in the order of the jobs.

    Args:
        jobs: Drills with seeds.
        parallel: So many at a time; of light ones, which wait for half of their time, half as many again.
        tell: Called with each verdict as it comes.
    """
    wanted = list(jobs)
    # The long ones first, so that none is left over at the end.
    order = sorted(range(len(wanted)), key=lambda n: -wanted[n][0].faults)
    found: dict[int, Verdict] = {}
    with folder() as shared:
        for kind, width in (("zaya", parallel), ("light", parallel + parallel // 2)):
            # A worker that dies takes its pool with it; what is left is run by the next one.
            while left := [n for n in order if n not in found and wanted[n][0].kind == kind]:
                before = len(found)
                for number, verdict in _pool(wanted, left, width, str(shared)):
                    found[number] = verdict
                    tell(verdict)
                if len(found) == before:
                    drill, seed = wanted[left[0]]
                    found[left[0]] = Verdict(
                        drill.name, kind, seed, findings=["the process that ran the drill was killed"]
                    )
                    tell(found[left[0]])
    return [found[n] for n in range(len(wanted))]


def _pool(
    wanted: Sequence[tuple[Drill, int]], numbers: Sequence[int], parallel: int, shared: str
) -> Iterator[tuple[int, Verdict]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parallel, mp_context=context) as pool:
        futures = {pool.submit(_named, wanted[n][0].name, wanted[n][1], shared): n for n in numbers}
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    return
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _named(name: str, seed: int, shared: str) -> Verdict:
    return run_drill(chosen([name])[0], seed, shared)


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder, removed afterwards; on tmpfs where there is room."""
    memory = "/dev/shm"
    usable = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM
    path = tempfile.mkdtemp(prefix="ckptkit-drill-", dir=memory if usable else None)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
