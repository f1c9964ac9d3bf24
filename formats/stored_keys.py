"""What the keys of a training state mean: weights, optimizer state, groups, and everything else.

Trainers flatten nested dictionaries with dots, and put weights under different prefixes:

    model.<name>  or  <name>  or  app.model.<name>              weights
    optimizer.state.<name>.exp_avg                              optimizer state; also without the prefix
    optimizer.param_groups.<i>.lr                               groups by number, `.params` lists their names
    optimizer.param_groups.<name>.lr                            or one group a parameter (flattened)

A name may contain dots itself, so keys are read from both ends. Wrappers (`_orig_mod.`, `_fsdp_wrapped_module.`, those of peft) are
no part of a name.

Sources: PyTorch, `torch/distributed/checkpoint/state_dict.py`; torchtitan, `components/checkpoint.py`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptkit.errors import FormatError
from ckptkit.formats import peft_names

SLOTS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "master_param": "master",
    "fp32_param": "master",
    "ema": "ema",
}
"""Names of optimizer slots, and the roles they are. `master_param` is Transformer Engine's name for it."""

SLOT_OF = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum": "momentum_buffer",
    "master": "master_param",
    "ema": "ema",
}
"""The slot that a role is written as."""

_OPTIMIZER = r"(?P<prefix>(?:[A-Za-z_]\w*\.)*?(?:optim\w*\.)(?:\d+\.)?|)"
_STATE = re.compile(_OPTIMIZER + r"state\.(?P<name>.+)\.(?P<slot>[A-Za-z_]\w*)")
_GROUP = re.compile(_OPTIMIZER + r"param_groups\.(?P<which>.+)\.(?P<field>[A-Za-z_]\w*)")
_WRAPPER = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)\."
)
_OTHER = re.compile(
    r"(?:lr_scheduler|train_state|dataloader|scheduler|scaler|rng\w*|step|iteration|epoch)(?:\.|$)"
)
_PREFIXES = ("model.", "module.", "state_dict.", "app.model.", "model.module.")


@dataclass
class Keys:
    """Keys by what they mean; values of the maps are the keys.

    Attributes:
        weights: Name to key.
        state: `(name, role)` to key.
        steps: Name to the key of its step count.
        groups: Group (its number, or a parameter's name) to field to key.
        unknown: Optimizer tensors of slots that no role fits.
        other: Everything else.
        model_prefix, optimizer_prefix: What names and optimizer keys begin with.
        wrapped: Whether keys are those that peft gives, in memory (with the name of an `adapter`) or in its files (without).
    """

    weights: dict[str, str] = field(default_factory=dict)
    state: dict[tuple[str, str], str] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    model_prefix: str = ""
    optimizer_prefix: str = ""
    wrapped: bool = False
    adapter: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def clean(self, name: str) -> str:
        """A parameter's name without wrappers."""
        bare = _WRAPPER.sub("", name)
        if not self.wrapped:
            return bare
        bare, adapter = peft_names.plain(bare)
        if adapter and self.adapter not in ("", adapter):
            raise FormatError(
                f"the keys hold several adapters ({self.adapter}, {adapter}); one at a time is read: save each by itself",
                tensor=name,
            )
        self.adapter = adapter or self.adapter
        return self.renamed.get(bare, bare)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give some names others."""
        self.renamed = dict(names)
        self.weights = {names.get(name, name): key for name, key in self.weights.items()}
        self.state = {(names.get(name, name), role): key for (name, role), key in self.state.items()}
        self.steps = {names.get(name, name): key for name, key in self.steps.items()}
        self.groups = {names.get(which, which): fields for which, fields in self.groups.items()}

    @property
    def extras(self) -> list[str]:
        """Keys of everything that is neither weight nor moment."""
        return [
            *self.steps.values(),
            *self.other,
            *(key for fields in self.groups.values() for key in fields.values()),
        ]


def sort_keys(
    tensors: Iterable[str],
    objects: Iterable[str],
    paths: Mapping[str, tuple[str | int, ...]],
    known: Iterable[str] = (),
) -> Keys:
    """Tell what each key means.

    Args:
        tensors, objects: Keys of tensors and of other values.
        paths: Where keys came from in the nested state, where that is known: tells a prefix from a name's first part.
        known: Names of the model's family, where a model is known.
    """
    tensors = list(tensors)
    found = Keys(wrapped=any(map(peft_names.is_wrapped, tensors)))
    weights: list[str] = []
    for key in tensors:
        state = _STATE.fullmatch(key)
        if state is None:
            (found.other if _OTHER.match(key) else weights).append(key)
            continue
        name, slot = found.clean(state["name"]), state["slot"]
        found.optimizer_prefix = state["prefix"]
        if slot == "step":
            found.steps[name] = key
        elif slot in SLOTS:
            found.state[name, SLOTS[slot]] = key
        else:
            found.unknown.append(key)
    for key in objects:
        group = _GROUP.fullmatch(key)
        state = _STATE.fullmatch(key)
        if group is not None:
            found.groups.setdefault(found.clean(group["which"]), {})[group["field"]] = key
            found.optimizer_prefix = group["prefix"]
        elif state is not None and state["slot"] == "step":
            found.steps[found.clean(state["name"])] = key
        else:
            found.other.append(key)
    prefix = found.model_prefix = _prefix(
        weights, list(map(found.clean, weights)), paths, {name for name, _ in found.state}, set(known)
    )
    for key in weights:
        name = found.clean(key.removeprefix(prefix))
        if found.weights.setdefault(name, key) != key:
            raise FormatError(f"{found.weights[name]} and {key} are both the weight {name}", tensor=name)
    return found


def _prefix(
    weights: list[str],
    cleaned: list[str],
    paths: Mapping[str, tuple[str | int, ...]],
    trained: set[str],
    known: set[str],
) -> str:
    """What the names of weights begin with: as the model, the optimizer or the nesting tells."""
    candidates = ["", *_PREFIXES]
    for names in (known, trained):
        if names:
            hits = {
                p: sum(key.startswith(p) and key[len(p) :] in names for key in cleaned) for p in candidates
            }
            best = max(candidates, key=lambda p: hits[p])
            if hits[best]:
                return best
    nested = {paths[key][:-1] for key in weights if key in paths}
    if len(nested) == 1:
        parts = nested.pop()
        prefix = "".join(f"{part}." for part in parts)
        if parts and all(key.startswith(prefix) for key in weights):
            return prefix
    return ""
