"""Which checkpoint is restored: the newest whole step, by one decision for all ranks, and the next older one where it cannot be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit import ops, stores
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, CoverageError, FormatError, LayoutError, StoreError, UsageError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.native import NativeFormat
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.opening import Opened
from ckptkit.hooks.planning import SavePlan
from ckptkit.hooks.registration import Registration
from ckptkit.hooks.restoring import Restored, extras_bytes, extras_of, restore_tensors
from ckptkit.ops import runs
from ckptkit.stores.base import Store

_WRONG_MODEL = (CoverageError, LayoutError, UsageError)
"""Errors that an older step would meet as well."""


@dataclass
class Done:
    """What a restore did."""

    step: int
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def restore(
    opened: Opened,
    meeting: Meeting,
    found: Registration,
    plan: SavePlan,
    source: str | None,
    *,
    fresh: bool,
    strict: bool,
    weights_only: bool,
    new_data: bool,
    seed: int,
    event: Callable[[Mapping[str, Any]], None],
    tag: str,
) -> Done:
    """Restore on all ranks; see `Checkpointer.restore`."""
    notes: list[str] = []
    tried: dict[str, str] = {}
    attempt = 0
    while True:
        attempt += 1
        name = f"{tag}/{attempt}"
        choice = _choose(opened, meeting, source, tried, fresh, name)
        notes += choice["notes"] if meeting.lead else []
        if choice["url"] is None:
            return Done(0, notes=notes)
        error: BaseException | None = None
        done = Restored()
        catalog: Catalog | None = None
        try:
            store, catalog = _open(choice["url"], found)
            absent = _absent(_shared_extras(meeting, catalog, f"{name}/extras"), weights_only)
            extras = absent[0]
            done = restore_tensors(
                found.table, found.places, catalog, store, rank=meeting.rank, strict=strict, weights_only=weights_only,
                absent=absent[1],
            )  # fmt: skip
        except (CkptError, OSError) as failure:
            error = failure
        told = meeting.agree(f"{name}/done", _said(error), _first_fault)
        if told is None:
            assert catalog is not None
            event({"event": "restored", "step": choice["step"], "url": choice["url"], "bytes": done.bytes_in})
            return _finish(found, plan, catalog, extras, choice, done, notes, weights_only, new_data, seed)
        if told["wrong_model"] or source is not None:
            if error is not None:
                raise error
            raise FormatError(f"rank {told['rank']}: {told['text']}")
        tried[choice["name"]] = f"rank {told['rank']}: {told['text']}"
        event({"event": "passed_over", "step": choice["step"], "why": tried[choice["name"]]})


def _choose(
    opened: Opened, meeting: Meeting, source: str | None, tried: Mapping[str, str], fresh: bool, name: str
) -> dict[str, Any]:
    """What all ranks restore: decided on rank 0. `url` is None for a fresh start."""

    def decide(_: Sequence[Any]) -> dict[str, Any]:
        if source is not None:
            opened_ = ops.open(source)
            return {"url": opened_.url, "name": "", "step": opened_.catalog.step or 0, "notes": opened_.notes}
        nothing = {"url": None, "name": "", "step": 0}
        try:
            names = opened.run.names()
            if not names:
                return {**nothing, "notes": [f"{opened.run.url} holds no step: starting at step 0"]}
            newest = runs.newest(opened.run.url, quick=True, without=tried)
        except StoreError as error:
            if fresh:
                return {**nothing, "notes": [f"starting at step 0, as asked, although {error}"]}
            raise
        reasons = [f"{step}: {why}" for step, why in tried.items()] + newest.reasons()
        if newest.path is None:
            if fresh:
                return {**nothing, "notes": ["starting at step 0, as asked", *reasons]}
            raise FormatError(
                f"{opened.run.url} holds steps, but none can be restored: {'; '.join(reasons)}. Repair one, or start afresh with "
                "restore(fresh=True)",
                file=opened.run.url,
            )
        assert newest.step is not None
        return {"url": newest.path, "name": newest.step.name, "step": newest.step.step, "notes": reasons}

    found: dict[str, Any] = meeting.agree(name, None, decide)
    return found


def _open(url: str, found: Registration) -> tuple[Store, Catalog]:
    """A checkpoint's store and catalog, as this rank reads it."""
    store = stores.open_store(url)
    if NativeFormat().detect(store):
        return store, NativeFormat().read(store, ReadOptions())
    source = ops.open(url)
    return source.store, source.catalog


def _shared_extras(meeting: Meeting, catalog: Catalog, name: str) -> Extras:
    """Extras, read once. An error of rank 0 is raised on all."""
    if meeting.world == 1:
        return catalog.extras
    if meeting.lead:
        try:
            data = extras_bytes(catalog.extras)
        except CkptError as error:
            meeting.publish(name, b"!" + f"{type(error).__name__}: {error}".encode())
            raise
        meeting.publish(name, b"=" + data)
        return catalog.extras
    data = meeting.read(name)
    if data[:1] == b"!":
        raise FormatError(f"rank 0 could not read the extras: {data[1:].decode()}")
    return extras_of(data[1:])


def _absent(extras: Extras, weights_only: bool) -> tuple[Extras, list[str]]:
    facts = extras.common.get("by_tensor", {})
    return extras, [name for name, known in facts.items() if known.get("absent")] if not weights_only else []


def _said(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"text": f"{type(error).__name__}: {error}", "wrong_model": isinstance(error, _WRONG_MODEL)}


def _first_fault(said: Sequence[Any]) -> dict[str, Any] | None:
    faults = [{**one, "rank": rank} for rank, one in enumerate(said) if one is not None]
    return next((one for one in faults if one["wrong_model"]), faults[0]) if faults else None


def _finish(
    found: Registration,
    plan: SavePlan,
    catalog: Catalog,
    extras: Extras,
    choice: Mapping[str, Any],
    done: Restored,
    notes: list[str],
    weights_only: bool,
    new_data: bool,
    seed: int,
) -> Done:
    if weights_only:
        return Done(0, done.missing, notes)
    saved: Layout | None = catalog.layout
    notes += found.put(extras, saved, plan, found.table.device, seed, new_data=new_data)
    return Done(int(extras.common.get("step") or choice["step"] or 0), done.missing, notes)
