"""Plans as reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import UsageError
from tests.ops.making import TRAINED, contents


def test_a_plan_proves_every_element_and_writes_nothing(trained: str, tmp_path: Path) -> None:
    """Elements are those of all tensors and roles; both layouts are named; nothing stays."""
    before = contents(trained)
    catalog = ops.open(trained).catalog
    total = sum(int(np.prod(catalog.tensors[name].shape)) for name, _ in catalog.held)

    report = ops.plan(trained, str(tmp_path / "x"), layout="pp=3,ep=2,dp=6,zero=1")

    assert report.elements == total
    assert report.pairs >= report.pieces_out > 0 and report.pieces_in > 0
    assert (report.source["layout"], report.source["world"]) == ("tp=2,pp=2:2/1,ep=4,dp=4,zero=1", 16)
    assert (report.destination["layout"], report.destination["world"], report.destination["files"]) == (
        "pp=3,ep=2,dp=6,zero=1", 18, 18,
    )  # fmt: skip
    assert report.over_read >= 1 and report.memory == 256 << 20
    assert report.free is not None and report.fits
    assert not list(tmp_path.iterdir()) and contents(trained) == before


def test_a_plan_is_what_a_run_does(trained: str, tmp_path: Path) -> None:
    """Bytes out, files, casts and drops are those of the run."""
    options: dict[str, Any] = {"layout": "tp=2,dp=3,zero=1", "dtype": "float32"}

    planned = ops.plan(trained, str(tmp_path / "x"), **options)
    done = ops.reshard(trained, str(tmp_path / "x"), **options)

    sizes = [path.stat().st_size for path in Path(done.url).glob("*.safetensors")]
    assert (planned.bytes_out, planned.largest_rank) == (sum(sizes), max(sizes))
    assert planned.mean_rank == pytest.approx(sum(sizes) / len(sizes))
    assert (planned.casts, planned.drops) == (done.plan.casts, done.plan.drops) and planned.casts
    assert not any(row.lossy for row in planned.casts)
    assert done.bytes_read <= planned.bytes_in * 1.5 and planned.bytes_in <= done.bytes_read * 1.5


def test_replicated_tensors_are_spread_over_ranks(trained: str, tmp_path: Path) -> None:
    """No rank holds more than 1.2 of the mean, though most tensors lie on every rank."""
    report = ops.plan(trained, str(tmp_path / "x"), layout="dp=8,zero=1")

    assert report.largest_rank <= 1.2 * report.mean_rank


def test_what_is_lost_needs_its_flag(trained: str, tmp_path: Path) -> None:
    """A plan lists it as not allowed, with the flag; with the flag it is allowed."""
    bare = ops.plan(trained, str(tmp_path / "x"), to="hf", probe=False)
    given = ops.plan(trained, str(tmp_path / "x"), to="hf", drop_optimizer=True, probe=False)

    assert bare.drops and not any(row.allowed for row in bare.drops)
    assert {row.flag for row in bare.drops} == {"--drop-optimizer"}
    assert all(row.allowed for row in given.drops)
    dropped = sum(row.nbytes for row in bare.drops)
    held = ops.inspect(trained)
    assert dropped == sum(role.nbytes for role in held.roles if role.role not in ("param", "buffer"))


def test_a_probe_gives_a_time_and_none_is_made_without(trained: str, tmp_path: Path) -> None:
    """Time is bytes over the rates that the probe measured."""
    with_probe = ops.plan(trained, str(tmp_path / "x"), layout="dp=2")
    without = ops.plan(trained, str(tmp_path / "x"), layout="dp=2", probe=False)

    assert with_probe.seconds is not None and with_probe.write_rate is not None
    assert without.seconds is without.read_rate is None


def test_what_stands_in_the_way_is_said(trained: str, weights: str, tmp_path: Path) -> None:
    """A destination that exists, ties, a source without digests, replicas that are not compared."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("")

    report = ops.plan(weights, str(tmp_path / "there"), to="native", probe=False)

    assert any("exists" in note and "--overwrite" in note for note in report.notes)
    assert any("hf has no digests" in text for text in report.unverified)
    assert report.ties == ["the output head is the embedding: stored once"]
    assert ops.plan(trained, str(tmp_path / "x"), layout="dp=2", probe=False).unverified == []


def test_padding_is_counted(trained: str, tmp_path: Path) -> None:
    """70 rows of 32 on four ranks of 128: 442 rows of padding, in param, master and two moments."""
    report = ops.plan(trained, str(tmp_path / "x"), layout="tp=4", probe=False)

    assert report.padding_out == (4 * 128 - 70) * 32 * (2 + 3 * 4)
    assert report.padding_in == (2 * 128 - 70) * 32 * (2 + 3 * 4)


def test_a_plan_is_json(trained: str, tmp_path: Path) -> None:
    """One object with a schema number, and the layout exactly as --layout takes it."""
    report = ops.plan(trained, str(tmp_path / "x"), layout=TRAINED, probe=False)
    plain = json.loads(report.to_json())

    assert plain["schema"] == 1
    again = ops.plan(trained, str(tmp_path / "x"), layout=plain["destination"]["layout"], probe=False)
    assert again.destination == report.destination and "proven" in report.summary()


def test_options_are_checked(trained: str, tmp_path: Path) -> None:
    """The same as those of a run."""
    with pytest.raises(UsageError):
        ops.plan(trained, str(tmp_path / "x"), replicas="none")
    with pytest.raises(TypeError):
        ops.plan(trained, str(tmp_path / "x"), colour="red")
