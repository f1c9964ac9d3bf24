"""Restoring: a checkpoint of any layout into the registered tensors, in place.

Source pieces come from a catalog, as for any reshard; the destination is this rank's holdings, whose bytes lie in live tensors. The
plan proves that every element has a source before the first is written. Leaves are compared with their digests when they are read.
"""

import json
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.clips import clip
from ckptkit.core.copies import copies_into
from ckptkit.core.dtypes import DType
from ckptkit.core.local import LocalTensor
from ckptkit.core.plan import Key, make_plan, resolve
from ckptkit.core.schema import Model
from ckptkit.engine.fill import fill
from ckptkit.engine.sources import Sources
from ckptkit.errors import CkptError, CoverageError, FormatError
from ckptkit.formats.chunks import bind_names, family_of
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.holdings import Holding, Places, catalog_of, dtype_of
from ckptkit.hooks.loading import direct_rows, load
from ckptkit.hooks.table import Table
from ckptkit.stores.base import Store

MEMORY = 128 << 20
"""Bytes of host buffers that a restore uses beside the tensors."""

WEIGHTS = ("param", "buffer", "master", "ema")


@dataclass
class Restored:
    """What was restored: bytes read, leaves compared, and what the source does not have."""

    bytes_in: int = 0
    checked_leaves: int = 0
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def restore_tensors(
    table: Table,
    places: Places,
    source: Catalog,
    store: Store,
    *,
    rank: int,
    strict: bool,
    weights_only: bool,
    absent: Sequence[str] = (),
    mapped: Callable[[str], HostBuffer | None] = lambda path: None,
) -> Restored:
    """Fill the registered tensors from a checkpoint.

    Args:
        strict: Every registered tensor must be in the source.
        weights_only: Parameters, buffers and copies of them only.
        mapped: Gives a rank file that lies in registered memory of this node, by its path.
        absent: Canonical tensors whose optimizer state was not there when it was saved; none is made for them.

    Raises:
        CoverageError, LayoutError: the source has not what is registered, or has it in other shapes.
        CorruptionError, FormatError, ShardMissingError, StoreError: the source cannot be read. Tensors hold a mixture then.
    """
    if not weights_only:
        table.materialize(absent)
    wanted = [h for h in table.holdings if h.tensor is not None and (not weights_only or h.role in WEIGHTS)]
    found = Restored()
    wanted, places = _named_alike(wanted, places, source)
    have = source.held
    missing = _missing(wanted, have, weights_only)
    if missing:
        lacking = {(tensor, role) for tensor, role in missing}
        left = [h for h in wanted if not any((s.tensor, h.role) in lacking for s in h.local.segments)]
        found.missing = [f"{tensor} ({role})" for tensor, role in missing]
        if strict or not left:
            some = ", ".join(found.missing[:5]) + (
                f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            )
            raise CoverageError(
                f"{source.where} does not hold {some}, which {'is' if len(missing) == 1 else 'are'} registered; it is of another model, or "
                "lacks the optimizer. restore(strict=False) takes what is there, weights_only=True the weights alone",
                missing=missing,
            )
        wanted = left
    target = catalog_of(wanted, places, rank, f"rank {rank}")
    plan = make_plan(source, target, master_from_param=weights_only)
    sources = Sources(store, source, verify=True)
    copies = copies_into(plan)
    offsets = target.entries.offset.tolist()
    sink = TensorSink(wanted, offsets)
    rest = np.ones(len(copies), bool)
    device = table.device
    for number in np.unique(copies.src_file).tolist() if device.type == "cuda" else ():
        buffer = mapped(source.files[number].path)
        if buffer is None or source.leaves is None:
            continue
        direct = direct_rows(copies, source, number, offsets, wanted, device)
        found.checked_leaves += load(direct, buffer, source, number, device)
        found.bytes_in += direct.nbytes
        rest[direct.rows] = False
    try:
        done = fill(
            copies.take(np.flatnonzero(rest)),
            sources,
            np.asarray([target.files[0].size], np.int64),
            sink,
            memory=MEMORY,
        )
        sink.finish()
    finally:
        sources.close()
    found.bytes_in += done.bytes_in
    found.checked_leaves += done.checked_leaves
    return found


def _missing(
    wanted: Sequence[Holding], have: Mapping[Key, DType], weights_only: bool
) -> list[tuple[str, str]]:
    keys = {(s.tensor, h.role): dtype_of(h.dtype, h.name) for h in wanted for s in h.local.segments}
    try:
        resolve(have, keys, master_from_param=weights_only)
    except CoverageError as error:
        return list(error.missing)
    return []


def _named_alike(wanted: Sequence[Holding], places: Places, source: Catalog) -> tuple[list[Holding], Places]:
    """Give holdings the source's canonical names, where it has a model and they go by their own."""
    listed = list(wanted)
    if places.model is not None or source.model is None:
        return listed, places
    names = {h.local.segments[0].tensor for h in listed if h.local.segments and "@" not in h.local.key}
    if names <= source.tensors.keys():
        return listed, places
    shapes = {name: places.tensors[name].shape for name in names}
    model: Model = source.model
    try:
        whole = bind_names(model, family_of(model, shapes, "the model"), shapes, "the model", [])
    except CkptError:
        return listed, places
    bound = Places(None, model)
    bound.tensors = {**places.tensors, **model.tensors}
    known: dict[LocalTensor, LocalTensor] = {}

    def of(local: LocalTensor) -> LocalTensor:
        if local not in known:
            segment = local.segments[0]
            known[local] = clip(whole[segment.tensor], Box(segment.box.start, segment.box.stop))
        return known[local]

    return [
        replace(h, local=of(h.local)) if h.local.segments and h.local.segments[0].tensor in whole else h
        for h in listed
    ], bound


class TensorSink:
    """Puts the bytes of a rank's catalog into live tensors.

    Args:
        holdings: With tensors, in the order of the catalog's entries.
        offsets: Of each entry.
    """

    def __init__(self, holdings: Sequence[Holding], offsets: Sequence[int]) -> None:
        order = sorted(range(len(offsets)), key=lambda k: (offsets[k], holdings[k].nbytes))
        self._starts = [offsets[k] for k in order]
        self._sizes = [holdings[k].nbytes for k in order]
        self._late: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # tensors that are not one range, and what they get
        self._raw: list[torch.Tensor] = []
        for k in order:
            tensor = holdings[k].tensor
            assert tensor is not None
            if not tensor.is_contiguous():
                room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._late.append((tensor, room))
                tensor = room
            self._raw.append(
                tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            )
        self._arrays: list[Any] = [raw.numpy() if raw.device.type == "cpu" else None for raw in self._raw]
        devices = {raw.device for raw in self._raw if raw.device.type != "cpu"}
        self._upload = {device: _Upload(device) for device in devices}

    def __call__(self, file: int, start: int, data: memoryview) -> None:
        stop = start + data.nbytes
        k = max(bisect_right(self._starts, start) - 1, 0)
        while k > 0 and self._starts[k - 1] + self._sizes[k - 1] > start:
            k -= 1
        while k < len(self._starts) and self._starts[k] < stop:
            low, high = max(start, self._starts[k]), min(stop, self._starts[k] + self._sizes[k])
            if low < high:
                piece = data[low - start : high - start]
                a, b = low - self._starts[k], high - self._starts[k]
                if self._arrays[k] is not None:
                    self._arrays[k][a:b] = np.frombuffer(piece, np.uint8)
                else:
                    raw = self._raw[k]
                    self._upload[raw.device].send(raw[a:b], piece)
            k += 1

    def finish(self) -> None:
        """Wait for copies to devices, and fill tensors that are not one range."""
        for upload in self._upload.values():
            upload.finish()
        for tensor, room in self._late:
            tensor.copy_(room)


class _Upload:
    """Host to device by way of pinned buffers, on a stream of its own, from several threads."""

    def __init__(self, device: torch.device, buffers: int = 16, nbytes: int = 1 << 20) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._nbytes = nbytes
        self._free = [
            (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(buffers)
        ]
        self._lock = threading.Condition()

    def send(self, target: torch.Tensor, data: memoryview) -> None:
        for at in range(0, data.nbytes, self._nbytes):
            piece = data[at : at + self._nbytes]
            with self._lock:
                self._lock.wait_for(lambda: bool(self._free))
                pinned, event = self._free.pop()
            event.synchronize()
            pinned.numpy()[: piece.nbytes] = np.frombuffer(piece, np.uint8)
            with torch.cuda.stream(self._stream):
                target[at : at + piece.nbytes].copy_(pinned[: piece.nbytes], non_blocking=True)
                event.record(self._stream)
            with self._lock:
                self._free.insert(0, (pinned, event))
                self._lock.notify()

    def finish(self) -> None:
        self._stream.synchronize()


def extras_bytes(extras: Extras) -> bytes:
    """All extras but files, to send to every rank."""
    plain = {"common": extras.common, "by_coordinate": extras.by_coordinate, "by_sample": extras.by_sample}
    return zlib.compress(json.dumps(plain).encode(), 1)


def extras_of(data: bytes) -> Extras:
    """What `extras_bytes` made bytes of."""
    try:
        plain = json.loads(zlib.decompress(data))
        return Extras(plain["common"], plain["by_coordinate"], plain["by_sample"])
    except (ValueError, KeyError, zlib.error) as error:
        raise FormatError(f"rank 0 sent extras that do not make sense: {error}") from error
