"""Registration: from what a trainer has to holdings, groups and extras."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptkit.core.catalog import Extras
from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, FormatError, LayoutError, UsageError
from ckptkit.formats.native_manifest import extras_bytes
from ckptkit.formats.optimizer_groups import OURS, kind_of
from ckptkit.hooks import extras as plain
from ckptkit.hooks.holdings import Holding, Places, box_of, explicit
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.modules import ema_tensors, mesh_of, model_of, module_holdings, tensors_of
from ckptkit.hooks.optimizers import (
    OptimizerView,
    is_number,
    set_groups,
    set_numbers,
    state_holdings,
    view_of,
)
from ckptkit.hooks.placement import Held, SchemaPlacement
from ckptkit.hooks.planning import SavePlan
from ckptkit.hooks.table import Table

_TP_NAMES = ("tp", "tensor", "model", "mp")


@dataclass
class Registration:
    """What is registered.

    Attributes:
        params: Canonical tensors of each parameter, by its name.
        layout: Of the run, as far as it can be told.
        things: Schedulers, loaders and others with a state, by name.
        note: Why tensors go by their own names, where they do.
    """

    table: Table
    places: Places
    layout: Layout
    params: dict[str, list[str]]
    things: dict[str, Any] = field(default_factory=dict)
    loader: Any = None
    rng: bool = True
    note: str = ""

    @property
    def views(self) -> list[OptimizerView]:
        return self.table.views

    def groups(self) -> list[list[str]]:
        """Canonical tensors of this rank in each optimizer group."""
        return [
            [tensor for name in names for tensor in self.params[name]]
            for view in self.views
            for _, names in view.groups()
        ]

    def replan(self) -> None:
        """Look for optimizer state again, after a step."""
        holdings = [h for h in self.table.holdings if h.source is None]
        by_param = self._by_param(holdings)
        views = [view_of(view.optimizer, view.names) for view in self.views]
        for view in views:
            holdings += _without(state_holdings(view, by_param, self.places), holdings)
        self.table = Table(holdings, views)

    def _by_param(self, holdings: Sequence[Holding]) -> dict[int, Holding]:
        return {id(h.item): h for h in holdings if h.role == "param" and h.item is not None}

    # ── what is taken at a step's end, and what becomes of it ─────────────────────────────────────────────────

    def take(self, lead: bool, device: torch.device) -> dict[str, Any]:
        """State that changes with the next step, as plain values. Raises UsageError where it is none."""
        taken: dict[str, Any] = {}
        if self.rng:
            taken["rng"] = plain.rng_state(device)
        if self.loader is not None:
            taken["loader"] = plain.state_of(self.loader, "loader")
        if lead:
            taken["things"] = {name: plain.state_of(thing, name) for name, thing in self.things.items()}
            taken["groups"] = [
                {k: v for k, v in group.items() if k not in ("params", "param_names")}
                for view in self.views
                for group in view.optimizer.param_groups
            ]
        return taken

    def extras(
        self,
        plan: SavePlan,
        step: int,
        taken: Mapping[str, Any],
        numbers: Sequence[Mapping[str, Mapping[str, Any]]],
        tag: str,
    ) -> bytes:
        """The content of this rank's `.extras`."""
        common: dict[str, Any] = {"step": step}
        if "things" in taken:
            for name, state in taken["things"].items():
                common[name] = state
            common["groups"] = self._canonical(plan, step, taken["groups"])
            if tag:
                common["tag"] = tag
        here = {plan.coordinate: {"rng": plain.pack_value(taken["rng"], "rng")}} if "rng" in taken else {}
        own: dict[str, Any] = {}
        if "loader" in taken and all(
            plan.layout.coordinate(plan.rank)[axis] == 0 for axis in ("tp", "pp", "cp")
        ):
            own["by_sample"] = [taken["loader"]]
        by_tensor = self._by_tensor(step, numbers)
        if by_tensor:
            own["by_tensor"] = by_tensor
        return extras_bytes(Extras(common, here), plan.layout, plan.rank, plan.about, own)

    def _canonical(
        self, plan: SavePlan, step: int, groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        found = []
        roles = {h.role for h in self.table.holdings}
        for hyper, tensors in zip(groups, plan.groups, strict=True):
            kept = {
                k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
                for k, v in hyper.items()
                if k not in OURS
            }
            packed = {
                k: list(v) if isinstance(v, tuple) else plain.pack_value(v, f"group[{k}]")
                for k, v in kept.items()
            }
            found.append(
                {
                    "kind": kind_of(kept, roles if "betas" in kept else set()),
                    "step": step,
                    "tensors": tensors,
                    **packed,
                }
            )
        return found

    def _by_tensor(
        self, step: int, numbers: Sequence[Mapping[str, Mapping[str, Any]]]
    ) -> dict[str, dict[str, Any]]:
        """What optimizers keep of single tensors beside arrays, as far as it is not the same for all."""
        found: dict[str, dict[str, Any]] = {}
        for view, known in zip(self.views, numbers, strict=True):
            for key, values in known.items():
                for name, value in values.items():
                    if key == "step" and value == step:
                        continue
                    for tensor in self.params[name]:
                        found.setdefault(tensor, {})[key] = (
                            int(value) if key == "step" else plain.pack_value(value, key)
                        )
            for param, specs in zip(view.params, view.specs, strict=True):
                if specs and not view.inner.state.get(param):
                    for tensor in self.params[view.names[id(param)]]:
                        found.setdefault(tensor, {})["absent"] = True
        return found

    # ── restoring ────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        extras: Extras,
        saved: Layout | None,
        plan: SavePlan,
        device: torch.device,
        seed: int,
        *,
        new_data: bool,
    ) -> list[str]:
        """Give everything its saved state, the random generators last; notes what was not.

        Raises:
            FormatError: a thing does not take its state, or loaders of another number of ranks cannot be continued.
        """
        notes = []
        common = extras.common
        self._put_optimizers(common)
        for name, thing in self.things.items():
            if name in common:
                plain.load_state(thing, common[name], name)
            else:
                notes.append(f"{name} is not in the checkpoint and keeps its state")
        if self.loader is not None:
            self._put_loader(extras.by_sample, saved, plan, new_data, notes)
        if self.rng:
            self._put_rng(extras, saved, plan, device, seed)
        return notes

    def _put_optimizers(self, common: Mapping[str, Any]) -> None:
        groups = common.get("groups")
        by_tensor = common.get("by_tensor", {})
        group_of = {name: group for group in groups or () for name in group.get("tensors", ())}
        for view in self.views:
            steps: dict[str, dict[str, Any]] = {}
            listed: dict[int, tuple[dict[str, Any], list[str]]] = {}
            for param, specs in zip(view.params, view.specs, strict=True):
                name = view.names[id(param)]
                tensor = self.params[name][0] if self.params[name] else name
                facts, group = by_tensor.get(tensor, {}), group_of.get(tensor, {})
                if facts.get("absent"):
                    continue
                values = {key: plain.unpack_value(v) for key, v in facts.items()}
                uneven = group.get("steps", {}).get(tensor)
                values.setdefault("step", uneven if uneven is not None else group.get("step"))
                for key, spec in specs.items():
                    known = spec.shape is None or is_number(spec.shape, tuple(param.shape))
                    if known and values.get(key) is not None:
                        steps.setdefault(key, {})[name] = values[key]
            set_numbers(view, steps)
            for _, names in view.groups():
                for name in names:
                    tensor = self.params[name][0] if self.params[name] else name
                    group = group_of.get(tensor)
                    if group is not None:
                        hyper = {k: plain.unpack_value(v) for k, v in group.items() if k not in OURS}
                        listed.setdefault(id(group), (hyper, []))[1].append(name)
            set_groups(view, list(listed.values()))

    def _put_loader(
        self, states: Sequence[Any], saved: Layout | None, plan: SavePlan, new_data: bool, notes: list[str]
    ) -> None:
        now, before = plan.layout.dp, saved.dp if saved is not None else len(states)
        if not states:
            notes.append("the checkpoint has no loader state; data starts anew")
        elif all(state == states[0] for state in states):
            plain.load_state(self.loader, states[0], "loader")
        elif len(states) == now:
            plain.load_state(self.loader, states[plan.layout.coordinate(plan.rank)["dp"]], "loader")
        elif callable(getattr(self.loader, "load_state_dicts", None)):
            self.loader.load_state_dicts([plain.unpack_value(state) for state in states])
        elif new_data:
            notes.append(f"loader states of {before} data-parallel ranks do not fit {now}; data starts anew")
        else:
            raise FormatError(
                f"each of {before} data-parallel ranks has a loader state of its own, and there are {now} now. Give the loader a "
                "load_state_dicts(list) that deals them out, or start data anew with restore(new_data=True)"
            )

    def _put_rng(
        self, extras: Extras, saved: Layout | None, plan: SavePlan, device: torch.device, seed: int
    ) -> None:
        same = saved is not None and all(
            getattr(saved, a) == getattr(plan.layout, a) for a in ("tp", "pp", "cp", "dp")
        )
        state = extras.by_coordinate.get(plan.coordinate) if same else None
        if isinstance(state, dict) and "rng" in state:
            plain.set_rng_state(state["rng"], device)
        else:
            plain.seed_all(seed, int(extras.common.get("step") or 0), plan.coordinate)


def register(
    meeting: Meeting,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: Any,
    scheduler: Any,
    loader: Any,
    placement: SchemaPlacement | None,
    tensors: Sequence[Held],
    ema: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    extras: Mapping[str, Any] | None,
    rng: bool,
) -> Registration:
    """Look at everything that a trainer registers; see `Checkpointer.register`."""
    modules = [model] if isinstance(model, torch.nn.Module) else list(model or ())
    found = tensors_of(modules)
    places = Places(placement, model_of(modules) if placement is None else None)
    note = places.bind({one.name: box_of(one.tensor, one.name)[0] for one in found})
    said = explicit(tensors, places)
    averages = ema_tensors(ema, {one.name for one in found})
    holdings = [*said, *_without(module_holdings(found, places, averages), said)]
    if not holdings:
        raise UsageError("nothing to save: give model= or tensors=")
    names: dict[int, str] = {id(one.tensor): one.name for one in found}
    params = {one.name: _canonical_of(holdings, one.name) for one in found if one.is_param}
    by_param = {id(h.item): h for h in holdings if h.role == "param" and h.item is not None}
    optimizers = (
        [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    )
    for one in tensors:  # parameters of a trainer without modules
        if one.role == "param" and id(one.tensor) not in names:
            names[id(one.tensor)] = one.name
            params.setdefault(one.name, _canonical_of(holdings, one.name))
    views = [view_of(one, names) for one in optimizers]
    for view in views:
        missing = [p for p in view.params if id(p) not in by_param]
        for param in missing:
            h = next((h for h in said if h.name == names[id(param)] and h.role == "param"), None)
            if h is None:
                raise UsageError(
                    f"{names[id(param)]} is registered, but not as a parameter", tensor=names[id(param)]
                )
            by_param[id(param)] = h
        holdings += _without(state_holdings(view, by_param, places), holdings)
    things = dict(extras or {})
    if scheduler is not None:
        things["scheduler"] = scheduler
    for name, thing in things.items():
        if name in ("step", "groups", "by_tensor", "tag"):
            raise UsageError(f"extras cannot be called {name!r}; that name is taken")
        plain.state_of(thing, name)
    if loader is not None:
        plain.state_of(loader, "loader")
    layout = placement.mesh if placement is not None else _layout(meeting.world, mesh_of(found))
    if layout.world != meeting.world:
        raise LayoutError(f"layout {layout} has {layout.world} ranks, but {meeting.world} are running")
    table = Table(holdings, views)
    return Registration(table, places, layout, params, things, loader, rng, note)


def _canonical_of(holdings: Sequence[Holding], name: str) -> list[str]:
    h = next((h for h in holdings if h.name == name and h.role in ("param", "buffer")), None)
    return [] if h is None else list(dict.fromkeys(segment.tensor for segment in h.local.segments))


def _without(found: Sequence[Holding], said: Sequence[Holding]) -> list[Holding]:
    """Holdings but those that were said otherwise: of the same tensors and role."""
    taken = {(segment.tensor, h.role) for h in said for segment in h.local.segments}
    return [h for h in found if not any((segment.tensor, h.role) in taken for segment in h.local.segments)]


def _layout(world: int, mesh: Any) -> Layout:
    """The layout of a run that uses DTensors: its mesh's tensor-parallel axis, and data parallel for the rest."""
    names: tuple[str, ...] = getattr(mesh, "mesh_dim_names", None) or ()
    tp = next((mesh.size(k) for k, name in enumerate(names) if name in _TP_NAMES), 1)
    if tp == 1 or world % tp or mesh.size() != world:
        return Layout(dp=world)
    fastest = names[-1] in _TP_NAMES
    try:
        return Layout(tp=tp, dp=world // tp, **({} if fastest else {"order": "dp-cp-ep-tp-pp"}))  # type: ignore[arg-type]
    except CkptError:
        return Layout(dp=world)
