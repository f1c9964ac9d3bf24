"""`ckptkit drill`: scenarios are listed and explored; a finding is exit code 1."""

import shutil

import pytest

from ckptkit.ops import collecting
from tests.cli.helpers import invoke, invoke_json


def test_list_names_every_scenario() -> None:
    done = invoke("drill", "list")
    code, found = invoke_json("drill", "list", "save")

    assert done.exit_code == code == 0
    assert {"save", "drain", "gc"} <= {line.split()[0] for line in done.stdout.splitlines()}
    assert list(found["scenarios"]) == ["save"]


def test_explore_counts_states() -> None:
    done = invoke("drill", "explore", "retention", "--limit", 8)
    code, found = invoke_json("drill", "explore", "retention", "--limit", 8, "--model", "ext4")

    assert done.exit_code == code == 0, done.output
    assert done.stdout.splitlines()[-1].endswith("distinct states, 0 findings")
    assert found["findings"] == 0 and found["scenarios"][0]["scenario"] == "retention"


def test_a_finding_is_exit_code_1_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(collecting, "remove_folder", lambda url, marker: shutil.rmtree(url))

    done = invoke("drill", "explore", "gc", "--limit", 8, "--model", "posix")

    assert done.exit_code == 1
    assert "<- lost" in done.stdout


def test_an_unknown_scenario_is_wrong_use() -> None:
    done = invoke("drill", "explore", "nothing")

    assert done.exit_code == 2
    assert "`ckptkit drill list` names them all" in done.stderr
