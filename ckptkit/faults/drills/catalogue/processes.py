"""Ranks, daemons and nodes that die, hang or come back too late."""

import signal

from ckptkit.faults.drills.base import drill
from ckptkit.faults.drills.light import LARGE, NODES, RANKS, Light
from ckptkit.faults.inject.plan import Choice
from ckptkit.faults.inject.processes import go_on, hang


@drill(
    "A rank killed while it copies costs that save only: the one before is restored.",
    1, "processes", menu=[Choice("kill", RANKS)], smoke=True,
)  # fmt: skip
def rank_killed_in_copy(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.plan.faults[0]
    victim = stage.rank(fault.target)
    step = stage.start_save(write=False)
    stage.all("write", [rank for rank in stage.ranks if rank is not victim], step=step)
    victim.do("write", step=step, part=fault.when)
    (slot,) = (
        s for s, r in victim.node.records().items() if r["state"] == "WRITING" and r["rank"] == victim.rank
    )
    stage.fault()
    victim.kill()
    stage.all("seal", [rank for rank in stage.ranks if rank is not victim], step=step)
    stage.until(lambda: victim.node.records()[slot]["state"] == "FREE", "the torn slot to be free")
    stage.expect(stage.recover() == step - 1, "a torn step was restored")


@drill(
    "A rank killed after its seal has saved: the step commits without it.",
    2, "processes", menu=[Choice("kill", RANKS)],
)  # fmt: skip
def rank_killed_after_seal(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.fault()
    victim = stage.rank(fault.target)
    step = stage.start_save()
    victim.do("seal", step=step)
    victim.kill()
    stage.all("seal", [rank for rank in stage.ranks if rank is not victim], step=step)
    stage.expect(stage.reached(step), f"step {step} did not commit, although every rank had sealed it")
    stage.recover(redone=0)


@drill(
    "All ranks killed at once, in the middle of a save, go on from memory.",
    1, "processes", menu=[Choice("kill all", ["the job"])],
)  # fmt: skip
def job_killed(stage: Light) -> None:
    stage.begin(saves=2)
    fault = stage.plan.faults[0]
    step = stage.start_save(write=False)
    for rank in stage.ranks:
        rank.tell("write", step=step, part=fault.when)
    stage.fault()
    for rank in stage.ranks:
        rank.kill()
    stage.recover()


@drill(
    "A rank that hangs holds up its save and no other; when it goes on its late seal is refused or counts, and nothing is mixed.",
    12, "processes", menu=[Choice("hang", RANKS)], vote_s=5.0,
)  # fmt: skip
def rank_hangs(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.fault()
    victim = stage.rank(fault.target)
    step = stage.start_save()
    others = [rank for rank in stage.ranks if rank is not victim]
    hang(victim.process.pid)
    victim.tell("seal", step=step)
    stage.all("seal", others, step=step)
    early = stage.reached(step, timeout_s=2.0, by=others[0].rank)
    stage.expect(not early, "a step committed without the seal of a rank")
    go_on(victim.process.pid)
    late = victim.raw_answer()
    reached = stage.reached(step, timeout_s=5.0)
    stage.expect(bool(late.get("sealed")) or not reached, "a refused seal was counted")
    stage.save()


@drill(
    "A daemon killed while ranks write comes back, takes their slots over, and the step commits.",
    3, "daemon", menu=[Choice("kill daemon", NODES)], smoke=True,
)  # fmt: skip
def daemon_killed_while_writing(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.plan.faults[0]
    node = stage.node(fault.target)
    step = stage.start_save(write=False)
    stage.fault()
    node.kill()
    stage.all("write", step=step)
    for rank in stage.ranks:
        rank.tell("seal", step=step)
    node.start()
    sealed = [rank.answer()["sealed"] for rank in stage.ranks]
    stage.expect(all(sealed), f"seals were refused: {sealed}")
    stage.expect(stage.reached(step), f"step {step} did not commit")
    stage.recover(redone=0)


@drill(
    "A daemon killed right after the seals hashes again and commits; nothing is asked of the ranks.",
    4, "daemon", menu=[Choice("kill daemon", NODES)], shapes=LARGE,
)  # fmt: skip
def daemon_killed_while_hashing(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.plan.faults[0]
    node = stage.node(fault.target)
    step = stage.start_save()
    stage.all("seal", step=step)
    stage.fault()
    node.kill()
    node.start()
    stage.expect(stage.reached(step), f"step {step} did not commit")
    stage.recover(redone=0)


@drill(
    "A daemon killed while copies travel fetches them when it is back; the step reaches its level.",
    4, "daemon", menu=[Choice("kill daemon", NODES)], shapes=LARGE, replicas={"max_bps": 20_000_000},
)  # fmt: skip
def daemon_killed_while_replicating(stage: Light) -> None:
    stage.begin()
    step = stage.save()
    fault = stage.fault()
    node = stage.node(fault.target)
    node.kill()
    node.start()
    stage.expect(stage.reached(step, 2), f"step {step} was not replicated")
    stage.recover(redone=0)


@drill(
    "Every daemon killed at once, with ranks alive: slots are read again, and saves go on.",
    3, 4, "daemon", menu=[Choice("kill every daemon", ["all nodes"])],
)  # fmt: skip
def all_daemons_killed(stage: Light) -> None:
    stage.begin(saves=2)
    step = stage.start_save()
    stage.fault()
    for node in stage.nodes:
        node.kill()
    for rank in stage.ranks:
        rank.tell("seal", step=step)
    for node in stage.nodes:
        node.start(wait=False)
    for node in stage.nodes:
        node.wait_serving()
    sealed = [rank.answer()["sealed"] for rank in stage.ranks]
    stage.expect(all(sealed), f"seals were refused: {sealed}")
    stage.expect(stage.reached(step), f"step {step} did not commit")
    stage.recover(redone=0)


@drill(
    "Without a daemon saves are skipped and counted, and training goes on; with it they are saved again.",
    5, "daemon", menu=[Choice("daemon away", NODES)],
)  # fmt: skip
def daemon_away(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.fault()
    node = stage.node(fault.target)
    there = [rank for rank in stage.ranks if rank.node is node]
    node.kill()
    answers = stage.all("begin", there, step=stage.step + 1)
    stage.expect(all(a.get("skipped") == "away" for a in answers), f"saves were not skipped: {answers}")
    node.start()
    stage.save_again()
    stage.expect(
        node.metric("save_skipped_total", reason="away") >= len(there), "skipped saves were not counted"
    )
    stage.recover()


@drill(
    "A daemon that hangs for a while holds up commits, not the truth: what commits is whole.",
    25, "daemon", menu=[Choice("hang daemon", NODES)],
)  # fmt: skip
def daemon_hangs(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.plan.faults[0]
    node = stage.node(fault.target)
    step = stage.start_save()
    stage.fault()
    assert node.process is not None
    hang(node.process.pid)
    others = [rank for rank in stage.ranks if rank.node is not node]
    for rank in stage.ranks:
        rank.tell("seal", step=step)
    for rank in others:
        rank.raw_answer()
    if others[0].node is not stage.nodes[0] or node is not stage.nodes[0]:
        stage.expect(
            not stage.reached(step, timeout_s=1.0, by=others[0].rank), "a step committed without a node"
        )
    go_on(node.process.pid)
    for rank in stage.ranks:
        if rank not in others:
            rank.raw_answer()
    stage.expect(stage.reached(step), f"step {step} did not commit when the daemon went on")
    stage.recover(redone=0)


@drill(
    "A process of an earlier epoch that still writes keeps its slot to itself, and its seal is refused.",
    13, "processes", menu=[Choice("zombie", RANKS)],
)  # fmt: skip
def zombie_rank(stage: Light) -> None:
    stage.begin(saves=1, level=2)
    fault = stage.plan.faults[0]
    zombie = stage.rank(fault.target)
    step = stage.start_save([zombie], write=False)
    zombie.do("write", step=step, part=fault.when)
    node = zombie.node
    (slot,) = (s for s, r in node.records().items() if r["state"] == "WRITING" and r["rank"] == zombie.rank)
    stage.fault()
    stage.cluster.ranks = [rank for rank in stage.ranks if rank is not zombie]
    stage.cluster.launch()
    try:
        stage.restore()
        stage.expect(node.records()[slot]["state"] == "QUARANTINED", "the zombie's slot was not set aside")
        zombie.do("write", step=step)
        late = zombie.do("seal", step=step)
        stage.expect(not late["sealed"], "a zombie's seal counted")
        for _ in range(4):
            stage.save()
            stage.expect(node.records()[slot]["state"] == "QUARANTINED", "a zombie's slot was used again")
    finally:
        zombie.close()
    stage.until(
        lambda: node.records()[slot]["state"] != "QUARANTINED", "the slot to be free after the zombie's end"
    )
    stage.recover(redone=0)


@drill(
    "A second daemon on a node is refused, and a process with the number of an earlier one adopts nothing.",
    35, "daemon", menu=[Choice("second daemon", NODES), Choice("pid used again", NODES)],
)  # fmt: skip
def second_daemon(stage: Light) -> None:
    import json

    stage.begin(saves=1)
    fault = stage.plan.faults[0]
    node = stage.node(fault.target)
    if fault.kind == "second daemon":
        stage.fault()
        first, node.process = node.process, None
        node.start(wait=False)
        assert first is not None and node.process is not None
        stage.expect(
            node.process.wait() == 2 and f"process {first.pid}" in node.tail(),
            "a second daemon was not refused",
        )
        node.process = first
        stage.save()
        return
    rank = next(rank for rank in stage.ranks if rank.node is node)
    step = stage.start_save([rank])
    (slot,) = (s for s, r in node.records().items() if r["state"] == "WRITING" and r["rank"] == rank.rank)
    node.kill()
    record = node.folder / "slots" / f"{slot:04d}.json"
    changed = json.loads(record.read_text())
    changed["writer"]["starttime"] -= 1
    record.write_text(json.dumps(changed))
    stage.fault()
    node.start()
    stage.until(
        lambda: node.records()[slot]["state"] == "FREE", "the slot of a process that is gone to be free"
    )
    stage.expect(stage.recover() == step - 1, "a step that was never sealed was restored")


@drill(
    "SIGTERM to all daemons, with ranks running: the newest committed step is durable before they end.",
    38, "daemon", menu=[Choice("sigterm", ["all nodes"]), Choice("finish", ["all nodes"])], drain=True, smoke=True,
)  # fmt: skip
def end_of_a_job(stage: Light) -> None:
    from ckptkit import ops

    stage.begin(saves=2)
    fault = stage.fault()
    if fault.kind == "finish":
        stage.all("finish")
    else:
        for node in stage.nodes:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
    codes = [node.process.wait() for node in stage.nodes if node.process is not None]
    stage.expect(codes == [0] * 4, f"daemons ended with {codes}")
    newest = ops.latest(str(stage.cluster.durable))
    stage.expect(newest.endswith("step-00000002.e1"), f"the newest durable step is {newest}")
    stage.acknowledge(2, 3)
    for node in stage.nodes:
        node.lose()
    stage.harm("all nodes are gone")
    stage.ledger.lost("memory")
    for node in stage.nodes:
        node.start(wait=False)
    for node in stage.nodes:
        node.wait_serving()
    stage.recover(redone=0)
