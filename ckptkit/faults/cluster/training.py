"""`ckptkit train` on this machine as if on several nodes: each rank saves through its own node's daemon, and meets the faults that are due.

    python -m ckptkit.faults.cluster.training JOB.json        # starts the ranks, or is one where torchrun started it

The job says: `settings` over the configuration, `layout`, `sockets` of the nodes, `per_node` ranks on each, a `folder` for pids and marks, and
`faults`: `{"rank", "step", "do"}`, each carried out once in the whole run, before that step. The loop is the real one; faults happen around it.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.cache.client import CacheClient
from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError
from ckptkit.faults.inject.processes import limit_memory
from ckptkit.train import launch
from ckptkit.train.config import Config, override

if TYPE_CHECKING:
    from ckptkit.train.trainer import Trainer

Job = Mapping[str, Any]
BEGIN_S = 5.0
PRELOAD = (
    "ckptkit.faults.cluster.training",
    "ckptkit.models.zaya",
    "ckptkit.models.megatron",
    "prometheus_client",
)
"""What every rank would import by itself."""


def placed(rank: int, address: str, device: str, job: Job, config: Config, layout: Layout) -> None:
    """A rank on its node."""
    from ckptkit.train import loop  # imports torch, which the process that starts the ranks can do without

    folder = Path(job["folder"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if job["sockets"]:
        os.environ["CKPTKIT_CACHE"] = job["sockets"][rank // job["per_node"]]
    else:
        os.environ["CKPTKIT_CACHE"] = "off"
    meet_faults(rank, job["faults"], folder)
    # Daemons and ranks of all nodes share this machine's processors: the 50 ms after which a save is skipped are too short for that.
    CacheClient.connect = partial(CacheClient.connect, begin_s=BEGIN_S)  # type: ignore[method-assign]
    loop.run(rank, address, device, config, layout, loop.Options(quiet=True))


def meet_faults(rank: int, faults: list[dict[str, Any]], folder: Path) -> None:
    """From here on the steps of this process meet the faults of a rank."""
    mine = [fault for fault in faults if fault["rank"] == rank]
    if not mine:
        return
    from ckptkit.train.trainer import Trainer

    step = Trainer.step

    def faulty(self: Trainer, stop: bool = False) -> Any:
        for number, fault in enumerate(mine):
            mark = folder / f"met-{rank}-{number}"
            if fault["step"] == self.done + 1 and not mark.exists():
                mark.write_text(str(time.monotonic()))
                _meet(self, fault)
        return step(self, stop)

    Trainer.step = faulty  # type: ignore[method-assign]


def _meet(running: "Trainer", fault: Mapping[str, Any]) -> None:
    match fault["do"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise RuntimeError(f"injected before step {fault['step']}")
        case "slow":
            time.sleep(fault["seconds"])
        case "memory":
            limit_memory(os.getpid(), 1 << 20)
        case "nan":
            run = running.pipeline.run

            def once(*batch: Any) -> Any:
                running.pipeline.run = run  # type: ignore[method-assign]
                return run(*batch) * float("nan")

            running.pipeline.run = once  # type: ignore[assignment,method-assign]
        case "flip":
            _flip(running, fault)
        case other:
            raise ValueError(f"there is no fault {other!r}")


def _flip(running: "Trainer", fault: Mapping[str, Any]) -> None:
    """A bit of a weight that other ranks hold, too."""
    from ckptkit.faults.inject.memory import flip_array

    chosen = random.Random(fault["seed"])
    names = [name for name, _ in running.stage.named_parameters() if "expert" not in name]
    name = chosen.choice(names)
    tensor = dict(running.stage.named_parameters())[name].detach()
    flip_array(tensor.reshape(-1).numpy(), chosen, name)


def main() -> int:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    config = Config.load("zaya1-tiny.toml")
    override(config, job["settings"])
    layout = Layout.parse(os.environ.get("CKPTKIT_LAYOUT") or job["layout"])
    try:
        started = launch.under_torchrun()
        if started is not None:
            placed(started[0], "env://", "cpu", job, config, layout)
        else:
            launch.launch(placed, layout.world, job, config, layout, preload=PRELOAD)
    except CkptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    # By its name, so that workers find `placed` where they unpickle it.
    from ckptkit.faults.cluster.training import main as named

    sys.exit(named())
