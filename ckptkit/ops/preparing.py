"""Preparing a reshard: from arguments to a destination and a plan, with all that is lost on the way listed.

`plan` reports what this module decides and `reshard` runs it, so that the two cannot differ.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit import __version__, stores
from ckptkit.core.destination import Destination
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.names import Names, StoredNames
from ckptkit.core.plan import Key, Plan, make_plan
from ckptkit.core.schema import STATE_ROLES
from ckptkit.core.shards import shards
from ckptkit.core.splitting import split_adapters
from ckptkit.errors import UsageError
from ckptkit.formats import registry
from ckptkit.formats.base import Format, WriteOptions
from ckptkit.formats.carried import carried
from ckptkit.formats.model_config import load_config
from ckptkit.ops.carrying import carry
from ckptkit.ops.checks import check_apart, check_complete
from ckptkit.ops.dropping import Dropped, DropRow, refuse_silent_loss
from ckptkit.ops.renaming import read_rules, renamed
from ckptkit.ops.selection import select
from ckptkit.ops.sources import Source, open
from ckptkit.stores.parts import Part

OPTIMIZER_STATE = tuple(role for role in STATE_ROLES if role != "ema")
"""Roles that exist only to go on optimising. An average of the weights is a result of its own."""

_CASTS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Options:
    """What `ckptkit.ops.reshard` takes, beside source and destination."""

    to: str | None = None
    layout: str | Layout | None = None
    like: str | None = None
    names: str | None = None
    from_format: str | None = None
    source_layout: str | Layout | None = None
    model: str | None = None
    config: str | Mapping[str, Any] | None = None
    dtype: str | None = None
    only: Sequence[str] = ()
    drop: Sequence[str] = ()
    drop_optimizer: bool = False
    drop_extras: bool = False
    master_from_param: bool = False
    max_shard_size: int = 5_000_000_000
    threads: int | None = None
    memory: int = 256 << 20
    replicas: str = "check"
    restart: bool = False
    overwrite: bool = False
    fingerprint: bool | None = None
    part: str | Part | None = None
    base: str | None = None
    rename: str | Mapping[str, str] | None = None
    rename_back: str | Mapping[str, str] | None = None
    fill_missing: bool = False

    def __post_init__(self) -> None:
        if self.replicas not in ("check", "first"):
            raise UsageError(
                f"replicas={self.replicas!r}: choose check (compare equal pieces) or first (take the first)"
            )
        if self.max_shard_size < 1 << 16:
            raise UsageError(f"max_shard_size={self.max_shard_size}: files of less than 64 KiB make no sense")
        if self.memory < 16 << 20:
            raise UsageError(f"memory={self.memory}: a run needs at least 16 MiB of buffers")
        if self.part is not None and self.overwrite:
            raise UsageError(
                "--part writes what is not there yet: remove DST yourself, or leave --overwrite out"
            )
        if self.rename is not None and self.rename_back is not None:
            raise UsageError("--rename reads rules one way and --rename-back the other: give one of them")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads={self.threads}: at least one is needed")


@dataclass
class Job:
    """A reshard that is decided but not run.

    Attributes:
        source: Opened.
        target: The destination's path.
        format: Of the destination.
        layout: Of the destination, with stage sizes written out.
        destination, plan: Laid out and proven.
        drops: All that is left behind, allowed or not.
        notes: What the user should hear.
    """

    source: Source
    target: str
    format: Format
    layout: Layout
    destination: Destination
    plan: Plan
    options: Options
    drops: list[DropRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse_silent_loss(self) -> None:
        """Raise UsageError that lists each drop whose flag is missing."""
        refuse_silent_loss(self.drops, self.source.url, self.format.name)


def prepare(src: str, dst: str, options: Options) -> Job:
    """Open, choose, lay out and plan. Nothing is written; drops without their flag do not raise here."""
    source = open(
        src,
        format=options.from_format,
        layout=options.source_layout,
        model=options.model,
        config=options.config,
        dequantize=options.dtype is not None,
        fill_missing=options.fill_missing,
    )
    rules = options.rename if options.rename is not None else options.rename_back
    if rules is not None:
        source = renamed(source, read_rules(rules, back=options.rename is None))
    return prepare_source(source, dst, options, open(options.like) if options.like else None)


def prepare_source(source: Source, dst: str, options: Options, like: Source | None = None) -> Job:
    """As `prepare`, from a source that is open already."""
    target = stores.destination(dst)
    check_apart(source.url, target)
    format = _format(source, options, like)
    names = _names(source, format, options, like)
    source, names = _adapters_apart(source, names)
    layout = _layout(source, format, names, options, like)
    check_complete(source)
    held, dropped = _held(source, format, names, options)
    extras, extras_dropped = carry(
        source.catalog,
        layout,
        format,
        _trained(source, held),
        drop_optimizer=options.drop_optimizer,
        drop_extras=options.drop_extras,
    )
    given = _given_files(options.config)
    if given:
        extras.files = {**extras.files, **given}
    # Formats without ranks hold tensors as published; padding belongs to layouts.
    laid = shards(names, layout, held, source.catalog.tensors, where=dst, pad=format.ranks)
    laid.extras = extras
    destination = format.lay_out(laid, WriteOptions(options.max_shard_size, _facts(source, options)))
    destination.fingerprints &= stores.on_disk(target) if options.fingerprint is None else options.fingerprint
    plan = make_plan(source.catalog, destination.catalog, master_from_param=options.master_from_param)
    return Job(
        source,
        target,
        format,
        layout,
        destination,
        plan,
        options,
        dropped + extras_dropped,
        [*source.notes, *_unknown(source)],
    )


def _format(source: Source, options: Options, like: Source | None) -> Format:
    if options.to is not None:
        return registry.by_name(options.to)
    found = like.format if like is not None else source.format
    assert found is not None, "values without a format are always given one to be written in"
    return found


def _names(source: Source, format: Format, options: Options, like: Source | None) -> Names | StoredNames:
    """The family of names to write."""
    model = source.catalog.model
    if model is None:
        if options.names is not None:
            raise UsageError(
                f"--names {options.names} needs to know the model, and no schema fits {source.url}; give --model"
            )
        ours = source.format.names if source.format is not None else "canonical"
        if "canonical" not in (ours, format.names) and ours != format.names:
            raise UsageError(
                f"{format.name} names tensors otherwise than {source.url}, whose model is not known; give --model"
            )
        return StoredNames(source.catalog.tensors)
    if format.names != "canonical":
        if options.names not in (None, format.names) and not format.any_names:
            raise UsageError(f"{format.name} always has the names {format.names}, not {options.names}")
        kept = format.any_names and source.format is not None and source.format.name == format.name
        return model.names(options.names or (source.catalog.names if kept else format.names))
    if options.names is not None:
        return model.names(options.names)
    for other in (like, source):
        if other is not None and other.format is not None and other.format.names == "canonical":
            return model.names(other.catalog.names if other.catalog.names in model.families else "canonical")
    return model.names("canonical")


def _adapters_apart(source: Source, names: Names | StoredNames) -> tuple[Source, Names | StoredNames]:
    """The source with adapters taken apart that the destination's names hold one by one only."""
    if not isinstance(names, Names):
        return source, names
    tensors = source.catalog.tensors
    adapters = {tensor for tensor, _ in source.catalog.held if tensors[tensor].part == "adapter"}
    if not adapters:
        return source, names
    placed = {segment.tensor for local in names.whole.values() for segment in local.segments}
    catalog = split_adapters(source.catalog, adapters - placed)
    if catalog.model is None or catalog is source.catalog:
        return source, names
    note = f"adapters of several projections together become one each: the names {names.name} have no other"
    split = replace(source, catalog=catalog, notes=[*source.notes, note])
    return split, catalog.model.names(names.name)


def _layout(
    source: Source, format: Format, names: Names | StoredNames, options: Options, like: Source | None
) -> Layout:
    """The destination layout, with the stage sizes that it comes to."""
    layout = Layout.parse(options.layout) if isinstance(options.layout, str) else options.layout
    if not format.ranks:
        if layout is not None and layout != Layout():
            raise UsageError(f"{format.name} holds no ranks: leave --layout {layout} out, or write native")
        return Layout()
    if layout is None:
        layout = (like or source).catalog.layout or Layout()
    return layout.with_stages(names.model.layers) if isinstance(names, Names) else layout


def _held(
    source: Source, format: Format, names: Names | StoredNames, options: Options
) -> tuple[dict[Key, DType], list[DropRow]]:
    """What the destination stores, and rows for what it does not."""
    catalog = source.catalog
    held = dict(catalog.held)
    dropped = Dropped(catalog.tensors)
    model = names.model if isinstance(names, Names) else None
    named = names.whole if model is not None or options.only or options.drop else {}
    placed = {segment.tensor for local in named.values() for segment in local.segments}
    wanted = select(held, options.only, named) if options.only else set(held)
    unwanted = select(held, options.drop, named) if options.drop else set()
    keep: dict[Key, DType] = {}
    for key, dtype in held.items():
        role = key[1]
        if key not in wanted:
            dropped.add(key, dtype, "not asked for (--only)", "--only")
        elif key in unwanted:
            dropped.add(key, dtype, "asked for", "--drop")
        elif role in OPTIMIZER_STATE and options.drop_optimizer:
            dropped.add(key, dtype, "asked for", "--drop-optimizer")
        elif role not in format.roles:
            flag = "--drop-optimizer" if role in OPTIMIZER_STATE else f"--drop '*/{role}'"
            dropped.add(key, dtype, f"{format.name} holds no {role}", flag, allowed=False)
        elif model is not None and catalog.tensors[key[0]].part not in format.parts:
            part = catalog.tensors[key[0]].part
            what, flag = {"base": ("weights", "--only"), "adapter": ("adapters", "--drop")}[part]
            dropped.add(key, dtype, f"{format.name} holds no {what}", f"{flag} '*.lora_*'", allowed=False)
        elif model is not None and key[0] not in placed:
            other = next((f for f in model.families if _places(model.names(f), key[0])), "")
            why = f"the names {names.name} have no place for it, those called {other} have"
            dropped.add(key, dtype, why, "--drop '*.lora_*'", allowed=False)
        elif role == "state" and model is not None:
            dropped.add(key, dtype, "no model says how it is cut", "--drop-optimizer", allowed=False)
        else:
            keep[key] = dtype
    for tensor, role in wanted - unwanted:
        if role == "master" and (tensor, "param") not in held and (tensor, "master") not in keep:
            keep[tensor, "param"] = held[tensor, "master"]  # the weight itself; its master is its only copy
        trained = role == "param" and catalog.tensors[tensor].optimizer != "none"
        if trained and options.master_from_param and "master" in format.roles:
            keep.setdefault((tensor, "master"), dtype_named("float32"))
    if not keep:
        raise UsageError(
            f"nothing of {source.url} is left to write; it holds {', '.join(sorted({r for _, r in held}))}"
        )
    if options.dtype is not None:
        keep = _cast(source, keep, dtype_named(options.dtype))
    order = {key: place for place, key in enumerate(held)}
    return dict(sorted(keep.items(), key=lambda item: order.get(item[0], len(order)))), dropped.rows()


def _places(names: Names, tensor: str) -> bool:
    """Whether a family of names holds a canonical tensor."""
    return any(segment.tensor == tensor for local in names.whole.values() for segment in local.segments)


def _cast(source: Source, keep: Mapping[Key, DType], dtype: DType) -> dict[Key, DType]:
    """Weights in `dtype`, but for those that stay float32, and what is no float at all."""
    if dtype.name not in _CASTS:
        raise UsageError(f"--dtype {dtype}: weights are cast to {', '.join(_CASTS)}")
    found = {}
    for (tensor, role), now in keep.items():
        stays = source.catalog.tensors[tensor].keep_fp32 and dtype.itemsize < 4
        casts = role in ("param", "buffer") and now.is_float and not stays
        found[tensor, role] = dtype if casts else now
    return found


def _unknown(source: Source) -> list[str]:
    """What a user should hear of a model that no schema covers."""
    catalog = source.catalog
    if catalog.model is not None or source.format is None:
        return []
    config = load_config(catalog.extras.files, source.url) or {}
    kind = config.get("model_type")
    what = (
        f"no schema knows the model_type {kind!r}"
        if isinstance(kind, str)
        else "no schema fits this checkpoint"
    )
    how = "so that a layout can cut them on dimension 0 only (dp, zero=3), or gather them"
    return [
        f"{what}: its tensors are taken as they are stored, {how}. --model names a schema where one fits after all"
    ]


def _given_files(config: str | Mapping[str, Any] | None) -> Mapping[str, bytes]:
    """Tokenizer and other files to carry along, where the configuration was given as the folder that holds them."""
    if not isinstance(config, str) or not os.path.isdir(config):
        return {}
    return dict(carried(stores.open_store(config), []))


def _trained(source: Source, held: Mapping[Key, DType]) -> set[str]:
    """Tensors that optimizer groups may list: kept, and with their state where the source has it."""
    state = {tensor for tensor, role in source.catalog.held if role in OPTIMIZER_STATE}
    kept = {tensor for tensor, role in held if role in OPTIMIZER_STATE}
    return {tensor for tensor, _ in held if tensor in kept or tensor not in state}


def _facts(source: Source, options: Options) -> dict[str, Any]:
    """What the destination's manifest tells of its origin. No time and no host, so that equal runs give equal bytes."""
    catalog = source.catalog
    name = os.path.basename(os.path.normpath(source.url))
    record: dict[str, Any] = {
        "tool": f"ckptkit {__version__}",
        "source": name,
        "format": catalog.format,
        "layout": str(catalog.layout) if catalog.layout is not None else "",
    }
    digests = catalog.facts.get("index")
    if digests:
        record["index"] = digests
    if options.only or options.drop:
        record["partial"] = {"base": name, "only": list(options.only), "drop": list(options.drop)}
    elif "partial" in catalog.facts:
        record["partial"] = catalog.facts["partial"]
    facts: dict[str, Any] = {"lineage": [record, *catalog.facts.get("lineage", ())]}
    if "epoch" in catalog.facts:
        facts["epoch"] = catalog.facts["epoch"]
    # Also of a part that was only cut otherwise since.
    parts = [past["partial"] for past in facts["lineage"] if isinstance(past, dict) and "partial" in past]
    if parts:
        facts["partial"] = parts[0]
    return facts
