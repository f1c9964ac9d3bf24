"""Nested training state of `torch.save` files as flat keys, and back: what `.pt` files and DCP's metadata have in common.

A dictionary's keys are joined by dots, with the path kept, since keys contain dots themselves. Optimizer states that
number their parameters (`optimizer.state_dict()`) get names, where the file tells which is which.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.formats.standins import StoredTensor

Path = tuple[str | int, ...]

MODELS = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim")


def flatten(value: Any, where: str) -> dict[Path, Any]:
    """Leaves by path: tensors, and whatever is no dictionary and no list of dictionaries.

    Raises:
        FormatError: the state is nested deeper than 50 levels, or has keys that are neither text nor numbers.
    """
    found: dict[Path, Any] = {}
    todo: list[tuple[Path, Any]] = [((), value)]
    while todo:
        path, item = todo.pop()
        if len(path) > 50 or len(found) > 20_000_000:
            raise FormatError(f"{where} is nested too deeply to be a training state", file=where)
        if isinstance(item, dict) and (item or not path):
            if any(type(key) not in (str, int) for key in item):
                found[path] = item  # such as Megatron's, keyed by pairs of dtypes
                continue
            todo.extend(((*path, key), inner) for key, inner in reversed(item.items()))
        elif isinstance(item, list) and item and all(isinstance(inner, dict) for inner in item):
            todo.extend(((*path, index), item[index]) for index in reversed(range(len(item))))
        else:
            found[path] = item
    return found


def unflatten(leaves: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Nested dictionaries of leaves by path; those whose keys are 0, 1, 2, … are lists."""
    root: dict[Any, Any] = {}
    for path, value in leaves:
        here = root
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = value
    return _lists(root)


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and all(type(key) is int for key in inner) and list(inner) == list(range(len(inner))):
        return list(inner.values())
    return inner


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def name_numbered(value: Any, warnings: list[str]) -> Any:
    """The state with its numbered parameters named, or without what cannot be named (with a warning).

    Names come from `param_names` of the groups; else, with one group, from the order of the model's entries, if shapes agree.
    """
    if not isinstance(value, dict):
        return value
    many = value.get("optimizer_states")
    if (
        isinstance(many, list) and len(many) == 1 and "optimizer" not in value
    ):  # as Lightning keeps its only optimizer
        value = {
            **{key: item for key, item in value.items() if key != "optimizer_states"},
            "optimizer": many[0],
        }
    for key in OPTIMIZERS:
        optimizer = value.get(key)
        if not isinstance(optimizer, dict):
            continue
        state, groups = optimizer.get("state"), optimizer.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list):
            continue
        if not all(type(number) is int for number in state) or not all(isinstance(g, dict) for g in groups):
            continue
        names = _names(state, groups, next((value[k] for k in MODELS if isinstance(value.get(k), dict)), {}))
        if names is None:
            warnings.append(
                f"{key} numbers its parameters in {len(groups)} groups and tells no names: its state was left out. Save it with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or from named_parameters()"
            )
            return {k: v for k, v in value.items() if k != key}
        renamed = [
            {
                **{field: item for field, item in group.items() if field != "param_names"},
                "params": [names[n] for n in group["params"] if n in names],
            }
            for group in groups
        ]
        value = {
            **value,
            key: {
                **optimizer,
                "state": {names[n]: slots for n, slots in state.items()},
                "param_groups": renamed,
            },
        }
    return value


def _names(
    state: Mapping[int, Any], groups: list[dict[str, Any]], model: Mapping[str, Any]
) -> dict[int, str] | None:
    names: dict[int, str] = {}
    for group in groups:
        numbers, given = group.get("params"), group.get("param_names")
        if isinstance(numbers, list) and isinstance(given, list) and len(numbers) == len(given):
            names.update(zip(numbers, given, strict=True))
    if not names and len(groups) == 1 and isinstance(groups[0].get("params"), list):
        # Entries of a module's state are its parameters and buffers in order; numbers count the parameters only.
        entries = [(name, item.shape) for name, item in model.items() if isinstance(item, StoredTensor)]
        at = 0
        for number in groups[0]["params"]:
            shape = _shape(state.get(number))
            while at < len(entries) and shape is not None and entries[at][1] != shape:
                at += 1
            if at == len(entries):
                return None
            names[number] = entries[at][0]
            at += 1
        if len(entries) - len(names) > 0 and any(_shape(slots) is None for slots in state.values()):
            return None
    if not all(isinstance(name, str) for name in names.values()) or not set(state) <= set(names):
        return None
    wrong = [
        n
        for n, name in names.items()
        if name in model and _shape(state.get(n)) not in (None, model[name].shape)
    ]
    return None if wrong else names


def _shape(slots: Any) -> tuple[int, ...] | None:
    """The shape of a parameter, as its moments tell."""
    if not isinstance(slots, dict):
        return None
    for name in ("exp_avg", "momentum_buffer", "exp_avg_sq"):
        if isinstance(slots.get(name), StoredTensor):
            shape: tuple[int, ...] = slots[name].shape
            return shape
    return None
