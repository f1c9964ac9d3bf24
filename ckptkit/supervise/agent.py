"""torchrun's elastic agent with eyes: it ends and restarts a worker group also when heartbeats, losses or digests say so."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ckptkit.errors import CkptError, UsageError
from ckptkit.hooks.pulse import FOLDER, stack_file
from ckptkit.supervise.incidents import IncidentLog
from ckptkit.supervise.policy import IGNORE, ROLLBACK, STOP, Policy
from ckptkit.supervise.resume import Resume
from ckptkit.supervise.watch import Finding, Watch

__all__ = ["Job", "supervise"]

LAYOUT = "CKPTKIT_LAYOUT"
_ENDLESS = 1 << 30
_STACK_S = 1.0


@dataclass(frozen=True)
class Job:
    """What to run on this node.

    Attributes:
        command: Program and arguments; `{layout}` in an argument becomes the layout.
        ranks: Processes on this node.
        nodes: Least and most nodes of the run.
        endpoint: `host:port` where nodes meet; empty for a run of one node.
        run_id: Of the run; the same on all nodes.
        node: This node's name.
        grace_s: From SIGTERM to SIGKILL when the supervisor itself is told to end, so that trainers can save.
        stop_s: Likewise, when a group is ended for a restart.
        poll_s: Seconds between looks.
        output: A folder for the output of ranks, or empty for this terminal.
        join_s: How long to wait for the least number of nodes, and `last_call_s`: for more once they are there.
    """

    command: Sequence[str]
    ranks: int = 1
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = ""
    run_id: str = ""
    node: str = ""
    grace_s: float = 120.0
    stop_s: float = 5.0
    poll_s: float = 0.5
    output: str = ""
    join_s: float = 600.0
    last_call_s: float = 30.0


def supervise(job: Job, policy: Policy, log: IncidentLog, resume: Resume | None = None) -> int:
    """Run a job until it ends by itself or the policy gives it up.

    Returns:
        0: the command ended well on every rank of this node. 1: given up, or this node left. 5: interrupted by a signal,
        which the ranks were given too.

    Raises:
        UsageError: there is no layout for the number of ranks, or nodes cannot meet.
    """
    resume = resume or Resume(policy.run)
    handler = _rendezvous(job)
    pulses = tempfile.mkdtemp(prefix="ckptkit-pulse-")
    spec = WorkerSpec(
        role="trainer",
        local_world_size=job.ranks,
        entrypoint=job.command[0],
        args=tuple(job.command[1:]),
        rdzv_handler=handler,
        max_restarts=_ENDLESS,
        monitor_interval=job.poll_s,
    )
    agent = SupervisedAgent(spec, job, policy, log, resume, pulses)
    try:
        result = agent.run()
        good = result is not None and not result.is_failed() and not agent.given_up
        if good:
            log.add(
                "finished",
                "the command ended well on every rank here",
                attempt=agent.attempt,
                step=agent.best,
            )
        elif agent.left:
            return 1  # the others meet again without this node: their meeting is not ours to close
        handler.shutdown()
        return 0 if good else 1
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        log.add(
            "interrupted",
            f"{name}; the ranks were told, and have ended",
            attempt=agent.attempt,
            step=agent.best,
        )
        handler.shutdown()
        return 5
    finally:
        agent.end_watch()
        shutil.rmtree(pulses, ignore_errors=True)


def _rendezvous(job: Job) -> Any:
    # Every start gets a store of its own. torch would let all of them use one, where a rank of a restart reads the addresses of
    # ranks that have ended, and cannot connect (seen with gloo and torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=job.endpoint or "localhost:0",
        run_id=job.run_id or uuid.uuid4().hex,
        min_nodes=job.nodes[0],
        max_nodes=job.nodes[1],
        local_addr=None if job.endpoint else "localhost",
        join_timeout=int(job.join_s),
        last_call_timeout=max(int(job.last_call_s), 1),
    )
    try:
        return get_rendezvous_handler(parameters)
    except Exception as error:
        raise UsageError(
            f"nodes cannot meet at {job.endpoint or 'this machine'}: {error}; --meet takes HOST:PORT of one of them"
        ) from error


class SupervisedAgent(LocalElasticAgent):
    """Starts, watches and restarts this node's ranks.

    Attributes:
        attempt: Starts so far.
        best: The highest step that was seen complete.
        given_up, left: How it ended, when it did not end well: the run was given up, or this node left it.
    """

    def __init__(
        self, spec: WorkerSpec, job: Job, policy: Policy, log: IncidentLog, resume: Resume, pulses: str
    ) -> None:
        super().__init__(
            spec,
            DefaultLogsSpecs(
                log_dir=job.output or None,
                redirects=_everything() if job.output else _nothing(),
            ),
            exit_barrier_timeout=job.join_s,
        )
        self._shutdown_timeout = int(job.grace_s)
        self._job, self._policy, self._log, self._resume, self._pulses = job, policy, log, resume, pulses
        self._command = tuple(spec.args)
        self._watch: Watch | None = None
        self._faults: deque[float] = deque()
        self._blamed: deque[float] = deque()
        self._delay = policy.restarts.backoff_s[0]
        self._last_best = -1
        self.attempt, self.best, self.given_up, self.left = 0, -1, False, False

    # -- what the elastic agent calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.attempt += 1
        ranks = [worker.global_rank for worker in worker_group.workers]
        world = worker_group.workers[0].world_size
        layout = self._policy.layout(world)
        os.environ[FOLDER] = self._pulses
        if layout:
            os.environ[LAYOUT] = layout
        worker_group.spec.args = tuple(part.replace("{layout}", layout) for part in self._command)
        shutil.rmtree(self._pulses, ignore_errors=True)
        os.makedirs(self._pulses)
        self._log.add(
            "start",
            f"ranks {ranks[0]} to {ranks[-1]} of {world} on {worker_group.group_world_size} nodes"
            f"{', layout ' + layout if layout else ''}; {self._resume.point()}",
            attempt=self.attempt,
        )
        started = super()._start_workers(worker_group)
        self._end_soon()
        self.end_watch()
        self._watch = Watch(self._pulses, ranks, self._policy, time.monotonic())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        assert self._watch is not None
        findings = self._watch.look(time.monotonic())
        self.best = max(self.best, self._watch.step)
        self._resume.saved(self._watch.saved)
        # Ranks that have ended, or were ended after one of them failed, do not hang; but what they told before still counts.
        ended = result.state != WorkerState.HEALTHY
        serious = [
            found for found in findings if found.action != IGNORE and not (ended and found.kind == "hang")
        ]
        for found in findings:
            if found.action == IGNORE:
                self._note(found)
        if serious:
            return self._fault(worker_group, serious[0])
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._decide(_crash(result, self._watch.step))
        return result

    def _end_soon(self) -> None:
        """Let the ranks that a failed one leaves behind have `stop_s` to end; torch, which ends them by itself, would wait 30 s."""
        assert self._pcontext is not None
        close, seconds = self._pcontext.close, max(int(self._job.stop_s), 1)

        def closes(death_sig: signal.Signals | None = None, timeout: int = seconds) -> None:
            close(death_sig, timeout)

        self._pcontext.close = closes  # type: ignore[method-assign]

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        time.sleep(self._delay)
        self._delay = min(self._delay * 2, self._policy.restarts.backoff_s[1])
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        # Ranks that are waiting for one another cannot save, so they get no grace here.
        self._shutdown(signal.SIGTERM, max(int(self._job.stop_s), 1))

    # -- what it lacks

    def end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _fault(self, worker_group: WorkerGroup, found: Finding) -> RunResult:
        if found.kind == "hang":
            stacks = self._stacks(worker_group)
            found = Finding(found.kind, found.action, found.rank, found.step, f"{found.detail}; {stacks}")
        self._decide(found)
        return RunResult(state=WorkerState.UNHEALTHY)

    def _decide(self, found: Finding) -> None:
        """What follows from a fault: whether to go on, and from where. The agent restarts unless told otherwise."""
        now, policy = time.monotonic(), self._policy
        if self.best > self._last_best:  # it got on since the last fault
            self._last_best, self._delay = self.best, policy.restarts.backoff_s[0]
        _remember(self._faults, now, policy.restarts.window_s)
        here = found.rank is not None and any(
            found.rank == worker.global_rank for worker in self._worker_group.workers
        )
        if here:
            _remember(self._blamed, now, policy.restarts.window_s)
        if found.action == STOP:
            self._give_up(found, "the policy says to stop")
        elif len(self._faults) > policy.restarts.max:
            self._give_up(
                found,
                f"{len(self._faults)} faults within {policy.restarts.window_s:g} s; the policy allows {policy.restarts.max}",
            )
        elif policy.node.bad_after and len(self._blamed) >= policy.node.bad_after and self._job.nodes[1] > 1:
            self.left = True
            self._note(found, "this node leaves the run")
            self._log.add(
                "leave",
                f"{len(self._blamed)} faults were blamed on this node; the others go on without it if {self._job.nodes[0]} "
                "of them are left. Look at its hardware",
                attempt=self.attempt,
            )
            self._remaining_restarts = 0
        else:
            self._go_on(found)

    def _go_on(self, found: Finding) -> None:
        then = f"restart in {self._delay:g} s"
        try:
            if found.action == ROLLBACK:
                banned = self._resume.go_back(found.step, found.detail)
                self._log.add("ban", banned, attempt=self.attempt, step=found.step)
            self._resume.check()
        except CkptError as error:
            self._give_up(found, str(error))
            return
        self._note(found, then)

    def _give_up(self, found: Finding, why: str) -> None:
        self.given_up, self._remaining_restarts = True, 0
        self._note(found, "give up")
        self._log.add("give-up", why, attempt=self.attempt, step=max(self.best, 0))

    def _note(self, found: Finding, action: str = "") -> None:
        self._log.add(
            found.kind, found.detail, attempt=self.attempt, rank=found.rank, step=found.step, action=action
        )

    def _stacks(self, worker_group: WorkerGroup) -> str:
        """Ask ranks where they are. A process that was stopped cannot say; its state does."""
        assert self._pcontext is not None
        told = []
        pids = {worker_group.workers[local].global_rank: pid for local, pid in self._pcontext.pids().items()}
        stopped = {rank: pid for rank, pid in pids.items() if _state(pid) in ("T", "t")}
        for rank, pid in pids.items():
            # SIGUSR1 would end a process that has no handler for it.
            if rank not in stopped and os.path.exists(stack_file(self._pulses, rank)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACK_S)
        for rank, pid in stopped.items():
            told.append(f"rank {rank} is stopped by a signal")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # SIGTERM would not reach it
        kept = os.path.join(self._log.folder, f"stacks-{self.attempt}")
        for rank in pids:
            if os.path.exists(stack_file(self._pulses, rank)) and os.path.getsize(
                stack_file(self._pulses, rank)
            ):
                os.makedirs(kept, exist_ok=True)
                shutil.copy(stack_file(self._pulses, rank), kept)
        if os.path.isdir(kept):
            told.append(f"stacks are in {kept}")
        return "; ".join(told) or "no rank could tell its stack"


def _crash(result: RunResult, step: int) -> Finding:
    """What the elastic agent knows of processes that ended badly: the first of them is the cause."""
    if not result.failures:
        return Finding(
            "crash", "restart", None, max(step, 0), "the processes are not those that were started"
        )
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    how = f"ended with exit code {failure.exitcode}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        how = f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    more = len(result.failures) - 1
    text = failure.message if isinstance(failure.message, str) else str(failure.message.get("message", ""))
    said = "" if text.startswith("Signal ") or "error_file" in text else f": {text[:400]}"
    others = f" ({more} others here followed)" if more else ""
    return Finding("crash", "restart", rank, max(step, 0), f"rank {rank} {how}{others}{said}")


def _remember(times: deque[float], now: float, window: float) -> None:
    times.append(now)
    while times and now - times[0] > window:
        times.popleft()


def _state(pid: int) -> str:
    """The state of a process as Linux calls it (`T` is stopped); empty where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _everything() -> Any:
    from torch.distributed.elastic.multiprocessing import Std

    return Std.ALL


def _nothing() -> Any:
    from torch.distributed.elastic.multiprocessing import Std

    return Std.NONE
