"""`Checkpointer`: what a trainer calls."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ckptkit.hooks.placement import Held, SchemaPlacement


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
        raise NotImplementedError

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
        raise NotImplementedError

    def restore(
        self,
        source: str | None = None,
        *,
        fresh: bool = False,
        strict: bool = True,
        weights_only: bool = False,
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
            weights_only: Parameters and buffers only (a warm start, for example from `hf`): no state, no extras, step 0.

        Returns:
            Completed optimizer steps: what `on_step_end` was called with. 0 where the run holds no step, with a warning.

        Raises:
            FormatError, CorruptionError: the run holds steps, but none that is whole; names each and why.
            StoreError: the store cannot be reached.
            LayoutError, CoverageError: the checkpoint is of another model.
        """
        raise NotImplementedError

    @property
    def missing(self) -> tuple[str, ...]:
        """What the last `restore(strict=False)` did not find, as `tensor (role)`."""
        raise NotImplementedError

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
        raise NotImplementedError

    def save(self, *, tag: str = "", pin: bool = False) -> int:
        """Start a save of the last completed step now, on all ranks; waits for a free buffer.

        Args:
            tag: Noted in the step's manifest.
            pin: Retention never deletes the step.

        Returns:
            The step.
        """
        raise NotImplementedError

    def wait(self, level: int = 3, timeout_s: float | None = None) -> int | None:
        """Wait until the last started save has reached a level, and give its step; None where none was started.

        Args:
            level: 1 committed in memory, 2 copied to other nodes, 3 durable at the URL. Without a cache each is 3.

        Raises:
            CkptError: that save failed; says why.
            StoreError: it took longer than `timeout_s`.
        """
        raise NotImplementedError

    def fence(self) -> None:
        """Wait for what is not copied yet. Needed before a step of an optimizer that is none of torch's."""
        raise NotImplementedError

    def on_exception(self) -> None:
        """Keep what can be kept after an error: let saves end, and save the last completed step if nothing changed it."""
        raise NotImplementedError

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM came: the trainer is to end after the next `on_step_end`."""
        raise NotImplementedError

    def close(self) -> None:
        """Let started saves end, and let go of buffers, hooks and threads. Raises where the last save failed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.on_exception()
        self.close()
