"""`repair`: whatever was damaged is byte for byte what it was, or is named and left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import FormatError, UsageError
from tests.ops.making import contents, flip, make


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One checkpoint on four ranks of several leaves each, and what holds the same values in other forms."""
    root = tmp_path_factory.mktemp("repair")
    size = {"hidden_size": 256, "num_hidden_layers": 3, "num_experts": 4, "moe_intermediate_size": 128}
    native = make(root / "native", settings=size, layout="tp=2,dp=2,zero=1")
    made = {"native": native, "same": ops.copy(native, str(root / "same")).url}
    made["cut"] = ops.reshard(native, str(root / "cut"), layout="dp=3,zero=3").url
    made["dcp"] = ops.reshard(native, str(root / "dcp"), to="dcp", layout="tp=1", drop_extras=True).url
    made["weights"] = ops.reshard(
        native, str(root / "weights"), to="hf", drop_optimizer=True, drop_extras=True
    ).url
    made["other"] = make(root / "other", settings=size, layout="tp=1", seed=1)
    return made


@pytest.fixture
def broken(copies: dict[str, str], tmp_path: Path) -> Path:
    return Path(ops.copy(copies["native"], str(tmp_path / "broken")).url)


def damage(folder: Path, seed: int) -> None:
    """Some bytes of some rank files, drawn; one file cut short, one gone."""
    rng = np.random.default_rng(seed)
    files = sorted(folder.glob("rank-*.safetensors"))
    for file in files[:2]:
        for _ in range(3):
            flip(file, int(rng.integers(0, file.stat().st_size)), int(rng.integers(0, 8)))
    os.truncate(files[2], int(rng.integers(0, files[2].stat().st_size)))
    files[3].unlink()


@pytest.mark.parametrize("kind", ["same", "cut", "dcp"])
def test_data_comes_back_from_a_copy_of_any_format_and_layout(
    copies: dict[str, str], broken: Path, kind: str
) -> None:
    damage(broken, 7)

    report = ops.repair(str(broken), source=copies[kind])

    assert report.exit_code == 0 and len(report.repaired) == 4
    assert contents(broken) == contents(copies["native"])


def test_only_the_damaged_leaves_are_read_from_the_copy(copies: dict[str, str], broken: Path) -> None:
    """A copy that is damaged elsewhere serves as well."""
    flip(broken / "rank-00001.safetensors", -1)
    cut = broken.parent / "cut"
    ops.copy(copies["same"], str(cut))
    flip(cut / "rank-00002.safetensors", -1)

    report = ops.repair(str(broken), source=str(cut))

    assert report.repaired == ["rank-00001.safetensors: 1 leaf from the other copy"]
    assert contents(broken) == contents(copies["native"])


def test_weights_alone_mend_damaged_weights(copies: dict[str, str], broken: Path) -> None:
    flip(broken / "rank-00001.safetensors", -1)  # bfloat16 comes last in a file

    assert ops.repair(str(broken), source=copies["weights"]).exit_code == 0
    assert contents(broken) == contents(copies["native"])


@pytest.mark.parametrize("name", ["index.npz", "rank-00001.digests", "manifest.json"])
@pytest.mark.parametrize("how", ["gone", "changed"])
def test_small_files_are_made_of_what_is_left(
    copies: dict[str, str], broken: Path, name: str, how: str
) -> None:
    """Byte for byte; but for lineage and fingerprints, which nothing else knows."""
    if how == "gone":
        (broken / name).unlink()
    else:
        flip(broken / name, -5)

    report = ops.repair(str(broken), rebuild_manifest=name == "manifest.json")

    assert report.exit_code == 0 and report.repaired == [name]
    now, before = contents(broken), contents(copies["native"])
    assert {k for k in before if now.get(k) != before[k]} <= {"manifest.json"} & {name}
    assert ops.verify(str(broken)).exit_code == 0
    a, b = ops.open(str(broken)).catalog, ops.open(copies["native"]).catalog
    assert a.model is not None and b.model is not None
    assert (a.layout, a.names, a.step, a.model.config) == (b.layout, b.names, b.step, b.model.config)


def test_headers_are_made_of_the_index(copies: dict[str, str], broken: Path) -> None:
    for rank in range(4):
        flip(broken / f"rank-{rank:05d}.safetensors", 100)

    report = ops.repair(str(broken))

    assert report.exit_code == 0
    assert contents(broken) == contents(copies["native"])


def test_extras_come_from_a_native_copy_alone(copies: dict[str, str], broken: Path) -> None:
    (broken / "rank-00002.extras").unlink()

    assert ops.repair(str(broken), source=copies["dcp"]).left
    assert ops.repair(str(broken), source=copies["same"]).exit_code == 0
    assert contents(broken) == contents(copies["native"])


@pytest.mark.parametrize("kind", ["other", "weights", None])
def test_what_is_not_the_same_repairs_nothing(copies: dict[str, str], broken: Path, kind: str | None) -> None:
    """Other values, a copy that lacks the optimizer's state, none at all: the file stays as it was, and is named."""
    file = broken / "rank-00001.safetensors"
    flip(file, file.stat().st_size // 4)
    before = contents(broken)

    report = ops.repair(str(broken), source=copies[kind] if kind else None)

    assert report.exit_code == 1 and not report.repaired
    assert any("rank-00001.safetensors" in text for text in report.left)
    assert contents(broken) == before


def test_a_manifest_is_not_made_anew_unless_told_and_only_where_all_ranks_agree(
    copies: dict[str, str], broken: Path
) -> None:
    (broken / "manifest.json").unlink()

    with pytest.raises(FormatError, match="--rebuild-manifest"):
        ops.repair(str(broken))
    (broken / "rank-00003.digests").unlink()
    with pytest.raises(FormatError):
        ops.repair(str(broken), rebuild_manifest=True)
    theirs = Path(
        make(broken.parent / "later", settings={"hidden_size": 256}, layout="tp=2,dp=2,zero=1", step=7)
    )
    (broken / "rank-00003.digests").write_bytes((theirs / "rank-00003.digests").read_bytes())
    with pytest.raises(FormatError, match="not those of all ranks of one step"):
        ops.repair(str(broken), rebuild_manifest=True)

    assert not (broken / "manifest.json").exists()


def test_a_manifest_is_not_made_anew_over_damaged_data(copies: dict[str, str], broken: Path) -> None:
    (broken / "manifest.json").unlink()
    flip(broken / "rank-00001.safetensors", -1)

    first = ops.repair(str(broken), rebuild_manifest=True)
    missing = not (broken / "manifest.json").exists()
    second = ops.repair(str(broken), rebuild_manifest=True, source=copies["dcp"])

    assert first.exit_code == 1 and missing
    assert second.exit_code == 0 and ops.verify(str(broken)).exit_code == 0


def test_a_dry_run_says_what_is_wrong_and_writes_nothing(copies: dict[str, str], broken: Path) -> None:
    damage(broken, 3)
    before = contents(broken)

    report = ops.repair(str(broken), source=copies["dcp"], dry_run=True)

    assert report.exit_code == 1 and len(report.found) >= 4
    assert contents(broken) == before
    assert ops.repair(copies["native"], dry_run=True).exit_code == 0


_REPAIR = "import sys; from ckptkit import ops; ops.repair(sys.argv[1], source=sys.argv[2])"


def test_a_repair_that_is_killed_is_run_again(copies: dict[str, str], broken: Path) -> None:
    damage(broken, 5)
    for delay in (0.25, 0.35, 0.45, 0.6):
        with subprocess.Popen([sys.executable, "-c", _REPAIR, str(broken), copies["dcp"]]) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)

    report = ops.repair(str(broken), source=copies["dcp"])

    assert report.exit_code == 0
    assert contents(broken) == contents(copies["native"])


def test_other_formats_and_places_are_refused(copies: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        ops.repair(copies["weights"])
    with pytest.raises(UsageError, match="local folder"):
        ops.repair(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="local folder"):
        ops.repair("memory://nothing")
