"""Long runs of a cluster of real daemons and ranks under faults drawn from a seed, with the promises checked after each.

Values of every array differ by step **and epoch**, so that a restore that mixes two saves is seen. Ranks compare every byte and all
extras of what they restore. What must be left is computed here from what the daemons had announced when a fault struck (`Safe`), not
asked afterwards.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.faults.cluster.nodes import Cluster, Failed, Node, RankProcess
from ckptkit.faults.inject.program import environment
from ckptkit.faults.inject.storage import Rule

SHAPES = {
    "w": ((192, 512), "float32"),
    "b": ((300,), "float32"),
    "e": ((7, 64, 64), "bfloat16"),
    "one": ((1,), "float32"),
}
COPIES = 1
Point = tuple[int, int]
"""Epoch and step."""


@dataclass
class Safe:
    """What was announced, and what was hurt since: gives the least version that a restore must find."""

    committed: Point | None = None
    replicated: Point | None = None
    durable: Point | None = None
    cliques: dict[str, frozenset[str]] = field(default_factory=dict)
    epoch: int = 0
    hurts: list[tuple[str, Point]] = field(default_factory=list)

    def saw(self, statuses: list[dict[str, Any]]) -> None:
        """Daemons' accounts, read while they ran."""
        for status in statuses:
            for level in ("committed", "replicated", "durable"):
                found = status[level]
                if found is not None:
                    point = (found["epoch"], found["step"])
                    setattr(self, level, max(point, getattr(self, level) or point))
            if status["epoch"] is not None:
                self.cliques[status["node"]] = frozenset((status["node"], *status["clique"]))

    def hurt(self, node: str) -> None:
        """A node lost memory, or a bit of it: whatever was saved until now has lost that copy. Later copies have not."""
        self.hurts.append((node, self.committed or (0, 0)))

    def _hurt(self, point: Point) -> set[str]:
        return {node for node, newest in self.hurts if newest >= point}

    def _survives(self, point: Point) -> bool:
        """Whether at most k nodes of a clique were hurt since a version was replicated."""
        hurt = self._hurt(point)
        if point[0] != self.epoch:  # its copies lie where an earlier epoch put them
            return len(hurt) <= COPIES
        return all(
            len(hurt & clique) <= COPIES for clique in self.cliques.values() if len(clique) > COPIES
        ) and not any(node in hurt for node, clique in self.cliques.items() if len(clique) <= COPIES)

    def floor(self) -> Point | None:
        found = [self.durable]
        if self.committed is not None and not self._hurt(self.committed):
            found.append(self.committed)
        if self.replicated is not None and self._survives(self.replicated):
            found.append(self.replicated)
        return max((point for point in found if point is not None), default=None)

    def restored(self, epoch: int, point: Point) -> None:
        """A new epoch has restored a version: that is what stands."""
        self.epoch, self.cliques = epoch, {}
        self.committed, self.replicated = point, None
        if self.durable is not None:
            self.durable = min(self.durable, point)


class Chaos:
    """One run: four nodes with two ranks each, saves in a row, faults in between.

    Args:
        folder: For the nodes' memory and durable storage.
        seed: Of all that is drawn.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.cluster = Cluster(
            folder, nodes=4, ranks=2, scale=0.2, drain=True, vote_s=40.0, restore_wait_s=60.0,
            options={"shapes": SHAPES, "by_epoch": True, "begin_s": 5.0},
        )  # fmt: skip
        self.cluster.config["drain"] = {"every": 5, "keep_last": 3}
        self.safe = Safe()
        self.step = self.saves = self.restores = self.bytes = 0
        self.history: list[str] = []
        self.faults: dict[str, int] = {}
        self.zombies: list[RankProcess] = []

    def run(self, saves: int, seconds: float = float("inf")) -> None:
        """Train for so many saves, or for a time, one fault at least. Raises Failed or AssertionError with all that happened before."""
        with self.cluster:
            try:
                self.cluster.launch()
                assert self.cluster.start() is None
                self.safe.epoch = self.cluster.epoch
                until = time.monotonic() + seconds
                self.round()
                while self.saves < saves and time.monotonic() < until:
                    self.round()
            except (Failed, AssertionError, OSError) as error:
                raise AssertionError(
                    f"seed {self.seed}: {error}\n" + "\n".join(self.history[-40:])
                ) from error
            finally:
                for zombie in self.zombies:
                    zombie.close()

    def round(self) -> None:
        """Some saves; in the middle of them a fault; then whatever has to happen before training goes on."""
        count = self.random.randint(4, 12)
        name = self.random.choice(list(FAULTS))
        self.faults[name] = self.faults.get(name, 0) + 1
        at = self.random.uniform(0.0, 0.12 * count)
        self.note(f"{count} saves from step {self.step}, {name} after {at:.2f} s")
        for rank in self.cluster.ranks:
            rank.tell("run", first=self.step, steps=self.step + count, pause_s=0.05)
        time.sleep(at)
        ended = FAULTS[name](self)
        self.saves += count
        if ended:
            self.restart()
            return
        for rank in self.cluster.ranks:
            rank.answer()
        self.step += count
        self.commit()

    def look(self) -> None:
        """Read what the daemons announce; those that are away are left out."""
        found = []
        for node in self.cluster.nodes:
            if node.process is not None and node.process.poll() is None:
                try:
                    found.append(node.status())
                except Exception as error:  # noqa: BLE001  (a daemon that was just killed, in whatever state)
                    self.note(f"no account of {node.name}: {type(error).__name__}")
        self.safe.saw(found)

    def restart(self) -> None:
        """A new epoch, perhaps in another layout; everything that was promised must be there."""
        nodes = list(self.cluster.nodes)
        if self.random.random() < 0.4:
            nodes = sorted(self.random.sample(nodes, self.random.randint(1, 4)), key=lambda node: node.number)
        per_node = self.random.choice([1, 2, 2, 2, 3])
        floor = self.safe.floor()
        self.note(f"epoch on {[node.name for node in nodes]} x {per_node}; must find {floor}; {self.safe}")
        self.cluster.launch(nodes, per_node)
        try:
            step = self.cluster.start()
        except Failed as error:
            if floor is not None or "no whole checkpoint" not in str(error):
                raise
            self.cluster.launch(nodes, per_node)
            step = self.cluster.start(fresh=True)
        self.restores += 1
        found = (self.cluster.answers[0]["epoch"], step) if step is not None else None
        self.note(f"epoch {self.cluster.epoch} restored {found}")
        wrong = [line for answer in self.cluster.answers for line in answer["wrong"]]
        assert not wrong, f"wrong bytes reached a rank: {wrong}"
        assert floor is None or (found is not None and found >= floor), (
            f"{found} was restored, but {floor} was safe"
        )
        assert len({answer["epoch"] for answer in self.cluster.answers}) == 1
        self.bytes += sum(answer["bytes"] for answer in self.cluster.answers)
        self.step = step or 0
        if found is not None:
            self.safe.restored(self.cluster.epoch, found)
        else:
            self.safe = Safe(epoch=self.cluster.epoch)
        self.wake_zombies()
        self.commit()

    def commit(self) -> None:
        """Whatever happened: within a minute a save of all ranks goes through, and once in a while it must be copied."""
        copied = self.random.random() < 0.4 and len(self.members()) > 1
        until, why = time.monotonic() + 60, ""
        while time.monotonic() < until:
            self.step += 1
            self.saves += 1
            answers = self.cluster.all("save", step=self.step, tries=100)
            why = "; ".join(str(answer) for answer in answers if not answer.get("sealed"))
            if (
                not why
                and self.cluster.ranks[0].do("wait", step=self.step, level=2 if copied else 1, timeout=30)[
                    "reached"
                ]
            ):
                self.look()
                return
            self.note(f"step {self.step} did not go through: {why or 'it was sealed everywhere'}")
            time.sleep(0.2)
        tails = "\n".join(node.tail() for node in self.cluster.nodes)
        raise Failed(f"no save goes through any more: {why}\n{tails}")

    def wake_zombies(self) -> None:
        """Ranks of earlier epochs that were stopped go on: nothing they do may count."""
        for zombie in self.zombies:
            zombie.kill(signal.SIGCONT)
            for _ in range(zombie._due):
                try:
                    zombie.raw_answer(20.0)
                except Failed:
                    break  # it was stopped in the middle of an answer that nobody will give
            zombie.close()
        self.zombies.clear()

    def accounts(self) -> list[str]:
        """What is left to say after a failure: late answers of ranks, ends of the nodes' logs."""
        said = []
        for rank in self.cluster.ranks:
            try:
                while rank._due:
                    said.append(f"rank {rank.rank}: {rank.raw_answer(5.0)}"[:600])
            except Failed as error:
                said.append(f"rank {rank.rank}: {error}"[:200])
        return said + [node.tail() for node in self.cluster.nodes]

    def note(self, text: str) -> None:
        self.history.append(f"{time.monotonic():.2f} {text}")

    def node(self) -> Node:
        return self.random.choice(self.cluster.nodes)

    def members(self) -> list[Node]:
        return sorted({rank.node for rank in self.cluster.ranks}, key=lambda node: node.number)

    def back(self, node: Node, faults: dict[str, str] | None = None) -> None:
        """Start a daemon again."""
        time.sleep(self.random.uniform(0.0, 0.4))
        node.environment = faults or {}
        node.start()


def kill_ranks(run: Chaos) -> bool:
    """SIGKILL of one or several ranks, in whatever phase."""
    run.look()
    ranks = run.cluster.ranks
    for rank in run.random.sample(ranks, run.random.randint(1, len(ranks))):
        rank.kill()
    return True


def kill_daemon(run: Chaos) -> bool:
    """SIGKILL of a daemon; its ranks wait for it, or skip saves, and go on."""
    run.look()
    node = run.node()
    node.kill()
    run.back(node)
    return False


def kill_coordinator(run: Chaos) -> bool:
    run.look()
    node = run.members()[0]
    node.kill()
    run.back(node)
    return False


def kill_both(run: Chaos) -> bool:
    """A daemon and all ranks of its node; the memory stays."""
    run.look()
    node = run.random.choice(run.members())
    node.kill()
    for rank in run.cluster.ranks:
        if rank.node is node:
            rank.kill()
    run.back(node)
    return True


def lose_node(run: Chaos) -> bool:
    """Power loss of a node: another one takes its place."""
    run.look()
    node = run.node()
    node.lose()
    run.safe.hurt(node.name)
    run.back(node)
    return True


def lose_two(run: Chaos) -> bool:
    """Two nodes at once, in different cliques or in one."""
    run.look()
    for node in run.random.sample(run.cluster.nodes, 2):
        node.lose()
        run.safe.hurt(node.name)
        run.back(node)
    return True


def partition(run: Chaos) -> bool:
    """The network is cut in two for a while."""
    names = [node.name for node in run.cluster.nodes]
    run.random.shuffle(names)
    at = run.random.randint(1, 3)
    run.cluster.proxy.partition(set(names[:at]), set(names[at:]))
    time.sleep(run.random.uniform(0.2, 1.5))
    run.look()
    run.cluster.proxy.heal()
    return False


def slow_peer(run: Chaos) -> bool:
    """A hundredth of the bandwidth, or none, from one node."""
    run.cluster.proxy.rate = {run.node().name: run.random.choice([200_000.0, 20_000.0, 0.0])}
    time.sleep(run.random.uniform(0.3, 1.5))
    run.look()
    run.cluster.proxy.heal()
    return False


def flips_on_the_wire(run: Chaos) -> bool:
    run.cluster.proxy.flip = {node.name: 3 for node in run.cluster.nodes}
    run.cluster.proxy.cut_after = {run.node().name: 300_000}
    time.sleep(run.random.uniform(0.2, 0.8))
    run.cluster.proxy.heal()
    return False


def disk_full(run: Chaos) -> bool:
    """The durable disk is full, or faulty, for the next writes of one daemon."""
    run.look()
    node = run.node()
    node.kill()
    effect, calls = run.random.choice(
        [
            ("enospc", "write"),
            ("enospc", "allocate,open"),
            ("eio", "sync,datasync"),
            ("eio", ""),
            ("short", "write"),
        ]
    )
    rules = [Rule(effect, calls, after=run.random.randint(0, 6), times=6)]
    run.back(node, environment(str(run.cluster.durable), rules, base={}))
    return False


def clock_jump(run: Chaos) -> bool:
    """The wall clock of a node is an hour off from now on."""
    run.look()
    node = run.node()
    node.kill()
    run.back(node, environment(clock_s=run.random.choice([-3600.0, 3600.0]), base={}))
    return False


def corrupt_slot(run: Chaos) -> bool:
    """A bit flips in a sealed slot; the scrubber looks, or the next restore meets it."""
    run.look()
    node = run.node()
    sealed = [number for number, record in node.records().items() if record["state"] == "SEALED"]
    if not sealed:
        return False
    slot = run.random.choice(sealed)
    used = node.records()[slot]["used"]
    node.flip(slot, run.random.randrange(used), 1 << run.random.randrange(8))
    run.look()
    run.safe.hurt(node.name)
    if run.random.random() < 0.5:
        with node.client() as client:
            client.request("scrub")
        return False
    return True


def relayout(run: Chaos) -> bool:
    """No fault: the job is started again, mostly otherwise."""
    run.look()
    return True


def hang(run: Chaos) -> bool:
    """A rank stops, the job is started again without it having ended; later it goes on as if nothing had been."""
    run.look()
    ranks = run.cluster.ranks
    zombie = run.random.choice(ranks)
    zombie.kill(signal.SIGSTOP)
    run.zombies.append(zombie)
    run.cluster.ranks = [rank for rank in ranks if rank is not zombie]
    return True


FAULTS: dict[str, Callable[[Chaos], bool]] = {
    made.__name__: made
    for made in (
        kill_ranks, kill_daemon, kill_coordinator, kill_both, lose_node, lose_two, partition, slow_peer, flips_on_the_wire, disk_full,
        clock_jump, corrupt_slot, relayout, hang,
    )
}  # fmt: skip
"""Name → what it does; gives whether the epoch is over."""
