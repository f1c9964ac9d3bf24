"""Folders of safetensors files: `hf` and `hub`."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.shards import shards
from ckptkit.errors import FormatError, LayoutError, ShardMissingError, UnsafeError
from ckptkit.formats.base import ReadOptions, WriteOptions
from ckptkit.formats.hf import HfFormat
from ckptkit.formats.hub import HubFormat
from ckptkit.formats.reference import (
    TOY,
    TOY_CONFIG,
    ZAYA_CONFIG,
    Truth,
    gather,
    json_bytes,
    random_truth,
    same,
    stored_truth,
    tiny_zaya,
    toy,
    write,
)
from ckptkit.formats.suite import FormatSuite
from ckptkit.stores.local import LocalStore

INDEX = "model.safetensors.index.json"


class TestHf(FormatSuite):
    make = HfFormat


class TestHub(FormatSuite):
    make = HubFormat


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Truth, Path]:
    """A toy in four or more shards."""
    truth = random_truth(toy(), "transformers")
    truth.extras = Extras(files={"config.json": json_bytes(TOY_CONFIG)})
    write(HfFormat(), truth, tmp_path / "c", options=WriteOptions(max_shard_size=600))
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) >= 4
    return truth, tmp_path / "c"


def read(root: Path, **options: Any) -> Catalog:
    return HfFormat().read(LocalStore(root), ReadOptions(model=TOY, **options))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weight_map(root: Path) -> dict[str, str]:
    return dict(json.loads((root / INDEX).read_text())["weight_map"])


def rewrite(path: Path, change: Any) -> None:
    """Change the arrays of one shard with the reference library."""
    arrays = load_raw(path)
    change(arrays)
    save_file(arrays, path, {"format": "pt"})


def load_raw(path: Path) -> dict[str, Any]:
    """Arrays of a shard; bfloat16 (unknown to numpy) as ml_dtypes gives it."""
    import ml_dtypes  # noqa: F401  (registers bfloat16)

    return dict(load_file(path))


def test_every_shard_opens_in_the_reference_reader(sharded: tuple[Truth, Path]) -> None:
    """Shards are named from 1, have `format: pt`, and together hold what the index says."""
    _, root = sharded
    names = sorted(path.name for path in root.glob("*.safetensors"))

    held: dict[str, str] = {}
    for name in names:
        with safe_open(root / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            held |= dict.fromkeys(file.keys(), name)

    assert names == [f"model-{k + 1:05d}-of-{len(names):05d}.safetensors" for k in range(len(names))]
    assert held == weight_map(root)


def test_a_missing_shard_is_named_at_once(sharded: tuple[Truth, Path]) -> None:
    """The file that is absent is named, with how many tensors it holds, in under a second."""
    _, root = sharded
    path = sorted(root.glob("model-*.safetensors"))[2]
    path.unlink()
    start = time.perf_counter()

    with pytest.raises(ShardMissingError, match=f"{path.name} is missing.*holds [0-9]+ tensors") as caught:
        read(root)

    assert caught.value.file == path.name
    assert time.perf_counter() - start < 1


def test_a_stray_shard_is_left_out_with_a_warning(sharded: tuple[Truth, Path]) -> None:
    """A shard that the index does not name is not merged in, even with names of the model."""
    truth, root = sharded
    shutil.copy(min(root.glob("model-*")), root / "model-99999.safetensors")

    found = read(root)

    same(gather(root, found), truth.values)
    assert found.facts["warnings"] == ["model-99999.safetensors belongs to no index and was left out"]


def test_a_tensor_that_left_its_shard_is_named(sharded: tuple[Truth, Path]) -> None:
    """A name that the index puts in a file whose header lacks it: both are named."""
    _, root = sharded
    name, file = next(
        (n, f) for n, f in weight_map(root).items() if list(weight_map(root).values()).count(f) > 1
    )
    rewrite(root / file, lambda arrays: arrays.pop(name))

    with pytest.raises(FormatError, match=f"{file} holds {name}, but its header does not") as caught:
        read(root)

    assert (caught.value.tensor, caught.value.file) == (name, file)


def test_a_tensor_that_the_index_lacks_is_named(sharded: tuple[Truth, Path]) -> None:
    """A name in a header that the index does not know is no part of the checkpoint in silence."""
    _, root = sharded
    file = min(root.glob("model-*"))
    rewrite(file, lambda arrays: arrays.update(extra=np.zeros(3, np.float32)))

    with pytest.raises(FormatError, match=f"{file.name}.* holds extra, which .* does not know"):
        read(root)


def test_a_tensor_in_another_shard_than_the_index_says(sharded: tuple[Truth, Path]) -> None:
    """The index must name the right file."""
    _, root = sharded
    known = weight_map(root)
    name, other = next(iter(known)), next(file for file in known.values() if file != known[next(iter(known))])
    edit(root / INDEX, weight_map={**known, name: other})

    with pytest.raises(FormatError, match=f"{other} holds {name}, but its header does not"):
        read(root)


@pytest.mark.parametrize(
    "path", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b.safetensors"]
)
def test_an_index_that_leaves_the_folder_is_unsafe(path: str, sharded: tuple[Truth, Path]) -> None:
    """Paths in an index are names of files in the folder, or the checkpoint is refused as unsafe."""
    _, root = sharded
    save_file({"embed.weight": np.zeros(1, np.float32)}, root.parent / "secret.safetensors")
    edit(root / INDEX, weight_map={**weight_map(root), "embed.weight": path})

    with pytest.raises(UnsafeError, match="no file of this folder"):
        read(root)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "lists no tensor"),
        ('{"weight_map": {"a": 1}}', "no weight_map from names to files"),
        ('{"weight_map": {"a": "x.bin"}}', "no safetensors file"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a key is there twice"),
        ('{"metadata": {"total_size": NaN}, "weight_map": {"a": "x.safetensors"}}', "NaN is no JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_index_is_refused(text: str, reason: str, sharded: tuple[Truth, Path]) -> None:
    """An index that is no map from names to files says what it is."""
    _, root = sharded
    (root / INDEX).write_text(text)

    with pytest.raises(FormatError, match=reason):
        read(root)


def test_shards_without_an_index_are_not_guessed_at(sharded: tuple[Truth, Path]) -> None:
    """Without its index nobody knows whether the shards are all, or belong together."""
    _, root = sharded
    (root / INDEX).unlink()

    with pytest.raises(ShardMissingError, match=r"safetensors files .* but no model.safetensors.index.json"):
        read(root)


def test_pickled_weights_are_named_as_such(tmp_path: Path) -> None:
    """A folder of pickles says so, and runs nothing."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")

    with pytest.raises(FormatError, match=r"pytorch_model.bin are pickles"):
        read(tmp_path)


def test_missing_reshaped_and_unknown_names_come_in_one_error(sharded: tuple[Truth, Path]) -> None:
    """Strict both ways: what is absent, what is of another shape and what is unknown is listed at once."""
    _, root = sharded
    known = weight_map(root)
    for name, change in (
        ("h.0.norm.weight", lambda arrays: (arrays.pop("h.0.norm.weight"), arrays.update(odd=np.zeros(2)))),
        ("norm.weight", lambda arrays: arrays.update({"norm.weight": np.zeros(7)})),
    ):
        rewrite(root / known[name], change)
    known["odd"] = known.pop("h.0.norm.weight")
    edit(root / INDEX, weight_map=known)

    with pytest.raises(FormatError) as caught:
        read(root)

    assert "missing: h.0.norm.weight" in str(caught.value)
    assert f"of another shape: norm.weight [7] in {known['norm.weight']} instead of [6]" in str(caught.value)
    assert "not of this model: odd" in str(caught.value)


def test_links_inside_the_folder_are_followed(sharded: tuple[Truth, Path]) -> None:
    """A shard may be a link to a file of the same folder."""
    truth, root = sharded
    file = min(root.glob("model-*"))
    (root / "blobs").mkdir()
    shutil.move(file, root / "blobs" / "0")
    os.symlink("blobs/0", file)

    same(gather(root, read(root)), truth.values)


def test_a_bad_configuration_is_refused(sharded: tuple[Truth, Path]) -> None:
    """config.json that is no JSON, no object, or lacks a size, is named."""
    _, root = sharded
    for text, reason in (
        ("{", "not valid JSON"),
        ("[]", "no object"),
        ('{"model_type": "toy"}', "lacks 'layers'"),
    ):
        (root / "config.json").write_text(text)

        with pytest.raises(FormatError, match=f"config.json.*{reason}"):
            read(root)


def test_an_unknown_model_is_read_as_stored(tmp_path: Path) -> None:
    """Without a schema each tensor is itself, with axes d0, d1, ..., and can be written again."""
    truth = stored_truth({"x.w": ((3, 5), dtype_named("bfloat16")), "n": ((), dtype_named("int64"))})
    truth.extras = Extras(files={"config.json": b'{"model_type": "nobody knows"}'})

    write(HfFormat(), truth, tmp_path / "c")
    found = HfFormat().read(LocalStore(tmp_path / "c"))

    same(gather(tmp_path / "c", found), truth.values)
    assert (found.model, found.names) == (None, "stored")
    assert found.tensors["x.w"].axes == ("d0", "d1")
    assert found.extras.files["config.json"] == b'{"model_type": "nobody knows"}'


def test_headers_are_split_below_their_limit(tmp_path: Path) -> None:
    """2,000 one-element tensors and a limit of 20 KB: several files, each header below it, each opened by the reference."""

    class Small(HfFormat):
        header_limit = 20_000

    float32 = dtype_named("float32")
    truth = stored_truth({f"{k:060d}": ((1,), float32) for k in range(2000)})

    write(Small(), truth, tmp_path / "c")

    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) > 10
    for path in files:
        assert int.from_bytes(path.read_bytes()[:8], "little") <= 20_000
        with safe_open(path, "np") as file:
            assert file.keys()
    same(gather(tmp_path / "c", HfFormat().read(LocalStore(tmp_path / "c"))), truth.values)


def test_data_is_aligned(tmp_path: Path) -> None:
    """Every tensor starts at a multiple of its item size, in memory that maps the file."""
    shapes = {
        f"t{k}": ((k + 1,), dtype_named(name))
        for k, name in enumerate(("bool", "int64", "bfloat16", "float32", "int8"))
    }

    destination = write(HfFormat(), stored_truth(shapes), tmp_path / "c")

    entries, start = destination.catalog.entries, destination.catalog.files[0].data_start
    assert not any((start + entries.offset) % (entries.nbytes // (entries.last - entries.first)))


def test_a_part_of_a_model_says_so(tmp_path: Path) -> None:
    """Weights that are a part of a model on purpose note what of; they are read, while an incomplete model is not."""
    truth = random_truth(toy(), "transformers")
    truth.held = {key: dtype for key, dtype in truth.held.items() if key[0] == "embed"}
    truth.extras = Extras(files={"config.json": json_bytes(TOY_CONFIG)})
    note = {"base": "toy", "only": ["embed"]}

    write(HfFormat(), truth, tmp_path / "part", options=WriteOptions(facts={"partial": note}))
    write(HfFormat(), truth, tmp_path / "broken")

    assert read(tmp_path / "part").facts["partial"] == note
    with pytest.raises(FormatError, match=r"missing: h\.0"):
        read(tmp_path / "broken")


@pytest.mark.parametrize(
    ("param", "expected"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("uint8", "bfloat16")]
)
def test_the_configuration_says_the_dtype_of_the_weights(param: str, expected: str, tmp_path: Path) -> None:
    """`torch_dtype` follows the weights where they are plain floats; an unchanged file is kept to the byte."""
    truth = random_truth(toy(), "transformers", param=param)
    text = json.dumps(TOY_CONFIG, indent=7).encode()
    truth.extras = Extras(files={"config.json": text})

    write(HfFormat(), truth, tmp_path / "c")
    found = (tmp_path / "c" / "config.json").read_bytes()

    assert json.loads(found) == {**TOY_CONFIG, "torch_dtype": expected}
    assert (found == text) == (expected == "bfloat16")


def test_carried_files_stay_in_the_folder(tmp_path: Path) -> None:
    """A carried file whose name leads out of the folder, or onto the weights, is refused before anything is written."""
    for name in ("../evil", "model.safetensors", "a/b", ".hidden", INDEX):
        truth = random_truth(toy(), "transformers")
        truth.extras = Extras(files={name: b"x"})

        with pytest.raises(UnsafeError, match="would overwrite"):
            write(HfFormat(), truth, tmp_path / "c")

        assert not (tmp_path / "evil").exists()


def test_large_and_foreign_files_are_not_carried(sharded: tuple[Truth, Path]) -> None:
    """Configuration and tokenizer files are carried; images and files of more than 64 MiB are not."""
    _, root = sharded
    for name in ("tokenizer.json", "spiece.model", "chat_template.jinja", "picture.png"):
        (root / name).write_bytes(b"{}")
    with open(root / "huge.json", "wb") as file:
        file.truncate((64 << 20) + 1)

    found = read(root)

    assert set(found.extras.files) == {"config.json", "tokenizer.json", "spiece.model", "chat_template.jinja"}
    assert [w for w in found.facts["warnings"] if "huge.json" in w]


def test_layouts_of_several_ranks_are_refused() -> None:
    """Whole tensors have no ranks."""
    truth = random_truth(toy(), "transformers")
    wanted = shards(truth.names, Layout.parse("tp=2"), truth.held, truth.tensors)

    with pytest.raises(LayoutError, match="whole tensors, not those of 2 ranks"):
        HfFormat().lay_out(wanted)


def test_padding_never_reaches_a_published_checkpoint() -> None:
    """A padded vocabulary is refused rather than written."""
    truth = random_truth(toy(), "transformers")

    with pytest.raises(LayoutError, match=r"embed\.weight is padded"):
        HfFormat().lay_out(shards(truth.names, Layout(), truth.held, truth.tensors, pad=True))


def test_names_of_the_other_format_are_refused(tmp_path: Path) -> None:
    """hf does not write the hub's names, nor read them, nor the reverse."""
    truth = random_truth(tiny_zaya(), "hub")
    truth.extras = Extras(files={"config.json": json_bytes(ZAYA_CONFIG)})
    write(HubFormat(), truth, tmp_path / "c")

    with pytest.raises(LayoutError, match="not hub"):
        write(HfFormat(), truth, tmp_path / "d")
    with pytest.raises(FormatError, match=r"names called hub.*leave out --from"):
        HfFormat().read(LocalStore(tmp_path / "c"))


def test_a_tied_head_is_a_replica(tmp_path: Path) -> None:
    """A tied lm_head that is stored all the same holds the embedding's elements a second time."""
    truth = random_truth(tiny_zaya(), "transformers", param="float32")
    truth.extras = Extras(files={"config.json": json_bytes(ZAYA_CONFIG)})
    write(HfFormat(), truth, tmp_path / "c")
    rewrite(
        tmp_path / "c" / "model.safetensors",
        lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"].copy()}),
    )

    found = HfFormat().read(LocalStore(tmp_path / "c"))

    same(gather(tmp_path / "c", found), truth.values)
    assert len(found.entries) == len(found.model.names("transformers").unpadded()) + 1  # type: ignore[union-attr]


def test_names_that_every_library_makes_anew_are_harmless(tmp_path: Path) -> None:
    """Rotary frequencies in a file are left out with a warning, and nothing else is."""
    truth = random_truth(tiny_zaya(), "transformers", param="float32")
    truth.extras = Extras(files={"config.json": json_bytes(ZAYA_CONFIG)})
    write(HfFormat(), truth, tmp_path / "c")
    rewrite(
        tmp_path / "c" / "model.safetensors",
        lambda arrays: arrays.update({"model.rotary_emb.hybrid_inv_freq": np.zeros(4, np.float32)}),
    )

    found = HfFormat().read(LocalStore(tmp_path / "c"))

    same(gather(tmp_path / "c", found), truth.values)
    assert "inv_freq" in found.facts["warnings"][0]
