"""Which checkpoint is restored: the newest whole step, by one decision for all ranks, and the next older one where it cannot be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptkit import ops
from ckptkit.cache.client import CacheClient, Located
from ckptkit.cache.store import LocatedStore
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, CoverageError, FormatError, LayoutError, StoreError, UsageError
from ckptkit.formats.native import NativeFormat
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.opening import Opened
from ckptkit.hooks.planning import SavePlan
from ckptkit.hooks.registration import Registration
from ckptkit.hooks.restoring import Restored, extras_bytes, extras_of, restore_tensors
from ckptkit.hooks.targets import CacheTarget
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
    rejoin: Callable[[], None],
) -> Done:
    """Restore on all ranks; see `Checkpointer.restore`.

    Args:
        tag: Names this restore among all of the run.
        rejoin: Begins a new epoch of the cache, which starts from nothing.
    """
    notes: list[str] = []
    tried: dict[str, str] = {}
    attempt = 0
    client = opened.client if source is None else None
    while True:
        attempt += 1
        name = f"{tag}/{attempt}"
        found_at = (
            _choose(opened, meeting, source, tried, fresh, name)
            if client is None
            else _located(client, opened.run.url, fresh, rejoin)
        )
        notes += found_at.notes if meeting.lead else []
        if found_at.open is None:
            if client is not None:
                client.report(True, timeout_s=meeting.timeout_s)  # saves begin when all ranks have
            return Done(0, notes=notes)
        error: BaseException | None = None
        done, catalog, extras = Restored(), None, Extras()
        store: Store | None = None
        try:
            store, catalog = found_at.open()
            extras = _shared_extras(meeting, catalog, f"{name}/extras")
            done = restore_tensors(
                found.table, found.places, catalog, store, rank=meeting.rank, strict=strict, weights_only=weights_only,
                absent=[] if weights_only else _absent(extras), mapped=partial(_in_slot, opened, found_at.located),
            )  # fmt: skip
        except (CkptError, OSError) as failure:
            error = failure
        finally:
            if isinstance(store, LocatedStore):
                notes += store.faults
                store.close()
        told = meeting.agree(f"{name}/done", _said(error), _first_fault)
        good = told is None
        if client is not None and (good or not told["wrong_model"]):
            text, late = ("", False) if told is None else (told["text"], told["late"])
            good = client.report(good, text, meeting.timeout_s, late=late)
        if good:
            assert catalog is not None
            if (
                opened.client is not None and client is None
            ):  # restored from elsewhere: the cache's own restore ends, too
                opened.client.locate()
                opened.client.report(True, timeout_s=meeting.timeout_s)
            event({"event": "restored", "step": found_at.step, "url": catalog.where, "bytes": done.bytes_in})
            return _finish(
                found, plan, catalog, extras, found_at.step, done, notes, weights_only, new_data, seed
            )
        if told is not None and (told["wrong_model"] or source is not None):
            if error is not None:
                raise error
            raise FormatError(f"rank {told['rank']}: {told['text']}")
        why = "another rank could not use it" if told is None else f"rank {told['rank']}: {told['text']}"
        tried[found_at.name] = why
        # With a cache, the next attempt may have the same step.
        what = "passed_over" if client is None else "restore_failed"
        event({"event": what, "step": found_at.step, "why": why})


@dataclass(frozen=True)
class _Candidate:
    """What all ranks restore. `open` is None for a fresh start."""

    open: Callable[[], tuple[Store, Catalog]] | None
    name: str = ""
    step: int = 0
    notes: tuple[str, ...] = ()
    located: Located | None = None


def _located(client: CacheClient, url: str, fresh: bool, rejoin: Callable[[], None]) -> _Candidate:
    """What the cache's coordinator decided. It looks at durable storage as well."""
    try:
        found = client.locate()
    except FormatError as error:
        if not fresh:
            raise FormatError(
                f"{error}. Repair a step, or start afresh with restore(fresh=True)", **error.facts
            ) from error
        rejoin()
        client.locate()
        return _Candidate(None, notes=(f"starting at step 0, as asked, although {error}",))
    if found is None:
        return _Candidate(None, notes=(f"neither the cache nor {url} holds a step: starting at step 0",))

    def open() -> tuple[Store, Catalog]:
        store = LocatedStore(client, found)
        return store, NativeFormat().read(store)

    return _Candidate(open, f"{found.epoch}-{found.step}", found.step, found.passed_over, found)


def _in_slot(opened: Opened, located: Located | None, path: str) -> HostBuffer | None:
    """The registered buffer that a rank file lies in, where it is a slot of this rank."""
    if located is None or not isinstance(opened.target, CacheTarget):
        return None
    sources = located.sources[int(path.partition("-")[2].partition(".")[0])]
    if not sources:
        return None
    nearest = sources[0]
    return opened.target.buffer_of(int(nearest.place)) if nearest.kind == "slot" else None


def _choose(
    opened: Opened, meeting: Meeting, source: str | None, tried: Mapping[str, str], fresh: bool, name: str
) -> _Candidate:
    """The newest whole step at the URL, or the checkpoint that was asked for; decided on rank 0."""

    def decide(_: Sequence[Any]) -> dict[str, Any]:
        if source is not None:
            opened_ = ops.open(source)
            return {"url": opened_.url, "name": "", "step": opened_.catalog.step or 0, "notes": opened_.notes}
        nothing = {"url": None, "name": "", "step": 0}
        try:
            if not opened.run.names():
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

    found = meeting.agree(name, None, decide)
    url = found["url"]
    return _Candidate(
        None if url is None else partial(_open, url), found["name"], found["step"], tuple(found["notes"])
    )


def _open(url: str) -> tuple[Store, Catalog]:
    """A checkpoint's store and catalog, as this rank reads it."""
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


def _absent(extras: Extras) -> list[str]:
    """Canonical tensors that had no optimizer state when they were saved."""
    return [name for name, known in extras.common.get("by_tensor", {}).items() if known.get("absent")]


def _said(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "text": f"{type(error).__name__}: {error}",
        "wrong_model": isinstance(error, _WRONG_MODEL),
        "late": isinstance(error, (StoreError, OSError)) and not isinstance(error, FormatError),
    }


def _first_fault(said: Sequence[Any]) -> dict[str, Any] | None:
    faults = [{**one, "rank": rank} for rank, one in enumerate(said) if one is not None]
    # First what trying again will not mend.
    return min(faults, key=lambda one: (not one["wrong_model"], one["late"]), default=None)


def _finish(
    found: Registration,
    plan: SavePlan,
    catalog: Catalog,
    extras: Extras,
    step: int,
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
    return Done(int(extras.common.get("step") or step), done.missing, notes)
