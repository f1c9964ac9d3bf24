"""megatron-core: models by their `sharded_state_dict`, its distributed optimizer by the ranges that each rank owns.

    ckpt = ckptkit.Checkpointer(url, every=50)
    register(ckpt, model, optimizer, opt_param_scheduler)
    step = ckpt.restore()
    ...
    ckpt.on_step_end(iteration)

What each local tensor is comes from Megatron itself: key, global shape and offset of its `ShardedTensor`s. Names and boxes do not depend on the
layout, so that a step is restored with other tensor, pipeline, expert and data parallel degrees; of the distributed optimizer whole
parameters or flat ranges are saved as they are in memory, and nothing is gathered.

Not here: FP8 optimizers, Megatron's own FSDP, and `extra_state` of Transformer Engine, which is made anew.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptkit.errors import UsageError
from ckptkit.hooks.checkpointer import Checkpointer
from ckptkit.hooks.placement import Held

_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}


def register(
    ckpt: Checkpointer,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any = None,
    *,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Register model chunks (wrapped in Megatron's DDP or not), an optimizer of `get_megatron_optimizer`, and its scheduler.

    Raises UsageError for a parameter that `sharded_state_dict` does not name.
    """
    held: list[Held] = []
    parts: dict[int, list[tuple[Any, int, int]]] = {}
    for chunk in model:
        inner = getattr(chunk, "module", chunk)
        own = {param.data_ptr(): param for param in inner.parameters() if param.numel()}
        buffers = {buffer.data_ptr() for buffer in inner.buffers() if buffer.numel()}
        for entry in _leaves(inner.sharded_state_dict()):
            role = "buffer" if entry.data.data_ptr() in buffers else "param"
            for part in entry.build_parts():
                size = part.tensor.numel()
                held.append(
                    Held(
                        part.key,
                        role,
                        part.tensor,
                        shape=part.shape,
                        start=part.start,
                        sizes=part.sizes,
                        last=size,
                    )
                )
            base = own.get(entry.data.data_ptr())
            if base is not None:
                parts[id(base)] = list(entry.ranges())
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in members:
        for param, first, last, state in _owned(one):
            if id(param) not in parts:
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} is in the optimizer, but sharded_state_dict does not name it"
                )
            for role, tensor in state:
                held += _cut(parts[id(param)], role, tensor, first, last)
    things = {**(extras or {}), "megatron_optimizer": _Groups(members)}
    if scheduler is not None:
        things["scheduler"] = scheduler
    ckpt.register(tensors=held, extras=things)
    for one in members:
        inner = getattr(one, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            inner.register_step_pre_hook(lambda *_: ckpt.fence())


class _Part:
    """A box of a global tensor, and the live tensor that holds it."""

    def __init__(self, sharded: Any) -> None:
        prepended = sharded.prepend_axis_num
        self.key: str = sharded.key
        self.tensor: torch.Tensor = sharded.data.detach()
        self.shape = tuple(int(n) for n in sharded.global_shape)
        self.start = tuple(int(n) for n in sharded.global_offset)
        self.sizes = (*(1,) * prepended, *map(int, sharded.local_shape))


class _Leaf:
    """A `ShardedTensor`, or a factory of several that lie one after the other in one parameter."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self.data: torch.Tensor = found.data

    def build_parts(self) -> list[_Part]:
        if not hasattr(self._found, "build_fn"):
            return [_Part(self._found)]
        return [part for leaf in _leaves(self._found.build()) for part in leaf.build_parts()]

    def ranges(self) -> Iterator[tuple[_Part, int, int]]:
        """The parts as ranges of the flattened parameter."""
        item = self.data.element_size()
        for part in self.build_parts():
            if not part.tensor.is_contiguous():
                raise UsageError(
                    f"{part.key} is cut otherwise than in rows; its optimizer state cannot be told apart",
                    tensor=part.key,
                )
            first = (part.tensor.data_ptr() - self.data.data_ptr()) // item
            yield part, first, first + part.tensor.numel()


def _leaves(tree: Any) -> Iterator[_Leaf]:
    """Everything in a sharded state dict that holds a tensor."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    elif not isinstance(tree, torch.Tensor) and isinstance(getattr(tree, "data", None), torch.Tensor):
        yield _Leaf(tree)  # a ShardedTensor or a factory of some; objects hold no tensors


def _inside(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a tensor is (part of) a parameter's memory."""
    low = param.data_ptr()
    return low <= tensor.data_ptr() < low + param.numel() * param.element_size()


def _owned(one: Any) -> Iterator[tuple[torch.Tensor, int, int, list[tuple[str, torch.Tensor]]]]:
    """Parameters of an optimizer: the range of each that this rank owns, and its state by role."""
    inner = one.optimizer
    if not inner.state:
        if hasattr(one, "_init_optimizer_states_with_dummy_values"):
            one._init_optimizer_states_with_dummy_values()
        elif getattr(one, "init_state_fn", None) is not None:
            one.init_state_fn(inner, one.config)
    if hasattr(one, "gbuf_ranges"):
        for ranges in one.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for param, where in bucket["param_map"].items():
                        found = one._get_main_param_and_optimizer_states(param)
                        main = found.pop("param")
                        yield param, where["param"].start, where["param"].end, _state(param, main, found)
        return
    models = [
        p
        for group in getattr(one, "float16_groups", []) + getattr(one, "fp32_from_fp32_groups", [])
        for p in group
    ]
    for param in models or [p for group in inner.param_groups for p in group["params"]]:
        main = getattr(param, "main_param", param)
        yield param, 0, param.numel(), _state(param, main, inner.state.get(main, {}))


def _state(
    param: torch.Tensor, main: torch.Tensor, state: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    found = [] if _inside(main, param) else [("master", main.detach())]
    return found + [(_ROLES[name], value.detach()) for name, value in state.items() if name in _ROLES]


def _cut(
    parts: Sequence[tuple[_Part, int, int]], role: str, tensor: torch.Tensor, first: int, last: int
) -> Iterator[Held]:
    """State of a range of a parameter, cut where the parameter is made of several tensors."""
    flat = tensor.reshape(-1)
    for part, low, high in parts:
        a, b = max(first, low), min(last, high)
        if a < b:
            yield Held(
                part.key, role, flat[a - first : b - first], first=a - low, last=b - low, shape=part.shape, start=part.start,
                sizes=part.sizes,
            )  # fmt: skip


class _Groups:
    """Hyper-parameters and steps of the optimizers' groups, and the loss scale.

    A layout with expert parallelism has an optimizer for dense parameters and one for experts, another has one for all; so a group is
    found by what Megatron made it for, not by its number.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members

    def state_dict(self) -> dict[str, Any]:
        groups, steps, scaler = [], [], None
        for one in self._members:
            for group in one.optimizer.param_groups:
                groups.append({k: v for k, v in group.items() if k != "params" and _is_plain(v)})
            steps += [float(state["step"]) for state in one.optimizer.state.values() if "step" in state]
            if getattr(one, "grad_scaler", None) is not None:
                scaler = one.grad_scaler.state_dict()
        return {"groups": groups, "step": max(steps, default=None), "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for one in self._members:
            for group in one.optimizer.param_groups:
                found = _alike(group, state["groups"])
                group.update({k: v for k, v in found.items() if k not in _PURPOSE})
            for values in one.optimizer.state.values():
                if state["step"] is None or "step" not in values:
                    continue
                if isinstance(values["step"], torch.Tensor):
                    values["step"].fill_(state["step"])
                else:
                    values["step"] = type(values["step"])(state["step"])
            if getattr(one, "grad_scaler", None) is not None and state["scaler"] is not None:
                one.grad_scaler.load_state_dict(state["scaler"])


_PURPOSE = ("is_expert_parallel", "is_decoupled_lr", "wd_mult", "lr_mult")
"""What Megatron makes a group for, the least telling first."""


def _alike(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The saved group that was made for the same; where there is none, for nearly the same."""
    for left_out in range(len(_PURPOSE)):
        wanted = _PURPOSE[left_out:]
        for one in saved:
            if all(one.get(name) == group.get(name) for name in wanted):
                return one
    return {}


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
    )
