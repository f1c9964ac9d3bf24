"""The demo: the whole tour, which fails when a step of it does not hold."""

from pathlib import Path

import pytest

from ckptkit.errors import UsageError
from ckptkit.ops.demo import demo


def test_the_tour_holds(tmp_path: Path) -> None:
    """Every step is shown as the command that does the same; none fails."""
    said: list[str] = []

    code = demo(str(tmp_path / "tour"), said.append)

    assert code == 0 and not [line for line in said if "FAILED" in line]
    verbs = [line.split()[2] for line in said if line.startswith("$ ckptkit")]
    assert set(verbs) == {"synth", "inspect", "plan", "reshard", "verify", "diff", "latest"}


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """The demo writes and breaks files: never among somebody's own."""
    (tmp_path / "mine").write_text("x")

    with pytest.raises(UsageError, match="not empty"):
        demo(str(tmp_path), print)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
