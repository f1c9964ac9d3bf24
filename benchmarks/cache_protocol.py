"""What the coordinator of the node cache costs: votes, holdings and records of one save, decoded, decided and encoded.

    python -m benchmarks.cache_protocol [NODES] [RANKS_PER_NODE] [SAVES]

No sockets: this is the part of the commit latency that is computed, to be put beside a round trip of the network
(`benchmarks/cache.py`). One thread, one process; the state machine is the daemon's.
"""

import sys
import time
from statistics import median

from ckptkit.cache.codec import decode, encode
from ckptkit.cache.coordinator import Coordinator
from ckptkit.cache.events import Broadcast, DurableListed, InventoryArrived, Received, WriteCoordinator
from ckptkit.cache.messages import (
    TO_COORDINATOR,
    Epoch,
    Holding,
    Inventory,
    Member,
    Record,
    RestoreReport,
    Sealed,
    Shard,
    Version,
    Vote,
)
from ckptkit.cache.settings import Settings

INC, INDEX = "5e" * 16, "1d" * 16


def trained(nodes: int, ranks: int) -> Coordinator:
    """A coordinator whose epoch has begun to train, from a restored step."""
    members = tuple(
        Member(node * ranks + local, f"node{node:04d}", f"host{node}:9000", f"rack{node // 8}")
        for node in range(nodes) for local in range(ranks)
    )  # fmt: skip
    epoch = Epoch(1, INC, members)
    coordinator, _ = Coordinator.start(epoch, None, Settings(), 0.0)
    coordinator.handle(DurableListed(), 0.0)
    world, old = nodes * ranks, Version(0, 1, INC)
    for node in epoch.ranks:  # a step of an earlier epoch, with its copies
        mates = (node, *coordinator.cliques.mates(node))
        held = (
            Shard(old, rank, world, INDEX, 1, f"{rank:032x}")
            for other in mates
            for rank in epoch.ranks[other]
        )
        coordinator.handle(InventoryArrived(node, Inventory(node, tuple(held))), 0.0)
    for node in epoch.ranks:
        coordinator.handle(Received(RestoreReport(1, INC, node, 1)), 0.0)
    assert coordinator.record is not None
    return coordinator


def coordinator_cost(nodes: int = 128, ranks: int = 8, saves: int = 50) -> dict[str, float]:
    """Processor time of whole saves, in seconds.

    Returns:
        `vote`: median of one vote, decoded and counted. `decision`: median from the last vote's bytes to the bytes of the stored and of
        the broadcast record (encoded once for all nodes). `save`: median of all votes and all holdings of a save, up to level 2.
        `vote_bytes`, `record_bytes`: sizes of the messages.
    """
    coordinator = trained(nodes, ranks)
    epoch = coordinator.epoch
    votes: list[float] = []
    decisions: list[float] = []
    whole: list[float] = []
    sizes = {"vote_bytes": 0, "record_bytes": 0}
    for step in range(1, saves + 1):
        seals = {
            node: tuple(Sealed(rank, f"{rank:032x}") for rank in own) for node, own in epoch.ranks.items()
        }
        bodies = [encode(Vote(1, INC, node, step, INDEX, seals[node])) for node in epoch.ranks]
        sizes["vote_bytes"] = len(bodies[0])
        began = time.process_time()
        for body in bodies:
            start = time.perf_counter()
            effects = coordinator.handle(Received(decode(body, *TO_COORDINATOR)), float(step))
            for effect in effects:
                if isinstance(effect, WriteCoordinator):
                    encode(effect.record)
                elif isinstance(effect, Broadcast):
                    sizes["record_bytes"] = len(encode(effect.message))
            (decisions if effects else votes).append(time.perf_counter() - start)
        version = epoch.version(step)
        assert coordinator.record is not None and coordinator.record.newest == version
        for node in epoch.ranks:
            held = tuple(seal for other in (node, *coordinator.cliques.mates(node)) for seal in seals[other])
            body = encode(Holding(1, INC, node, version, held))
            for effect in coordinator.handle(Received(decode(body, *TO_COORDINATOR)), float(step)):
                if isinstance(effect, WriteCoordinator):
                    encode(effect.record)
        assert isinstance(coordinator.record, Record) and coordinator.record.keep == version
        whole.append(time.process_time() - began)
    return {"vote": median(votes), "decision": median(decisions), "save": median(whole), **sizes}


def main() -> None:
    nodes, ranks, saves = (int(word) for word in [*sys.argv[1:], *("128", "8", "50")[len(sys.argv) - 1 :]])
    found = coordinator_cost(nodes, ranks, saves)
    print(f"{nodes} nodes x {ranks} ranks, {saves} saves")
    for name in ("vote", "decision", "save"):
        print(f"{name:9} {found[name] * 1e6:10.0f} us")
    print(f"a vote has {found['vote_bytes']:.0f} bytes, the record {found['record_bytes']:.0f}")


if __name__ == "__main__":
    main()
