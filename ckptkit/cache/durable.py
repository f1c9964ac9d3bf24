"""A job's run folder in durable storage: its steps, claims of epochs, pins and bans.

    <run>/step-00001200.e3/   a native checkpoint; whole when it has a manifest.json, which is written last
    <run>/epochs/00000003     claimed by the incarnation that it names
    <run>/pins/step-00001200.e3
    <run>/banned.json

Everything here blocks; the daemon calls it from threads.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from ckptkit import stores
from ckptkit.cache.codec import MessageError, build, decode, encode
from ckptkit.cache.messages import Bans, Place, Shard, Version
from ckptkit.errors import CkptError, CorruptionError, FormatError, ShardMissingError, StoreError
from ckptkit.formats.native import parse_step_dir, step_dir
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, NAME, Manifest, digests_name, extras_name, manifest_of
from ckptkit.stores.shared import SharedFolder, shared_folder

NO_INC = "0" * 32
"""Incarnation of steps that no daemon wrote."""

_EPOCH = re.compile(r"epochs/([0-9]{8,16})")
_CLAIMS = 3
"""Epochs whose members are looked for."""
_BANS = "banned.json"


@dataclass(frozen=True)
class DurableStep:
    """One step folder that has a manifest."""

    name: str
    step: int
    epoch: int
    manifest: Manifest

    @property
    def version(self) -> Version:
        return Version(self.epoch, self.step, self.manifest.incarnation or NO_INC)

    @property
    def shards(self) -> tuple[Shard, ...]:
        world = len(self.manifest.files)
        return tuple(
            Shard(self.version, rank, world, self.manifest.index, file.size, file.digest)
            for rank, file in enumerate(self.manifest.files)
        )


class DurableRun:
    """The run folder at a URL. `folder` writes to it."""

    def __init__(self, url: str, *, direct: bool = True) -> None:
        self.url = url
        self._direct = direct
        self._folder: SharedFolder | None = None

    @property
    def folder(self) -> SharedFolder:
        if self._folder is None:
            self._folder = shared_folder(self.url, direct=self._direct)
        return self._folder

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        """Folders of steps, whole or not, the newest last. Raises StoreError where storage does not answer."""
        try:
            there = stores.folders(self.url)
        except StoreError:
            if stores.is_folder(self.url):
                raise
            return []
        found = [(number[::-1], name) for name in there if (number := parse_step_dir(name)) is not None]
        return [name for _, name in sorted(found)]

    def step(self, name: str) -> DurableStep | None:
        """A step by the name of its folder; None where it has no manifest. Raises CkptError where the manifest cannot be used."""
        try:
            manifest = Manifest.parse(f"{self.url}/{name}/{NAME}", self.folder.read(f"{name}/{NAME}"))
        except ShardMissingError:
            return None
        number = parse_step_dir(name)
        assert number is not None
        return DurableStep(name, number[0], number[1], manifest)

    def steps(self) -> tuple[list[DurableStep], list[str]]:
        """Every whole step, the oldest first, and what is wrong with those whose manifests cannot be used."""
        found, faults = [], []
        for name in self.names():
            try:
                step = self.step(name)
            except FormatError as error:
                faults.append(str(error))
                continue
            except CorruptionError as error:
                faults.append(str(error))
                continue
            if step is not None:
                found.append(step)
        return found, faults

    def write_manifest(self, version: Version, world: int, writer: tuple[int, str]) -> None:
        """Make a step whole: check every file, that `writer` (epoch and incarnation) is not fenced, write the manifest, read it back.

        Raises CkptError; the step is then not whole, unless the message says that it is.
        """
        name = step_dir(version.step, version.epoch)
        digests: list[RankDigests] = []
        for rank in range(world):
            path = digests_name(file_name(rank))
            found = RankDigests.parse(path, self.folder.read(f"{name}/{path}"))
            size = self.folder.size(f"{name}/{file_name(rank)}")
            if size != found.data_start + found.data_size:
                raise StoreError(
                    f"{self.url}/{name}/{file_name(rank)} has {size} bytes, but should have {found.data_start + found.data_size}"
                )
            digests.append(found)
        extras = self.folder.read(f"{name}/{extras_name(file_name(0))}")
        made = manifest_of(f"{self.url}/{name}", extras, digests)
        if (made.step, made.epoch, made.incarnation) != (version.step, version.epoch, version.inc):
            raise CorruptionError(f"{self.url}/{name} holds files of another save than {version}")
        if xxhash.xxh3_128_hexdigest(self.folder.read(f"{name}/{INDEX}")) != made.index:
            raise CorruptionError(f"{self.url}/{name}/{INDEX} is not the index of {version}")
        self.check_epoch(*writer)
        content = made.to_bytes()
        self.folder.write_small(f"{name}/{NAME}", content)
        if self.folder.read(f"{name}/{NAME}") != content:
            raise StoreError(f"{self.url}/{name}/{NAME} reads back otherwise than it was written")

    # ── epochs, pins, bans ───────────────────────────────────────────────────────────────────────────────────

    def latest_epoch(self) -> int:
        """The highest epoch that was claimed or has a step; 0 where there is none."""
        claimed = [int(match[1]) for path in self._below("epochs") if (match := _EPOCH.fullmatch(path))]
        stepped = [number[1] for name in self.names() if (number := parse_step_dir(name))]
        return max([0, *claimed, *stepped])

    def claim(self, epoch: int, inc: str, places: Iterable[Place] = ()) -> None:
        """Claim an epoch for an incarnation, again where that has it already, and say where its members are. Raises StoreError where another one has it, or a later one began."""
        name = f"epochs/{epoch:08d}"
        members = {place.node: place.address for place in places}
        if not self.folder.write_new(name, json.dumps({"inc": inc, "members": members}).encode()):
            self._check_claim(epoch, inc)
        self.check_epoch(epoch)

    def former(self) -> tuple[Place, ...]:
        """Where members of the last epochs were: a node without memory may need them. What cannot be read is left out."""
        found: dict[str, Place] = {}
        for name in sorted(path for path in self._below("epochs") if _EPOCH.fullmatch(path))[-_CLAIMS:]:
            with contextlib.suppress(CkptError, MessageError, ValueError, AttributeError):
                for node, address in json.loads(self.folder.read(name)).get("members", {}).items():
                    found[node] = build(Place, {"node": node, "address": address})
        return tuple(found.values())

    def _check_claim(self, epoch: int, inc: str) -> None:
        try:
            holder = json.loads(self.folder.read(f"epochs/{epoch:08d}")).get("inc")
        except (ShardMissingError, ValueError, AttributeError):
            return
        if holder != inc:
            raise StoreError(
                f"epoch {epoch} was claimed in {self.url} by another start of the job; this one writes nothing there"
            )

    def check_epoch(self, epoch: int, inc: str | None = None) -> None:
        """Raise StoreError where a later epoch was claimed, or this one by another incarnation (where `inc` is given): we are fenced."""
        latest = max([0, *(int(m[1]) for path in self._below("epochs") if (m := _EPOCH.fullmatch(path)))])
        if latest > epoch:
            raise StoreError(
                f"epoch {latest} was claimed in {self.url}; epoch {epoch} writes nothing there any more"
            )
        if inc is not None:
            self._check_claim(epoch, inc)

    def pins(self) -> set[str]:
        """Names of step folders that retention never removes."""
        return {path.removeprefix("pins/") for path in self._below("pins")}

    def pin(self, name: str) -> None:
        self.folder.write_small(f"pins/{name}", b"{}")

    def unpin(self, name: str) -> None:
        self.folder.remove(f"pins/{name}")

    def bans(self) -> Bans:
        """The durable list of bans. Raises FormatError where it cannot be read, since a banned step must not come back by accident."""
        try:
            return decode(self.folder.read(_BANS), Bans)
        except ShardMissingError:
            return Bans()
        except MessageError as error:
            raise FormatError(
                f"{self.url}/{_BANS} cannot be used: {error}; correct it or remove it"
            ) from error

    def add_bans(self, bans: Bans) -> None:
        known = self.bans()
        joined = known.union(bans)
        if joined != known:
            self.folder.write_small(_BANS, encode(joined))

    def _below(self, folder: str) -> list[str]:
        """Files in a folder of ours, by their path in the run."""
        below = shared_folder(f"{self.url}/{folder}")
        try:
            return [f"{folder}/{path}" for path in below.files()]
        finally:
            below.close()

    # ── removal ──────────────────────────────────────────────────────────────────────────────────────────────

    def remove(self, name: str) -> None:
        """Remove a step: its manifest first, so that nobody takes what is left for a checkpoint."""
        assert parse_step_dir(name) is not None
        self.folder.remove(f"{name}/{NAME}")
        below = shared_folder(f"{self.url}/{name}")
        try:
            for path in below.files():
                below.remove(path)
            below.remove_empty()
        finally:
            below.close()

    def retain(self, *, keep_last: int, keep_every: int, epoch: int, restored: Version | None) -> list[str]:
        """Remove steps that are old enough, and give their names.

        Never removed: the newest, pinned ones, multiples of `keep_every`, and steps of earlier epochs that lie above the one from which this
        epoch started: a run that was started afresh by mistake must not age out the real one.
        """
        if keep_last <= 0:
            return []
        steps, _ = self.steps()
        old = to_remove(
            steps, self.pins(), keep_last=keep_last, keep_every=keep_every, epoch=epoch, restored=restored
        )
        for step in old:
            self.check_epoch(epoch)
            self.remove(step.name)
        return [step.name for step in old]

    def sweep(self, epoch: int, age_s: float) -> list[str]:
        """Remove folders of steps of earlier epochs that never became whole and were not touched for `age_s`; gives their names."""
        swept = []
        for name in self.names():
            number = parse_step_dir(name)
            assert number is not None
            if number[1] >= epoch:
                continue
            with contextlib.suppress(CkptError):
                whole = self.folder.size(f"{name}/{NAME}") >= 0
                if not whole and stores.open_store(f"{self.url}/{name}").age_s() > age_s:
                    self.remove(name)
                    swept.append(name)
        return swept


def to_remove(
    steps: Sequence[DurableStep],
    pins: set[str],
    *,
    keep_last: int,
    keep_every: int,
    epoch: int,
    restored: Version | None,
) -> list[DurableStep]:
    """Which of the whole `steps` retention removes (`DurableRun.retain`), the oldest first."""

    def ours(step: DurableStep) -> bool:
        if step.epoch >= epoch:
            return True
        return restored is not None and (step.epoch, step.step) <= (restored.epoch, restored.step)

    ordered = sorted((step for step in steps if ours(step)), key=lambda step: (step.epoch, step.step))
    old = ordered[: -max(keep_last, 1)]
    return [
        step for step in old if step.name not in pins and not (keep_every and step.step % keep_every == 0)
    ]
