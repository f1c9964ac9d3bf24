"""`ckptkit cache`: what an operator sees and does, against daemons that run."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from ckptkit import ops
from ckptkit.cli.cache_asking import needs
from ckptkit.cli.main import cli
from ckptkit.errors import UsageError
from ckptkit.faults.cluster.nodes import Cluster, wait_for
from ckptkit.formats.native import step_dir
from tests.cli.helpers import SCHEMA


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with a rank each; steps 1 and 2 saved and copied, step 1 durable."""
    with Cluster(tmp_path_factory.mktemp("cli"), nodes=2, ranks=1, drain=True) as made:
        made.launch()
        made.start()
        made.save(1, level=2)
        assert run(made, "drain", "--wait")[0] == 0
        made.save(2, level=2)
        yield made


def run(cluster: Cluster | None, *arguments: str, node: int = 0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    asked = ["--socket", cluster.nodes[node].socket] if cluster is not None else []
    with pytest.raises(SystemExit) as ended:
        runner = CliRunner()
        with runner.isolation() as (out, err, _):
            try:
                cli.main(["cache", *arguments, *asked])
            finally:
                printed, told = out.getvalue().decode(), err.getvalue().decode()
                run.last = printed, told  # type: ignore[attr-defined]
    code = ended.value.code
    printed, told = run.last  # type: ignore[attr-defined]
    if "--json" in arguments:
        jsonschema.validate(json.loads(printed), SCHEMA)
    return (code if isinstance(code, int) else 0), printed, told


def test_status_says_first_what_is_lost(cluster: Cluster) -> None:
    """Exposure in words, then levels."""
    code, out, _ = run(cluster, "status")

    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "If a process dies now, step 2 is restored."
    assert lines[1] == "If this node dies now, step 2 is restored."
    assert lines[2] == "If its whole clique dies now, step 1 is restored."
    assert lines[3].startswith("The durable step is ")


def test_status_as_json(cluster: Cluster) -> None:
    code, out, _ = run(cluster, "status", "--json")

    found = json.loads(out)
    assert (code, found["report"], found["committed"], found["durable"]) == (
        0, "CacheStatus", {"step": 2, "epoch": 1}, {"step": 1, "epoch": 1},
    )  # fmt: skip
    assert found["clique"] == ["n1"] and found["slots"]["own/0"]["COMMITTED"] == 1


def test_ls_lists_what_is_where(cluster: Cluster) -> None:
    code, out, _ = run(cluster, "ls", "--json")

    rows = {row["step"]: row for row in json.loads(out)["versions"]}
    assert code == 0
    assert sorted(rows[2]["ranks"]) == [0, 1] and not rows[2]["durable"] and "newest" in rows[2]["marks"]
    assert rows[1]["durable"]
    assert "step" in run(cluster, "ls")[1]


def test_get_writes_a_version_as_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    """From the memory of both nodes, and from storage; nothing is left of what cannot be had."""
    code, out, _ = run(cluster, "get", "2", str(tmp_path / "two"))
    assert code == 0 and "step 2 of epoch 1" in out
    assert ops.verify(str(tmp_path / "two")).exit_code == 0
    assert ops.open(str(tmp_path / "two")).catalog.step == 2

    assert run(cluster, "get", "1", str(tmp_path / "one"), "--epoch", "1", "--json")[0] == 0
    same = ops.verify(str(tmp_path / "one"), against=str(cluster.durable / step_dir(1, 1)))
    assert same.exit_code == 0

    code, _, err = run(cluster, "get", "7", str(tmp_path / "seven"))
    assert code == 4 and "whole nowhere" in err
    assert [path.name for path in tmp_path.iterdir() if "seven" in path.name] == []


def test_pins_are_in_storage(cluster: Cluster) -> None:
    assert json.loads(run(cluster, "pin", "1", "--json")[1])["did"] == "pin"
    assert (cluster.durable / "pins" / step_dir(1, 1)).exists()
    assert [
        row["pinned"] for row in json.loads(run(cluster, "ls", "--json")[1])["versions"] if row["step"] == 1
    ] == [True]
    assert run(cluster, "unpin", "1")[0] == 0
    assert not (cluster.durable / "pins" / step_dir(1, 1)).exists()


def test_what_is_not_there_is_an_error_with_advice(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_CACHE_ROOT", str(tmp_path))
    code, _, err = run(None, "status")
    assert code == 2 and "no daemon of yours runs here" in err
    code, _, err = run(None, "status", "--job", "nothing")
    assert code == 4 and "Start it with `ckptkit cache serve`" in err
    code, _, err = run(cluster, "status", "--job", "other")
    assert code == 4 and "not of 'other'" in err


def test_certs_are_made_and_checked(tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    assert run(None, "certs", "node", folder, "n0")[0] == 2
    assert run(None, "certs", "ca", folder, "--job", "run-1")[0] == 0
    assert run(None, "certs", "ca", folder, "--job", "run-1")[0] == 2
    assert (
        run(None, "certs", "node", folder, "n0", "--host", "n0.cluster", "--host", "10.0.0.1", "--json")[0]
        == 0
    )
    assert run(None, "certs", "node", folder, "../n0")[0] == 2
    assert {path.name for path in (tmp_path / "certs").iterdir()} == {"ca.pem", "ca.key", "n0.pem", "n0.key"}
    assert (tmp_path / "certs" / "n0.key").stat().st_mode & 0o077 == 0


def test_doctor_names_what_is_wrong(tmp_path: Path) -> None:
    """Every check a line; a fault is exit code 1."""
    config = tmp_path / "cache.toml"
    config.write_text(
        f'job = "run-1"\nroot = "{tmp_path}"\nlisten = "127.0.0.1:0"\n[tls]\nmode = "off"\n[drain]\nurl = "{tmp_path / "run"}"\n'
    )

    code, out, _ = run(None, "doctor", "--config", str(config), "--json")

    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert set(checks) >= {
        "kernel",
        "root",
        "swap",
        "huge pages",
        "numa",
        "memory",
        "cgroup",
        "descriptors",
        "address",
        "tls",
        "storage",
    }
    assert checks["storage"]["level"] == "ok"
    assert code == (1 if any(check["level"] == "error" for check in checks.values()) else 0)
    assert not list((tmp_path / "run").rglob("*.*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no job"), ("job = 1", "should be of type str"), ('job = "A"', "use small letters"), ('job = "a"\nslots = 3', "no table"),
        ('job = "a"\n[slots]\nper_rnak = 2', "did you mean slots.per_rank"), ('job = "a"\n[slots]\nper_rank = 1', "below 2"),
        ('job = "a"\n[drain]\nmax_bps = "fast"', "write a size"), ('job = "a"\ntime_scale = 0.0', "above 0"), ("job = ", "is no TOML"),
        ('job = "a"\nlisten = "0.0.0.0:0"\n[tls]\nmode = "off"', "loopback"), ('job = "a"', "ckptkit cache certs"),
        ('job = "a"\nroot = "x"\nlisten = "127.0.0.1:0"\n[tls]\nmode = "off"', "absolute path"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "cache.toml"
    config.write_text(text)

    code, _, err = run(None, "serve", "--config", str(config))

    assert code == 2 and message in err


def test_ban_and_evict(cluster: Cluster) -> None:
    """Last in this file: they change what is there."""
    assert run(cluster, "evict", "10")[0] == 0
    assert not cluster.nodes[0].holding(2, rank=1)
    assert run(cluster, "ban", "2", "--epoch", "1", node=1)[0] == 0
    wait_for(
        lambda: any(row["banned"] for row in cluster.nodes[0].versions()),
        "the ban on the other node",
        cluster,
    )
    assert cluster.restart() == 1


def test_without_the_extra_it_is_said_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install 'ckptkit\[cache\]'"):
        needs("json", "no_such_library")
