"""The choice between writing past the page cache and through it, on disks that are only numbers."""

import pytest

from ckptkit.engine.ways import Way


def written(way: Way, rate_of: dict[bool, float], periods: int) -> list[bool]:
    """The ways of some periods of a second, on a disk that takes so many bytes a second each way."""
    taken = []
    for _ in range(periods):
        taken.append(way.direct)
        way.judge(int(rate_of[way.direct]), 1.0)
    return taken


@pytest.mark.parametrize("direct", [False, True])
def test_the_faster_way_is_taken(direct: bool) -> None:
    taken = written(Way(), {direct: 2e9, not direct: 1e9}, 100)

    assert taken[:3] == [False, False, True]  # both are tried
    assert taken[3:].count(direct) >= 90


@pytest.mark.parametrize("direct", [False, True])
def test_a_disk_that_changes_is_noticed(direct: bool) -> None:
    way = Way()
    written(way, {direct: 2e9, not direct: 1e9}, 50)

    taken = written(way, {direct: 0.5e9, not direct: 1e9}, 100)

    assert taken[30:].count(not direct) >= 65


@pytest.mark.parametrize("fixed", [False, True])
def test_a_way_that_was_asked_for_stays(fixed: bool) -> None:
    assert written(Way(fixed), {True: 1e9, False: 2e9}, 60) == [fixed] * 60
    assert Way(fixed).possible is fixed


def test_periods_in_which_nothing_was_written_say_nothing() -> None:
    way = Way()
    for _ in range(20):
        way.judge(0, 1.0)
    assert not way.direct
