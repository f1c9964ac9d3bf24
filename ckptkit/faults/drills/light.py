"""The stage of a light drill: four nodes with their daemons, two ranks on each, a save a step, every byte compared at every restore.

    def rank_killed(stage: Light) -> None:
        stage.begin()
        stage.save(level=2)
        fault = stage.fault()                 # drawn from the seed
        stage.kill_rank(fault.target)
        stage.recover()                       # new processes, a new epoch; checks what was restored
        stage.save()

Whatever a drill leaves to the stage is checked: a recovery gives no older step than the faults spare, no step that was never begun, equal
bytes and extras on every rank; and the run goes on afterwards.
"""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptkit.faults.cluster.nodes import Cluster, Failed, Node, RankProcess, wait_for
from ckptkit.faults.drills.base import Drill
from ckptkit.faults.drills.ledger import Ledger
from ckptkit.faults.drills.verdict import Clock, Verdict
from ckptkit.faults.inject.plan import Fault

SHAPES = {
    "w": ((256, 512), "float32"), "b": ((300,), "float32"), "e": ((7, 64, 64), "bfloat16"), "one": ((1,), "float32"),
}  # fmt: skip
"""0.6 MB: a leaf a rank."""
LARGE = {"w": ((4096, 1024), "float32"), "b": ((300,), "float32")}
"""16 MB: three leaves a rank, so that copies and drains take a while."""
QUICK = {"vote_s": 15.0, "restore_wait_s": 60.0}
SCALE = 0.25
"""Of every time in the daemons."""
CLIENT_SCALE = 1.0
"""Of the clients' times: a rank that waits longer for a daemon that has little of a busy machine spoils no drill."""

NODES = tuple(f"node {number}" for number in range(4))
RANKS = tuple(f"rank {number}" for number in range(8))


class Light:
    """A cluster under faults, and what was observed of it.

    Args:
        folder: Empty; holds nodes' memory and the durable run.
        drill: Its options may have `shapes`, `digests`, `nodes`, `ranks`, `drain`, `draining` (`[drain]` of `cache.toml`), and its other sections.
    """

    def __init__(self, drill: Drill, seed: int, folder: Path) -> None:
        self.drill, self.folder = drill, folder
        self.plan = drill.plan(seed)
        self.random = random.Random(f"{drill.name} {seed}")
        self.verdict = Verdict(drill.name, drill.kind, seed, self.plan.text())
        self.clock = Clock(self.verdict)
        self.ledger = Ledger()
        self.step = 0
        self.allowed = 1
        """Saves that the last recovery may have to do again."""
        self._compared = False
        self._left = list(self.plan.faults)
        given: dict[str, Any] = {**QUICK, "nodes": 4, "ranks": 2, "scale": SCALE, **dict(drill.options)}
        draining = given.pop("draining", {})
        given["options"] = {
            "shapes": given.pop("shapes", SHAPES),
            "digests": given.pop("digests", False),
            "time_scale": CLIENT_SCALE,
        }
        self.cluster = Cluster(folder, **given)
        if draining:
            self.cluster.config["drain"] = dict(draining)

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, saves: int = 0, level: int = 1) -> None:
        """Start the ranks with nothing, and save so many steps."""
        self.cluster.launch()
        step = self.cluster.start()
        self.expect(step is None, f"a run without steps started at step {step}")
        for _ in range(saves):
            self.save(level=level)

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    @property
    def ranks(self) -> list[RankProcess]:
        return self.cluster.ranks

    def save(self, level: int = 1) -> int:
        """Save the next step on all ranks, waiting for slots, until it has a level; gives the step."""
        self.step += 1
        self.ledger.began(self.step)
        self.cluster.save(self.step, level)
        self.acknowledge(self.step, level)
        return self.step

    def save_again(self) -> int:
        """Save steps, skipped ones included, until all ranks have reached their daemons again; gives the step."""

        def saved() -> bool:
            self.step += 1
            self.ledger.began(self.step)
            return all(answer.get("sealed") for answer in self.all("save", step=self.step, tries=100))

        self.until(saved, "saving again")
        self.expect(self.reached(self.step), f"step {self.step} did not commit")
        return self.step

    def acknowledge(self, step: int, level: int) -> None:
        """The run was told that a step has a level."""
        self.ledger.acknowledged(step, level)
        self.clock.note("saved", f"step {step} at level {level}")
        self.clock.recovered()

    def all(
        self, do: str, ranks: Sequence[RankProcess] | None = None, **command: Any
    ) -> list[dict[str, Any]]:
        """A command on some ranks at once, for the step that is being saved; the answers, errors included."""
        there = self.ranks if ranks is None else ranks
        for rank in there:
            rank.tell(do, **command)
        return [rank.raw_answer() for rank in there]

    def start_save(self, ranks: Sequence[RankProcess] | None = None, *, write: bool = True) -> int:
        """Begin (and write) the next step on some ranks without sealing it; gives the step."""
        self.step += 1
        self.ledger.began(self.step)
        self.all("begin", ranks, step=self.step)
        if write:
            self.all("write", ranks, step=self.step)
        return self.step

    def reached(self, step: int, level: int = 1, timeout_s: float = 30.0, by: int | None = None) -> bool:
        """Whether a step comes to a level; then it is acknowledged."""
        alive = [rank for rank in self.ranks if rank.alive] if by is None else [self.ranks[by]]
        found = alive[0].try_("wait", step=step, level=level, timeout=timeout_s)
        if found.get("reached"):
            self.acknowledge(step, level)
        return bool(found.get("reached"))

    def drain(self, step: int) -> None:
        """Ask for the newest step to be durable, and wait."""
        with self.nodes[0].client() as client:
            client.request("drain")
        self.cluster.reach(step, level=3)
        self.acknowledge(step, 3)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────

    def fault(self) -> Fault:
        """The next fault of the plan, put on the timeline."""
        fault = self._left.pop(0)
        self.harm(fault.text().partition(" ")[2])
        return fault

    def note(self, text: str) -> None:
        self.clock.note("note", text)

    def harm(self, text: str) -> None:
        """A fault that the plan does not name by itself."""
        self.clock.note("fault", text)
        self._compared = False

    def node(self, target: str) -> Node:
        """`node 2`."""
        return self.nodes[_number(target)]

    def rank(self, target: str) -> RankProcess:
        """`rank 5`."""
        return self.ranks[_number(target)]

    def lose(self, *nodes: Node, replace: bool = True) -> None:
        """Nodes lose power at once, all processes and memory; new ones take their places."""
        for node in nodes:
            self.harm(f"{node.name} loses power")
            node.lose()
        self.ledger.lost("node" if len(nodes) == 1 else "memory")
        if replace:
            for node in nodes:
                node.start(wait=False)
            for node in nodes:
                node.wait_serving()

    def clique(self, node: Node) -> Node:
        """The node that holds the copies of another: the one whose loss besides takes the last copy in memory."""
        mine = {
            record["rank"]
            for record in node.records().values()
            if record["state"] == "SEALED" and record["lane"] != "replica"
        }
        for other in self.nodes:
            if other is not node and mine & {
                r["rank"]
                for r in other.records().values()
                if r["state"] == "SEALED" and r["lane"] == "replica"
            }:
                return other
        raise Failed(f"no node has copies of {node.name}")

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────

    def recover(
        self,
        nodes: Sequence[Node] | None = None,
        per_node: int | None = None,
        *,
        redone: int = 1,
        **options: Any,
    ) -> int:
        """New processes in a new epoch, from whatever they find; checks it, and gives the step.

        Args:
            nodes, per_node: Where they run; everywhere unless given.
            redone: The most saves that may have to be done again.
        """
        self.clock.note("restart", f"{len(nodes or self.nodes)} nodes")
        self.cluster.launch(nodes, per_node, **options)
        return self.restore(redone=redone)

    def restore(self, *, redone: int = 1) -> int:
        """The part of `recover` after new processes were started."""
        found = self.cluster.start() or 0
        floor, trained = self.ledger.floor, self.ledger.trained
        wrong = {line for answer in self.cluster.answers for line in answer["wrong"]}
        self.verdict.findings += [f"wrong bytes reached a rank: {line}" for line in sorted(wrong)]
        self.verdict.bytes_verified += sum(answer["bytes"] for answer in self.cluster.answers)
        self.verdict.restores += 1
        self._compared = True
        self.expect(found >= floor, f"step {found} was restored although step {floor} was safe")
        self.expect(found <= trained, f"step {found} was restored, which was never saved")
        lost = self.ledger.restored(found)
        self.expect(lost <= redone, f"{lost} saves have to be done again, {redone} are allowed")
        self.verdict.steps_lost = max(self.verdict.steps_lost, lost)
        self.clock.note("restored", f"step {found}")
        self.step = found
        return found

    def finish(self) -> None:
        """What every drill ends with: what is there is compared, and the run goes on."""
        if not self._compared:
            self.recover(redone=self.allowed)
        if self.clock.open:
            self.save()

    # ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, holds: Any, what: str) -> None:
        """What the drill promises; a finding where it does not hold."""
        if not holds:
            self.verdict.findings.append(what)
            self.clock.note("note", f"finding: {what}")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for something to come about; a finding and the end of the drill where it does not."""
        return wait_for(condition, what, self.cluster)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all daemons that run."""
        return sum(
            node.metric(name, **labels)
            for node in self.nodes
            if node.process is not None and node.process.poll() is None
        )

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.__exit__(kind, error, trace)


def _number(target: str) -> int:
    found = re.search(r"\d+", target)
    if found is None:
        raise ValueError(f"{target!r} has no number")
    return int(found[0])
