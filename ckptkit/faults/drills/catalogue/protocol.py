"""Nodes, votes and epochs: what the ranks and daemons of a job agree on while some of them are lost."""

import json
import threading
from functools import partial

from ckptkit.faults.drills.base import drill
from ckptkit.faults.drills.light import NODES, RANKS, Light
from ckptkit.faults.inject.plan import Choice
from ckptkit.formats.native import step_dir


@drill(
    "A node that loses power takes nothing with it that has a copy: its shards come from its clique.",
    6, "nodes", menu=[Choice("power loss", NODES)], smoke=True,
)  # fmt: skip
def node_lost(stage: Light) -> None:
    stage.begin(saves=1)
    step = stage.save(level=2)
    stage.lose(stage.node(stage.fault().target))
    stage.expect(stage.recover(redone=0) == step, "the copied step was not restored")
    stage.save(level=2)


@drill(
    "When a node and the holder of its copies are lost together, the newest durable step is restored.",
    7, "nodes", menu=[Choice("power loss", NODES)], drain=True,
)  # fmt: skip
def clique_lost(stage: Light) -> None:
    stage.begin()
    step = stage.save(level=2)
    stage.drain(step)
    stage.save(level=2)
    node = stage.node(stage.fault().target)
    stage.lose(node, stage.clique(node))
    stage.expect(stage.recover() == step, "not the durable step was restored")


@drill(
    "When every node loses power at once, the newest durable step is restored, with the epochs that there were.",
    7, "nodes", menu=[Choice("power loss", ["all nodes"])], drain=True,
)  # fmt: skip
def every_node_lost(stage: Light) -> None:
    stage.begin()
    step = stage.save()
    stage.drain(step)
    stage.save(level=2)
    stage.fault()
    stage.lose(*stage.nodes)
    stage.expect(stage.recover() == step, "not the durable step was restored")
    sources = {source for answer in stage.cluster.answers for source in answer["sources"]}
    stage.expect("durable" in sources, f"it came from {sources}")


@drill(
    "A node lost between its seal and its copies leaves the step before, whole: shards of two steps are never mixed.",
    8, "nodes", menu=[Choice("power loss", NODES)],
)  # fmt: skip
def node_lost_before_copy(stage: Light) -> None:
    stage.begin()
    step = stage.save(level=2)
    node = stage.node(stage.fault().target)
    stage.cluster.proxy.partition({node.name}, {other.name for other in stage.nodes})
    stage.start_save()
    stage.all("seal", step=stage.step)
    stage.lose(node, replace=False)
    stage.cluster.proxy.heal()
    node.start()
    stage.expect(stage.recover() == step, "a step was restored that has a shard nowhere")


@drill(
    "The coordinator's daemon killed between votes comes back, hears them again, and decides the same.",
    9, "daemon", menu=[Choice("kill coordinator", ["node 0"], values={"first": (1, 7)})],
)  # fmt: skip
def coordinator_restarts(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.fault()
    step = stage.start_save()
    # Ranks of whole nodes, so that some votes are in.
    first = stage.ranks[int(fault.values["first"]) :]
    stage.all("seal", first, step=step)
    stage.nodes[0].kill()
    rest = [rank for rank in stage.ranks if rank not in first]
    for rank in rest:
        rank.tell("seal", step=step)
    stage.nodes[0].start()
    for rank in rest:
        rank.raw_answer()
    stage.expect(stage.reached(step), f"step {step} did not commit")
    stage.recover(redone=0)


@drill(
    "The coordinator gone for good after all have sealed: the next epoch takes the step by evidence, or the one before, whole.",
    10, "nodes", "daemon", menu=[Choice("daemon gone", ["node 0"]), Choice("node gone", ["node 0"])],
)  # fmt: skip
def coordinator_gone(stage: Light) -> None:
    stage.begin()
    step = stage.save(level=2)
    fault = stage.fault()
    stage.start_save()
    for rank in stage.ranks:
        rank.tell("seal", step=stage.step)
    for rank in stage.ranks:
        rank.raw_answer()
    if fault.kind == "daemon gone":
        stage.nodes[0].kill()
        stage.nodes[0].start()
        stage.expect(stage.recover() >= step, "an acknowledged step was lost")
        return
    stage.lose(stage.nodes[0], replace=False)
    stage.expect(stage.recover(stage.nodes[1:]) in (step, step + 1), "neither step was restored")
    stage.save()


@drill(
    "Votes that are lost, sent again and late lead to the same decision: connections break all the time, and every save commits.",
    11, "network", menu=[Choice("break connections", ["all nodes"], values={"every_s": (0.03, 0.15)})],
)  # fmt: skip
def votes_lost(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.fault()
    over = threading.Event()

    def breaking() -> None:
        while not over.wait(float(fault.values["every_s"])):
            stage.cluster.proxy.reset(stage.random.choice(NODES).replace("node ", "n"))

    thread = threading.Thread(target=breaking, daemon=True)
    thread.start()
    try:
        for _ in range(3):
            stage.save()
    finally:
        over.set()
        thread.join()
    stage.save(level=2)
    stage.recover(redone=0)


@drill(
    "A rank that seals after the step was given up is refused, its slot is free, and the step does not come back.",
    12, "processes", menu=[Choice("late", RANKS)],
)  # fmt: skip
def straggler(stage: Light) -> None:
    stage.begin(saves=1)
    late = stage.rank(stage.fault().target)
    step = stage.start_save()
    other = next(rank for rank in stage.ranks if rank.node is not late.node)
    other.do("abort", step=step)
    stage.expect(not stage.reached(step, timeout_s=3.0, by=other.rank), "an aborted step committed")
    stage.expect(not stage.reached(step, timeout_s=3.0, by=late.rank), "an aborted step committed")
    answer = late.do("seal", step=step)
    stage.expect(not answer["sealed"], "a late seal counted")
    sealed = [node.name for node in stage.nodes if node.holding(step)]
    stage.expect(not sealed, f"shards of the aborted step are kept on {sealed}")
    stage.cluster.launch()
    stage.restore()
    stage.save()


@drill(
    "A coordinator of an earlier epoch writes no manifest once a later epoch has begun.",
    14, "storage", menu=[Choice("later epoch", ["storage"])], drain=True,
)  # fmt: skip
def zombie_coordinator(stage: Light) -> None:
    stage.begin()
    claim = stage.cluster.durable / "epochs" / "00000001"
    stage.until(claim.exists, "the claim of the epoch")
    stage.fault()
    (stage.cluster.durable / "epochs" / "00000002").write_text('{"inc": "another"}')
    stage.save()
    with stage.nodes[0].client() as client:
        client.request("drain")
    written = stage.cluster.durable / step_dir(1, 1) / "manifest.json"
    stage.until(lambda: written.exists() or stage.nodes[0].events("manifest not written"), "the refusal")
    stage.expect(not list(stage.cluster.durable.glob("step-*/manifest.json")), "a zombie wrote a manifest")
    stage.recover(redone=0)


@drill(
    "Two starts with one epoch: each daemon takes the first, the other takes a higher epoch, and nothing of the two is mixed.",
    15, "processes", menu=[Choice("second start", ["the job"], values={"first": (0, 7)})],
)  # fmt: skip
def two_incarnations(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    first = stage.ranks
    stage.fault()
    stage.cluster.ranks = []
    stage.cluster.launch()
    try:
        members = [{k: v for k, v in rank.member.items() if k != "max_epoch"} for rank in stage.ranks]
        codes = {a.get("code") for a in stage.all("join", members=members, epoch=1, inc="5" * 32)}
        stage.expect(codes == {409}, f"a second incarnation of an epoch got {codes}")
        stage.restore(redone=0)
        skipped = {rank.do("begin", step=stage.step + 1).get("skipped") for rank in first}
        stage.expect(skipped == {"fenced"}, f"ranks of the first incarnation got {skipped}")
    finally:
        for rank in first:
            rank.close()
    stage.save()


@drill(
    "A step saved by two epochs is two versions: the later epoch's is restored, never a mix.",
    16, "processes", menu=[Choice("restart", ["the job"])],
)  # fmt: skip
def same_step_of_two_epochs(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    step = stage.start_save()
    half = stage.ranks[: len(stage.ranks) // 2]
    stage.all("seal", half, step=step)
    stage.fault()
    stage.recover()
    again = stage.save(level=2)
    stage.expect(again == step, f"step {again} came after the restart, not {step}")
    stage.recover(redone=0)
    epochs = {answer["epoch"] for answer in stage.cluster.answers}
    stage.expect(epochs == {2}, f"epochs {epochs} were restored")


@drill(
    "The run goes on in another layout on the nodes that are left: every byte is where the new layout wants it.",
    32, "nodes", menu=[Choice("power loss", NODES, values={"per_node": (1, 3)})], smoke=True,
)  # fmt: skip
def other_layout(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    fault = stage.fault()
    node = stage.node(fault.target)
    stage.lose(node, replace=False)
    left = [other for other in stage.nodes if other is not node]
    stage.recover(left, int(fault.values["per_node"]), redone=0)
    stage.save()
    stage.recover(left[:2], 2, redone=0)
    stage.save()


@drill(
    "A step that two epochs called bad is avoided; the last one left is never avoided by itself.",
    33, "processes", menu=[Choice("bad step", RANKS)],
)  # fmt: skip
def marked_bad(stage: Light) -> None:
    stage.begin()
    first = stage.save(level=2)
    bad = stage.save(level=2)
    number = stage.fault().target
    for round_ in range(2):
        stage.expect(stage.recover(redone=0) == bad, f"step {bad} was avoided after {round_} marks")
        stage.rank(number).do("mark_bad", epoch=1, step=bad)
        stage.until(partial(_marked, stage, stage.cluster.epoch), "the mark everywhere")
    stage.ledger.unusable.add(bad)
    stage.expect(stage.recover() == first, "a step that was called bad twice was restored")
    stage.rank(number).do("mark_bad", epoch=1, step=first)
    stage.recover(redone=0)
    stage.save()


def _marked(stage: Light, epoch: int) -> bool:
    """Whether every node knows that an epoch has marked a version as bad."""
    paths = [node.folder / "banned.json" for node in stage.nodes]
    return all(
        path.exists() and epoch in [mark["epoch"] for mark in json.loads(path.read_text())["marks"]]
        for path in paths
    )


@drill(
    "A banned step is not restored, not even from storage after all memory is lost.",
    33, 7, "nodes", menu=[Choice("ban", NODES)], drain=True,
)  # fmt: skip
def banned_step(stage: Light) -> None:
    stage.begin()
    first = stage.save(level=2)
    stage.drain(first)
    bad = stage.save(level=2)
    stage.drain(bad)
    with stage.node(stage.fault().target).client() as client:
        client.request("ban", epoch=1, step=first, newer=True)
    stage.until(lambda: (stage.cluster.durable / "banned.json").exists(), "the ban to be durable")
    stage.ledger.unusable.add(bad)
    stage.recover()
    stage.lose(*stage.nodes)
    stage.expect(stage.recover() == first, "a banned step was restored")


@drill(
    "Saves faster than their copies skip at worst; the copied step is never evicted and moves on.",
    37, "network", menu=[Choice("slow copies", ["all nodes"], values={"rate": (30_000, 90_000)})],
)  # fmt: skip
def saves_faster_than_copies(stage: Light) -> None:
    stage.begin()
    kept = stage.save(level=2)
    fault = stage.fault()
    stage.cluster.proxy.rate = {node.name: float(fault.values["rate"]) for node in stage.nodes}
    committed = 0
    for _ in range(8):
        stage.step += 1
        stage.ledger.began(stage.step)
        stage.all("save", step=stage.step)
        committed += stage.reached(stage.step, timeout_s=0.3)
        for step in range(kept + 1, stage.step + 1):
            kept = step if stage.reached(step, 2, timeout_s=0.0) else kept
        stage.expect(_copied(stage, kept), f"step {kept}, the last one with copies, was evicted")
    stage.expect(committed > 0, "no save committed while copies were slow")
    # The step that was protected must be there without any one node.
    lost = stage.nodes[stage.random.randrange(len(stage.nodes))]
    stage.lose(lost, replace=False)
    stage.cluster.proxy.heal()
    lost.start()
    stage.recover(redone=10)
    stage.save(level=2)


def _copied(stage: Light, step: int) -> bool:
    """Whether every shard of a step, or of a later one that has copies, is still somewhere."""
    held = {
        r["rank"]
        for node in stage.nodes
        for r in node.records().values()
        if r["state"] == "SEALED" and r["version"]["step"] == step
    }
    return len(held) == len(stage.ranks) or stage.reached(stage.step, 2, timeout_s=1.0)


@drill(
    "Unfinished saves of a dead epoch in every slot do not keep the next one from saving and copying.",
    39, "processes", menu=[Choice("dead epochs", ["the job"])],
)  # fmt: skip
def dead_epoch(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    stage.fault()
    for _ in range(2):
        for _ in range(2):
            stage.start_save()
            stage.all("seal", stage.ranks[:-1], step=stage.step)
        stage.recover(redone=4)
    for _ in range(3):
        stage.save(level=2)
    stage.recover(redone=0)


@drill(
    "Retention removes old steps while the job is killed and started again: the newest durable one and pinned ones stay whole.",
    38, "storage", "processes", menu=[Choice("kill all", ["the job"])], drain=True, draining={"keep_last": 2},
)  # fmt: skip
def retention_under_kill(stage: Light) -> None:
    from ckptkit import ops

    stage.begin()
    pinned = stage.save()
    stage.drain(pinned)
    with stage.nodes[0].client() as client:
        client.request("pin", step=pinned)
    for _ in range(3):
        stage.drain(stage.save())
    stage.fault()
    for rank in stage.ranks:
        rank.kill()
    for node in stage.nodes:
        node.kill()
        node.start()
    newest = stage.recover(redone=0)
    stage.drain(stage.save())
    manifests = partial(stage.cluster.durable.glob, "step-*/manifest.json")
    stage.until(lambda: len(list(manifests())) <= 3, "retention")
    rows = ops.steps(str(stage.cluster.durable)).steps
    whole = {row.step for row in rows if row.state == "whole"}
    stage.expect({pinned, newest + 1} <= whole, f"steps {sorted(whole)} are whole")
    torn = [
        row.name
        for row in rows
        if row.state not in ("whole",) and (stage.cluster.durable / row.name / "manifest.json").exists()
    ]
    stage.expect(not torn, f"{torn} have a manifest and are not whole")
    found = ops.verify(str(stage.cluster.durable / step_dir(newest + 1, stage.cluster.epoch)))
    stage.expect(found.exit_code == 0, "the newest durable step does not verify")
