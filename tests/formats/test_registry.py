"""Formats by name and by what a folder looks like."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.errors import FormatError, UsageError
from ckptkit.formats.registry import FORMATS, by_name, detect, looks_like
from ckptkit.stores.local import LocalStore

DOCS = Path(__file__).parents[2] / "docs" / "formats"


def test_every_format_answers_to_its_name() -> None:
    """Names in the registry are those that formats have, and each is documented."""
    assert {"native", "hf", "hub"} <= set(FORMATS)
    for name, format in FORMATS.items():
        assert format.name == name
        assert by_name(name) is format
        assert (DOCS / f"{name}.md").read_text().startswith(f"# {name}\n")


def test_an_unknown_name_lists_the_known_ones() -> None:
    """Who mistypes a format is told which there are."""
    with pytest.raises(UsageError, match=r"unknown format 'hfs'; known: .*native.*hf"):
        by_name("hfs")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "it has no file"),
        (["notes.txt"], r"it has notes\.txt"),
        (["a/model.safetensors"], "a checkpoint may lie in a folder below"),
        (["a.safetensors", "b.safetensors"], "several safetensors files without an index"),
        ([f"{k}.png" for k in range(30)], "and 22 more"),
    ],
)
def test_what_is_no_checkpoint_says_what_was_seen(files: list[str], reason: str, tmp_path: Path) -> None:
    """The error lists what is there, and guesses what was meant."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    assert looks_like(LocalStore(tmp_path)) is None
    with pytest.raises(FormatError, match=reason):
        detect(LocalStore(tmp_path))


@pytest.mark.parametrize("config", ["{", '{"model_type": "zaya"}', "[" * 100_000])
def test_a_broken_configuration_does_not_hide_the_format(config: str, tmp_path: Path) -> None:
    """Weights beside a configuration that cannot be read are still an hf folder, whose reading says what is wrong."""
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    store = LocalStore(tmp_path)

    found = detect(store)

    assert found.name == "hf"
    with pytest.raises(FormatError, match=r"config\.json"):
        found.read(store)


def test_weights_without_a_configuration_are_read_as_stored(tmp_path: Path) -> None:
    """One safetensors file of any name is enough."""
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "adapter.safetensors")
    store = LocalStore(tmp_path)

    assert detect(store).read(store).tensors["a"].shape == (2, 3)


def test_names_of_two_eras_in_one_folder_are_refused(tmp_path: Path) -> None:
    """A ZAYA folder merged by hand, with names of both layouts, is neither hf nor hub."""
    from ckptkit.formats.reference import ZAYA_CONFIG, json_bytes, tiny_zaya

    arrays = {}
    for family in ("transformers", "hub"):
        for name, item in tiny_zaya().names(family).unpadded().items():
            arrays[name] = np.zeros(item.shape, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(json_bytes(ZAYA_CONFIG))
    store = LocalStore(tmp_path)

    with pytest.raises(FormatError, match="mixes names of two families"):
        detect(store).read(store)
