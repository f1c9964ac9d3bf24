"""`Checkpointer`: what a trainer calls."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from ckptkit import stores
from ckptkit.errors import CkptError, CorruptionError, StoreError, UsageError
from ckptkit.hooks import finding, opening
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.metrics import Metrics, log
from ckptkit.hooks.optimizers import force_state
from ckptkit.hooks.placement import Held, SchemaPlacement
from ckptkit.hooks.planning import SavePlan, make_save_plan
from ckptkit.hooks.registration import Registration, register
from ckptkit.hooks.saving import Save, Saver
from ckptkit.hooks.stopping import Stopper
from ckptkit.hooks.targets import CacheTarget, Skip
from ckptkit.hooks.twins import Verdict, line_of

ERROR_S = 60.0
"""The longest wait for other ranks after an error in the loop."""

_REPLICAS = ("warn", "raise", "outvote", "off")


class Checkpointer:
    """Saves a trainer's state while it trains, and restores it.

    Every rank of a run makes one, with equal arguments, and calls the same methods in the same order. No call waits
    longer for other ranks than `timeout_s`, and none uses the trainer's process group.

    Args:
        url: Of the run: a folder or an fsspec URL; steps become folders in it (`step-00001200.e3`). It is probed now
            (that it can be reached and written, and has space), not at the first save.
        cache: `auto` uses the node's cache daemon where one runs, `off` goes straight to the URL, anything else is
            the path of a daemon's socket, which must answer. `CKPTKIT_CACHE` overrides.
        every: Save after every so many optimizer steps. None: only when `save` is called.
        durable_every: With a cache: steps that are multiples of this are drained to the URL. Without one every save
            goes to the URL, and this interval is used instead of `every` where both are given.
        replicas: What to do when ranks that hold the same values differ: `warn`, `raise`, `outvote` (three or more
            holders: what the majority holds is saved, and the odd rank is named), `off`.
        max_failures: So many failed saves in a row raise; fewer warn and are counted.
        busy: `skip` a periodic save while every buffer is still being written, or `wait`.
        timeout_s: The longest wait for other ranks, the daemon or the store.
        grace_s: On SIGTERM all ranks save at the same step within so many seconds, then exit; None leaves SIGTERM alone.
        on_event: Called on a background thread with each event (`requested`, `staged`, `written`, `committed`,
            `failed`, `skipped`) as a dict.
        meeting: Where ranks meet: an address `host:port` of a `torch.distributed.TCPStore` and this process's
            `(rank, world)`. Unless given: `torch.distributed` where it is initialised, else one rank.
        seed: Of the RNG streams of mesh coordinates that a restored step does not have.

    Raises:
        UsageError: arguments that make no sense.
        StoreError: the URL cannot be used.

    `CKPTKIT_DISABLE=1` makes every method do nothing; `restore` then gives 0.
    """

    def __init__(
        self,
        url: str,
        *,
        cache: str = "auto",
        every: int | None = None,
        durable_every: int | None = None,
        replicas: str = "warn",
        max_failures: int = 3,
        busy: str = "skip",
        timeout_s: float = 600.0,
        grace_s: float | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        meeting: tuple[str, int, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.disabled = os.environ.get("CKPTKIT_DISABLE", "") not in ("", "0")
        self._registered: Registration | None = None
        self._missing: tuple[str, ...] = ()
        if self.disabled:
            return
        _check(every, durable_every, replicas, busy, max_failures)
        self.url, self.every, self.replicas, self.busy = url, every, replicas, busy
        self.max_failures, self.timeout_s, self.seed = max_failures, timeout_s, seed
        self._meeting = Meeting.of(meeting, timeout_s)
        self._metrics = Metrics(self._meeting.rank, on_event)
        arguments = {
            "url": url,
            "every": every,
            "durable_every": durable_every,
            "replicas": replicas,
            "busy": busy,
        }
        self._opened = opening.open_run(url, os.environ.get("CKPTKIT_CACHE", cache), self._meeting, arguments)
        self._durable_every = durable_every
        self._interval = every
        if not self._opened.cached and durable_every is not None:
            self._interval = durable_every
        self._stopper = None if grace_s is None else Stopper(self._meeting, grace_s)
        self._step: int | None = None
        self._restored_step: int | None = None
        self._requests = 0
        self._optimizer_steps = 0
        self._steps_at_end = 0
        self._end: _End | None = None
        self._loose: list[torch.Tensor] | None = None
        self._failures = 0
        self._fatal: CkptError | None = None
        self._replan = False
        self._distrusted: set[int] = set()
        self._hooks: list[Any] = []
        self._saver: Saver
        self._plan: SavePlan
        self._closed = False
        self._broken = False

    def register(
        self,
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        placement: SchemaPlacement | None = None,
        tensors: Sequence[Held] = (),
        ema: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        extras: Mapping[str, Any] | None = None,
        rng: bool = True,
    ) -> None:
        """Say what is saved. Once; all ranks alike. Slots get their size here, before the first step.

        Args:
            model: A module, or several (pipeline chunks). What a tensor is in the global model comes from `placement` or
                else from the tensors: DTensor (TP, FSDP2, HSDP); DDP and plain modules are whole. Where the model's
                `config` (Transformers) fits a known schema, tensors get canonical names, so that the step can be
                resharded to any layout and format.
            optimizer: A `torch.optim.Optimizer`, or several. State is saved by parameter name; state that is not there
                yet is planned from its parameter. A hook before its next `step` waits for what is not copied yet.
                Optimizers that are none of torch's need `fence` to be called before they change anything.
            scheduler, loader: Objects with `state_dict` and `load_state_dict`; states must be plain values (numbers,
                text, lists, small tensors). A loader whose state differs between ranks is kept for each
                data-parallel rank.
            placement: For trainers that place tensors by a schema. Names of parameters are then the family's local names
                (after `placement.rename`), and shapes those of its local tensors.
            tensors: Further tensors, or all of them, said one by one: optimizer state that is cut (ZeRO-1) or not in a
                torch optimizer. Names are the placement's, or any where there is none. They are fenced by
                the optimizer's step as parameters are. They win over what introspection finds of the same
                name and role.
            ema: A copy of the model's weights that is kept beside it. Saved with the role `ema`.
            extras: Further objects with `state_dict`/`load_state_dict`, by name.
            rng: Whether to keep the random generators of Python, NumPy, torch and the device, for each rank.

        Raises:
            UsageError: a second call, nothing to save, a tensor whose place is not known, state that is no plain
                value, or ranks that do not register the same model.
            LayoutError: a tensor has not the shape that its placement says.
            StoreError: a rank did not arrive in time; names it.
        """
        if self.disabled:
            return
        if self._registered is not None:
            raise UsageError(
                "register was called before; a Checkpointer keeps one set of tensors. Make a new one for another model"
            )
        began = time.perf_counter()
        found = register(
            self._meeting, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, placement=placement, tensors=tensors,
            ema=ema, extras=extras, rng=rng,
        )  # fmt: skip
        self._saver = Saver(
            found.table, self._meeting, self._opened.target, compare=self.replicas != "off", event=self._event
        )
        self._saver.on_differing = self._on_differing
        self._saver.on_end = self._finished
        self._registered = found
        try:
            self._make_plan()
        except BaseException:
            self._registered = None
            raise
        for view in found.views:
            self._hooks.append(view.optimizer.register_step_pre_hook(self._before_step))
        self._say(time.perf_counter() - began)

    def restore(
        self,
        source: str | None = None,
        *,
        fresh: bool = False,
        strict: bool = True,
        weights_only: bool = False,
        new_data: bool = False,
    ) -> int:
        """Restore the newest whole step into the registered tensors, in place, from the nearest copy.

        The saved layout may be any other. Groups, parameters and tensors keep their identity. All ranks restore the same
        step, or all raise.

        Args:
            source: Another checkpoint to start from, in any format that `ckptkit.open` reads; the run's own steps unless
                given.
            fresh: Allow that nothing is restored although the run holds steps, or its store does not answer.
            strict: Every registered tensor must be in the checkpoint. Else what is missing keeps its
                values, and is listed in `missing`.
            new_data: Start the loader anew where each data-parallel rank's state is its own and their number changed.
            weights_only: Parameters and buffers only (a warm start, for example from `hf`): no state, no extras, step 0.

        Returns:
            Completed optimizer steps: what `on_step_end` was called with. 0 where the run holds no step, with a warning.

        Raises:
            FormatError, CorruptionError: the run holds steps, but none that is whole; names each and why.
            StoreError: the store cannot be reached.
            LayoutError, CoverageError: the checkpoint is of another model.
        """
        if self.disabled:
            return 0
        found = self._needed()
        if self._saver.last is not None:
            raise UsageError("restore comes before the first save: the run's newest step would be its own")
        if not weights_only and any(not view.known and not view.inner.state for view in found.views):
            for view in found.views:
                force_state(view)
            found.replan()
            self._make_plan()
        self._requests += 1
        done = finding.restore(
            self._opened, self._meeting, found, self._plan, source, fresh=fresh, strict=strict, weights_only=weights_only,
            new_data=new_data, seed=self.seed, event=self._event, tag=f"restore/{self._requests}", rejoin=self._rejoin,
        )  # fmt: skip
        self._missing = tuple(done.missing)
        for note in done.notes:
            log.warning("rank=%d restore: %s", self._meeting.rank, note)
        found.table.refresh()
        self._saver.retable()
        self._step = self._restored_step = done.step
        return done.step

    @property
    def missing(self) -> tuple[str, ...]:
        """What the last `restore(strict=False)` did not find, as `tensor (role)`."""
        return self._missing

    def on_step_end(self, step: int) -> bool:
        """Tell that `step` optimizer steps are complete; starts a save when one is due, and returns at once.

        Call it on every rank after the optimizer's step. The copy runs beside the next forward and backward pass.

        Args:
            step: Completed steps; higher than at the last call.

        Returns:
            Whether a save was started.

        Raises:
            UsageError: not registered, `step` does not rise, or a registered tensor was replaced.
            CkptError: the `max_failures`th save in a row failed.
            SystemExit: SIGTERM came, and the state of this step is saved (see `grace_s`).
        """
        if self.disabled:
            return False
        found = self._needed()
        if self._step is not None and step <= self._step:
            raise UsageError(
                f"on_step_end({step}) after {self._step} completed steps: it takes the number of completed optimizer steps, which rises"
            )
        self._raise_failure()
        self._step, self._end = step, None
        stop = self._stopper is not None and self._stopper.due(step)
        due = stop or (self._interval is not None and step % self._interval == 0)
        stepped, self._steps_at_end = self._optimizer_steps - self._steps_at_end, self._optimizer_steps
        if due and found.views and not stepped and found.table.has_gradients():
            self._failed(step, UsageError(f"step {step}: {_MIDDLE}"))  # or a step that a loss scaler left out
            self._raise_failure()
            return False
        started = (
            due
            and self._start(step, wait_s=self.timeout_s if stop or self.busy == "wait" else 0.0) is not None
        )
        self._end = None if started or self._interval is None else self._state_at_end(found)
        if stop:
            self._end_after(step)
        return started

    def save(self, *, tag: str = "", pin: bool = False) -> int:
        """Start a save of the last completed step now, on all ranks; waits for a free buffer.

        Args:
            tag: Noted in the step's manifest.
            pin: Retention never deletes the step.

        Returns:
            The step.
        """
        if self.disabled:
            return 0
        self._needed()
        if self._step is None:
            raise UsageError("save comes after restore or on_step_end, which say how many steps are complete")
        if self._start(self._step, wait_s=self.timeout_s, tag=tag, pin=pin) is None:
            raise StoreError(f"no buffer became free within {self.timeout_s:g} s")
        return self._step

    def wait(self, level: int = 3, timeout_s: float | None = None) -> int | None:
        """Wait until the last started save has reached a level, and give its step; None where none was started.

        Args:
            level: 1 committed in memory, 2 copied to other nodes, 3 durable at the URL. Without a cache each is 3.

        Raises:
            CkptError: that save failed; says why.
            StoreError: it took longer than `timeout_s`.
        """
        if self.disabled or self._registered is None or self._saver.last is None:
            return None
        if level not in (1, 2, 3):
            raise UsageError(f"level {level}: 1 is committed in memory, 2 copied to other nodes, 3 durable")
        limit = self.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + limit
        save = self._saver.last
        try:
            self._saver.wait(limit)
        except Skip as skip:
            raise StoreError(f"the save of step {save.step} was skipped: {skip}") from skip
        if not self._opened.target.wait(save.step, level, max(until - time.monotonic(), 0.0)):
            raise StoreError(f"step {save.step} did not reach level {level} within {limit:g} s")
        return save.step

    def fence(self) -> None:
        """Wait for what is not copied yet. Needed before a step of an optimizer that is none of torch's."""
        if not self.disabled and self._registered is not None:
            self._fence()

    def on_exception(self) -> None:
        """Keep what can be kept after an error: let saves end, and save the last completed step if nothing changed it."""
        if self.disabled or self._closed:
            return
        self._broken = True
        if self._registered is None:
            return
        saver = self._saver
        # The other ranks may hang in a collective; nobody waits for them as long as in training.
        self.timeout_s = self._meeting.timeout_s = min(self.timeout_s, ERROR_S)
        unsaved = self._step is not None and (saver.last is None or saver.last.step != self._step)
        unchanged = (
            self._optimizer_steps == self._steps_at_end and self._end is not None and self._end.holds()
        )
        try:
            if unsaved and unchanged and self._step is not None and self._end is not None:
                self._start(self._step, wait_s=10.0, taken=self._end.taken)
            saver.wait(self.timeout_s)
        except (CkptError, Skip) as error:
            log.warning("rank=%d the state at the error could not be saved: %s", self._meeting.rank, error)

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM came: the trainer is to end after the next `on_step_end`."""
        return not self.disabled and self._stopper is not None and self._stopper.requested.is_set()

    def close(self) -> None:
        """Let started saves end, and let go of buffers, hooks and threads. Raises where the last save failed."""
        if self.disabled or self._closed:
            return
        self._closed = True
        error: BaseException | None = None
        if self._registered is not None:
            for hook in self._hooks:
                hook.remove()
            try:
                self._saver.wait(self.timeout_s)
            except (CkptError, Skip) as failure:
                error = failure if isinstance(failure, CkptError) else None
            self._saver.close()
        if self._stopper is not None:
            self._stopper.close()
        # After an error the run will be started again: the daemon must keep what it holds for it.
        self._opened.target.close(drain=error is None and not self._broken)
        self._meeting.close()
        if error is not None:
            raise error

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts and times of this rank's saves so far (docs/hooks.md)."""
        return {} if self.disabled else dict(self._metrics.values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.on_exception()
        self.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _needed(self) -> Registration:
        if self._registered is None:
            raise UsageError("nothing is registered yet: call register(model=..., optimizer=...) first")
        if self._closed:
            raise UsageError("the Checkpointer is closed")
        return self._registered

    def _make_plan(self) -> None:
        """Plan the saves, with all ranks."""
        assert self._registered is not None
        found = self._registered
        self._requests += 1
        self._plan = make_save_plan(
            self._meeting, found.table.holdings, found.places, found.layout, found.groups(), f"plan/{self._requests}",
            distrusted=frozenset(self._distrusted),
        )  # fmt: skip
        self._check_space()
        self._saver.table = found.table
        self._saver.adopt(self._plan)
        self._replan = False

    def _check_space(self) -> None:
        """Raise StoreError where the URL has no room for one step; with a cache it is only said."""
        free = stores.free_bytes(self.url)
        if free is not None and free < self._plan.total:
            why = f"{self.url} has {free:,} bytes free, but a step takes {self._plan.total:,}"
            if not self._opened.cached:
                raise StoreError(f"{why}. Free some space, or choose another URL", file=self.url)
            log.warning("rank=%d %s", self._meeting.rank, why)

    def _rejoin(self) -> None:
        """A new epoch of the cache, for a start from nothing."""
        target = self._opened.target
        assert isinstance(target, CacheTarget)
        self._requests += 1
        claim = self._meeting.agree(
            f"claim/{self._requests}",
            None,
            lambda said: list(opening.claim_above(self._opened.run, target.epoch)),
        )
        target.rejoin((int(claim[0]), str(claim[1])))
        self._saver.adopt(self._plan)

    def _before_step(self, *_: Any) -> None:
        """The optimizer's pre-hook."""
        self._optimizer_steps += 1
        self._fence()

    def _fence(self) -> None:
        waited = self._saver.fence()
        if waited:
            self._metrics.add(stall_seconds_total=waited)

    def _state_at_end(self, found: Registration) -> "_End":
        if self._loose is None:
            self._loose = [h.tensor for h in found.table.holdings if not h.fenced and h.tensor is not None]
        taken = found.take(self._meeting.lead, self._saver.device)
        return _End(taken, self._loose, [tensor._version for tensor in self._loose])

    def _start(
        self,
        step: int,
        *,
        wait_s: float,
        tag: str = "",
        pin: bool = False,
        taken: dict[str, Any] | None = None,
    ) -> Save | None:
        """Begin a save; None where it is skipped. `taken` is the state of loaders and generators, where it is not that of now."""
        found = self._needed()
        if self._opened.cached and self._restored_step is None:
            raise UsageError(
                "restore comes before the first save; restore(fresh=True) where nothing is to be restored"
            )
        began = time.perf_counter()
        self._loose = None  # a save looks all tensors up again
        if self._replan or found.table.unforeseen():
            self._saver.drain(self.timeout_s)
            found.replan()
            self._make_plan()
        self._requests += 1
        key = f"save/{self._requests}/{step}"
        self._event({"event": "requested", "step": step})
        plan = self._plan
        taken = found.take(self._meeting.lead, self._saver.device) if taken is None else taken
        try:
            save = self._saver.start(
                step,
                lambda one: found.extras(plan, step, taken, one.numbers, tag),
                pin=pin,
                key=key,
                wait_s=wait_s,
            )
        except Skip as skip:
            self._skipped(step, skip)
            return None
        self._metrics.add(saves_total=1, stall_seconds_total=time.perf_counter() - began)
        return save

    def _finished(self, save: Save, error: BaseException | None) -> None:
        """On the saver's thread: count, and keep what is to be raised."""
        if isinstance(error, Skip):
            self._skipped(save.step, error)
            return
        if error is None:
            self._failures = 0
            copied = save.device_copy_s or save.copy_s
            self._metrics.add(copied_bytes_total=self._plan.size)
            self._metrics.set(failed_in_a_row=0, copy_bytes_per_second=self._plan.size / max(copied, 1e-9))
            if not self._opened.cached:
                self._metrics.set(durable_step=save.step, durable_time=time.time())
            return
        self._failed(save.step, error)

    def _failed(self, step: int, error: BaseException) -> None:
        self._failures += 1
        self._metrics.add(saves_failed_total=1)
        self._metrics.set(failed_in_a_row=self._failures)
        self._event({"event": "failed", "step": step, "why": str(error), "in_a_row": self._failures})
        if self._failures >= self.max_failures and isinstance(error, CkptError):
            self._fatal = error

    def _skipped(self, step: int, skip: Skip) -> None:
        self._metrics.add(saves_skipped_total=1)
        self._event({"event": "skipped", "step": step, "why": str(skip)})

    def _raise_failure(self) -> None:
        error, self._fatal = self._fatal, None
        if error is not None:
            raise type(error)(
                f"{self._failures} saves in a row failed, the last with: {error}", **error.facts
            ) from error

    def _on_differing(self, verdict: Verdict) -> bool:
        """Whether a save whose replicas differ is to fail."""
        if self.replicas == "warn":
            return False
        if self.replicas == "outvote" and -1 not in verdict.odd:
            if set(verdict.odd) <= self._distrusted and not self._replan:
                return False  # what they hold is not in the file
            self._distrusted |= set(verdict.odd)
            self._replan = True
            return True  # this one holds what the odd rank wrote; the next is taken from the majority
        self._fatal = CorruptionError(line_of(verdict), ranks=list(verdict.odd))
        return True

    def _end_after(self, step: int) -> None:
        """After the save of a SIGTERM: wait for it, within the grace, and end."""
        assert self._stopper is not None
        try:
            self.wait(3, self._stopper.left_s)
            log.warning("rank=%d SIGTERM: step %d is durable", self._meeting.rank, step)
        except (CkptError, Skip) as error:
            log.error("rank=%d SIGTERM: step %d may not be durable: %s", self._meeting.rank, step, error)
        raise SystemExit(143)

    def _event(self, event: Mapping[str, Any]) -> None:
        self._metrics.event(event)

    def _say(self, seconds: float) -> None:
        """The one line at registration."""
        saver, plan = self._saver, self._plan
        where = "the node's cache" if self._opened.cached else self.url
        interval = "when asked" if self._interval is None else f"every {self._interval} steps"
        if self._opened.cached and self._durable_every:
            interval += f", durable every {self._durable_every}"
        elif self.every is not None and self._interval != self.every:
            interval += f" (no cache here: every={self.every} is for its memory)"
        rate = f", {saver.rate / 1e9:.1f} GB/s to the host" if saver.rate else ""
        assert self._registered is not None
        names = f"; names are the trainer's own ({self._registered.note})" if self._registered.note else ""
        log.info(
            "rank=%d saves %d tensors, %s bytes of %s in all, to %s %s; %d buffers (%s%s), %s bytes of device memory; planned in %.2f s%s",
            self._meeting.rank, len(saver.table.holdings), f"{plan.size:,}", f"{plan.total:,}", where, interval, len(saver.buffers),
            saver.mode, rate, f"{saver.snapshot.extra_device_bytes:,}", seconds, names,
        )  # fmt: skip


_MIDDLE = (
    "gradients are there that no optimizer step has used: this is in the middle of gradient accumulation. Call on_step_end after the "
    "optimizer's step, with the number of completed steps"
)


@dataclass(frozen=True)
class _End:
    """The end of a step that was not saved: what a save after an error in the next step, whose batch is taken by then, must hold.

    Attributes:
        taken: Of loaders, generators, schedulers.
        loose, versions: The tensors that no optimizer owns, and how often each had been changed.
    """

    taken: dict[str, Any]
    loose: list[torch.Tensor]
    versions: list[int]

    def holds(self) -> bool:
        """Whether the step that failed has changed none of these tensors."""
        return [tensor._version for tensor in self.loose] == self.versions


def _check(every: int | None, durable_every: int | None, replicas: str, busy: str, max_failures: int) -> None:
    for name, value in (("every", every), ("durable_every", durable_every), ("max_failures", max_failures)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: give a whole number of steps, at least 1")
    if every and durable_every and durable_every % every:
        raise UsageError(
            f"durable_every={durable_every} is no multiple of every={every}, so no save would be drained"
        )
    if replicas not in _REPLICAS:
        raise UsageError(f"replicas={replicas!r}: choose {', '.join(_REPLICAS)}")
    if busy not in ("skip", "wait"):
        raise UsageError(f"busy={busy!r}: choose skip or wait")
