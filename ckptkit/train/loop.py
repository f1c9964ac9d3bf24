"""The loop of one rank: restore, step, save, tell, stop when asked."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, InterruptedRunError, TrainingError
from ckptkit.hooks import Checkpointer, SchemaPlacement
from ckptkit.hooks.pulse import Pulse
from ckptkit.train import parallel, telemetry
from ckptkit.train.config import Config
from ckptkit.train.held import family
from ckptkit.train.trainer import Result, Trainer


@dataclass(frozen=True)
class Options:
    """What is asked of one call, beside the configuration.

    Attributes:
        quiet: Print nothing.
        profile: File for a trace of a few steps (rank 0); empty for none.
        fresh: Start at step 0 although the run holds steps.
        stop_after: Stop, as if asked to, after so many steps of this call; 0 for never.
    """

    quiet: bool = False
    profile: str = ""
    fresh: bool = False
    stop_after: int = 0


@dataclass(frozen=True)
class Summary:
    """What a finished run came to.

    Attributes:
        first: Step that it started from.
        losses: Of every step of this call.
        seconds: Of all steps.
    """

    first: int
    losses: list[float]
    seconds: float


def run(rank: int, address: str, device: str, config: Config, layout: Layout, options: Options) -> Summary:
    """Train as one rank until `[train] steps`.

    Raises:
        InterruptedRunError: SIGINT or SIGTERM came; the state is saved where there is a place for it.
        TrainingError: the loss is no number.
        CkptError: the checkpoint could not be restored or saved.
    """
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // layout.world))
    groups = parallel.start(layout, rank, address, device)
    try:
        trainer = Trainer(config, groups)
        ckpt = checkpointer(trainer)
        try:
            return _loop(trainer, ckpt, options)
        except BaseException as error:
            if ckpt is not None:
                ckpt.on_exception()
            if isinstance(error, TrainingError):  # every rank raises it
                groups.barrier()
            if ckpt is not None:
                with suppress(CkptError):  # that the last save failed, too, must not hide why the run ends
                    ckpt.close()
            raise
        finally:
            if ckpt is not None:
                ckpt.close()
    finally:
        parallel.stop()


def checkpointer(trainer: Trainer) -> Checkpointer | None:
    """The run's checkpointer with the trainer's state registered; None where the run has no place to save."""
    table, groups = trainer.config.checkpoint, trainer.parallel
    if not table.root:
        return None
    ckpt = Checkpointer(
        table.root,
        cache=table.cache,
        every=table.every,
        durable_every=table.durable_every or None,
        seed=trainer.config.train.seed,
    )
    ckpt.register(
        model=trainer.stage,
        placement=SchemaPlacement(trainer.model.config, groups.layout, groups.rank, family(trainer.model)),
        optimizer=trainer.optimizer.groups,
        tensors=trainer.optimizer.saved(),
        loader=trainer.loader,
        extras={"balance": trainer.balancer},
    )
    return ckpt


def restore(trainer: Trainer, ckpt: Checkpointer | None, fresh: bool) -> None:
    """Bring a trainer to the newest step of its run, or to the weights it starts from."""
    if ckpt is not None:
        trainer.done = ckpt.restore(fresh=fresh)
        if not trainer.done and trainer.config.checkpoint.init:
            ckpt.restore(trainer.config.checkpoint.init, weights_only=True)
            trainer.optimizer.refresh()


def _loop(trainer: Trainer, ckpt: Checkpointer | None, options: Options) -> Summary:
    config, groups = trainer.config, trainer.parallel
    restore(trainer, ckpt, options.fresh)
    first = trainer.done
    meter = telemetry.Meter(config, trainer.model, groups.world.size, groups.device)
    told = telemetry.sinks(config.log, config.train.steps, options.quiet) if groups.rank == 0 else []
    pulse = Pulse(groups.rank)
    losses: list[float] = []
    begin = time.perf_counter()
    try:
        with (
            _asked_to_stop(groups.world.size > 1) as asked,
            telemetry.Profile(options.profile if groups.rank == 0 else "", groups.device) as trace,
        ):
            while trainer.done < config.train.steps:
                at = time.perf_counter()
                stop = bool(asked) or (0 < options.stop_after <= len(losses) + 1)
                result, stall = _step(trainer, ckpt, stop)
                losses.append(result.loss)
                pulse.beat(result.step, result.loss)
                record = meter.record(result, time.perf_counter() - at, stall) if told else {}
                for sink in told:
                    sink.write(record)
                trace.step()
                if result.stop and trainer.done < config.train.steps:
                    raise _interrupted(trainer, ckpt)
        if ckpt is not None:
            _settle(trainer, ckpt)
    finally:
        pulse.close()
        for sink in told:
            sink.close()
    return Summary(first, losses, time.perf_counter() - begin)


def _step(trainer: Trainer, ckpt: Checkpointer | None, stop: bool) -> tuple[Result, float]:
    """One step and its save; the result, and the seconds that saving took from it."""
    if ckpt is None:
        return trainer.step(stop), 0.0
    waited = ckpt.metrics.get("stall_seconds_total", 0.0)
    result = trainer.step(stop)
    waited = ckpt.metrics.get("stall_seconds_total", 0.0) - waited  # for what was not copied yet
    at = time.perf_counter()
    last = result.stop or result.step == trainer.config.train.steps
    if last:
        ckpt.busy = "wait"  # there is no later save to make up for this one
    saved = ckpt.on_step_end(result.step)
    if last and not saved:
        ckpt.save(tag="interrupted" if result.stop else "")
    return result, waited + time.perf_counter() - at


def _settle(trainer: Trainer, ckpt: Checkpointer) -> None:
    """Wait until every rank's last save is whole; rank 0, where ranks meet, must not be the first to leave."""
    ckpt.wait()
    trainer.parallel.barrier()


def _interrupted(trainer: Trainer, ckpt: Checkpointer | None) -> InterruptedRunError:
    where = "nothing is saved, since the run has no [checkpoint] root"
    if ckpt is not None:
        _settle(trainer, ckpt)
        where = f"saved to {trainer.config.checkpoint.root}; run the same command again to go on"
    return InterruptedRunError(f"interrupted; stopped after step {trainer.done}: {where}", step=trainer.done)


@contextmanager
def _asked_to_stop(launched: bool) -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM add to. The second one ends the process, unless a launcher sees to that."""
    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        if not launched:
            for known, handler in before.items():
                signal.signal(known, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: whoever embeds the loop handles signals
        before.clear()
    try:
        yield asked
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
