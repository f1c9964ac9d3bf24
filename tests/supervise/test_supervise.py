"""The supervisor over a real program: what it notices, what it does, where the run goes on, and what the log says."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
from click.testing import CliRunner

import ckptkit
from ckptkit.cli.main import cli
from ckptkit.ops.bans import Ban, ban, ban_of, read_bans
from tests.cli.helpers import SCHEMA

TRAINER = str(Path(__file__).with_name("trainer.py"))
POLICY = """
[restarts]
max = 8
backoff_s = [0.05, 0.2]
[hang]
startup_s = 60
after_s = 3
factor = 5
[loss]
nan = "rollback"
window = 4
spike_steps = 2
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small whole step."""
    path = tmp_path_factory.mktemp("template") / "step"
    ckptkit.synth(
        str(path),
        model="llama",
        settings={"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64},
        optimizer="none",
    )
    return str(path)


class Run:
    """A supervised run of the little trainer."""

    def __init__(self, folder: Path, template: str) -> None:
        self.folder, self.template = folder, template
        self.steps = folder / "run"
        self.steps.mkdir()

    def command(
        self, faults: list[dict], *, ranks: int, steps: int, policy: str, more: tuple[str, ...] = ()
    ) -> list[str]:
        (self.folder / "policy.toml").write_text(f'run = "{self.steps}"\n{policy}')
        return [
            sys.executable, "-m", "ckptkit", "supervise", "--policy", str(self.folder / "policy.toml"),
            "--log", str(self.folder / "log"), "--nproc", str(ranks), *more, "--",
            sys.executable, TRAINER, str(self.steps), self.template, str(steps), json.dumps(faults), "{layout}",
        ]  # fmt: skip

    def go(self, faults: list[dict], *, ranks: int = 2, steps: int = 12, policy: str = POLICY) -> int:
        done = subprocess.run(
            self.command(faults, ranks=ranks, steps=steps, policy=policy),
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stderr.replace(
            'Traceback (most recent call last):\n  File "' + TRAINER, ""
        ), done.stderr
        self.errors = done.stderr
        return done.returncode

    def log(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "log/incidents.jsonl").read_text().splitlines()]

    def kinds(self) -> list[str]:
        return [row["kind"] for row in self.log()]

    def starts(self, rank: int = 0) -> list[str]:
        return (self.steps / f"starts-{rank}").read_text().splitlines()


@pytest.fixture
def run(tmp_path: Path, template: str) -> Run:
    return Run(tmp_path, template)


def test_a_run_that_ends_well_is_left_alone(run: Run) -> None:
    """One start, one end, exit 0; both kinds of log, and the same as one JSON object."""
    command = run.command([], ranks=2, steps=6, policy=POLICY, more=("--json",))
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    jsonschema.validate(found, {"$ref": "#/$defs/Supervised", "$defs": SCHEMA["$defs"]})
    assert [entry["kind"] for entry in found["incidents"]] == run.kinds()

    assert run.kinds() == ["start", "finished"]
    assert "holds no step yet" in run.log()[0]["detail"]
    assert (run.folder / "log/incidents.log").read_text().count("\n") == 2


def test_crashes_in_a_row_are_survived_from_the_newest_step(run: Run) -> None:
    """An exit code, a SIGKILL: each restart goes on where the last whole step was, and the log names rank and cause."""
    faults = [{"rank": 1, "step": 5, "do": "exit"}, {"rank": 0, "step": 8, "do": "kill"}]

    assert run.go(faults) == 0

    assert run.kinds() == ["start", "crash", "start", "crash", "start", "finished"]
    first, second = (row for row in run.log() if row["kind"] == "crash")
    assert first["rank"] == 1 and "exit code 3" in first["detail"]
    assert second["rank"] == 0 and "SIGKILL" in second["detail"]
    starts = [int(line.split()[0]) for line in run.starts()]
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] >= 6
    assert f"goes on from step-{starts[1]:08}" in run.log()[2]["detail"]


def test_a_crash_is_named_although_the_others_take_long_to_end(run: Run) -> None:
    """Ranks that wait for one that has died stand still for longer than a hang takes, and do not heed SIGTERM; the crash is the cause."""
    assert run.go([{"rank": 0, "step": 3, "do": "deaf"}, {"rank": 1, "step": 5, "do": "exit"}]) == 0

    assert run.kinds() == ["start", "crash", "start", "finished"]
    assert run.log()[1]["rank"] == 1 and "exit code 3" in run.log()[1]["detail"]


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_rank_that_hangs_is_found_and_named(run: Run, how: str) -> None:
    """Silence ends a group; the rank that is behind is named, with its stack where it can tell it."""
    assert run.go([{"rank": 1, "step": 6, "do": how}]) == 0

    assert run.kinds() == ["start", "hang", "start", "finished"]
    hang = run.log()[1]
    assert hang["rank"] == 1 and hang["step"] == 5
    if how == "sleep":
        stacks = list((run.folder / "log").glob("stacks-1/rank-00001.stack"))
        assert stacks and "trainer.py" in stacks[0].read_text()
    else:
        assert "rank 1 is stopped by a signal" in hang["detail"]


def test_a_loss_that_is_no_number_rolls_the_run_back(run: Run) -> None:
    """Steps that may hold the fault are banned for every reader; the run goes on from the one before."""
    assert run.go([{"rank": 0, "step": 7, "do": "nan"}]) == 0

    assert run.kinds() == ["start", "ban", "nan", "start", "finished"]
    banned = read_bans(str(run.steps))
    assert len(banned) == 1 and banned[0].covers(1, 6) and not banned[0].covers(1, 4)
    assert int(run.starts()[1].split()[0]) == 4


def test_a_fault_that_comes_again_goes_further_back_until_none_is_left(run: Run) -> None:
    """A run is never started anew: when only its last whole step is left, a person has to decide."""
    assert run.go([{"rank": 0, "step": 7, "do": "nan", "times": 9}]) == 1

    assert [int(line.split()[0]) for line in run.starts()] == [0, 4, 2]
    assert run.kinds()[-2:] == ["nan", "give-up"]
    assert "last whole step" in run.log()[-1]["detail"]
    assert (run.steps / "step-00000002.e1").is_dir()


def test_replicas_that_differ_restart_the_run(run: Run) -> None:
    """What the hook API tells of silent corruption is acted on, and logged with rank and leaf."""
    assert run.go([{"rank": 1, "step": 3, "do": "corruption"}]) == 0

    assert run.kinds() == ["start", "corruption", "start", "finished"]
    found = run.log()[1]
    assert found["rank"] == 1 and "leaf 17" in found["detail"]


@pytest.mark.parametrize(("spikes", "kinds"), [(2, ["spike", "start"]), (1, [])])
def test_a_loss_spike_counts_when_it_lasts(run: Run, spikes: int, kinds: list[str]) -> None:
    """So many steps in a row, as the policy says; a single one is nothing."""
    faults = [{"rank": 0, "step": 8 + n, "do": "spike"} for n in range(spikes)]

    assert run.go(faults, policy=POLICY.replace("window", 'spike = "restart"\nwindow')) == 0

    assert run.kinds() == ["start", *kinds, "finished"]


def test_too_many_faults_give_the_run_up(run: Run) -> None:
    """The limit holds, the exit code says so, and the last line says why."""
    faults = [{"rank": 0, "step": 1, "do": "exit", "times": 99}]

    assert run.go(faults, policy=POLICY.replace("max = 8", "max = 2"), ranks=1) == 1

    assert run.kinds().count("crash") == 3
    assert run.kinds()[-1] == "give-up" and "the policy allows 2" in run.log()[-1]["detail"]


def test_a_run_that_lost_all_its_steps_is_not_started_anew(run: Run) -> None:
    """After a durable step there is always one to go on from, or an end that says what happened."""
    import shutil
    import threading

    stop = threading.Event()

    def lose() -> None:
        """Once step 4 is there, every step goes, and all that follow."""
        seen = False
        while not stop.wait(0.01):
            seen = seen or (run.steps / "step-00000004.e1").is_dir()
            if seen:
                for path in run.steps.glob("step-*"):
                    shutil.rmtree(path, ignore_errors=True)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        code = run.go([{"rank": 0, "step": 8, "do": "exit"}], ranks=1)
    finally:
        stop.set()
        thread.join()

    assert code == 1
    assert run.kinds()[-1] == "give-up" and "not started anew" in run.log()[-1]["detail"]
    assert len(run.starts()) == 1


def test_the_layout_follows_the_number_of_ranks(run: Run) -> None:
    """By environment and in the command's arguments; a number without a layout is refused before anything starts."""
    policy = POLICY + '[layouts]\n2 = "tp=2"\n'

    assert run.go([], policy=policy, steps=2) == 0
    assert run.starts() == ["0 2 tp=2 tp=2"]

    assert run.go([], policy=policy, ranks=1, steps=2) == 2
    assert "no layout for 1 ranks" in run.errors


def test_sigterm_reaches_the_ranks_and_ends_it(run: Run) -> None:
    """Exit 5; no rank is left."""
    command = run.command([], ranks=2, steps=10_000, policy=POLICY, more=("--grace", "5"))
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not (run.steps / "step-00000002.e1").is_dir() and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 5
    assert run.kinds()[-1] == "interrupted"
    mine = subprocess.run(
        ["pgrep", "-f", f"{TRAINER} {run.steps}"], check=False, capture_output=True, text=True
    )
    assert mine.stdout == ""


@pytest.mark.long
def test_a_lost_node_is_done_without(run: Run) -> None:
    """Two nodes; one dies with all its ranks. The other goes on from the newest step, with the layout for fewer ranks."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    policy = POLICY + '[layouts]\n2 = "dp=2"\n1 = "tp=1"\n'
    more = (
        "--nodes",
        "1:2",
        "--meet",
        f"127.0.0.1:{port}",
        "--id",
        "job",
        "--last-call",
        "5",
        "--join",
        "60",
    )
    command = run.command([], ranks=1, steps=400, policy=policy, more=more)
    log = command.index("--log") + 1
    nodes = []
    for name in ("a", "b"):
        command[log] = str(run.folder / f"log-{name}")
        nodes.append(subprocess.Popen([*command[:4], "--node", name, *command[4:]], start_new_session=True))
        time.sleep(2)  # the first one holds the meeting
    try:
        limit = time.monotonic() + 120
        while not (run.steps / "step-00000004.e1").is_dir() and time.monotonic() < limit:
            time.sleep(0.05)
        lost = psutil.Process(nodes[1].pid)
        for process in [*lost.children(recursive=True), lost]:
            process.kill()

        assert nodes[0].wait(240) == 0
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
            node.wait(60)
    rows = [json.loads(line) for line in (run.folder / "log-a/incidents.jsonl").read_text().splitlines()]
    starts = [row["detail"] for row in rows if row["kind"] == "start"]
    assert "of 2 on 2 nodes, layout dp=2" in starts[0]
    assert "of 1 on 1 nodes, layout tp=1" in starts[-1] and "goes on from step-" in starts[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hang]\nafter = 3", "hang.after is not known"),
        ("[restarts]\nmax = -1", "restarts.max must be a whole number"),
        ("[restarts]\nbackoff_s = 3", "restarts.backoff_s must be a list of 2 numbers"),
        ('[loss]\nnan = "pray"', "choose restart, rollback, stop, ignore"),
        ('[layouts]\n8 = "tp=2"', "it has 2 ranks"),
        ("[hang", "is not TOML"),
        ("hang = 3", "hang must be a table"),
        ("nonsense = 1", "nonsense is not known"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    """Exit 2 and one line, before anything is started."""
    (tmp_path / "policy.toml").write_text(text)

    done = CliRunner().invoke(cli, ["supervise", "--policy", str(tmp_path / "policy.toml"), "--", "true"])

    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2:1"], "MIN no more than MAX"),
        (["--nodes", "2"], "needs --meet HOST:PORT and --id"),
        (["--policy", "/nowhere.toml"], "cannot read the policy"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["supervise", *arguments, "--", "true"])

    assert done.exit_code == 2
    assert message in done.output


def test_newest_passes_banned_steps_over(tmp_path: Path, template: str) -> None:
    """For every reader of the run, with the reason; a later incarnation of the same steps is not meant."""
    import shutil

    for name in ("step-00000002.e1", "step-00000004.e1", "step-00000003.e2"):
        shutil.copytree(template, tmp_path / name)
    ban(str(tmp_path), Ban(2, 3, why="bad"))
    ban(str(tmp_path), Ban(1, 4, newer=True, why="worse"))

    from ckptkit.ops import runs

    found = runs.newest(str(tmp_path))

    assert found.step is not None and found.step.name == "step-00000002.e1"
    assert [(row.name, row.state, row.why) for row in found.passed_over] == [
        ("step-00000003.e2", "banned", "bad"),
        ("step-00000004.e1", "banned", "worse"),
    ]
    assert ban_of(read_bans(str(tmp_path)), 2, 4) is None
    assert min(os.listdir(tmp_path)) == "banned.json"
