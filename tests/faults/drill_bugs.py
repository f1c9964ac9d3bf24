"""Mistakes in the node cache, as patches of the real daemons and ranks: a drill must turn red for each.

python -m tests.faults.drill_bugs NAME FD       # a nursery whose children have the mistake
"""

import dataclasses
import sys
from collections.abc import Callable

import pytest

from ckptkit.cache import config, copies, pull, store
from ckptkit.cache.durable import DurableRun
from ckptkit.faults.cluster import nursery
from tests.cache import mutations

Patch = Callable[[pytest.MonkeyPatch], None]


def of_protocol(mutation: Callable[[], mutations.Patches]) -> Patch:
    """A mistake of `tests.cache.mutations`, put into the processes."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for (owner, name), value in mutation().items():
            monkeypatch.setattr(owner, name, value)

    return patch


def digests_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Whoever reads a slot or fetches a shard takes what it gets."""
    patch.setattr(copies._Check, "arrived", lambda self, nbytes: None)


def extras_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A copy on another node has the extras of no step, and nobody compares."""
    patch.setattr(pull, "extras_of", lambda sources, digests: b'{"common": {}, "by_coordinate": {}}')
    patch.setattr(store, "extras_of", lambda sources, digests: sources[0].small("extras"))


def device_digests_not_compared(patch: pytest.MonkeyPatch) -> None:
    real = config.load_config
    patch.setattr(config, "load_config", lambda path: dataclasses.replace(real(path), hash_verify=False))


def pins_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """Retention removes what was pinned."""
    patch.setattr(DurableRun, "pins", lambda self: set())


def later_epochs_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """Whoever was superseded goes on writing to storage."""
    patch.setattr(DurableRun, "check_epoch", lambda self, epoch, inc=None: None)


BUGS: dict[str, tuple[Patch, str]] = {
    "digests are not checked": (digests_not_checked, "flip-without-copy"),
    "extras are not copied": (extras_not_copied, "node-lost"),
    "a vote is missing": (of_protocol(mutations.commit_without_one_vote), "partition"),
    "a vote counts for another node": (of_protocol(mutations.vote_counted_for_another_node), "partition"),
    "a zombie's slot is used again": (of_protocol(mutations.quarantined_slot_reused), "zombie-rank"),
    "there is no fence": (later_epochs_not_looked_at, "zombie-coordinator"),
    "a slot in use is evicted": (
        of_protocol(mutations.protected_version_evicted),
        "saves-faster-than-copies",
    ),
    "a torn slot counts as sealed": (of_protocol(mutations.torn_slot_taken_for_sealed), "second-daemon"),
    "a device's digests are not compared": (device_digests_not_compared, "flip-in-copy"),
    "pins are not looked at": (pins_not_looked_at, "retention-under-kill"),
}
"""Name of the mistake → its patch and a drill that it spoils."""

if __name__ == "__main__":
    BUGS[sys.argv[1]][0](pytest.MonkeyPatch())
    nursery.main()
