"""What a node asks of others and of durable storage: inventories and lists for a restore, the manifest of what is restored, indexes.

All of it runs beside the protocol and gives plain values; who asked decides what becomes of them.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from ckptkit import stores
from ckptkit.cache.codec import MessageError, decode
from ckptkit.cache.copies import (
    Arrived,
    Copy,
    DurableCopy,
    MappedCopy,
    PeerCopy,
    digests_of,
    extras_of,
    none_right,
)
from ckptkit.cache.durable import NO_INC, DurableRun
from ckptkit.cache.events import DurableListed
from ckptkit.cache.fetch import Peers
from ckptkit.cache.messages import DURABLE, Bans, Inventory, RestoreDecision, Shard, SlotRecord, Version
from ckptkit.cache.node import Node
from ckptkit.cache.outbox import Outbox
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import Choice, choose
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.errors import CkptError, StoreError
from ckptkit.formats.native import step_dir
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, RankFile, assembled

_MOST_INVENTORY = 64 << 20


class Gathering:
    """Questions of one daemon.

    Args:
        address: Gives a node's address, or None where it is not known.
        former: Addresses of nodes that were members before.
        peers: For threads; `outbox` is for the event loop.
        run: None where nothing is drained.
    """

    def __init__(
        self, tmpfs: Tmpfs, outbox: Outbox, peers: Callable[[], Peers], run: DurableRun | None, node: str,
        address: Callable[[str], str | None], former: Callable[[], Mapping[str, str]],
    ) -> None:  # fmt: skip
        self.tmpfs, self.outbox, self.peers, self.run = tmpfs, outbox, peers, run
        self.node, self.address, self.former = node, address, former

    # ── for a coordinator ────────────────────────────────────────────────────────────────────────────────────

    async def inventory(self, address: str) -> Inventory | None:
        """A node's inventory; None where it does not answer, or not with one."""
        data = await self.outbox.get(address, "/v1/inventory", _MOST_INVENTORY)
        if data is None:
            return None
        try:
            return decode(data, Inventory, limit=_MOST_INVENTORY)
        except MessageError:
            return None

    async def durable(self) -> DurableListed:
        """The durable versions and bans, or the failure to list them."""
        if self.run is None:
            return DurableListed()
        try:
            return await asyncio.to_thread(self._list, self.run)
        except CkptError as error:
            return DurableListed(failure=str(error)[:900])

    def _list(self, run: DurableRun) -> DurableListed:
        steps, _ = run.steps()
        shards = tuple(shard for step in steps for shard in step.shards)
        return DurableListed(shards, run.bans(), former=run.former())

    async def find(self, node: Node, step: int, epoch: int | None) -> Choice | None:
        """Where the shards of a version are, on whatever node and in storage; None where some are nowhere. Raises StoreError."""
        members = node.epoch.addresses if node.epoch is not None else {}
        others = [address for name, address in ({**self.former(), **members}).items() if name != self.node]
        found = {self.node: node.inventory()}
        for inventory in await asyncio.gather(*(self.inventory(address) for address in others)):
            if inventory is not None:
                found[inventory.node] = inventory
        listed = await self.durable()
        if listed.failure:
            raise StoreError(listed.failure)

        def meant(shard: Shard) -> bool:
            return shard.version.step == step and epoch in (None, shard.version.epoch)

        narrowed = {name: Inventory(name, tuple(filter(meant, i.shards))) for name, i in found.items()}
        cliques = Cliques(node.epoch.domains if node.epoch is not None else {self.node: ""}, 0)
        return choose(narrowed, filter(meant, listed.shards), Bans(), (), cliques)

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────

    def copies(self, version: Version, rank: int, sources: Iterable[str]) -> list[Copy]:
        """The copies of a shard on other nodes and in durable storage, in the order of `sources`; places that are not known are left out."""
        found: list[Copy] = []
        for source in sources:
            if source == DURABLE:
                if self.run is not None:
                    found.append(_Late(self.run, version, rank))
            elif source != self.node and (address := self.address(source)) is not None:
                found.append(PeerCopy(self.peers(), address, version, rank))
        return found

    def own(self, record: SlotRecord, view: memoryview) -> MappedCopy:
        """The copy in a slot of this node, mapped at `view`."""
        return MappedCopy(view, lambda what: self.tmpfs.read_side(record.slot, what), f"slot {record.slot}")

    def files(self, records: Sequence[SlotRecord]) -> list[dict[str, Any]]:
        """What a manifest says of these shards. Ones whose digests cannot be read are left out."""
        rows = []
        for record in records:
            try:
                digests = RankDigests.parse(
                    f"slot {record.slot}", self.tmpfs.read_side(record.slot, "digests")
                )
            except CkptError:
                continue
            rows.append(
                {
                    "rank": record.rank,
                    "size": digests.data_start + digests.data_size,
                    "digest": digests.content.hex(),
                    "extras": digests.extras.hex(),
                }
            )
        return rows

    # ── for ranks that restore ───────────────────────────────────────────────────────────────────────────────

    async def manifest(self, decision: RestoreDecision, own: Sequence[SlotRecord]) -> bytes:
        """The `manifest.json` of what is restored. `own` are this node's shards of it. Raises CkptError where something is missing."""
        version = decision.version
        assert version is not None
        rows: dict[int, RankFile] = {}
        self._take(rows, decision, self.files(own))
        nodes = {
            source for rank, sources in enumerate(decision.sources) if rank not in rows for source in sources
        }
        asked = [address for node in sorted(nodes - {self.node, DURABLE}) if (address := self.address(node))]
        path = f"/v1/files/{version.epoch}/{version.step}/{version.inc}"
        for answer in await asyncio.gather(*(self.outbox.get(address, path) for address in asked)):
            self._take(rows, decision, _rows(answer))
        return await asyncio.to_thread(self._assemble, decision, rows, list(own))

    def _take(
        self, rows: dict[int, RankFile], decision: RestoreDecision, found: Iterable[Mapping[str, Any]]
    ) -> None:
        for row in found:
            rank = row["rank"]
            if 0 <= rank < decision.world and row["digest"] == decision.digests[rank]:
                rows.setdefault(rank, RankFile(file_name(rank), row["size"], row["digest"], row["extras"]))

    def _assemble(self, decision: RestoreDecision, rows: dict[int, RankFile], own: list[SlotRecord]) -> bytes:
        version = decision.version
        assert version is not None
        missing = [rank for rank in range(decision.world) if rank not in rows]
        if missing and self.run is not None:
            step = self.run.step(step_dir(version.step, version.epoch))
            if step is not None and step.version == version and step.manifest.index == decision.index_hash:
                if len(missing) == decision.world:
                    return step.manifest.to_bytes()
                self._take(
                    rows, decision,
                    ({"rank": r, "size": f.size, "digest": f.digest, "extras": f.extras} for r, f in enumerate(step.manifest.files)),
                )  # fmt: skip
                missing = [rank for rank in range(decision.world) if rank not in rows]
        if missing:
            raise StoreError(
                f"no node tells the digests of rank {missing[0]} of {version} ({len(missing)} ranks in all)"
            )
        extras = self._first_extras(decision, own)
        made = assembled(
            str(version), extras, [rows[rank] for rank in range(decision.world)], index=decision.index_hash, step=version.step,
            epoch=version.epoch, incarnation="" if version.inc == NO_INC else version.inc,
        )  # fmt: skip
        return made.to_bytes()

    def _first_extras(self, decision: RestoreDecision, own: list[SlotRecord]) -> bytes:
        version = decision.version
        assert version is not None
        here: list[Copy] = [self.own(record, memoryview(b"")) for record in own if record.rank == 0]
        copies = here + self.copies(version, 0, decision.sources[0])
        _, digests = digests_of(copies, decision.digests[0])
        return extras_of(copies, digests)

    def fetch_index(self, index_hash: str, sources: Sequence[str], version: Version) -> None:
        """Make sure that an index is on this node. Blocks. Raises CorruptionError where nobody gives it right, StoreError where one was not reached."""
        if (fd := self.tmpfs.open_index(index_hash)) is not None:
            os.close(fd)
            return
        faults: list[CkptError] = []
        for source in dict.fromkeys(sources):
            try:
                data = self._index_at(source, index_hash, version)
            except CkptError as error:
                faults.append(error)
                continue
            if data is not None and xxhash.xxh3_128_hexdigest(data) == index_hash:
                self.tmpfs.put_index(index_hash, data)
                return
        raise none_right(f"no node gives the index {index_hash}", faults)

    def _index_at(self, source: str, index_hash: str, version: Version) -> bytes | None:
        if source == DURABLE:
            if self.run is None:
                return None
            return self.run.folder.read(f"{step_dir(version.step, version.epoch)}/{INDEX}")
        address = self.address(source)
        if source == self.node or address is None:
            return None
        return self.peers().get(address, f"/v1/index/{index_hash}")


class _Late(Copy):
    """A durable copy whose folder is opened when it is read."""

    kind = "durable"

    def __init__(self, run: DurableRun, version: Version, rank: int) -> None:
        self._url = f"{run.url}/{step_dir(version.step, version.epoch)}"
        self._rank = rank
        self.where = f"{self._url}/{file_name(rank)}"

    def small(self, what: str) -> bytes:
        return DurableCopy(stores.open_store(self._url), self._rank).small(what)

    def read_into(self, offset: int, buffer: memoryview, arrived: Arrived) -> None:
        DurableCopy(stores.open_store(self._url), self._rank).read_into(offset, buffer, arrived)


def _rows(answer: bytes | None) -> list[dict[str, Any]]:
    """A peer's rows, those that make sense."""
    try:
        plain = json.loads(answer or b"[]")
    except ValueError:
        return []
    kinds = {"rank": int, "size": int, "digest": str, "extras": str}
    rows = plain if isinstance(plain, list) else []
    return [
        row for row in rows
        if isinstance(row, dict) and all(type(row.get(name)) is kind for name, kind in kinds.items())
    ]  # fmt: skip
