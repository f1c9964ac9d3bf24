"""The benchmark of planning at scale, on a model small enough for every test run."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_scale.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_scale", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_scale"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["zero1", "zero3", "inner"])
def test_every_case_covers_all_elements(benchmark: ModuleType, name: str) -> None:
    """`measure` ends in an error unless every element of every role is copied; it counts pieces and pairs of both sides."""
    found = benchmark.measure(benchmark.SMALL_CASES[name], benchmark.SMALL)

    assert found.pairs >= max(found.source_pieces, found.destination_pieces) > 1000


def test_pieces_grow_with_layers(benchmark: ModuleType) -> None:
    """What the table's columns divide time by: twice the layers are about twice the pieces."""
    case = benchmark.SMALL_CASES["inner"]

    one, two = (benchmark.measure(case, {**benchmark.SMALL, "layers": layers}).rows for layers in (12, 24))

    assert 1.8 < two / one < 2.6


def test_the_model_has_671_billion_parameters(benchmark: ModuleType) -> None:
    """As the paper counts them, without the multi-token prediction module."""
    model = benchmark.SCHEMA.bind(benchmark.MODEL)
    count = 0
    for tensor in model.tensors.values():
        size = 1
        for axis in tensor.shape:
            size *= axis
        count += size

    assert 670e9 < count < 672e9


def test_the_small_table_prints() -> None:
    """One line a case, exit code 0."""
    done = subprocess.run([sys.executable, SCRIPT, "--small"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
