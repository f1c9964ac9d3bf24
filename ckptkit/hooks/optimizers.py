"""Optimizers: their state by parameter name, planned before it exists, and their groups.

State of a parameter's own shape becomes a holding with the parameter's boxes: `exp_avg`, `exp_avg_sq` and `momentum` have roles; any other
name is a tensor `PARAMETER@NAME` with the role `state`. State of one element (`step`, and what some optimizers multiply up)
travels as numbers in the extras, since it is the same for nearly every parameter.

An optimizer makes its state at its first step. What it will be is found out by giving its class a parameter of the same shape
on the meta device and letting it take one step: no memory, and nothing of the trainer is touched.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ckptkit.errors import UsageError
from ckptkit.hooks.holdings import Holding, Places, box_of, shard_of

ROLE_OF = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "master_param": "master",
    "master": "master",
}
"""Names of torch's state that have a role of their own."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One name of a parameter's state: `shape` and `dtype` of its tensor, or the plain `value` it has. `on_cpu`: a
    tensor that does not follow its parameter to the device."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    on_cpu: bool = False
    value: Any = None


@dataclass
class OptimizerView:
    """One optimizer as the hooks see it.

    Attributes:
        optimizer: Whose `param_groups` the trainer changes; `inner` is the one that holds state (differs for
            `ZeroRedundancyOptimizer`).
        names: Of its parameters, by identity.
        specs: By parameter, what state it has or will have. Parameters whose state lies on other ranks have none.
        known: Whether all state could be foreseen; else it is looked at again after the first step.
    """

    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer
    names: dict[int, str]
    params: list[torch.Tensor] = field(default_factory=list)
    specs: list[dict[str, StateSpec]] = field(default_factory=list)
    known: bool = True

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """`(hyper-parameters, parameter names)` of every group, as they are now."""
        return [
            (
                {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")},
                [self.names[id(param)] for param in group["params"] if id(param) in self.names],
            )
            for group in self.optimizer.param_groups
        ]


def view_of(optimizer: Any, names: Mapping[int, str]) -> OptimizerView:
    """Look at an optimizer.

    Raises:
        UsageError: it is no torch optimizer, or has a parameter that the model does not.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):  # Accelerate and others wrap it
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"a {type(optimizer).__name__} is no torch.optim.Optimizer; register its state with tensors=, its settings with "
            "extras=, and call fence() before its step"
        )
    held: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise UsageError(
                    f"group {number} of {type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that the registered "
                    "model does not have: it belongs to another model, or the model was wrapped or copied after the optimizer "
                    "was made"
                )
    view = OptimizerView(optimizer, held, dict(names))
    foreseen: dict[tuple[Any, ...], dict[str, StateSpec] | None] = {}
    for number, group in enumerate(held.param_groups):
        for param in group["params"]:
            specs = _seen(held, param)
            if not specs and param.requires_grad:
                shard = shard_of(param)
                key = number, tuple(shard.shape), shard.dtype, hasattr(param, "device_mesh")
                if key not in foreseen:
                    foreseen[key] = foresee(held, group, shard)
                expected = foreseen[key]
                view.known &= expected is not None
                specs = expected or {}
            view.params.append(param)
            view.specs.append(specs)
    return view


def _seen(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, StateSpec]:
    """The state that a parameter has now."""
    found: dict[str, StateSpec] = {}
    for name, value in optimizer.state.get(param, {}).items():
        if isinstance(value, torch.Tensor):
            shard = shard_of(value)
            away = shard.device.type == "cpu" and shard_of(param).device.type != "cpu"
            found[name] = StateSpec(tuple(shard.shape), shard.dtype, on_cpu=away)
        else:
            found[name] = StateSpec(None, None, value=value)
    return found


def foresee(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor
) -> dict[str, StateSpec] | None:
    """The state that an optimizer will make for a parameter; None where its class cannot tell without a real step."""
    known = inspect.signature(type(optimizer).__init__).parameters
    hyper = {key: value for key, value in group.items() if key != "params" and key in known}
    # Forms for a device refuse a parameter that lies on none; they keep the same state.
    hyper |= {key: False for key in ("fused", "capturable", "foreach") if key in known}
    if isinstance(hyper.get("lr"), torch.Tensor):
        hyper["lr"] = float(hyper["lr"])
    probe_of = torch.nn.Parameter(torch.empty_like(like, device="meta"))
    probe_of.grad = torch.empty_like(probe_of)
    try:
        probe = type(optimizer)([probe_of], **hyper)
        with suppress(Exception):  # state is made before the mathematics, which may not work without values
            probe.step()
        state = probe.state.get(probe_of)
    except Exception:  # noqa: BLE001  (a probe; whatever fails, fails here only)
        return None
    if not state and _fails(optimizer, hyper, like):
        return None
    found: dict[str, StateSpec] = {}
    for name, value in (state or {}).items():
        if isinstance(value, torch.Tensor):
            away = not value.is_meta and not bool(group.get("fused") or group.get("capturable"))
            found[name] = StateSpec(tuple(value.shape), value.dtype, on_cpu=away)
        else:
            found[name] = StateSpec(None, None, value=value)
    return found


def _fails(optimizer: torch.optim.Optimizer, hyper: Mapping[str, Any], like: torch.Tensor) -> bool:
    """Whether a step without any state is a step that failed (plain SGD has none)."""
    probe_of = torch.nn.Parameter(torch.zeros((2,) * like.dim(), dtype=like.dtype))
    probe_of.grad = torch.zeros_like(probe_of)
    try:
        probe = type(optimizer)([probe_of], **hyper)
        probe.step()
    except Exception:  # noqa: BLE001  (a probe; whatever fails, fails here only)
        return True
    return bool(probe.state.get(probe_of))


def force_state(view: OptimizerView) -> None:
    """Let an optimizer make its state by a step without gradients. Before a restore, which puts all values in place."""
    for param in view.params:
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)
    view.optimizer.step()
    view.optimizer.zero_grad(set_to_none=True)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that a first step would make, as zeros, where there is none yet: for trainers whose state is said one by one.

    Raises UsageError for an optimizer whose state cannot be foreseen.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state.get(param):
                continue
            specs = foresee(optimizer, group, shard_of(param))
            if specs is None:
                raise UsageError(
                    f"the state of {type(optimizer).__name__} cannot be foreseen: take one step before you register it"
                )
            for name, spec in specs.items():
                if spec.shape is None:
                    optimizer.state[param][name] = spec.value
                else:
                    _make(optimizer, param, name, spec)


def state_holdings(view: OptimizerView, params: Mapping[int, Holding], places: Places) -> list[Holding]:
    """State tensors of more than one number as holdings.

    Raises:
        UsageError: state of another shape than its parameter's, of a parameter that is cut, cannot be placed.
    """
    found = []
    for param, specs in zip(view.params, view.specs, strict=True):
        like = params[id(param)]
        for name, spec in specs.items():
            if spec.shape is None or is_number(spec.shape, like.shape):
                continue
            state = view.inner.state.get(param)
            value = state.get(name) if state else None
            role = ROLE_OF.get(name, "state")
            if spec.shape == like.shape:
                first, last = like.first, like.last
                local = like.local if role != "state" else places.beside(like.local, name)
            else:
                local, first, last = _odd(value, f"{like.name}@{name}", like, spec, places)
                role = "state"
            tensor = shard_of(value) if isinstance(value, torch.Tensor) else None
            assert spec.dtype is not None
            found.append(
                Holding(
                    f"{like.name}.{name}", local, first, last, role, spec.shape, spec.dtype, like.device, tensor, fenced=True,
                    owner=state, key=name, item=value, source=(view.inner, param), make=partial(_make, view.inner, param, name, spec),
                )
            )  # fmt: skip
    return found


def _odd(value: Any, name: str, like: Holding, spec: StateSpec, places: Places) -> Any:
    """State of a shape of its own (factored second moments)."""
    whole = like.first == 0 and like.last == like.local.size and len(like.local.segments) == 1
    whole = whole and like.local.shape == places.tensors[like.local.segments[0].tensor].shape
    if isinstance(value, torch.Tensor) and hasattr(value, "device_mesh"):
        return (
            Places(None).place(name, *box_of(value, name))
            if False
            else places.place(name, *box_of(value, name))
        )
    if not whole or places.placement is not None:
        raise UsageError(
            f"{name} has shape {spec.shape}, its parameter {like.shape}: which part of the global state it is cannot be told, since "
            "the parameter is cut. Register it with tensors=",
            tensor=name,
        )
    assert spec.shape is not None
    return places.place(name, spec.shape, (0,) * len(spec.shape), spec.shape)


def _make(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str, spec: StateSpec) -> torch.Tensor:
    """Put zeros where the optimizer will look for its state, and give the part that this rank stores."""
    shard = shard_of(param)
    assert spec.shape is not None
    if spec.shape == tuple(shard.shape):
        made = torch.zeros_like(
            param, dtype=spec.dtype, memory_format=torch.preserve_format, requires_grad=False
        )
    else:
        device = torch.device("cpu") if spec.on_cpu else shard.device
        made = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    optimizer.state[param][name] = made
    return shard_of(made)


def is_number(shape: Sequence[int], param: Sequence[int]) -> bool:
    """Whether state is one number beside its parameter."""
    return len(shape) == 0 and tuple(param) != ()


Numbers = dict[str, dict[str, Any]]
"""State name to parameter name to value."""


def numbers_of(view: OptimizerView) -> Callable[[], Numbers]:
    """The plain numbers in the state, as they are now. Those on a device are gathered there; the function that is given fetches them."""
    names: dict[tuple[str, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
    found: Numbers = {}
    for param in view.params:
        state = view.inner.state.get(param)
        if not state:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if value.dim() == 0:
                    shard = shard_of(value)
                    listed = names.setdefault((key, shard.device), ([], []))
                    listed[0].append(view.names[id(param)])
                    listed[1].append(shard)
            elif value is None or isinstance(value, bool | int | float):
                found.setdefault(key, {})[view.names[id(param)]] = value
    gathered = [(key, of, torch.stack(tensors)) for (key, _), (of, tensors) in names.items()]

    def fetch() -> Numbers:
        for key, of, values in gathered:
            found.setdefault(key, {}).update(zip(of, values.tolist(), strict=True))
        return found

    return fetch


def set_numbers(view: OptimizerView, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """Write numbers back into the state, in the form that it has or will have."""
    for param, specs in zip(view.params, view.specs, strict=True):
        name = view.names[id(param)]
        for key, values in numbers.items():
            if name not in values or key not in specs:
                continue
            spec, state = specs[key], view.inner.state[param]
            if spec.shape is None:
                state[key] = values[name]
            elif isinstance(state.get(key), torch.Tensor):
                shard_of(state[key]).fill_(values[name])
            else:
                device = torch.device("cpu") if spec.on_cpu else shard_of(param).device
                state[key] = torch.full((), values[name], dtype=spec.dtype, device=device)


def set_groups(view: OptimizerView, groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> None:
    """Write hyper-parameters back into the live groups, which keep their identity. A group is found by its parameters.

    Where the saved groups are cut otherwise, a live group takes the settings of the one that holds its first parameter.
    """
    of = {name: hyper for hyper, names in groups for name in names}
    for group in view.optimizer.param_groups:
        name = next((view.names[id(p)] for p in group["params"] if view.names.get(id(p)) in of), None)
        if name is None:
            continue
        for key, value in of[name].items():
            if key in group and key != "params":
                group[key] = _like(group[key], value)
    if view.inner is not view.optimizer:
        sync = getattr(view.optimizer, "_sync_param_groups", None)
        if callable(sync):
            sync(view.optimizer.param_groups, view.inner.param_groups)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value


def _like(now: Any, value: Any) -> Any:
    """A saved value in the form of the live one."""
    if isinstance(now, torch.Tensor):
        now.fill_(value)
        return now
    return tuple(value) if isinstance(value, list) and (isinstance(now, tuple) or now is None) else value
