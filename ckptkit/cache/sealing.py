"""What happens to a slot that its rank has sealed: digests computed, compared with those of the device, written down.

Before a seal is passed on, the rank's extras and its digests, where it gave some, are beside the slot; so a restarted daemon goes on here.
"""

from dataclasses import replace

import numpy as np
import xxhash

from ckptkit.cache.hashing import Hashing, check_given, data_start
from ckptkit.cache.messages import SlotRecord
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.errors import CkptError, CorruptionError
from ckptkit.formats.native_digests import RankDigests, leaf_count


class Sealing:
    """Digests of sealed slots.

    Args:
        verify: Whether leaves that came with digests are read and compared; else their digests are believed until the first scrub.
    """

    def __init__(self, tmpfs: Tmpfs, hashing: Hashing, *, verify: bool) -> None:
        self._tmpfs, self._hashing, self._verify = tmpfs, hashing, verify

    def seal(self, record: SlotRecord) -> tuple[str, str]:
        """The content digest of the rank file in a slot, in hex; or nothing, and why the shard is refused. Blocks."""
        try:
            return self._digest(record), ""
        except (CkptError, OSError) as error:
            return "", str(error)

    def _digest(self, record: SlotRecord) -> str:
        extras = self._tmpfs.read_side(record.slot, "extras")
        given = self._given(record)
        with self._tmpfs.mapped(record.slot, max(record.used, 1)) as view:
            start = data_start(view, record.used)
            found = self._identity(record, start, extras)
            if given is None or self._verify:
                leaves = self._hashing.leaves(view, start, record.used)
                found = replace(found, header=xxhash.xxh3_128_digest(view[:start]), leaves=leaves)
            else:
                found = replace(found, header=given.header, leaves=given.leaves)
        if given is not None:
            if leaf_count(given.data_size) != leaf_count(found.data_size):
                raise CorruptionError(
                    f"digests of {given.data_size} bytes were given with {found.data_size} bytes of data"
                )
            check_given(given, found)
        self._tmpfs.write_side(record.slot, "digests", found.to_bytes())
        return found.content.hex()

    def _given(self, record: SlotRecord) -> RankDigests | None:
        try:
            raw = self._tmpfs.read_side(record.slot, "digests")
        except CkptError:
            return None
        return RankDigests.parse(f"the digests of rank {record.rank}", raw)

    def _identity(self, record: SlotRecord, start: int, extras: bytes) -> RankDigests:
        """Digests with everything but the data's."""
        version = record.version
        assert version is not None
        return RankDigests(
            data_start=start, data_size=record.used - start, header=bytes(16), extras=xxhash.xxh3_128_digest(extras),
            index=bytes.fromhex(record.index_hash), world=record.world, rank=record.rank, step=version.step, epoch=version.epoch,
            incarnation=bytes.fromhex(version.inc), leaves=np.zeros((0, 16), np.uint8),
        )  # fmt: skip
