"""The stage of a zaya drill: `ckptkit train` with 8 ranks as 4 nodes, each with its daemon; the loss curve against the undisturbed run.

In the layout of the undisturbed run every loss must be equal bit for bit, those of steps that were done again included; in another
layout within `RELATIVE`.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptkit import ops
from ckptkit.errors import CkptError, StoreError
from ckptkit.faults.cluster.nodes import Cluster, Failed, Node, wait_for
from ckptkit.faults.drills.base import Drill
from ckptkit.faults.drills.verdict import Clock, Verdict
from ckptkit.faults.inject.plan import Fault

LAYOUT = "dp=8,ep=2,zero=1"
FEWER = "dp=4,tp=1,ep=2,zero=1"
STEPS, EVERY, DURABLE = 12, 2, 4
RELATIVE = 1e-5
PATIENCE_S = 240.0
SETTINGS = {
    "train.batch": 8, "train.micro_batch": 1, "train.seq_len": 32, "train.steps": STEPS, "checkpoint.every": EVERY,
    "checkpoint.durable_every": DURABLE, "optimizer.warmup": 2, "data.synthetic_bytes": 1 << 15,
}  # fmt: skip
SUPERVISED = """
run = "{run}"
[restarts]
max = 40
backoff_s = [0.1, 0.5]
[hang]
startup_s = 240
after_s = 12
factor = 20
[layouts]
8 = "{layout}"
"""


class Training:
    """A run of the training loop under faults, and what was observed of it.

    Args:
        folder: Empty; nodes' memory, the durable run, logs.
        shared: Where undisturbed runs are kept for other drills.
    """

    def __init__(self, drill: Drill, seed: int, folder: Path, shared: Path) -> None:
        self.drill, self.seed, self.folder, self.shared = drill, seed, folder, shared
        self.plan = drill.plan(seed)
        self.random = random.Random(f"{drill.name} {seed}")
        self.verdict = Verdict(drill.name, drill.kind, seed, self.plan.text())
        self.clock = Clock(self.verdict)
        options = dict(drill.options)
        self.steps = int(options.pop("steps", STEPS))
        self.settings = {
            **SETTINGS,
            "train.seed": seed,
            "data.seed": seed,
            "train.steps": self.steps,
            **options.pop("settings", {}),
        }
        self.cluster = Cluster(folder, nodes=4, ranks=2, scale=0.5, drain=True, **options)
        self.work = folder / "work"
        self.work.mkdir()
        self.jsonl = self.work / "steps.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        self._left = list(self.plan.faults)
        self._starts: list[int] = []
        self._layouts: list[str] = []
        self._again: Callable[[], None] = self.start

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    def start(
        self,
        faults: Sequence[dict[str, Any]] = (),
        *,
        layout: str = LAYOUT,
        nodes: Sequence[Node] | None = None,
        supervised: bool = False,
    ) -> None:
        """Start the ranks of a run, or start them again; `faults` are met inside of them (`cluster.training`)."""
        there = list(nodes or self.nodes)
        for node in there:
            if node.process is not None and node.process.poll() is not None:
                node.start()  # it ended with its job, or was killed; a service manager would do the same
        job = self._job(
            layout, [node.socket for node in there], self.jsonl, str(self.cluster.durable), self.work
        )
        job["faults"] = list(faults)
        path = self.work / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "ckptkit.faults.cluster.training", str(path)]
        if supervised:
            policy = self.work / "policy.toml"
            policy.write_text(SUPERVISED.format(run=self.cluster.durable, layout=layout))
            command = [
                sys.executable, "-m", "ckptkit", "supervise", "--policy", str(policy), "--nproc", "8", "--log", str(self.work / "incidents"),
                "--output", str(self.work / "output"), "--grace", "60", "--", *command,
            ]  # fmt: skip
        self._again = partial(self.start, layout=layout, nodes=nodes, supervised=supervised)
        self._starts.append(len(self.records()))
        self._layouts.append(layout)
        self.clock.note("restart" if len(self._starts) > 1 else "note", f"started, layout {layout}")
        self.process = self._popen(command, self.work / "errors")

    def _job(self, layout: str, sockets: list[str], jsonl: Path, root: str, folder: Path) -> dict[str, Any]:
        settings = {**self.settings, "checkpoint.root": root, "log.jsonl": str(jsonl)}
        return {
            "settings": settings,
            "layout": layout,
            "sockets": sockets,
            "per_node": 2,
            "folder": str(folder),
            "faults": [],
        }

    def _popen(self, command: Sequence[str], errors: Path) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        variables.pop("CKPTKIT_CACHE", None)
        with errors.open("ab") as file:
            return subprocess.Popen(
                command,
                env=variables,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def records(self) -> list[dict[str, Any]]:
        """What the loop has logged, a record a step, of all attempts."""
        return _read(self.jsonl)

    def trained(self, step: int) -> bool:
        """Whether some attempt has come to a step."""
        return any(one["step"] >= step for one in self.records())

    def reached(self, step: int) -> None:
        """Wait until a step has been trained."""
        self.until(
            lambda: any(one["step"] >= step for one in self.records()[self._starts[-1] :]), f"step {step}"
        )
        self.clock.recovered()

    def ends(self, code: int | None = 0, *, again: int = 0, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the run's end; raises Failed where its exit code is another.

        Args:
            code: Expected; None for any.
            again: How often the same command may be run again where its last save was not taken (exit code 4, whose message says so). Only for
                faults that keep a daemon from taking the last save: then there is nothing else that the run could say.
        """
        assert self.process is not None
        while True:
            try:
                found = self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise Failed(f"the run did not end within {timeout_s:g} s\n{self.said()}") from None
            self._end_group()
            if code in (None, found):
                return found
            if found != StoreError.exit_code or not again:
                raise Failed(f"the run ended with {found}, not {code}\n{self.said()}")
            again -= 1
            self._again()

    def end_job(self) -> None:
        """What a scheduler does when a node is lost: it ends the rest of the job."""
        self._end_group()

    def said(self) -> str:
        """The end of what the run printed."""
        text = (
            (self.work / "errors").read_text(errors="replace")[-2500:]
            if (self.work / "errors").exists()
            else ""
        )
        return text + "\n" + "\n".join(node.tail()[-1500:] for node in self.nodes)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait for something, as long as the run lives."""

        def look() -> Any:
            found = condition()
            if not found and self.process is not None and self.process.poll() is not None:
                raise Failed(f"the run ended with {self.process.returncode} before {what}\n{self.said()}")
            return found

        return wait_for(look, what, self.cluster, timeout_s)

    def pids(self, node: Node | None = None) -> list[int]:
        """Processes of the ranks, or of those on a node."""
        ranks = range(8) if node is None else (2 * node.number, 2 * node.number + 1)
        return [int((self.work / f"pid-{rank}").read_text()) for rank in ranks]

    def incidents(self) -> list[str]:
        """What the supervisor logged, by kind."""
        return [one["kind"] for one in _read(self.work / "incidents" / "incidents.jsonl")]

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────

    def fault(self) -> Fault:
        """The next fault of the plan, put on the timeline."""
        fault = self._left.pop(0)
        self.clock.note("fault", fault.text().partition(" ")[2])
        return fault

    def harm(self, text: str) -> None:
        self.clock.note("fault", text)

    def step_of(self, fault: Fault) -> int:
        """A step in the middle of the run, by the fault's time."""
        return 4 + int(fault.when * (self.steps - 6))

    def inside(self, fault: Fault, do: str, **values: Any) -> dict[str, Any]:
        """A fault that a rank meets in the loop."""
        return {"rank": int(fault.target.partition(" ")[2]), "step": self.step_of(fault), "do": do, **values}

    def lose(self, node: Node) -> None:
        """A node loses power: its ranks, its daemon, its memory."""
        self.harm(f"{node.name} loses power")
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.lose()

    # ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, holds: Any, what: str) -> None:
        if not holds:
            self.verdict.findings.append(what)

    def reference(self, layout: str = LAYOUT) -> dict[int, float]:
        """The losses of the undisturbed run of this seed, by step; computed once."""
        name = f"{self.seed}-{self.steps}-{layout.replace(',', '_').replace('=', '')}"
        path = self.shared / f"reference-{name}.jsonl"
        with (self.shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                folder = self.folder / "reference"
                folder.mkdir()
                job = self._job(layout, [], folder / "steps.jsonl", "", folder)
                (folder / "job.json").write_text(json.dumps(job))
                process = self._popen(
                    [sys.executable, "-m", "ckptkit.faults.cluster.training", str(folder / "job.json")],
                    folder / "errors",
                )
                if process.wait(PATIENCE_S):
                    raise Failed(f"the undisturbed run failed\n{(folder / 'errors').read_text()[-2000:]}")
                (folder / "steps.jsonl").rename(path)
        return {one["step"]: one["loss"] for one in _read(path)}

    def finish(self) -> None:
        """What every drill ends with: the whole curve against the undisturbed one, what was done again, and the last step verified."""
        records, reference = self.records(), self.reference()
        self.verdict.reference = sorted(reference.items())
        self.verdict.curve = [(one["step"], one["loss"]) for one in records]
        self.expect(
            {one["step"] for one in records} == set(reference),
            f"steps {sorted({one['step'] for one in records})} were trained",
        )
        layouts = [
            self._layouts[max(k for k, start in enumerate(self._starts) if start <= n)]
            for n in range(len(records))
        ]
        other = []
        for number, one in enumerate(records):
            want = reference.get(one["step"], float("nan"))
            allowed = 0.0 if layouts[number] == LAYOUT else RELATIVE * abs(want)
            if not abs(one["loss"] - want) <= allowed:
                other.append(f"the loss of step {one['step']} is {one['loss']!r}, undisturbed it is {want!r}")
        self.expect(
            not other,
            "; ".join([*other[:1], *([f"{len(other) - 1} further losses differ"] * (len(other) > 1))]),
        )
        self._redone(records)
        self._verify()

    def _redone(self, records: list[dict[str, Any]]) -> None:
        given_up = set()
        if self.saves_spoiled:
            given_up = {line["step"] for node in self.nodes for line in node.events("abort")}
        for one, following in pairwise(records):
            before, after = one["step"], following["step"]
            if after != before + 1:
                restored = after - 1
                saves = [step for step in range(restored + 1, before + 1) if step % EVERY == 0]
                lost = len([step for step in saves if step not in given_up])
                self.verdict.restores += 1
                self.verdict.steps_lost = max(self.verdict.steps_lost, lost)
                self.clock.note_past(following["time"], "restored", f"step {restored} after step {before}")
                self.expect(restored <= before, f"step {before} was followed by {after}")
                self.expect(
                    lost <= self.allowed,
                    f"{lost} saves were done again, from step {restored} after step {before}",
                )

    allowed = 1
    """Saves that a recovery may have to do again."""
    saves_spoiled = False
    """Whether saves that were given up while training went on do not count as done again: where one fault spoils a save (a daemon is killed)
    and the next one ends the run before another save, two intervals are lost by two faults."""

    def _verify(self) -> None:
        """The last durable step, by its digests; and that it is the last step of the run."""
        try:
            newest = ops.latest(str(self.cluster.durable))
            report = ops.verify(newest)
        except CkptError as error:
            self.expect(False, f"the run holds no whole step: {error}")
            return
        self.expect(report.exit_code == 0, f"{newest} does not verify")
        self.expect(
            f"step-{self.steps:08d}" in newest, f"the newest durable step is {newest.rpartition('/')[2]}"
        )
        folder = Path(newest)
        self.verdict.bytes_verified += sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_group()
        self.cluster.__exit__(kind, error, trace)

    def _end_group(self) -> None:
        """End what is left of the run's processes: they are a session of their own."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for path in self.work.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                pid = int(path.read_text())
                if _ours(pid):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _ours(pid: int) -> bool:
    """Whether a process is a rank of a drill, and not another one with its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"ckptkit" in command or b"multiprocessing" in command


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # a rank was killed while it wrote
            found.append(json.loads(line))
    return found
