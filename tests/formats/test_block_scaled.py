"""Block-scaled float8 weights are read as the values they stand for; torch is the judge."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit import ops
from ckptkit.errors import FormatError

_CONFIG = {
    "model_type": "deepseek_v3",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
SHAPES = {"a.weight": (300, 520), "b.weight": (128, 128), "c.weight": (1, 700), "d.weight": (3, 200, 130)}


def write(
    folder: Path, block: tuple[int, int] = (128, 128), kind: torch.dtype = torch.float8_e4m3fn
) -> dict[str, torch.Tensor]:
    """A checkpoint in two files, scales apart from their weights; gives the values as torch makes them."""
    generator = torch.Generator().manual_seed(0)
    first: dict[str, torch.Tensor] = {"norm.weight": torch.randn(7, generator=generator).to(torch.bfloat16)}
    second: dict[str, torch.Tensor] = {}
    values = {"norm.weight": first["norm.weight"].float()}
    for name, shape in SHAPES.items():
        weight = (torch.randn(shape, generator=generator) * 40).to(kind)
        blocks = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        scale = torch.rand(blocks, generator=generator) * 1e-3
        first[name], second[f"{name}_scale_inv"] = weight, scale
        spread = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        values[name] = weight.float() * spread[..., : shape[-2], : shape[-1]]
    folder.mkdir(parents=True)
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    where = dict.fromkeys(first, "model-00001-of-00002.safetensors") | dict.fromkeys(
        second, "model-00002-of-00002.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {**_CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def load(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [(128, 128), (32, 96)])
def test_values_are_those_of_torch(tmp_path: Path, dtype: str, block: tuple[int, int]) -> None:
    values = write(tmp_path / "a", block)

    ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), dtype=dtype, memory=16 << 20)

    found = load(tmp_path / "b")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(found[name], value.to(getattr(torch, dtype))), name
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


@pytest.mark.parametrize("kind", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_other_narrow_types(tmp_path: Path, kind: torch.dtype) -> None:
    values = write(tmp_path / "a", kind=kind)

    ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), dtype="float32")

    assert all(torch.equal(load(tmp_path / "b")[name], value) for name, value in values.items())


def test_without_a_cast_what_is_stored_is_kept_to_the_bit(tmp_path: Path) -> None:
    """Nobody wants four times the bytes unasked."""
    write(tmp_path / "a")

    ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"))

    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == json.loads(
        (tmp_path / "a" / "config.json").read_text()
    )


def test_any_layout_cuts_the_values(tmp_path: Path) -> None:
    """Cuts that have nothing to do with blocks."""
    values = write(tmp_path / "a")

    ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), to="native", layout="dp=7,zero=3", dtype="bfloat16")
    ops.reshard(str(tmp_path / "b"), str(tmp_path / "c"), to="hf", layout="tp=1")

    assert all(torch.equal(load(tmp_path / "c")[name], value.bfloat16()) for name, value in values.items())


def test_ranges_of_any_size_and_place_are_the_same_bytes(tmp_path: Path) -> None:
    """As the engine may ask for them: borders within elements, rows and blocks."""
    values = write(tmp_path / "a")
    source = ops.open(str(tmp_path / "a"), dequantize=True)
    whole = values["d.weight"].numpy().tobytes()
    rng = np.random.default_rng(0)

    with source.store.open("d.weight (block-scaled)") as reader:
        for _ in range(200):
            first, last = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
            found = bytearray(last - first)
            reader.readinto(first, memoryview(found))
            assert found == whole[first:last]
        with pytest.raises(FormatError, match="ends at byte"):
            reader.readinto(len(whole) - 1, memoryview(bytearray(2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"a.weight_scale_inv": torch.zeros(3, 4)}, "a.weight_scale_inv"),
        (lambda t: {"a.weight_scale_inv": torch.zeros(3, 5, dtype=torch.int32)}, "int32"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path / "a")
    file = tmp_path / "a" / "model-00002-of-00002.safetensors"
    save_file({**load_file(file), **change(None)}, file)

    with pytest.raises(FormatError, match=message):
        ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), dtype="bfloat16")

    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("block", [[128], [0, 128], "128", [128, 128.0]])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, block: object) -> None:
    write(tmp_path / "a")
    config = {"model_type": "x", "quantization_config": {"weight_block_size": block}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))

    with pytest.raises(FormatError, match="weight_block_size"):
        ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), dtype="bfloat16")


def test_a_model_with_a_schema_is_always_its_values(weights_of_llama: Path, tmp_path: Path) -> None:
    """Its tensors are bfloat16 in one checkpoint and block-scaled in another; both are the same model."""
    stored = load(weights_of_llama)
    narrow, values = {}, {}
    for name, value in stored.items():
        if value.ndim == 2 and "proj" in name:
            scale = torch.full((-(-value.shape[0] // 128), -(-value.shape[1] // 128)), 0.25)
            narrow[name], narrow[f"{name}_scale_inv"] = (value / 0.25).to(torch.float8_e4m3fn), scale
            values[name] = narrow[name].float() * 0.25
        else:
            narrow[name] = values[name] = value
    folder = tmp_path / "fp8"
    folder.mkdir()
    save_file(narrow, folder / "model.safetensors")
    config = json.loads((weights_of_llama / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )

    found = ops.inspect(str(folder))
    ops.reshard(str(folder), str(tmp_path / "b"), dtype="bfloat16", to="native", layout="tp=2")
    ops.reshard(str(tmp_path / "b"), str(tmp_path / "c"), to="hf", layout="tp=1")

    assert found.model.startswith("llama") and any("block-scaled" in note for note in found.notes)
    assert all(torch.equal(load(tmp_path / "c")[k], v.bfloat16()) for k, v in values.items())
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())


@pytest.fixture
def weights_of_llama(tmp_path: Path) -> Path:
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 384}  # fmt: skip
    return Path(
        ops.synth(str(tmp_path / "llama"), model="llama", settings=small, to="hf", optimizer="none").url
    )


_PEAK = r"""
import re, sys
from pathlib import Path
from ckptkit import ops

ops.reshard(sys.argv[1], sys.argv[2], dtype="float32", memory=16 << 20, threads=1)
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    """A tensor of 34 MB, 134 MB as values, beside one that is 16 times smaller."""
    peaks = []
    for rows in (256, 4096):
        folder = tmp_path / str(rows)
        folder.mkdir()
        weight = torch.zeros((rows, 8192), dtype=torch.float8_e4m3fn)
        scale = torch.ones((rows // 128, 64))
        save_file({"w": weight, "w_scale_inv": scale}, folder / "model.safetensors")
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, str(folder), str(tmp_path / f"out{rows}")],
            capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        peaks.append(int(done.stdout))

    assert peaks[1] - peaks[0] < 20_000
