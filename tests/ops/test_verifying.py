"""Verification: what is found, what is named, and what is said not to be checked."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import StoreError, UsageError
from ckptkit.formats import reference
from ckptkit.formats.native import NativeFormat
from tests.ops.making import TRAINED, contents, flip, make


@pytest.fixture
def broken(trained: str, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(trained, tmp_path / "broken"))


def rewrite(file: Path, change) -> None:
    """Change the header of a safetensors file that holds it, and keep its data."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_a_sound_checkpoint_has_no_fault(trained: str) -> None:
    """Every leaf is read; structure, coverage and masters are checked; reading changes nothing."""
    before = contents(trained)

    report = ops.verify(trained)

    assert report.exit_code == 0 and not report.faults
    assert report.leaves == report.leaves_checked > 0 and report.bytes_checked > 0
    assert [text.split()[0] for text in report.checked] == ["headers,", "coverage:", "digests", "parameters"]
    assert contents(trained) == before


def test_every_flipped_bit_of_data_is_found_with_its_file(broken: Path) -> None:
    """One bit in each of 30 random places over all rank files: each is found, in the right file."""
    files = ops.open(str(broken)).catalog.files
    rng = random.Random(0)

    for _ in range(30):
        chosen = rng.choice(files)
        file = broken / chosen.path
        offset, bit = rng.randrange(chosen.data_start, chosen.size), rng.randrange(8)
        flip(file, offset, bit)
        report = ops.verify(str(broken))
        flip(file, offset, bit)

        assert report.exit_code == 1
        assert {fault.file for fault in report.faults if fault.kind == "digest"} == {file.name}


def test_a_flipped_bit_of_any_other_file_is_found(broken: Path) -> None:
    """Headers, digest files, extras, index and manifest are no less part of the checkpoint."""
    rng = random.Random(1)

    for name in (
        "rank-00002.safetensors",
        "rank-00003.digests",
        "rank-00004.extras",
        "index.npz",
        "manifest.json",
    ):
        size = 4096 if name.endswith(".safetensors") else (broken / name).stat().st_size
        offset = rng.randrange(size)
        flip(broken / name, offset)
        report = ops.verify(str(broken))
        flip(broken / name, offset)

        assert report.exit_code == 1, name
        assert any(name in fault.file or name in fault.what for fault in report.faults), name


def test_a_fault_names_its_tensors(tmp_path: Path) -> None:
    """A leaf of one tensor names it; one of several lists them."""
    settings = {"vocab_size": 40_000, "num_hidden_layers": 1}
    made = make(tmp_path / "big", settings={"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 24,
                "router_hidden_size": 16, **settings}, optimizer="none")  # fmt: skip
    piece = ops.inspect(made).where("embed[39999]")[0]
    flip(Path(made) / piece.file, piece.offset - 600_000)

    (fault,) = ops.verify(made).faults

    assert fault.tensor == "embed" and "embed/param" in fault.what and fault.what.startswith("leaf ")


def test_quick_reads_no_bytes_and_says_so(broken: Path) -> None:
    """A flipped bit of data passes; a cut file does not."""
    flip(broken / "rank-00001.safetensors", -5)

    quick = ops.verify(str(broken), quick=True)

    assert quick.exit_code == 0 and quick.leaves_checked == 0
    assert quick.not_checked == ["the bytes of tensors (--quick)"]
    os.truncate(broken / "rank-00001.safetensors", 5000)
    assert ops.verify(str(broken), quick=True).exit_code == 1


def test_a_sample_reads_a_share_and_says_what_it_left(trained: str) -> None:
    """A quarter of 16 leaves is four; masters are not compared."""
    report = ops.verify(trained, sample=0.25)

    assert report.exit_code == 0
    assert (report.leaves, report.leaves_checked) == (16, 4)
    assert report.not_checked == ["12 leaves (--sample)", "masters against parameters (--sample)"]


@pytest.mark.parametrize("sample", [0.0, -1.0, 1.5])
def test_a_share_that_is_none_is_refused(trained: str, sample: float) -> None:
    """So are quick and a sample together: one of them would be ignored."""
    with pytest.raises(UsageError, match="share above 0"):
        ops.verify(trained, sample=sample)
    with pytest.raises(UsageError, match="one of them"):
        ops.verify(trained, sample=0.5, quick=True)


def test_a_format_without_digests_says_that_bytes_cannot_be_checked(weights: str) -> None:
    """No fault is not the same as sound."""
    report = ops.verify(weights)

    assert report.exit_code == 0 and report.leaves == 0
    assert any("hf has none" in text for text in report.not_checked)


def test_a_tensor_that_left_a_shard_is_found(tmp_path: Path) -> None:
    """A header that lost one entry and an index that still names it: the tensor and the file are named."""
    made = Path(make(tmp_path / "hf", to="hf", optimizer="none", max_shard_size=65536))
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.mlp.experts.down_proj"

    rewrite(made / index[name], lambda header: header.pop(name))
    report = ops.verify(str(made), quick=True)

    assert report.exit_code == 1 and report.faults[0].kind == "structure"
    assert index[name] in report.faults[0].what


def test_a_missing_shard_and_a_stray_one(tmp_path: Path) -> None:
    """A shard of the index that is absent is a fault with its name; a file that the index does not know is only noted."""
    made = Path(make(tmp_path / "hf", to="hf", optimizer="none", max_shard_size=65536))
    shards = sorted(made.glob("model-*.safetensors"))
    shutil.copy(shards[0], made / "model-00099-of-00099.safetensors")

    report = ops.verify(str(made))
    assert report.exit_code == 0 and any("model-00099-of-00099.safetensors" in note for note in report.notes)

    shards[1].unlink()
    report = ops.verify(str(made))
    assert report.exit_code == 1 and shards[1].name in report.faults[0].what


def test_a_parameter_that_is_not_its_master_rounded_is_found(tmp_path: Path) -> None:
    """Digests are right, since the file was written so; the tensor and the element are named."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", state=True)
    for (name, role), array in truth.values.items():
        if role == "param":  # masters that end in zeros, so that rounding is cutting off
            truth.values[name, "master"] = array.astype(np.uint32) << 16
    truth.values["norm", "param"][3] ^= 1
    reference.write(NativeFormat(), truth, tmp_path / "c", TRAINED)

    report = ops.verify(str(tmp_path / "c"))

    assert [(fault.kind, fault.tensor, fault.box) for fault in report.faults] == [("master", "norm", "[3]")]


def test_equal_tensors_are_equal_across_layouts_and_formats(trained: str, tmp_path: Path) -> None:
    """Against another layout everything is compared; against weights alone, what is left out is said."""
    other = ops.reshard(trained, str(tmp_path / "other"), layout="pp=3,ep=2,dp=6,zero=1").url
    weights = ops.reshard(trained, str(tmp_path / "hub"), to="hub", drop_optimizer=True).url

    full, part = ops.verify(trained, against=other), ops.verify(trained, against=weights)

    assert full.exit_code == part.exit_code == 0
    held = ops.open(trained).catalog
    sizes = {key: int(np.prod(held.tensors[key[0]].shape)) for key in held.held}
    assert full.elements_compared == sum(sizes.values())
    assert part.elements_compared == sum(n for (_, role), n in sizes.items() if role in ("param", "buffer"))
    assert sorted(text.split()[0] for text in part.not_checked) == [
        "exp_avg",
        "exp_avg_sq",
        "master",
        "momentum",
    ]


def test_one_different_element_is_found_against_another_layout(trained: str, tmp_path: Path) -> None:
    """The tensor, the role and the element are named, though it lies elsewhere in the other checkpoint."""
    other = Path(ops.reshard(trained, str(tmp_path / "other"), layout="dp=3,zero=3").url)
    (piece,) = ops.inspect(str(other)).where("layers.2.experts.down/momentum[1, 7, 3]")
    flip(other / piece.file, piece.offset)

    report = ops.verify(trained, against=str(other), bitwise=True)

    assert [(fault.kind, fault.tensor, fault.box) for fault in report.faults] == [
        ("against", "layers.2.experts.down", "[1, 7, 3]")
    ]


def test_different_sets_of_tensors_are_a_difference(tmp_path: Path, weights: str) -> None:
    """A tensor that only one side has, and one of another dtype, are faults with their names."""
    part = ops.reshard(weights, str(tmp_path / "part"), drop=["norm"]).url
    cast = ops.reshard(weights, str(tmp_path / "cast"), dtype="float32").url

    lacking, other = ops.verify(weights, against=part), ops.verify(weights, against=cast)

    assert [fault.tensor for fault in lacking.faults] == [
        "norm"
    ] and "has no param of norm" in lacking.faults[0].what
    assert ops.verify(part, against=weights).exit_code == 1
    assert other.exit_code == 1 and "is bfloat16, in" in other.faults[0].what


def test_faults_are_counted_beyond_the_list(tmp_path: Path, weights: str) -> None:
    """Twenty of a kind are listed unless told otherwise; all are counted."""
    other = make(tmp_path / "other", to="hf", optimizer="none", seed=1)

    report = ops.verify(weights, against=other, limit=5)

    assert len(report.faults) == 5 < report.fault_count == len(ops.open(weights).catalog.held)


def test_what_cannot_be_opened_is_a_fault_and_what_is_absent_an_error(broken: Path, tmp_path: Path) -> None:
    """A broken checkpoint is a result (exit 1); no checkpoint at all is not."""
    (broken / "rank-00007.safetensors").unlink()

    report = ops.verify(str(broken))

    assert report.exit_code == 1 and "rank-00007.safetensors is missing" in report.faults[0].what
    assert "cannot be opened" in report.not_checked[0]
    with pytest.raises(StoreError):
        ops.verify(str(tmp_path / "absent"))


def test_the_report_is_json(broken: Path) -> None:
    """One object with a schema number; what people read is in the summary."""
    flip(broken / "rank-00001.safetensors", -5)

    report = ops.verify(str(broken))
    plain = json.loads(report.to_json())

    assert (
        plain["schema"] == 1
        and plain["report"] == "VerifyReport"
        and plain["fault_count"] == report.fault_count > 0
    )
    assert plain["faults"][0]["file"] == "rank-00001.safetensors"
    assert "rank-00001.safetensors" in report.summary() and "checked:" in report.summary()
