"""Names that peft gives tensors: in memory, in its files, and here.

    in memory    base_model.model.<module>.base_layer.weight            the weight itself, where its module is adapted
                 base_model.model.<module>.lora_A.<adapter>.weight
                 base_model.model.<module>.modules_to_save.<adapter>.weight, ….original_module.weight
    in files     base_model.model.<module>.lora_A.weight
                 base_model.model.<module>.weight                       a trained copy (`modules_to_save`, biases)
    here         <module>.weight, <module>.lora_A.weight, <module>.modules_to_save.weight

Parameters that are no module's `weight` (all experts in one) are adapted by wrapping their module once for each, in the order of
its parameters: `experts.base_layer.lora_A` is that of the first, `experts.lora_A` that of the last. Here they are
`experts.gate_up_proj.lora_A.weight`.

Source: peft 0.21, `utils/save_and_load.py`, `tuners/tuners_utils.py`, `utils/other.py`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from ckptkit.core.adapters import possible, with_adapters
from ckptkit.core.schema import Model
from ckptkit.errors import FormatError, LayoutError

PREFIX = "base_model.model."

_KIND = r"lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save"
_STORED = re.compile(rf"(?P<module>.+)\.(?P<kind>{_KIND})(?P<rest>\..+)?")
_HELD = re.compile(r"\.(?:base_layer|original_module)(?=\.(?!lora_|base_layer\.lora_))")
_NESTED = re.compile(r"(?P<module>.+?)(?P<nest>(?:\.base_layer)*)\.(?P<kind>lora_[AB]\.weight)")
_NO_REST = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Kinds whose names end with them in files; in memory an adapter's name follows, and for the last one `.weight`."""


def is_adapter(name: str) -> bool:
    """Whether a stored name is that of an adapter's tensor, as peft or as Megatron spells it."""
    return _STORED.fullmatch(name) is not None or ".adapter." in name


def is_wrapped(key: str) -> bool:
    """Whether a key of a training state shows that peft wraps the model."""
    return PREFIX in key or _STORED.fullmatch(key) is not None


def plain(name: str) -> tuple[str, str]:
    """A name without what peft wraps around it, and the adapter's name where it has one (in memory)."""
    name = name.removeprefix(PREFIX)
    match = _STORED.fullmatch(name)
    if match is None:
        before = ""
        while before != name:  # parameters of experts lie below several wrappers
            before, name = name, _HELD.sub("", name)
        return name, ""
    module, kind, rest = match["module"], match["kind"], (match["rest"] or "")[1:]
    if kind in _NO_REST:
        return f"{module}.{kind}", rest.removesuffix(".weight")
    adapter, dot, end = rest.partition(".")
    return (f"{module}.{kind}.{end}", adapter) if dot else (name, "")


def spell(names: Iterable[str], adapter: str, whole: Collection[str] = ()) -> dict[str, str]:
    """Names as peft has them in memory under an adapter's name.

    Args:
        names: Names as here, in module order: all that are stored.
        whole: Every name that the model has, so that parameters that are no `weight` are known.
    """
    listed = list(names)
    owners = _parameters(listed, whole)
    adapted = {match["module"]: match["kind"] for name in listed if (match := _STORED.fullmatch(name))}
    found = {}
    for name in listed:
        match = _STORED.fullmatch(name)
        module, _, end = name.rpartition(".")
        if match is None and module in owners:
            made = f"{module}{'.base_layer' * len(owners[module])}.{end}"
        elif match is None:
            kind = adapted.get(module, "")
            wrapped = {"": "", "modules_to_save": ".original_module"}.get(kind, ".base_layer")
            made = f"{module}{wrapped}.{end}"
        else:
            kind, rest = match["kind"], match["rest"] or ""
            tail = ".weight" if kind == "lora_magnitude_vector" else rest
            made = f"{_wrapped(match['module'], owners)}.{kind}.{adapter}{tail}"
        found[name] = PREFIX + made
    return found


def in_file(names: Iterable[str], whole: Collection[str] = ()) -> dict[str, str]:
    """Names as an adapter's file has them. `names` and `whole` as for `spell`."""
    listed = list(names)
    owners = _parameters(listed, whole)
    lora = {
        match["module"]
        for name in listed
        if (match := _STORED.fullmatch(name)) and match["kind"] != "modules_to_save"
    }
    found = {}
    for name in listed:
        match = _STORED.fullmatch(name)
        if match is None:
            made = name
        elif (
            match["kind"] == "modules_to_save"
        ):  # beside an adapter of the same module it is the module's own
            layer = ".base_layer" if match["module"] in lora else ""
            made = f"{match['module']}{layer}{match['rest'] or ''}"
        else:
            made = f"{_wrapped(match['module'], owners)}.{match['kind']}{match['rest'] or ''}"
        found[name] = PREFIX + made
    return found


def from_file(key: str) -> str:
    """The name here of a key of an adapter's file."""
    name = plain(key)[0]
    if _STORED.fullmatch(name):
        return name
    module, _, end = name.rpartition(".")
    return f"{module}.modules_to_save.{end}"


def _parameters(names: Iterable[str], whole: Collection[str]) -> dict[str, list[str]]:
    """Modules whose parameters are adapted by themselves, with these parameters in order."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for name in names:
        match = _STORED.fullmatch(name)
        if match is not None and match["module"] in whole:
            module, _, parameter = match["module"].rpartition(".")
            found[module][parameter] = None
    return {module: list(parameters) for module, parameters in found.items()}


def _wrapped(module: str, owners: Mapping[str, list[str]]) -> str:
    """The module that an adapter is stored below: itself, or the one around a parameter."""
    owner, _, parameter = module.rpartition(".")
    if parameter not in owners.get(owner, ()):
        return module
    return owner + ".base_layer" * (len(owners[owner]) - 1 - owners[owner].index(parameter))


def known_names(model: Model, keys: Iterable[str]) -> set[str]:
    """Every name of the model's families; where keys are of a model that peft wraps, also those of adapters it could have."""
    known = {name for family in model.families for name in model.names(family).keys}
    if any(map(is_wrapped, keys)):
        known.update(name for family in model.families for name in possible(model, family))
    return known


def adapt(model: Model, shapes: Mapping[str, tuple[int, ...]], where: str) -> tuple[Model, dict[str, str]]:
    """The model with the adapters that stored names and shapes say, and other names for those of parameters that are no `weight`.

    Args:
        shapes: Stored names as here; `experts.base_layer.lora_A.weight` is told apart by its shape.

    Raises:
        FormatError: an adapter belongs to no matrix of the model, or to one of another shape.
    """
    stored = [name for name in shapes if is_adapter(name)]
    if not stored:
        return model, {}
    best: list[str] | None = None
    for family in ("canonical", *(f.name for f in model.schema.families)):
        slots = possible(model, family)
        renamed = _unnest(model, family, stored, shapes)
        unknown = [name for name in stored if renamed.get(name, name) not in slots]
        if unknown:
            best = unknown if best is None or len(unknown) < len(best) else best
            continue
        found: dict[str, int] = {}
        try:
            for name in stored:
                slot = slots[renamed.get(name, name)]
                rank = slot.rank(name, shapes[name])
                for tensor in slot.tensors:
                    if found.setdefault(tensor, rank) != rank:
                        raise LayoutError(
                            f"{name} has rank {rank}, elsewhere it has {found[tensor]}", tensor=name
                        )
            return with_adapters(model, found), renamed
        except LayoutError as error:
            raise FormatError(f"{where}: {error}", **error.facts) from error
    assert best is not None
    more = f" and {len(best) - 1} more" if len(best) > 1 else ""
    raise FormatError(
        f"{where}: {best[0]}{more} adapts no matrix of {model.schema.id}. Give the configuration of the model that was adapted "
        "with --config",
        tensor=best[0],
    )


def _unnest(
    model: Model, family: str, stored: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Adapters that are named after the module around a parameter, by the parameter that their shape and place fit."""
    if family == "canonical":
        return {}
    slots = possible(model, family)
    whole = model.names(family).unpadded()
    wrappers: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in stored:
        match = _NESTED.fullmatch(name)
        if match is not None and name not in slots:
            wrappers[match["module"]][match["nest"].count(".base_layer")][match["kind"]] = name
    found = {}
    for module, levels in wrappers.items():
        free = [n for n in whole if n.rpartition(".")[0] == module and f"{n}.lora_A.weight" in slots]
        for level in sorted(levels, reverse=True):
            members = levels[level]
            for place, parameter in enumerate(free):
                _, out, into = whole[parameter].shape
                sizes = {"lora_A.weight": (1, into), "lora_B.weight": (0, out)}
                if all(shapes[name][sizes[kind][0]] == sizes[kind][1] for kind, name in members.items()):
                    found.update({name: f"{parameter}.{kind}" for kind, name in members.items()})
                    free = free[place + 1 :]
                    break
    return found
