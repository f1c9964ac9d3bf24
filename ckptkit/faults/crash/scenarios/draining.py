"""The node cache's drain: shards of a version become a native step, and the coordinator's manifest makes it whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckptkit.cache.drain import Drainer
from ckptkit.cache.durable import DurableRun
from ckptkit.cache.events import Drained, Scrubbed
from ckptkit.cache.messages import SlotRecord, Version
from ckptkit.cache.throttle import Throttle
from ckptkit.errors import StoreError
from ckptkit.faults.crash.scenarios.base import synth
from ckptkit.faults.crash.scenarios.writing import WriteStep
from ckptkit.formats.native import step_dir
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, NAME, Manifest, digests_name, extras_name

STEP, INC = 2, "5a" * 16


class _Slots:
    """The slots of a node, read from the files of a native checkpoint: what they hold is the same, byte for byte."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.manifest = Manifest.parse(NAME, self._read(NAME))

    def _read(self, name: str) -> bytes:
        with open(os.path.join(self._folder, name), "rb") as file:
            return file.read()

    def records(self, version: Version) -> list[SlotRecord]:
        files = self.manifest.files
        return [
            SlotRecord(
                rank, "own/0", "SEALED", version=version, rank=rank, world=len(files),
                index_hash=self.manifest.index, used=file.size, digest=file.digest,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip

    def read_side(self, slot: int, kind: str) -> bytes:
        if kind == "extras":
            return self._read(extras_name(file_name(slot)))
        name = digests_name(file_name(slot))
        found = RankDigests.parse(name, self._read(name))
        # A daemon's shards name the incarnation that saved them.
        return replace(found, step=STEP, epoch=0, incarnation=bytes.fromhex(INC)).to_bytes()

    def read_index(self, index_hash: str) -> bytes | None:
        return self._read(INDEX)

    @contextmanager
    def mapped(self, slot: int, used: int) -> Iterator[memoryview]:
        yield memoryview(self._read(file_name(slot)))[:used]


class Drain(WriteStep):
    """The real `Drainer` and `DurableRun`, on slots that are files."""

    new = step_dir(STEP, 0)

    def make_source(self, path: str) -> None:
        synth(path, 2, layout="ep=2,dp=2")

    def write(self, target: str, **options: Any) -> None:
        slots = _Slots(self._source)
        manifest = slots.manifest
        version = Version(0, STEP, INC)
        durable = DurableRun(os.path.dirname(target))
        faults: list[str] = []

        def done(event: Drained | Scrubbed) -> None:
            if not isinstance(event, Drained) or event.failure:
                faults.append(str(event))
                drainer.cancel(version)

        drainer = Drainer(
            slots, durable, Throttle(0), lambda *args, **more: None,  # type: ignore[arg-type]
            done=done, over=lambda records, seconds: None, moved=lambda nbytes: None, mismatch=lambda: None,
        )  # fmt: skip
        try:
            drainer.drain(version, slots.records(version))
            assert drainer._thread is not None
            drainer._thread.join()
            if faults:
                raise StoreError(faults[0])
            durable.write_manifest(version, len(manifest.files), (version.epoch, version.inc))
        finally:
            drainer.close()
            durable.close()

    def again(self, root: str) -> None:
        self.act(root)
