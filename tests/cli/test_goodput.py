"""`ckptkit goodput`: advice in text and JSON, accounts of logs, and wrong use."""

import json

import pytest

from tests.cli.helpers import invoke, invoke_json

JOB = ("--nodes", 16, "--state-size", "150GB", "--step-time", "30s")


def test_advice_names_every_tier_and_ends_with_a_sentence() -> None:
    done = invoke("goodput", "--mtbf", "3.1h", *JOB)

    lines = done.stdout.splitlines()
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in lines[1:4]] == ["ram", "replica", "durable"]
    assert lines[-1].startswith("Save ram every 30.0 s (1 steps)")


def test_advice_in_json() -> None:
    code, found = invoke_json("goodput", "--failure-rate", 6.5, *JOB, "--no-replica")

    assert code == 0
    assert [tier["name"] for tier in found["tiers"]] == ["ram", "durable"]
    assert sum(found["parts"].values()) == pytest.approx(1)
    assert found["mtbf_s"] == pytest.approx(86400 * 1000 / 6.5 / 16)
    assert found["assumptions"]["nodes"] == 16


def test_the_mtbf_of_a_node_is_divided_by_the_nodes() -> None:
    _, found = invoke_json("goodput", "--node-mtbf", "160d", *JOB, "--no-ram")

    assert found["mtbf_s"] == pytest.approx(10 * 86400)
    assert [tier["name"] for tier in found["tiers"]] == ["durable"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--mtbf", "3h"), ("--mtbf", "3h", "--node-mtbf", "9d", *JOB), JOB],
)
def test_what_is_missing_or_twice_there_is_wrong_use(arguments) -> None:
    done = invoke("goodput", *arguments)

    assert done.exit_code == 2
    assert "give --nodes, --state-size and one of" in done.stderr


@pytest.mark.parametrize("text", ["3 parsecs", "h", "-1h"])
def test_times_are_checked(text) -> None:
    done = invoke("goodput", f"--mtbf={text}", *JOB)

    assert done.exit_code == 2
    assert "is no time; write it like" in done.stderr


def test_an_account_of_a_log(tmp_path) -> None:
    rows = [(0, "launch", 0), (10, "resume", 0), (20, "step", 1), (30, "step", 2), (40, "end", 2)]
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps({"time": t, "event": e, "step": s}) + "\n" for t, e, s in rows))

    done = invoke("goodput", "--log", file)
    code, found = invoke_json("goodput", "--log", file)

    assert done.stdout.splitlines()[-1] == "0 failures; 50.00% of the time was useful"
    assert code == 0
    assert (found["useful"], found["lost"], found["wall"], found["goodput"]) == (20, 10, 40, 0.5)


def test_a_log_without_events_is_unusable(tmp_path) -> None:
    (tmp_path / "empty").write_text("")

    done = invoke("goodput", "--log", tmp_path / "empty")

    assert done.exit_code == 3
    assert "holds no event" in done.stderr
