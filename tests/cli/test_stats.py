"""`ckptkit stats`: finds a sick tensor."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.cli.helpers import invoke, invoke_json


def poison(folder: Path, ending: str) -> None:
    """Put a NaN into the first element of the first tensor whose name ends so (bfloat16)."""
    for file in sorted(folder.glob("*.safetensors")):
        raw = bytearray(file.read_bytes())
        (size,) = struct.unpack_from("<Q", raw)
        for name, entry in json.loads(raw[8 : 8 + size]).items():
            if name.endswith(ending):
                at = 8 + size + entry["data_offsets"][0]
                raw[at : at + 2] = b"\xc0\x7f"
                file.write_bytes(raw)
                return
    raise AssertionError(ending)


def test_a_tensor_with_a_nan_is_named_last(copy_of: Callable[[str], Path]) -> None:
    source = copy_of("hf")
    poison(source, "q_proj.weight")

    done = invoke("stats", source)

    assert done.exit_code == 0, done.output
    assert "1 sick: " in done.stderr.splitlines()[-1] and "attn.q/param" in done.stderr.splitlines()[-1]


def test_sick_lists_those_alone(copy_of: Callable[[str], Path]) -> None:
    source = copy_of("hf")
    poison(source, "q_proj.weight")

    code, found = invoke_json("stats", source, "--sick")

    assert code == 0
    assert [(row["nans"], row["tensor"].endswith("attn.q")) for row in found["tensors"]] == [(1, True)]


def test_numbers_are_those_of_numpy(made: Path) -> None:
    _, values = invoke_json("inspect", made / "native", "--values", "norm/master")
    expected = np.asarray(values["values"]["data"], np.float64)

    _, found = invoke_json("stats", made / "native", "--only", "norm/master")

    (row,) = found["tensors"]
    assert (row["min"], row["max"], row["elements"]) == (expected.min(), expected.max(), expected.size)
    assert np.isclose(row["mean"], expected.mean()) and np.isclose(row["rms"], np.sqrt((expected**2).mean()))
