"""Small checkpoints for the tests of the command line, made by it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import TINY_LLAMA, invoke, settings


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small checkpoints, made once: `hf` (several shards), `native` (8 ranks with optimizer state)."""
    folder = tmp_path_factory.mktemp("made")
    llama = ("--model", "llama", *settings(TINY_LLAMA))
    for name, options in {
        "hf": ("--to", "hf", "--optimizer", "none", "--max-shard-size", "64KiB"),
        "native": ("--layout", "tp=2,pp=2,dp=2,zero=1", "--optimizer", "adamw"),
    }.items():
        done = invoke("synth", folder / name, *llama, *options)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def copy_of(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies one of `made` so that a test can break it."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return copy
