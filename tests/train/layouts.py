"""Runs of layouts in one set of processes, for the tests."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptkit.core.layouts import Layout
from ckptkit.errors import InterruptedRunError
from ckptkit.train import parallel
from ckptkit.train.launch import launch
from ckptkit.train.loop import Options, run
from ckptkit.train.trainer import Trainer
from tests.train.zayas import config_of

PRELOAD = ["torch.distributed.pipelining", "tests.train.layouts"]

Curve = list[tuple[float, float]]
"""Loss and gradient norm of every step."""


def work(
    rank: int, address: str, device: str, folder: str, layouts: list[str], steps: int, settings: dict
) -> list:
    """One rank: the curve of every layout that it is a rank of."""
    del address
    curves: list[Any] = []
    for number, text in enumerate(layouts):
        layout = Layout.parse(text)
        if rank >= layout.world:
            curves.append(None)
            continue
        groups = parallel.start(layout, rank, f"file://{folder}/curve-{number}", device)
        try:
            trainer = Trainer(config_of(**settings), groups)
            results = [trainer.step() for _ in range(steps)]
            load = [result.load.tolist() for result in results]
            curves.append(([(result.loss, result.norm) for result in results], load))
            groups.barrier()
        finally:
            parallel.stop()
    return curves


def curves(folder: Path, layouts: list[str], steps: int, **settings: Any) -> dict[str, tuple[Curve, list]]:
    """The curve of every layout; all ranks of one must agree. Starts as many processes as the largest needs."""
    world = max(Layout.parse(text).world for text in layouts)
    ranks = launch(work, world, str(folder), layouts, steps, settings, preload=PRELOAD)
    found = {}
    for number, text in enumerate(layouts):
        told = [rank[number] for rank in ranks if rank[number] is not None]
        assert all(other == told[0] for other in told), f"{text}: ranks differ"
        found[text] = told[0]
    return found


def continue_work(
    rank: int, address: str, device: str, folder: str, phases: list[tuple[str, int]], settings: dict
) -> None:
    """One rank: a run that goes on in another layout after each phase, which ends at a step."""
    del address
    for number, (text, stop) in enumerate(phases):
        layout = Layout.parse(text)
        if rank >= layout.world:
            continue
        config = config_of(**settings)
        first = phases[number - 1][1] if number else 0
        options = Options(quiet=True, stop_after=stop - first if stop < config.train.steps else 0)
        with suppress(InterruptedRunError):
            run(rank, f"file://{folder}/meet-{number}", device, config, layout, options)


def continued(folder: Path, phases: list[tuple[str, int]], **settings: Any) -> list[dict[str, Any]]:
    """Train in one layout until a step, go on in the next, and so on: `phases` are layouts and the step each ends at.

    Returns the records of all steps; the run is in `folder / "run"`.
    """
    settings |= {
        "checkpoint__root": str(folder / "run"),
        "log__jsonl": str(folder / "log.jsonl"),
        "checkpoint__every": 100,
    }
    world = max(Layout.parse(text).world for text, _ in phases)
    launch(continue_work, world, str(folder), phases, settings, preload=PRELOAD)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
