"""Each example, killed in the middle and started again, on as many ranks and on another number: losses go on as if nothing had happened.

Examples of frameworks with an environment of their own: tests/peers/test_examples.py.
"""

from pathlib import Path

import pytest

from tests.examples.running import Start, killed_and_continued

CLOSE = 1e-6  # relative, float32: sums over other numbers of ranks are rounded elsewhere


def test_plain(tmp_path: Path) -> None:
    """One process without torchrun; goes on as two with DistributedDataParallel."""
    (apart,) = killed_and_continued("plain", Start(0), [Start(2)], tmp_path, seed=1)

    assert apart <= CLOSE


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "first", "other"),
    [
        ("plain", Start(2), Start(1)),
        ("fsdp2", Start(2), Start(1)),
        ("fsdp2", Start(2), Start(4)),
        ("tp_dp", Start(4), Start(2, ("--tp", "1"))),
        ("tp_dp", Start(2), Start(4)),
        ("dcp", Start(2), Start(1)),
        ("dcp", Start(2), Start(4)),
    ],
)
def test_other_numbers_of_ranks(example: str, first: Start, other: Start, tmp_path: Path) -> None:
    """Killed on some ranks; goes on on the same, and on another number of them."""
    (apart,) = killed_and_continued(example, first, [other], tmp_path, seed=first.ranks + other.ranks)

    assert apart <= CLOSE
