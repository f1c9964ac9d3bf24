"""Fingerprints of checkpoints do not depend on how these are stored, and tell two checkpoints apart without reading them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.core.fingerprints import axis_names, axis_words, sum_of, unsigned
from ckptkit.errors import InterruptedRunError
from ckptkit.formats.native_manifest import Manifest
from ckptkit.ops.fingerprinting import compute, fingerprints, stored
from tests.ops.making import TRAINED, flip, make, values


def expected(url: str) -> dict[tuple[str, str], int]:
    """From whole arrays, put together without planner or engine."""
    tensors = ops.open(url).catalog.tensors
    found = {}
    for (name, role), array in values(url).items():
        bits = np.ascontiguousarray(array)
        bits = bits.view(unsigned(bits.dtype.itemsize))
        names = axis_names(tensors[name].axes)
        found[name, role] = sum_of(
            bits, [axis_words(n, 0, s) for n, s in zip(names, bits.shape, strict=True)]
        )
    return found


@pytest.mark.parametrize("layout", ["tp=1", "tp=2,dp=2,zero=3", "pp=3,ep=2,dp=2,zero=1", "dp=5,zero=2"])
def test_a_reshard_stores_the_same_fingerprints_in_every_layout(
    trained: str, tmp_path: Path, layout: str
) -> None:
    ops.reshard(trained, str(tmp_path / "b"), layout=layout, fingerprint=True)

    found = stored(ops.open(str(tmp_path / "b")))

    assert found == stored(ops.open(trained)) == expected(trained)


@pytest.mark.parametrize("to", ["dcp", "megatron", "zarr", "torch"])
def test_formats_without_a_place_for_them_have_the_same_ones_computed(
    trained: str, tmp_path: Path, to: str
) -> None:
    ops.reshard(trained, str(tmp_path / "b"), to=to, drop_extras=True, drop_optimizer=True)

    source = ops.open(str(tmp_path / "b"))
    found, computed = fingerprints(source)

    theirs = stored(ops.open(trained))
    assert stored(source) == {}
    assert computed == len(found) > 100
    assert all(value == theirs[key] for key, value in found.items())


def test_a_remote_destination_has_them_too(trained: str) -> None:
    """Its files are written from first to last."""
    ops.reshard(trained, "memory://prints/b", layout="dp=3,zero=3", fingerprint=True)

    assert stored(ops.open("memory://prints/b")) == stored(ops.open(trained))


def test_computed_and_stored_ones_are_the_same(trained: str) -> None:
    source = ops.open(trained)

    assert compute(source, source.catalog.held, memory=16 << 20) == stored(source)


def test_an_interrupted_run_goes_on_with_the_fingerprints_of_its_durable_part(
    trained: str, tmp_path: Path
) -> None:
    """What was computed from durable bytes is in the journal."""
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if done >= total // 2:
            raise KeyboardInterrupt

    big = make(tmp_path / "big", model="zaya-tiny", settings={"hidden_size": 512, "num_hidden_layers": 3})
    with pytest.raises(InterruptedRunError):
        ops.reshard(
            big,
            str(tmp_path / "b"),
            layout="dp=3,zero=1",
            progress=stop,
            threads=1,
            memory=16 << 20,
            fingerprint=True,
        )
    ops.reshard(big, str(tmp_path / "b"), layout="dp=3,zero=1", fingerprint=True)

    assert stored(ops.open(str(tmp_path / "b"))) == stored(ops.open(big))


def test_verify_against_reads_no_byte_of_tensors_whose_fingerprints_are_equal(
    trained: str, tmp_path: Path
) -> None:
    """Shown by damage that is not noticed: it is said that it was not looked for."""
    ops.reshard(trained, str(tmp_path / "b"), layout="tp=1", fingerprint=True)
    flip(tmp_path / "b" / "rank-00000.safetensors", -1)

    quick = ops.verify(trained, against=str(tmp_path / "b"), quick=True)
    bitwise = ops.verify(trained, against=str(tmp_path / "b"), quick=True, bitwise=True)

    assert quick.exit_code == 0
    assert any("by fingerprint" in text for text in quick.checked)
    assert any("verify it alone" in text for text in quick.not_checked)
    assert bitwise.exit_code == 1
    assert not any("by fingerprint" in text for text in bitwise.checked)


def test_verify_against_says_where_values_differ_whose_fingerprints_do(trained: str, tmp_path: Path) -> None:
    other = make(tmp_path / "other", layout=TRAINED, seed=1)

    report = ops.verify(trained, against=other, quick=True, limit=10_000)

    differing = {
        key for key, value in stored(ops.open(trained)).items() if value != stored(ops.open(other))[key]
    }
    assert {fault.tensor for fault in report.faults} == {tensor for tensor, _ in differing}
    assert all("elements differ" in fault.what for fault in report.faults)


def test_a_wrong_fingerprint_is_not_taken_for_a_difference_of_values(trained: str, tmp_path: Path) -> None:
    ops.reshard(trained, str(tmp_path / "b"), layout="tp=1", fingerprint=True)
    _forge(tmp_path / "b", "embed/param", "0" * 16)

    report = ops.verify(trained, against=str(tmp_path / "b"), quick=True)

    assert [fault.what for fault in report.faults] == [
        "embed/param is equal in both, but one of the two stores a wrong fingerprint of it"
    ]


def test_without_fingerprints_the_manifest_has_no_word_of_them(trained: str, tmp_path: Path) -> None:
    ops.reshard(trained, str(tmp_path / "b"), fingerprint=False)

    assert "fingerprints" not in json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert ops.verify(trained, against=str(tmp_path / "b"), quick=True).exit_code == 0


def _forge(folder: Path, key: str, value: str) -> None:
    path = folder / "manifest.json"
    manifest = Manifest.parse(str(path), path.read_bytes())
    assert manifest.fingerprints is not None and key in manifest.fingerprints
    path.write_bytes(replace(manifest, fingerprints={**manifest.fingerprints, key: value}).to_bytes())
