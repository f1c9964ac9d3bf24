"""The table of what is registered: live tensors looked up again before each save, and watched while they are copied."""

from collections.abc import MutableMapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from ckptkit.errors import CorruptionError, UsageError
from ckptkit.hooks.holdings import Holding, shard_of
from ckptkit.hooks.optimizers import OptimizerView

_ADDRESS = torch.Tensor.data_ptr
_VERSION = attrgetter("_version")
_LOCAL = attrgetter("_local_tensor")


class Table:
    """The registered tensors of this rank.

    What a save costs the trainer is here: loops over all tensors run in C, and look at each tensor once, since they wait for memory.

    Attributes:
        holdings: In order; a plan counts in it.
        views: Of the optimizers.
        marks: What `refresh` saw of the tensors that only the optimizer changes, for `check_unchanged`.
    """

    def __init__(self, holdings: Sequence[Holding], views: Sequence[OptimizerView]) -> None:
        self.holdings = list(holdings)
        self.views = list(views)
        self._index()

    def _index(self) -> None:
        self._kept = [h for h in self.holdings if h.owner is not None]
        self._owners = self._columns()
        self._unborn = [h for h in self.holdings if h.tensor is None]
        there = [h for h in self.holdings if h.tensor is not None]
        self._watched = _Live([h for h in there if h.fenced])
        self._others = _Live([h for h in there if not h.fenced])
        self._states = [view.inner.state for view in self.views]
        self.marks = self._watched.look()
        self._places = self._others.look()[::2]

    def _columns(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Where things are kept, under which key, and what was there: columns, for loops that run in C."""
        return [h.owner for h in self._kept], [h.key for h in self._kept], [h.item for h in self._kept]

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """The live tensor of each holding; None where state is not there yet."""
        return [h.tensor for h in self.holdings]

    def refresh(self) -> bool:
        """Look everything up again; whether a tensor moved, so that what was made of addresses must be made anew.

        Raises:
            UsageError: a parameter was replaced, or a tensor has another shape or type than at registration; names it.
        """
        moved = False
        if any(view.inner.state is not known for view, known in zip(self.views, self._states, strict=True)):
            for h in self._kept:  # load_state_dict puts a new table in place
                if h.source is not None:
                    h.owner = _state_of(h)
            self._owners = self._columns()
        if not all(map(is_, map(dict.get, *self._owners[:2]), self._owners[2])):
            for h in self._kept:
                assert h.owner is not None
                now = h.owner.get(h.key)
                if now is not h.item:
                    self._replaced(h, now)
                    moved = True
        born = [h for h in self._unborn if self._find(h)]
        marks = self._watched.look()
        moved = (
            moved or bool(born) or marks[::2] != self.marks[::2] or self._others.look()[::2] != self._places
        )
        self.marks = marks
        if moved:
            for h in self.holdings:
                if h.item is not None:
                    tensor = shard_of(h.item)
                    self._check(h, tensor)
                    h.tensor = tensor
            self._index()
        return moved

    def _replaced(self, h: Holding, now: Any) -> None:
        """Take a new object in a tensor's place, where that can be right."""
        if not isinstance(now, torch.Tensor):
            raise UsageError(
                f"{h.what} is gone: it was registered, but its owner does not have it any more", tensor=h.name
            )
        if h.fenced and h.source is None:
            raise UsageError(
                f"{h.what} was replaced after it was registered, so the optimizer still updates the old one. Make the optimizer and "
                "register both after the model is final",
                tensor=h.name,
            )
        self._check(h, shard_of(now))
        h.item = now

    @staticmethod
    def _check(h: Holding, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != h.shape or tensor.dtype != h.dtype:
            raise UsageError(
                f"{h.what} has shape {tuple(tensor.shape)} and type {tensor.dtype}, but was registered with {h.shape} and "
                f"{h.dtype}. Make a new Checkpointer for a model that changed",
                tensor=h.name,
            )

    def _find(self, h: Holding) -> bool:
        """Whether planned state is there by now."""
        if h.source is None:
            return False
        state = _state_of(h)
        value = state.get(h.key)
        if not isinstance(value, torch.Tensor):
            return False
        self._check(h, shard_of(value))
        h.owner, h.item, h.tensor = state, value, shard_of(value)
        return True

    def unforeseen(self) -> bool:
        """Whether an optimizer keeps state that was not planned, so that saves must be planned again."""
        return any(not view.known and len(view.inner.state) for view in self.views)

    def materialize(self, absent: Sequence[str] = ()) -> None:
        """Make the planned state, as zeros, so that it can be restored; not that of parameters which had none."""
        skip = set(absent)
        for h in self._unborn:
            if h.make is not None and not any(s.tensor.partition("@")[0] in skip for s in h.local.segments):
                h.make()
        self.refresh()

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────

    def check_unchanged(self, marks: Sequence[int]) -> None:
        """Compare with `marks` of an earlier `refresh`.

        Raises:
            CorruptionError: a tensor that only the optimizer changes has changed, or lies in other memory; names it.
        """
        now = self._watched.look()
        if now == marks:
            return
        at = next(k for k, (a, b) in enumerate(zip(marks, now, strict=True)) if a != b)
        h = self._watched.holdings[at // 2]
        if at % 2 == 0:
            raise CorruptionError(f"{h.what} moved to other memory while it was copied", tensor=h.name)
        raise CorruptionError(
            f"{h.what} was changed while it was copied: something other than the optimizer's step writes to it (a balancing bias "
            "that is a parameter, an update in the forward pass). Make it a buffer, or change it in the optimizer's step",
            tensor=h.name,
        )

    @property
    def device(self) -> torch.device:
        """Where most bytes are."""
        sizes: dict[torch.device, int] = {}
        for h in self.holdings:
            sizes[h.device] = sizes.get(h.device, 0) + h.nbytes
        return max(sizes, key=lambda device: sizes[device], default=torch.device("cpu"))

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that no step has used up."""
        return any(param.grad is not None for view in self.views for param in view.params)


class _Live:
    """Some holdings, and the tensor objects that the trainer has of them."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        cut = [h for h in holdings if hasattr(h.item, "_local_tensor")]
        whole = [h for h in holdings if not hasattr(h.item, "_local_tensor")]
        self.holdings = [*whole, *cut]
        self._whole: list[Any] = [h.tensor if h.item is None else h.item for h in whole]
        self._cut: list[Any] = [h.item for h in cut]

    def look(self) -> list[int]:
        """Address and version of each in turn."""
        tensors = [*self._whole, *map(_LOCAL, self._cut)]
        return list(chain.from_iterable(zip(map(_ADDRESS, tensors), map(_VERSION, tensors), strict=True)))


def _state_of(h: Holding) -> MutableMapping[Any, Any]:
    """What an optimizer keeps of the parameter that a holding is the state of; empty where it keeps nothing yet."""
    optimizer, param = h.source
    found: MutableMapping[Any, Any] = optimizer.state.get(param) or {}
    return found
