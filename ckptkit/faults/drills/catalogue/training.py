"""The ZAYA1 loop under faults: every loss is the undisturbed one's."""

import os
import shutil
import signal
import time
from functools import partial

from ckptkit.faults.drills.base import drill
from ckptkit.faults.drills.light import NODES, RANKS
from ckptkit.faults.drills.training import FEWER, Training
from ckptkit.faults.inject.memory import flip_file
from ckptkit.faults.inject.plan import Choice
from ckptkit.faults.inject.processes import kill


@drill(
    "A rank killed at any moment of a step ends the run with a message; the same command goes on with the same losses.",
    1, "processes", kind="zaya", menu=[Choice("kill", RANKS)], smoke=True,
)  # fmt: skip
def zaya_rank_killed(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(stage.step_of(fault))
    time.sleep(stage.random.uniform(0, 0.2))
    stage.fault()
    kill(stage.pids()[int(fault.target[5:])])
    stage.ends(4)
    stage.start()
    stage.reached(stage.step_of(fault) + 1)
    stage.ends()


@drill(
    "An exception in a step of one rank, or memory that runs out there, ends the run; it goes on with the same losses.",
    "processes", kind="zaya", menu=[Choice("exception", RANKS), Choice("memory", RANKS)],
)  # fmt: skip
def zaya_exception(stage: Training) -> None:
    fault = stage.fault()
    stage.start([stage.inside(fault, fault.kind)])
    stage.ends(None)
    stage.start()
    stage.ends()


@drill(
    "A node that loses power, with its ranks, its daemon and its memory, costs one save at most; its shards come from its clique.",
    6, "nodes", kind="zaya", menu=[Choice("power loss", NODES)],
)  # fmt: skip
def zaya_node_lost(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(stage.step_of(fault))
    node = stage.nodes[int(stage.fault().target[5:])]
    stage.lose(node)
    stage.end_job()
    node.start()
    stage.start()
    stage.reached(stage.step_of(fault) + 1)
    stage.ends()


@drill(
    "A daemon killed while steps are saved through it comes back; saves are skipped meanwhile, and every loss is the same.",
    3, "daemon", kind="zaya", menu=[Choice("kill daemon", NODES)],
)  # fmt: skip
def zaya_daemon_killed(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(stage.step_of(fault))
    node = stage.nodes[int(stage.fault().target[5:])]
    node.kill()
    time.sleep(stage.random.uniform(0, 0.5))
    node.start()
    stage.ends()


@drill(
    "A daemon killed in the middle of a drain goes on with it; the durable step is whole.",
    4, "daemon", "storage", kind="zaya", menu=[Choice("kill daemon", NODES)],
)  # fmt: skip
def zaya_daemon_killed_in_drain(stage: Training) -> None:
    stage.start()
    fault = stage.fault()
    stage.until(lambda: list(stage.cluster.durable.glob("step-*/rank-*")), "a drain to begin")
    node = stage.nodes[int(fault.target[5:])]
    node.kill()
    node.start()
    stage.ends()


@drill(
    "A rank that hangs is found by the supervisor, named, and the run restarted; every loss is the same.",
    "processes", kind="zaya", menu=[Choice("hang", RANKS)],
)  # fmt: skip
def zaya_hang(stage: Training) -> None:
    fault = stage.fault()
    stage.start([stage.inside(fault, "hang")], supervised=True)
    stage.ends()
    kinds = stage.incidents()
    stage.expect("hang" in kinds or "crash" in kinds, f"the supervisor saw {kinds}")


@drill(
    "A loss that is no number updates nothing; the run goes on from the step before it with the same losses.",
    "memory", kind="zaya", menu=[Choice("nan", RANKS)],
)  # fmt: skip
def zaya_nan(stage: Training) -> None:
    fault = stage.fault()
    stage.start([stage.inside(fault, "nan")])
    stage.ends(6)
    stage.start()
    stage.ends()


@drill(
    "A bit that flipped in a slot never reaches the model: the shard comes from the copy, and every loss is the same.",
    17, "memory", kind="zaya", menu=[Choice("bit flip", RANKS, values={"at": (0.0, 1.0), "bit": (0, 7)})],
)  # fmt: skip
def zaya_slot_flip(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(stage.step_of(fault))
    stage.end_job()
    rank = int(stage.fault().target[5:])
    node = stage.nodes[rank // 2]
    for slot in (
        n
        for n, r in node.records().items()
        if r["state"] == "SEALED" and r["lane"] != "replica" and r["rank"] == rank
    ):
        used = node.records()[slot]["used"]
        place = flip_file(
            str(node.folder / "slots" / f"{slot:04d}.dat"),
            int(float(fault.values["at"]) * (used - 1)),
            int(fault.values["bit"]),
        )
        stage.harm(f"bit {place.bit} of byte {place.offset} in slot {slot} of {node.name}")
    stage.start()
    stage.reached(stage.step_of(fault) + 1)
    stage.ends()


@drill(
    "A copy of a shard that is damaged on another node is found when it is needed, and another source is taken.",
    17, 31, "memory", kind="zaya", menu=[Choice("damaged copies", NODES, values={"at": (0.1, 0.9)})],
)  # fmt: skip
def zaya_copy_damaged(stage: Training) -> None:
    stage.allowed = 3  # the last durable step is what is left
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(max(stage.step_of(fault), 7))
    stage.until(
        lambda: (stage.cluster.durable / "step-00000004.e1" / "manifest.json").exists(), "a durable step"
    )
    stage.end_job()
    stage.fault()
    node = stage.nodes[int(fault.target[5:])]
    for other in stage.nodes:
        for slot, record in other.records().items():
            if (
                record["lane"] == "replica"
                and record["state"] == "SEALED"
                and record["rank"] // 2 == node.number
            ):
                flip_file(
                    str(other.folder / "slots" / f"{slot:04d}.dat"),
                    int(float(fault.values["at"]) * (record["used"] - 1)),
                )
    stage.lose(node)
    node.start()
    stage.start()
    stage.ends()


@drill(
    "A disk that is full during a drain delays durability only; with room again the last step is durable.",
    27, "storage", kind="zaya", menu=[Choice("enospc", ["durable"], values={"after": (0, 8), "times": (2, 6)})],
)  # fmt: skip
def zaya_disk_full(stage: Training) -> None:
    from ckptkit.faults.inject.program import environment
    from ckptkit.faults.inject.storage import Rule

    fault = stage.fault()
    durable = stage.cluster.durable.parent
    durable.mkdir(parents=True, exist_ok=True)
    rule = Rule(
        "enospc", "open,write,allocate", "*step-*", int(fault.values["after"]), int(fault.values["times"])
    )
    for node in stage.nodes:
        node.stop()
        node.environment = environment(str(durable), [rule], base={})
        node.start()
    stage.start()
    stage.reached(2)
    stage.ends()


@drill(
    "A durable store that is away for a while is waited for; training and saves in memory go on meanwhile.",
    27, "storage", kind="zaya", menu=[Choice("store away", ["durable"], values={"steps": (2, 4)})],
)  # fmt: skip
def zaya_store_away(stage: Training) -> None:
    stage.start()
    stage.reached(2)
    fault = stage.fault()
    place, aside = stage.cluster.durable.parent, stage.folder / "aside"
    place.rename(aside)
    place.write_bytes(b"in the way")
    stage.reached(2 + int(fault.values["steps"]))
    place.unlink()
    aside.rename(place)
    stage.ends()


@drill(
    "A network that is partitioned for a while commits nothing and loses nothing; training goes on meanwhile.",
    26, "network", kind="zaya", menu=[Choice("partition", NODES, values={"steps": (1, 3)})],
)  # fmt: skip
def zaya_partition(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    step = stage.step_of(fault)
    stage.reached(step)
    alone = stage.nodes[int(stage.fault().target[5:])].name
    stage.cluster.proxy.partition({alone}, {node.name for node in stage.nodes})
    stage.reached(min(step + int(fault.values["steps"]), stage.steps - 1))
    stage.cluster.proxy.heal()
    stage.ends()


@drill(
    "When half of the nodes are gone the run goes on in another layout on the others, with the same losses to 1e-5.",
    32, "nodes", kind="zaya", menu=[Choice("power loss", ["node 3"])], smoke=True,
)  # fmt: skip
def zaya_fewer_nodes(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    step = stage.step_of(fault)
    stage.reached(step)
    stage.fault()
    stage.lose(stage.nodes[3])
    stage.end_job()
    stage.start(layout=FEWER, nodes=stage.nodes[:2])
    stage.reached(step + 1)
    stage.ends()


@drill(
    "SIGTERM or Ctrl-C: all ranks end after the same step, it is saved, the exit code says so, and nothing is done again.",
    38, "processes", kind="zaya", menu=[Choice("SIGTERM", ["the run"]), Choice("SIGINT", ["the run"])],
)  # fmt: skip
def zaya_interrupted(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(stage.step_of(fault))
    stage.fault()
    assert stage.process is not None
    os.kill(stage.process.pid, signal.Signals[fault.kind])
    stage.ends(5)
    stage.allowed = 0
    for node in stage.nodes:
        node.stop()
        shutil.rmtree(node.folder, ignore_errors=True)
        node.start()
    stage.start()
    stage.ends()


@drill(
    "The launcher of the ranks killed at once with everything: nothing is left running, and the run goes on from memory.",
    1, "processes", kind="zaya", menu=[Choice("kill all", ["the job"])],
)  # fmt: skip
def zaya_job_killed(stage: Training) -> None:
    stage.start()
    fault = stage.plan.faults[0]
    stage.reached(stage.step_of(fault))
    stage.fault()
    stage.end_job()
    stage.start()
    stage.reached(stage.step_of(fault) + 1)
    stage.ends()


@drill(
    "The supervisor brings a run through ten faults in a row, with nobody looking on, to the undisturbed losses.",
    1, 3, 6, "processes", "daemon", "nodes", kind="zaya", steps=33,
    menu=[Choice("kill", RANKS, weight=2), Choice("exception", RANKS), Choice("nan", RANKS), Choice("hang", RANKS), Choice("daemon", NODES, weight=2), Choice("node", NODES)],
    faults=10,
)  # fmt: skip
def ten_faults(stage: Training) -> None:
    stage.saves_spoiled = True
    steps = [3 * (number + 1) for number in range(len(stage.plan.faults))]
    inside = {"exception", "nan", "hang", "kill"}
    stage.start(
        [{"rank": int(f.target[5:]), "step": step, "do": f.kind} for f, step in zip(stage.plan.faults, steps, strict=True) if f.kind in inside],
        supervised=True,
    )  # fmt: skip
    for step, fault in zip(steps, stage.plan.faults, strict=True):
        stage.until(partial(stage.trained, step - 1), f"step {step - 1}", 600)
        stage.fault()
        if fault.kind == "daemon":
            node = stage.nodes[int(fault.target[5:])]
            node.kill()
            node.start()
        elif fault.kind == "node":
            node = stage.nodes[int(fault.target[5:])]
            stage.lose(node)
            node.start()
        stage.until(partial(stage.trained, step), f"step {step}", 600)
        stage.clock.recovered()
    stage.ends(timeout_s=600)
    restarts = stage.incidents().count("start") - 1
    expected = sum(fault.kind != "daemon" for fault in stage.plan.faults)
    stage.expect(
        restarts >= expected, f"the supervisor restarted {restarts} times for {expected} faults of ranks"
    )
