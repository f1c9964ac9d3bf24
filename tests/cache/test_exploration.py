"""All schedules of small clusters hold every invariant, and every known way to break the protocol is found."""

from collections.abc import Callable

import pytest

from tests.cache import scenarios
from tests.cache.driver import Trace
from tests.cache.explore import Budget, Found, explore
from tests.cache.mutations import MUTATIONS, Patches, broken
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
    "a drain that fails, a daemon is killed": 6,
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
    found = run(name, DEPTHS[name] + 3, most=1_000_000)

    print(
        f"{name}: {found.states} states, {found.transitions} steps, depth {found.depth}, whole: {found.complete}"
    )
    assert not found.violation, "\n".join((found.violation, *found.path))


def caught(mutation: Callable[[], Patches]) -> list[str]:
    """Every start and the traces that show the mutation, each with what is violated."""
    found = []
    with broken(mutation):
        for name in STARTS:
            try:
                seen = run(name, DEPTHS[name], most=1500)
            except Exception as error:  # the broken protocol may not even reach the start
                found.append(f"{name}: {type(error).__name__} {error}")
                continue
            if seen.violation:
                found.append(f"{name}: {seen.violation} (step {seen.depth} of {seen.states} states)")
                break
        for seed in range(120):
            try:
                Trace(seed).run(200)
            except Exception as error:
                found.append(f"trace {seed}: {error}")
                break
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_protocol_is_found(mutation: Callable[[], Patches]) -> None:
    found = caught(mutation)

    print(mutation.__name__, *found, sep="\n    ")
    assert found
