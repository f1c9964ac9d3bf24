"""A rank of a job without a model: numpy arrays whose values follow from the step, saved through the cache and checked at every restore.

Run as a program it obeys commands, one JSON object a line on standard input, and answers each with one line on standard output; so that it
can be stopped anywhere. `{"do": "run", …}` trains by itself until it is done.

    {"do": "start", "members": [...], "epoch": 1, "inc": "…"}   join and restore; answers with the step, after every value was compared
    {"do": "save", "step": 7}                                   begin, write, seal
    {"do": "begin" | "write" | "seal" | "abort", "step": 7}     the parts of that
    {"do": "wait", "step": 7, "level": 2, "timeout": 20}
    {"do": "run", "steps": 100, "every": 5, …}
"""

import faulthandler
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.cache.client import CacheClient, Lane, Located, Member, Skipped, Slot
from ckptkit.cache.store import LocatedStore
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.destination import Written
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.shards import shards
from ckptkit.errors import StoreError
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.native_manifest import INDEX, about, extras_bytes
from ckptkit.formats.reference import Truth, leaf_digests, random_values, regions, stored_truth
from ckptkit.stores.base import Store

SHAPES = {
    "w": ((512, 1024), "float32"), "b": ((300,), "float32"), "e": ((7, 64, 64), "bfloat16"), "one": ((1,), "float32"),
}  # fmt: skip


class Model:
    """The arrays of one layout, `dp=world,zero=3`; `rank`'s file is laid out once."""

    def __init__(self, world: int, rank: int, shapes: dict[str, Any] | None = None) -> None:
        wanted = {
            name: (tuple(shape), dtype_named(dtype)) for name, (shape, dtype) in (shapes or SHAPES).items()
        }
        self.truth: Truth = stored_truth(wanted)
        self.world, self.rank = world, rank
        self.layout = Layout.parse(f"dp={world},zero=3")
        laid = shards(self.truth.names, self.layout, self.truth.held, self.truth.tensors, pad=True)
        self.destination = NativeFormat().lay_out(laid)
        self.catalog: Catalog = self.destination.catalog
        self.largest = max(file.size for file in self.catalog.files)
        self.nbytes = self.catalog.files[rank].size
        self.about = about(self.layout, self.catalog.names, None, None)

    def index(self) -> bytes:
        """`index.npz` of the layout."""
        nothing = [
            Written(f.path, f.size, leaf_digests(bytes(f.size), f.data_start)) for f in self.catalog.files
        ]
        return dict(self.destination.finish(nothing))[INDEX]

    def file(self, step: int, seed: int | None = None) -> bytearray:
        """This rank's file at a step; `seed` gives other values than those of the step."""
        files = [bytearray(file.size if n == self.rank else 0) for n, file in enumerate(self.catalog.files)]
        values = random_values(self.truth.tensors, self.truth.held, step if seed is None else seed)
        for key, region, box in self._mine(files):
            region[...] = values[key][box]
        data = files[self.rank]
        for literal in self.destination.literals.get(self.rank, ()):
            data[literal.offset : literal.offset + len(literal.data)] = literal.data
        return data

    def _mine(self, files: list[bytearray]) -> Iterator[Any]:
        """The regions of this rank's file; the other files are empty, so theirs must not be made."""
        full = [
            bytearray(file.size) if n != self.rank else files[n] for n, file in enumerate(self.catalog.files)
        ]
        entries, pieces = self.catalog.entries, self.catalog.pieces
        for k, found in enumerate(regions(self.catalog, full)):
            if int(entries.file[int(pieces.entry[k])]) == self.rank:
                yield found

    def extras(self, step: int) -> bytes:
        made = Extras(
            common={"step": step, "loader": {"position": step * 17}}, by_coordinate=self._coordinate(step)
        )
        return extras_bytes(made, self.layout, self.rank, self.about)

    def _coordinate(self, step: int) -> dict[str, Any]:
        from ckptkit.formats.native_manifest import coordinate_name

        return {coordinate_name(self.layout, self.rank): {"rng": [step, self.rank]}}


class WrongError(Exception):
    """A restore gave other bytes or extras than were saved, and did not notice."""


def check(store: Store, truth: Truth, step: int, seed: int | None = None) -> int:
    """Compare every element and the extras of a checkpoint with what was saved; gives the bytes of its rank files.

    Raises:
        WrongError: something differs, although the store gave it as good.
        CkptError: the store itself found something wrong.
    """
    catalog = NativeFormat().read(store)
    files = []
    for number, file in enumerate(catalog.files):
        data = bytearray(file.size)
        with store.open(file.path) as reader:
            reader.readinto(0, memoryview(data))
        found = catalog.leaves(number) if catalog.leaves is not None else None
        if found is None:
            raise WrongError(f"{file.path} has no digests")
        if (leaf_digests(bytes(data), file.data_start).digests != found.digests).any():
            raise WrongError(f"{file.path} differs from its digests")
        files.append(data)
    values = random_values(truth.tensors, truth.held, step if seed is None else seed)
    seen = {key: np.zeros(array.shape, bool) for key, array in values.items()}
    for key, region, box in regions(catalog, files):
        if not np.array_equal(region, values[key][box]):
            raise WrongError(f"{key} {box} at step {step} is not what was saved")
        seen[key][box] = True
    if not all(array.all() for array in seen.values()):
        raise WrongError(f"elements are missing at step {step}")
    if catalog.step != step:
        raise WrongError(f"the catalog says step {catalog.step}, not {step}")
    if catalog.extras.common != {"step": step, "loader": {"position": step * 17}}:
        raise WrongError(f"extras at step {step} are {catalog.extras.common}")
    for name, value in catalog.extras.by_coordinate.items():
        rank = int(name.rpartition("dp=")[2])
        if value != {"rng": [step, rank]}:
            raise WrongError(f"extras of {name} at step {step} are {value}")
    if len(catalog.extras.by_coordinate) != len(files):
        raise WrongError(f"extras of {sorted(catalog.extras.by_coordinate)} only, of {len(files)} ranks")
    return sum(map(len, files))


class Rank:
    """One rank and its connection."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.rank, self.local_rank, self.world = options["rank"], options["local_rank"], options["world"]
        self.scale = options.get("time_scale", 1.0)
        self.digests = options.get("digests", False)
        self.by_epoch = options.get(
            "by_epoch", False
        )  # one step of two epochs differs, so that a mixture is seen
        self.model = Model(self.world, self.rank, options.get("shapes"))
        self.client = CacheClient.connect(
            options["socket"],
            options["job"],
            timeout_s=options.get("connect_s", 20.0),
            begin_s=options.get("begin_s", 5.0),
            time_scale=self.scale,
        )
        self.lane: Lane | None = None
        self.slots: dict[int, Slot] = {}
        self.index_hash = ""

    def info(self, **_: Any) -> dict[str, Any]:
        found = self.client.info()
        return {
            "node": found.node,
            "address": found.address,
            "domain": found.domain,
            "max_epoch": found.max_epoch,
        }

    def join(
        self, members: list[dict[str, Any]], epoch: int, inc: str, fresh: bool = False, **_: Any
    ) -> dict[str, Any]:
        self.lane = self.client.join(
            epoch, inc, rank=self.rank, local_rank=self.local_rank, members=[Member(**m) for m in members],
            bytes_max=self.model.largest, fresh=fresh, timeout_s=60,
        )  # fmt: skip
        self.index_hash = self.client.put_index(self.model.index())
        return {"slots": [slot.number for slot in self.lane.slots], "slot_bytes": self.lane.slot_bytes}

    def start(self, timeout: float = 60.0, **options: Any) -> dict[str, Any]:
        """Join and restore."""
        self.join(**options)
        return self.restore(timeout)

    def restore(self, timeout: float = 60.0, **_: Any) -> dict[str, Any]:
        """Restore; the answer says what was compared, and what was wrong although the cache gave it as good."""
        found: dict[str, Any] = {"attempts": 0, "bytes": 0, "wrong": [], "passed_over": [], "sources": {}}
        while True:
            located = self.client.locate(timeout)
            found["attempts"] += 1
            why, late = "", False
            if located is not None:
                why, late = self._load(located, found)
            if self.client.report(not why, why, timeout, late=late):
                step, epoch = (located.step, located.epoch) if located is not None else (None, None)
                return {**found, "step": step, "epoch": epoch}

    def _load(self, located: Located, found: dict[str, Any]) -> tuple[str, bool]:
        """Why this rank cannot use the version, empty where it can; and whether it may be tried again."""
        try:
            with LocatedStore(self.client, located) as store:
                try:
                    found["bytes"] += check(
                        store, self.model.truth, located.step, self._seed(located.step, located.epoch)
                    )
                finally:
                    found["sources"] = dict(store.bytes_from)
            return "", False
        except WrongError as error:
            found["wrong"].append(str(error))
            return str(error), False
        except Exception as error:  # noqa: BLE001  (whatever it is, this rank cannot use the version)
            found["passed_over"].append(f"step {located.step}: {type(error).__name__}: {error}")
            return found["passed_over"][-1], isinstance(error, StoreError)

    def begin(self, step: int, wait: bool = False, **_: Any) -> dict[str, Any]:
        slot = self.client.begin(step, self.model.nbytes, wait=wait)
        if isinstance(slot, Skipped):
            return {"skipped": slot.reason, "detail": slot.detail}
        self.slots[step] = slot
        return {"slot": slot.number}

    def _seed(self, step: int, epoch: int) -> int:
        return step + 1_000_003 * epoch if self.by_epoch else step

    def _file(self, step: int) -> bytearray:
        assert self.lane is not None
        return self.model.file(step, self._seed(step, self.lane.epoch))

    def write(self, step: int, part: float = 1.0, flip: int | None = None, **_: Any) -> dict[str, Any]:
        """Copy the file into the slot, or a part of it; `flip` changes a byte afterwards, as a faulty copy would."""
        data = self._file(step)
        count = int(len(data) * part)
        self.slots[step].buffer[:count] = data[:count]
        if flip is not None:
            self.slots[step].buffer[flip] ^= 1
        return {"bytes": count}

    def seal(self, step: int, **_: Any) -> dict[str, Any]:
        slot = self.slots.pop(step)
        skipped = self.client.seal(
            slot, self.model.nbytes, self.index_hash, self._given(step), self.model.extras(step), step=step
        )
        return {
            "sealed": skipped is None,
            "why": "" if skipped is None else f"{skipped.reason}: {skipped.detail}",
        }

    def _given(self, step: int) -> bytes | None:
        """Digests as a device computes them: of what the arrays hold, whatever arrived in the slot."""
        if not self.digests:
            return None
        import xxhash

        from ckptkit.formats.native_digests import RankDigests

        assert self.lane is not None
        data = bytes(self._file(step))
        file = self.model.catalog.files[self.rank]
        made = RankDigests(
            data_start=file.data_start, data_size=len(data) - file.data_start, header=xxhash.xxh3_128_digest(data[: file.data_start]),
            extras=xxhash.xxh3_128_digest(self.model.extras(step)), index=bytes.fromhex(self.index_hash), world=self.world, rank=self.rank,
            step=step, epoch=self.lane.epoch, incarnation=bytes.fromhex(self.lane.inc), leaves=leaf_digests(data, file.data_start).digests,
        )  # fmt: skip
        return made.to_bytes()

    def abort(self, step: int, **_: Any) -> dict[str, Any]:
        self.client.abort(self.slots.pop(step), step=step)
        return {}

    def save(self, step: int, tries: int = 1, **_: Any) -> dict[str, Any]:
        """Save; while every slot is busy try again, `tries` times in all."""
        for left in reversed(range(tries)):
            found = self.begin(step, wait=left > 0)
            if found.get("skipped") != "busy" or not left:
                break
            time.sleep(0.05)
        if "skipped" in found:
            return found
        self.write(step)
        return self.seal(step)

    def wait(self, step: int, level: int = 1, timeout: float = 30.0, **_: Any) -> dict[str, Any]:
        return {"reached": self.client.wait(step, level, timeout)}

    def skipped(self, **_: Any) -> dict[str, Any]:
        return {"skipped": self.client.skipped, "fenced": self.client.fenced}

    def mark_bad(self, epoch: int, step: int, **_: Any) -> dict[str, Any]:
        self.client.mark_bad(epoch, step, "loss is nan")
        return {}

    def finish(self, **_: Any) -> dict[str, Any]:
        self.client.finish()
        return {}

    def run(
        self, first: int, steps: int, every: int = 1, pause_s: float = 0.0, log: str = "", **_: Any
    ) -> dict[str, Any]:
        """Train from step `first` to `steps`, saving every so many; each step that was sealed is noted in the file `log`."""
        sealed = skipped = 0
        for step in range(first, steps):
            time.sleep(pause_s)
            if (step + 1) % every:
                continue
            found = self.save(step + 1)
            if found.get("sealed"):
                sealed += 1
            else:
                skipped += 1
            if log:
                with Path(log).open("a") as file:
                    file.write(json.dumps({"step": step + 1, "rank": self.rank, **found}) + "\n")
        return {"sealed": sealed, "skipped": skipped}


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # tells where each thread is
    rank = Rank(json.loads(sys.argv[1]))
    print(json.dumps({"ready": rank.info()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "exit":
            break
        try:
            answer = getattr(rank, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001  (who asked judges)
            answer = {
                "error": f"{type(error).__name__}: {error}",
                "code": getattr(error, "facts", {}).get("code"),
            }
        print(json.dumps(answer), flush=True)
    rank.client.close()


if __name__ == "__main__":
    main()
