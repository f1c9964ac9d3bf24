"""Cliques: every node in one, copies apart, domains apart where there can be; and what a set of holders outlives."""

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.cache.messages import DURABLE, Ban, Bans, Inventory, Mark, Shard, Version
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import choose, nearest

INDEX = "1d" * 16

MEMBERS = st.dictionaries(
    st.integers(0, 40).map("n{}".format), st.integers(0, 5).map("rack{}".format), min_size=1, max_size=24
)


@given(MEMBERS, st.integers(0, 4))
def test_every_node_has_its_copies_elsewhere(domains: dict[str, str], copies: int) -> None:
    cliques = Cliques(domains, copies)
    possible = min(copies, len(domains) - 1)

    assert sorted(node for group in cliques.groups for node in group) == sorted(domains)
    for node in domains:
        targets = cliques.targets(node)
        assert len({node, *targets}) == possible + 1
        assert cliques.replicated({node, *targets})
        assert not possible or not cliques.replicated({node, *targets[:-1]})


@given(MEMBERS, st.integers(0, 4))
def test_load_is_even_inside_a_clique(domains: dict[str, str], copies: int) -> None:
    cliques = Cliques(domains, copies)

    load = Counter(target for node in domains for target in cliques.targets(node))
    assert set(load.values()) <= {cliques.copies}


@given(MEMBERS, st.integers(1, 3))
def test_domains_are_shared_only_where_one_has_more_nodes_than_there_are_cliques(
    domains: dict[str, str], copies: int
) -> None:
    cliques = Cliques(domains, copies)

    if max(Counter(domains.values()).values()) <= len(cliques.groups):
        assert cliques.collisions() == 0


@given(MEMBERS, st.integers(1, 2))
def test_replicated_outlives_any_loss_it_promises(domains: dict[str, str], copies: int) -> None:
    cliques = Cliques(domains, copies)

    for node in list(domains)[:4]:
        holders = {node, *cliques.targets(node)}
        group = next(group for group in cliques.groups if node in group)
        for lost in combinations(group, min(cliques.copies, len(group))):
            assert holders - set(lost)


def test_sixteen_nodes_with_one_copy_have_eight_fatal_pairs() -> None:
    nodes = {f"n{i:02}": "" for i in range(16)}
    cliques = Cliques(nodes, 1)

    fatal = [
        pair for pair in combinations(nodes, 2) if any({n, *cliques.targets(n)} <= set(pair) for n in nodes)
    ]
    assert len(fatal) == 8


def shard(step: int, rank: int, world: int = 2, epoch: int = 1, inc: str = "a" * 32) -> Shard:
    return Shard(Version(epoch, step, inc), rank, world, INDEX, 1, f"{step * 100 + rank:032x}")


CLIQUES = Cliques({"a": "", "b": ""}, 1)


def test_the_newest_whole_version_is_chosen_and_parts_are_never_put_together() -> None:
    inventories = {
        "a": Inventory("a", (shard(1, 0), shard(1, 1), shard(2, 0), shard(3, 0), shard(3, 0, inc="b" * 32))),
        "b": Inventory("b", (shard(1, 1), shard(2, 1), shard(3, 1, world=3), shard(3, 1, inc="c" * 32))),
    }

    found = choose(inventories, (), Bans(), (), CLIQUES)

    assert found is not None and found.version.step == 2 and found.sources == (("a",), ("b",))
    assert found.keep is None, "shard 0 of step 1 is on one node only"


def test_a_later_epoch_outranks_a_higher_step_and_durable_shards_count() -> None:
    inventories = {"a": Inventory("a", (shard(9, 0), shard(9, 1), shard(2, 0, epoch=2)))}

    found = choose(inventories, [shard(2, 1, epoch=2)], Bans(), (), CLIQUES)

    assert found is not None and (found.version.epoch, found.version.step) == (2, 2)
    assert found.sources == (("a",), (DURABLE,))


def test_banned_versions_are_passed_over_and_marked_ones_are_the_last_resort() -> None:
    inventories = {"a": Inventory("a", tuple(shard(step, rank) for step in (1, 2, 3) for rank in (0, 1)))}
    v2 = Version(1, 2, "a" * 32)
    banned = Bans((Ban(1, 3, 1, 3),), (Mark(v2, 5), Mark(v2, 6)))

    found = choose(inventories, (), banned, (), CLIQUES)
    assert found is not None and found.version.step == 1

    last = choose(inventories, (), banned, {found.version}, CLIQUES)
    assert last is not None and last.version.step == 2
    assert choose(inventories, (), banned, {found.version, last.version}, CLIQUES) is None


def test_copies_that_disagree_do_not_both_count() -> None:
    odd = Shard(Version(1, 1, "a" * 32), 0, 1, INDEX, 1, "f" * 32)
    inventories = {name: Inventory(name, (shard(1, 0, world=1),)) for name in "ab"} | {
        "c": Inventory("c", (odd,))
    }

    found = choose(inventories, (), Bans(), (), CLIQUES)

    assert found is not None and found.sources == (("a", "b"),) and found.digests == (shard(1, 0).digest,)


def test_the_nearest_source_is_the_own_node_then_its_clique_then_others_then_durable() -> None:
    cliques = Cliques({name: "" for name in "abcd"}, 1)
    mate = cliques.mates("a")[0]
    far = next(name for name in "bcd" if name != mate)

    assert nearest((DURABLE, far, mate, "a"), "a", cliques) == ("a", mate, far, DURABLE)
