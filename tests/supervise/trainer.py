"""A trainer without torch, for tests: its state is a number, a step of it a copy of a small checkpoint.

    python trainer.py RUN TEMPLATE STEPS FAULTS

FAULTS is a JSON list of `{"rank", "step", "do", "times"}`: each fault happens at that step so many times over all attempts.
Every rank beats, and no rank is more than a step ahead of another; rank 0 saves every other step by copying TEMPLATE, and goes on from the newest step.
"""

import json
import os
import shutil
import signal
import sys
import time

from ckptkit import stores
from ckptkit.hooks.pulse import Pulse
from ckptkit.ops import runs

run, template, steps, faults = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
pulse = Pulse()

start = 0
if stores.is_folder(run) and runs.step_folders(run):
    found = runs.newest(run, quick=True)
    assert found.step is not None, "no whole step"
    start = found.step.step
with open(os.path.join(run, f"starts-{rank}"), "a") as file:
    print(start, world, os.environ.get("CKPTKIT_LAYOUT", "-"), *sys.argv[5:], file=file)
pulse.tell("restored", step=start)


def due(fault: dict, step: int) -> bool:
    if fault["rank"] != rank or fault["step"] != step:
        return False
    marks = [
        os.path.join(run, f"fault-{rank}-{step}-{fault['do']}-{n}") for n in range(fault.get("times", 1))
    ]
    left = [mark for mark in marks if not os.path.exists(mark)]
    if left:
        open(left[0], "w").close()
    return bool(left)


attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]


def meet(step: int) -> None:
    """Wait until every rank of this attempt has come to this step."""
    open(os.path.join(run, f"at-{attempt}-{rank}-{step}"), "w").close()
    while not all(
        os.path.exists(os.path.join(run, f"at-{attempt}-{other}-{step}")) for other in range(world)
    ):
        time.sleep(0.002)


for step in range(start + 1, steps + 1):
    meet(step)
    time.sleep(0.02)
    loss = 4.0 / step
    for fault in faults:
        if due(fault, step):
            match fault["do"]:
                case "exit":
                    sys.exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "deaf":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "sleep":
                    time.sleep(1000)
                case "nan":
                    loss = float("nan")
                case "spike":
                    loss = 1e6
                case "corruption":
                    pulse.tell("corruption", step=step, rank=rank, detail="layers.0.attn.q leaf 17")
    pulse.beat(step, loss)
    if rank == 0 and step % 2 == 0:
        target = os.path.join(run, f"step-{step:08}.e1")
        if not os.path.exists(target):
            shutil.copytree(template, target + ".tmp")
            os.rename(target + ".tmp", target)
        pulse.tell("saved", step=step, level=3)
pulse.tell("closing")
