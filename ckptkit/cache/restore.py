"""Which version an epoch restores, from what the nodes and the durable storage hold.

Evidence decides, not the memory of a commit: a version can be restored when for one (version, world, index) every shard has a
copy somewhere. Copies are not read here; readers verify each leaf, and a version that fails is left out of the next choice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.cache.messages import DURABLE, MAX_SOURCES, Bans, Epoch, Inventory, Shard, Version
from ckptkit.cache.placement import Cliques

Layout = tuple[Version, int, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """A version to restore. `sources[p]` are the places of shard p; `keep` is the newest version, up to this one, that has its copies."""

    version: Version
    world: int
    index_hash: str
    sources: tuple[tuple[str, ...], ...]
    digests: tuple[str, ...]
    keep: Version | None


def choose(
    inventories: Mapping[str, Inventory],
    durable: Iterable[Shard],
    bans: Bans,
    excluded: Collection[Version],
    cliques: Cliques,
) -> Choice | None:
    """The newest whole version, None where there is none. Ones that trainers called bad only if there is no other."""
    places = _gather(inventories, durable)
    whole = sorted(
        (layout for layout, ranks in places.items() if len(ranks) == layout[1] and not bans.hard(layout[0])),
        key=lambda layout: (not bans.soft(layout[0]), layout),
        reverse=True,
    )
    for layout in whole:
        if layout[0] not in excluded:
            copies = [places[layout][rank] for rank in range(layout[1])]
            sources = tuple(_agreeing(found) for found in copies)
            digests = tuple(found[places_[0]] for found, places_ in zip(copies, sources, strict=True))
            return Choice(*layout, sources, digests, _replicated(whole, layout, places, cliques))
    return None


def missing(
    inventories: Mapping[str, Inventory], durable: Iterable[Shard], version: Version
) -> tuple[int, ...] | None:
    """The shards of a version of which nobody has a copy, None where nobody has any. Where several layouts share it: of the most complete."""
    found = [
        tuple(rank for rank in range(world) if rank not in ranks)
        for (other, world, _), ranks in _gather(inventories, durable).items() if other == version
    ]  # fmt: skip
    return min(found, key=len, default=None)


def nearest(sources: Sequence[str], node: str, cliques: Cliques) -> tuple[str, ...]:
    """The places of one shard in the order in which `node` tries them: itself, its clique, other nodes, durable storage."""
    mates = cliques.mates(node)
    rank = {node: 0, DURABLE: 3} | dict.fromkeys(mates, 1)
    # Others start at different places, so that not all read from the first.
    spread = {source: hash_of(node, source) for source in sources}
    return tuple(sorted(sources, key=lambda source: (rank.get(source, 2), spread[source], source)))


def homes(sources: Sequence[Sequence[str]], epoch: Epoch) -> tuple[str, ...]:
    """The node that answers for each shard of a restored version: it has it, or fetches it, and offers it to its clique.

    That of the shard's rank; after a change of layout, a member that holds the shard.
    """
    if len(sources) == epoch.world:
        return tuple(member.node for member in epoch.members)
    found = []
    for rank, places in enumerate(sources):
        spare = epoch.members[rank % epoch.world].node
        found.append(next((place for place in places if place in epoch.ranks), spare))
    return tuple(found)


def hash_of(*words: str) -> int:
    """A small number that depends on the words only, not on the process."""
    found = 0
    for byte in "\0".join(words).encode():
        found = (found * 1_000_003 ^ byte) & 0xFFFFFFFF
    return found


def safe(places: Collection[str], cliques: Cliques) -> bool:
    """Whether a shard in these places outlives what its copies are there for; durable storage does anyway."""
    return DURABLE in places or cliques.replicated(places)


def _gather(
    inventories: Mapping[str, Inventory], durable: Iterable[Shard]
) -> dict[Layout, dict[int, dict[str, str]]]:
    """For each layout and rank the digest of each place's copy."""
    places: dict[Layout, dict[int, dict[str, str]]] = {}
    found = [(node, shard) for node, inventory in inventories.items() for shard in inventory.shards]
    found += [(DURABLE, shard) for shard in durable]
    for source, shard in found:
        if shard.rank < shard.world:
            layout = (shard.version, shard.world, shard.index_hash)
            places.setdefault(layout, {}).setdefault(shard.rank, {})[source] = shard.digest
    return places


def _agreeing(copies: Mapping[str, str]) -> tuple[str, ...]:
    """The places whose copies have the digest that most have."""
    digests = list(copies.values())
    best = max(sorted(set(digests)), key=digests.count)
    return tuple(sorted(source for source, digest in copies.items() if digest == best))[:MAX_SOURCES]


def _replicated(
    whole: Sequence[Layout],
    chosen: Layout,
    places: Mapping[Layout, Mapping[int, Mapping[str, str]]],
    cliques: Cliques,
) -> Version | None:
    for layout in sorted(whole, reverse=True):
        copies = (_agreeing(found) for found in places[layout].values())
        if layout[0] <= chosen[0] and all(safe(found, cliques) for found in copies):
            return layout[0]
    return None
