"""The state of optimizers that are not distributed, in a legacy Megatron checkpoint: one tensor for each parameter, numbered.

    {"optimizer": {"state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}, 1: ...},
                   "param_groups": [{"params": [0, 1], ...}, ...]},
     "fp32_from_fp16_params": [[...], ...]}

Numbers count through the groups. Which parameters a group has is the rule of the run, so that every shape is compared; ckptkit
notes the names. Source: megatron-core 0.16.1, `optimizer/optimizer.py` (`Float16OptimizerWithFloat16Params`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.core.dtypes import DType
from ckptkit.errors import FormatError
from ckptkit.formats.megatron_groups import decaying, decays
from ckptkit.formats.megatron_parts import Held
from ckptkit.formats.megatron_tensors import ROLE_OF
from ckptkit.formats.optimizer_groups import kind_of
from ckptkit.formats.plain import scalar
from ckptkit.formats.standins import StoredTensor

_EMBEDDINGS = ("word_embeddings.weight", "output_layer.weight")
Add = Callable[[Held, str, DType, int], None]


def optimizers(value: Any) -> list[Any]:
    """The optimizers of a chain, or the only one."""
    return value if isinstance(value, list) else [value]


def inner(one: Any) -> Mapping[Any, Any]:
    """The state of torch's optimizer inside Megatron's."""
    found = one.get("optimizer", one) if isinstance(one, dict) else {}
    return found if isinstance(found, dict) else {}


def is_distributed(value: Any) -> bool:
    """Whether one of the optimizers keeps its state elsewhere: it has groups, but neither numbers nor state."""
    return any(
        isinstance(groups := inner(one).get("param_groups"), list)
        and bool(groups)
        and "state" not in inner(one)
        for one in optimizers(value)
    )


def stripped(value: Any) -> Any:
    """Optimizers without their tensors: groups with their step, and what else there is."""
    if isinstance(value, list):
        return [stripped(one) for one in value]
    if not isinstance(value, dict):
        return None
    state, groups = inner(value).get("state"), inner(value).get("param_groups")
    kept = {k: v for k, v in value.items() if k not in ("optimizer", "state", "param_groups")}
    kept = {k: v for k, v in kept.items() if not str(k).startswith("fp32_from")}
    made = []
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict):
            continue
        fields = {k: v for k, v in group.items() if k != "params"}
        step = _step(group, state)
        made.append({**fields, "step": step} if step is not None else fields)
    return {**kept, "optimizer": {"param_groups": made}}


def _step(group: Mapping[Any, Any], state: Any) -> Any:
    """The step of a group: its own, or that of its first parameter."""
    if group.get("step") is not None or not isinstance(state, dict):
        return group.get("step")
    params = group.get("params")
    first = state.get(params[0]) if isinstance(params, list) and params else None
    return first.get("step") if isinstance(first, dict) else None


def read_whole(
    value: Any,
    told: Any,
    held: Sequence[Held],
    dtypes: Mapping[str, DType],
    place: Callable[[StoredTensor], int],
    add: Add,
    where: str,
) -> list[list[str]]:
    """Add the entries of one rank's optimizers; what each group trains, through all optimizers.

    Args:
        value: The optimizers, as their pickle has them.
        told: Names of each group of each optimizer, where ckptkit noted them.
        held: What the rank holds and trains, in module order.
        dtypes: Element type of each name's weight.

    Raises:
        FormatError: the groups are not those that Megatron's rule makes, or a shape is not its parameter's.
    """
    by_name = {item.name: item for item in held}
    found: list[list[str]] = []
    for number, one in enumerate(optimizers(value)):
        state, groups = inner(one).get("state"), inner(one).get("param_groups")
        if not isinstance(groups, list):
            continue
        if not isinstance(state, dict) or not any(type(key) is int for key in state):
            found += [[] for _ in groups]
            continue
        mains = one.get("fp32_from_fp16_params", one.get("fp32_from_fp16"))
        for k, group in enumerate(groups):
            names = _members(told, number, k, group, groups, held, where)
            ids = group.get("params") if isinstance(group, dict) else None
            if not isinstance(ids, list) or len(ids) != len(names):
                raise FormatError(
                    f"{where}: optimizer group {k} has {len(ids) if isinstance(ids, list) else 'no'} parameters, but by Megatron's "
                    f"rule it would be {len(names)}. Which parameters a group has is not stored; save with the distributed "
                    "optimizer, or in torch_dist"
                )
            for index, name in zip(ids, names, strict=True):
                item = by_name.get(name)
                slots = state.get(index)
                if item is None or not isinstance(slots, dict):
                    raise FormatError(f"{where}: parameter {index} of the optimizer ({name}) has no state")
                for slot, tensor in slots.items():
                    if slot in ROLE_OF and isinstance(tensor, StoredTensor):
                        _add(item, ROLE_OF[slot], tensor, place, add, where)
            halves = [name for name in names if dtypes[name].itemsize == 2] if mains is not None else []
            rows = mains[k] if isinstance(mains, list) and k < len(mains) else []
            if len(rows) == len(names):  # of float32 weights too: from a checkpoint that had both
                halves = names
            if len(rows) != len(halves):
                raise FormatError(
                    f"{where}: optimizer group {k} has {len(rows)} fp32 weights for {len(halves)} parameters"
                )
            for name, tensor in zip(halves, rows, strict=True):
                if not isinstance(tensor, StoredTensor):
                    raise FormatError(f"{where}: the fp32 weight of {name} is no tensor")
                _add(by_name[name], "master", tensor, place, add, where)
            found.append(names)
    return found


def _add(
    item: Held, role: str, tensor: StoredTensor, place: Callable[[StoredTensor], int], add: Add, where: str
) -> None:
    if tensor.shape != item.local.shape or not tensor.contiguous:
        raise FormatError(
            f"{where}: the {role} at the place of {item.name} has shape {tensor.shape} instead of {item.local.shape}. The "
            "optimizer's groups were made by another rule than Megatron's; save with the distributed optimizer, or in torch_dist"
        )
    add(item, role, tensor.dtype, place(tensor))


def _members(
    told: Any, number: int, k: int, group: Any, groups: Sequence[Any], held: Sequence[Held], where: str
) -> list[str]:
    """What a group trains: as noted, else by Megatron's rule."""
    if told is not None:
        try:
            names = told[number][k]
            assert isinstance(names, list) and all(isinstance(name, str) for name in names)
        except (IndexError, TypeError, KeyError, AssertionError):
            raise FormatError(f"{where}: its note does not name the members of optimizer group {k}") from None
        return names
    if not isinstance(group, dict) or kind_of(group, set()) != "adamw":
        raise FormatError(
            f"{where}: optimizer group {k} is none of Adam's, so that no rule tells its members. Save it in torch_dist"
        )
    told_apart = any(isinstance(g, dict) and g.get("is_expert_parallel") for g in groups)
    away = any(isinstance(g, dict) and g.get("is_decoupled_lr") for g in groups)
    expert = bool(group.get("is_expert_parallel"))
    return [
        item.name
        for item in held
        if decays(item.name, item.local.shape) == decaying(group)
        and (item.expert == expert if told_apart or expert else True)
        and (not away or item.name.endswith(_EMBEDDINGS) == bool(group.get("is_decoupled_lr")))
    ]


def plain_groups(value: Any) -> list[dict[str, Any]]:
    """The groups of all optimizers, from plain values of `stripped`."""
    found = []
    for one in optimizers(value):
        for group in inner(one).get("param_groups", ()):
            step = group.get("step")
            number = scalar(step) if isinstance(step, dict) else step
            found.append({**group, "step": number} if "step" in group else dict(group))
    return found
