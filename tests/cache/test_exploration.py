"""All schedules of small clusters hold every invariant, and every known way to break the protocol is found."""

from collections.abc import Callable

import pytest

from tests.cache import mutations, scenarios
from tests.cache.driver import Trace
from tests.cache.explore import Budget, Found, explore
from tests.cache.mutations import Patches, broken
from tests.cache.world import World

Start = tuple[Callable[[], World], Budget]

STARTS: dict[str, Start] = {
    "a save, nothing fails": (lambda: scenarios.saving(2, 1), Budget(0, 0, 0, steps=1)),
    "a save, a daemon is killed": (lambda: scenarios.saving(2, 1), Budget(1, 1, 0, steps=1)),
    "a save, a rank dies or time runs out": (lambda: scenarios.saving(2, 1), Budget(0, 1, 1, kills=1, steps=1)),
    "a save of 2 nodes x 2 ranks, a daemon is killed": (lambda: scenarios.saving(2, 2), Budget(1, 0, 0, steps=1)),
    "copies, a daemon is killed": (lambda: scenarios.copying(2, 1), Budget(1, 0, 0, steps=1)),
    "copies beside older ones, a node is lost": (
        lambda: scenarios.second_copying(2, 1), Budget(0, 0, 1, losses=1, steps=1)),
    "a new epoch beside a zombie, a daemon is killed": (
        lambda: scenarios.restarting(2, 1, zombies=1), Budget(1, 0, 0, steps=1)),
    "a drain that fails, a daemon is killed": (lambda: scenarios.draining(2, 1), Budget(1, 0, 0, failures=1, steps=1)),
    "a restore, a member is late": (lambda: scenarios.restoring(2, 1), Budget(0, 1, 1, steps=0)),
    "a restore, a daemon is killed": (lambda: scenarios.restoring(2, 1), Budget(1, 1, 0, steps=0)),
    "a restore from a node that is no member, and late": (
        lambda: scenarios.moving(decided=False), Budget(0, 1, 1, failures=1, steps=0)),
    "a restore whose source was killed": (scenarios.unreached, Budget(0, 2, 1, steps=0)),
    "a restore beside a zombie that has the last vote": (scenarios.overtaken, Budget(0, 1, 0, steps=0)),
    "a restore after two incarnations of one epoch": (scenarios.split_brain, Budget(0, 0, 0, steps=0)),
    "a save and a new epoch": (lambda: scenarios.saving(2, 1), Budget(0, 0, 0, epochs=1, steps=1)),
}  # fmt: skip

DEPTHS = {
    "a save, nothing fails": 40,
    "a save, a daemon is killed": 9,
    "a save, a rank dies or time runs out": 7,
    "a save of 2 nodes x 2 ranks, a daemon is killed": 8,
    "copies, a daemon is killed": 8,
    "copies beside older ones, a node is lost": 5,
    "a new epoch beside a zombie, a daemon is killed": 6,
    "a drain that fails, a daemon is killed": 5,
    "a restore, a member is late": 9,
    "a restore, a daemon is killed": 7,
    "a restore from a node that is no member, and late": 7,
    "a restore whose source was killed": 7,
    "a restore beside a zombie that has the last vote": 9,
    "a restore after two incarnations of one epoch": 5,
    "a save and a new epoch": 6,
}


def run(name: str, depth: int, most: int = 10**9) -> Found:
    make, budget = STARTS[name]
    return explore(make(), budget, depth, most)


@pytest.mark.parametrize("name", STARTS)
def test_every_schedule_up_to_a_depth_holds_the_invariants(name: str) -> None:
    found = run(name, DEPTHS[name])

    print(
        f"{name}: {found.states} states, {found.transitions} steps, depth {found.depth}, whole: {found.complete}"
    )
    assert not found.violation, "\n".join((found.violation, *found.path))
    assert found.states > 100


@pytest.mark.long
@pytest.mark.parametrize("name", STARTS)
def test_every_schedule_further_down_holds_the_invariants(name: str) -> None:
    found = run(name, DEPTHS[name] + 2, most=200_000)

    print(
        f"{name}: {found.states} states, {found.transitions} steps, depth {found.depth}, whole: {found.complete}"
    )
    assert not found.violation, "\n".join((found.violation, *found.path))


CALM = Budget(0, 0, 0, steps=9)
KILLED = Budget(1, 1, 0, steps=1)

CATCHES: dict[Callable[[], Patches], tuple[Callable[[], World], Budget, int, str]] = {
    mutations.commit_without_one_vote: (lambda: scenarios.saving(2, 1), CALM, 5, "I4"),
    mutations.vote_counted_for_another_node: (lambda: scenarios.saving(2, 1), KILLED, 6, "I4"),
    mutations.decision_told_before_it_is_stored: (lambda: scenarios.last_vote(2, 1), Budget(1, 1, 1, steps=1), 7, "I4"),
    mutations.protected_version_evicted: (lambda: scenarios.replicated(2, 1), CALM, 4, "I7"),
    mutations.abort_frees_a_slot_that_is_being_written: (
        lambda: scenarios.saving(2, 1), Budget(0, 0, 0, kills=1, steps=1), 5, "I6"),
    mutations.epoch_stored_after_the_answer: (lambda: scenarios.restarting(2, 1), KILLED, 3, "I8"),
    mutations.quarantined_slot_reused: (lambda: scenarios.restarting(2, 1, zombies=1), CALM, 3, "I6"),
    mutations.order_of_records_ignored: (lambda: scenarios.late_records(2, 1), CALM, 3, "I15"),
    mutations.copies_reported_before_they_are_verified: (lambda: scenarios.copying(2, 1), CALM, 9, "I5"),
    mutations.restore_mixes_incarnations: (scenarios.split_brain, CALM, 5, "I2"),
    mutations.keep_before_all_copies: (lambda: scenarios.copying(2, 1), CALM, 8, "I5"),
    mutations.vote_before_the_slot_is_stored: (lambda: scenarios.saving(2, 1), KILLED, 7, "I4"),
    mutations.slot_handed_out_before_it_is_stored: (lambda: scenarios.cluster(2, 1), CALM, 3, "I6"),
    mutations.no_fence: (lambda: scenarios.restarting(2, 1), CALM, 5, "I"),
    mutations.torn_slot_taken_for_sealed: (lambda: scenarios.daemon_down(2, 1), Budget(0, 2, 0, steps=1), 10, "I"),
    mutations.manifest_before_all_shards: (lambda: scenarios.draining(2, 1), CALM, 4, "I10"),
    mutations.drained_version_not_protected: (lambda: scenarios.draining_long(2, 1), CALM, 4, "I7"),
    mutations.restore_without_a_late_member: (lambda: scenarios.restoring(2, 1), Budget(0, 0, 1, steps=0), 6, "I16"),
    mutations.inventory_counted_before_its_node_has_joined: (scenarios.overtaken, CALM, 7, "I16"),
    mutations.copy_out_of_reach_taken_for_bad: (scenarios.unreached, Budget(0, 0, 1, steps=0), 6, "I16"),
    mutations.committed_step_given_up_at_once: (
        lambda: scenarios.moving(decided=False), Budget(0, 0, 0, failures=1, steps=0), 6, "I16"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", CATCHES, ids=lambda mutation: mutation.__name__)
def test_exploration_finds_a_broken_protocol(mutation: Callable[[], Patches]) -> None:
    make, budget, depth, invariant = CATCHES[mutation]
    start = make()

    with broken(mutation):
        found = explore(start, budget, depth, trust=False)

    print(f"{mutation.__name__}: {found.violation}; {found.depth} steps, {found.states} states")
    assert found.violation.startswith(invariant)
    assert not explore(make(), budget, found.depth, most=3000, trust=False).violation


@pytest.mark.long
@pytest.mark.parametrize("mutation", CATCHES, ids=lambda mutation: mutation.__name__)
def test_random_traces_find_a_broken_protocol(mutation: Callable[[], Patches]) -> None:
    """All but what needs two whole saves of one step under one epoch number, which traces hardly ever draw."""
    with broken(mutation):
        for seed in range(3000):
            try:
                Trace(seed).run(250)
            except (AssertionError, LookupError, ValueError, AttributeError) as error:
                print(f"{mutation.__name__}: seed {seed}: {error}")
                return
    assert mutation is mutations.restore_mixes_incarnations
