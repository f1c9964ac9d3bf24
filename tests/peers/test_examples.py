"""Examples of frameworks, killed in the middle and started again, as in tests/examples."""

import importlib.util
from pathlib import Path

import pytest

from tests.examples.running import Start, killed_and_continued

pytestmark = pytest.mark.peers

CLOSE = 1e-6  # relative, float32


@pytest.mark.parametrize(
    ("library", "example", "first", "others"),
    [
        ("accelerate", "hf_trainer", Start(2), [Start(1)]),
        ("megatron", "megatron_core", Start(2, ("--tp", "2")), [Start(1), Start(2)]),
        ("deepspeed", "deepspeed_zero", Start(2), [Start(1), Start(4)]),
    ],
    ids=["trainer", "megatron", "deepspeed"],
)
def test_other_numbers_of_ranks(
    library: str, example: str, first: Start, others: list[Start], tmp_path: Path
) -> None:
    """Killed on two ranks; goes on on two, and in other layouts."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")

    found = killed_and_continued(example, first, others, tmp_path, seed=2)

    assert max(found) <= CLOSE
