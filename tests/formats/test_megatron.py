"""Megatron-core's distributed checkpoints: the suite, every form of keys and optimizer state, and what is refused."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptkit import models
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, CoverageError, FormatError, ShardMissingError, UnsafeError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.dcp_metadata import Index, write_index
from ckptkit.formats.distcp_writer import ItemWriter
from ckptkit.formats.megatron import MegatronFormat
from ckptkit.formats.megatron_args import args_of, config_of, layout_of
from ckptkit.formats.megatron_buffers import lay, lay_as
from ckptkit.formats.megatron_keys import StoredKeys
from ckptkit.formats.plain import TensorValue
from ckptkit.formats.reference import TOY, Truth, gather, json_bytes, random_truth, same, toy, write
from ckptkit.formats.standins import Global, Opaque
from ckptkit.formats.suite import FormatSuite
from ckptkit.formats.torch_zip_writer import zip_bytes
from ckptkit.stores.local import LocalStore

F32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]


class TestMegatron(FormatSuite):
    make = MegatronFormat


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10, "num_local_experts": 3, "intermediate_size": 6,
}  # fmt: skip


def mixtral() -> Any:
    return models.named("mixtral").bind(MIXTRAL)


def save(
    root: Path,
    tensors: dict[str, npt.NDArray[Any]],
    common: dict[str, Any],
    objects: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """A `torch_dist` checkpoint with these whole tensors, put together without the format under test."""
    writer = ItemWriter()
    for key, value in (objects or {}).items():
        writer.object(0, key, value)
    for key, array in tensors.items():
        writer.scalar(0, key, TensorValue(_dtype(array), array.shape, array.tobytes()))
    root.mkdir(parents=True)
    put(root, writer, common, more)


def put(
    root: Path, writer: ItemWriter, common: dict[str, Any] | None, more: dict[str, Any] | None = None
) -> None:
    for file, literals in zip(writer.files(), writer.literals().values(), strict=True):
        data = bytearray(file.size)
        for literal in literals:
            data[literal.offset : literal.offset + len(literal.data)] = literal.data
        (root / file.path).write_bytes(data)
    (root / ".metadata").write_bytes(metadata(writer.index, more or {}))
    if common is not None:
        (root / "common.pt").write_bytes(zip_bytes(common))
    (root / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )


def metadata(index: Index, more: dict[str, Any]) -> bytes:
    """`.metadata` with further attributes, as older versions of megatron-core hang on it."""
    from ckptkit.formats import pickles
    from ckptkit.formats.pickling import dumps

    found = pickles.loads(write_index(index), "index")
    found.state.update(more)
    return dumps(found, 4).data


def _dtype(array: npt.NDArray[Any]) -> DType:
    return BF16 if array.dtype == np.uint16 else F32


def read(root: Path, config: dict[str, Any] | None = None, layout: str = "") -> Catalog:
    options = ReadOptions(config=config, layout=Layout.parse(layout) if layout else None)
    return MegatronFormat().read(LocalStore(root), options)


def stacked_weights(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Mixtral's weights under the keys of alike layers, in bfloat16 bits."""
    keys = StoredKeys(mixtral(), "megatron")
    names = mixtral().names("megatron").unpadded()
    rng = np.random.default_rng(seed)
    shapes = {}
    for name, item in names.items():
        address = next(keys.addresses(name))
        shapes[address.key] = (*address.sizes, *item.shape)
    return {key: rng.integers(0x3000, 0x4000, shape).astype(np.uint16) for key, shape in shapes.items()}


def widened(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_alike_layers_and_experts_become_axes() -> None:
    """Layer 1, expert 2 of Mixtral lies at [1, 2] of one tensor; ZAYA1's half-layers differ, so that layers stay in names."""
    keys = StoredKeys(mixtral(), "megatron")
    name = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"

    first = keys.written(name)[0]

    assert (first.key, first.index, first.sizes) == (
        "decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 2), (2, 3),
    )  # fmt: skip
    assert [a.key for a in keys.addresses(name)][1:] == [
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.mlp.experts.experts.2.linear_fc1.weight",
        "decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight",
        "decoder.layers.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
    ]
    from ckptkit.formats.reference import tiny_zaya

    zaya = StoredKeys(tiny_zaya(), "megatron")
    half = zaya.written("decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight")[0]
    assert (half.key, half.index, half.sizes) == (
        "decoder.layers.3.mlp.experts.experts.linear_fc2.weight",
        (1,),
        (4,),
    )


def test_every_form_of_keys_is_read(tmp_path: Path) -> None:
    """Stacked, by layer, and single experts with gate and up apart: the same weights."""
    stacked = stacked_weights()
    by_layer: dict[str, npt.NDArray[Any]] = {}
    single: dict[str, npt.NDArray[Any]] = {}
    for key, array in stacked.items():
        if ".layers." not in key:
            by_layer[key] = single[key] = array
            continue
        for i in range(2):
            mine = key.replace(".layers.", f".layers.{i}.")
            by_layer[mine] = array[i]
            if ".experts." not in key:
                single[mine] = array[i]
                continue
            for e in range(3):
                one = mine.replace("experts.experts.", f"experts.experts.{e}.")
                if "linear_fc1" in one:
                    single[f"{one}_w"], single[f"{one}_v"] = array[i, e, :6], array[i, e, 6:]
                else:
                    single[one] = array[i, e]
    found = []
    for name, tensors in (("stacked", stacked), ("layers", by_layer), ("single", single)):
        save(tmp_path / name, tensors, {"iteration": 3})
        found.append(gather(tmp_path / name, read(tmp_path / name, MIXTRAL)))

    same(found[1], found[0])
    same(found[2], found[0])
    up = found[0]["layers.1.experts.gate_up", "param"][2, 1]
    assert np.array_equal(up, stacked["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1, 2, 6:])


def test_rows_of_qkv_go_group_by_group(tmp_path: Path) -> None:
    """The stored matrix is queries, key and value of each key-value head in turn."""
    stacked = stacked_weights()
    save(tmp_path / "c", stacked, {"iteration": 3})

    values = gather(tmp_path / "c", read(tmp_path / "c", MIXTRAL))

    qkv = stacked["decoder.layers.self_attention.linear_qkv.weight"][1]
    assert np.array_equal(values["layers.1.attn.q", "param"].reshape(4, 4), qkv[:4])
    assert np.array_equal(values["layers.1.attn.k", "param"].reshape(2, 4), qkv[4:6])
    assert np.array_equal(values["layers.1.attn.v", "param"].reshape(2, 4), qkv[6:8])


def test_the_common_state_may_be_an_object(tmp_path: Path) -> None:
    """Newer versions have no common.pt; iteration, arguments and groups come from the object instead."""
    weights = stacked_weights()
    common = {"iteration": 12, "args": Opaque(Global("argparse", "Namespace"), (), {"num_layers": 2}, True)}
    writer = ItemWriter()
    writer.object(0, "common_state/shard_0_1", [common])
    writer.object(0, "rng_state/shard_0.0_1.1", [[{"seed": 5}]])
    for key, array in weights.items():
        writer.scalar(0, key, TensorValue(BF16, array.shape, array.tobytes()))
    (tmp_path / "c").mkdir()
    put(tmp_path / "c", writer, None)

    found = read(tmp_path / "c", MIXTRAL)

    assert found.step == 12
    assert found.extras.by_coordinate == {"tp=0,pp=0": {"megatron_rng": [{"seed": 5}]}}


def test_flattened_state_of_old_versions_is_read(tmp_path: Path) -> None:
    """State cut by ZeRO within each rank's block, the true shape being in the metadata (fully_sharded_model_space)."""
    weights = stacked_weights()
    writer = ItemWriter()
    for key, array in weights.items():
        writer.scalar(0, key, TensorValue(BF16, array.shape, array.tobytes()))
    key = "decoder.layers.self_attention.linear_proj.weight"  # (2, 4, 4), cut in 2 along its last axis by tensor parallelism
    master = widened(weights[key])
    parts: dict[tuple[int, ...], npt.NDArray[Any]] = {}
    for i in range(2):
        for t in range(2):
            block = master[i, :, 2 * t : 2 * t + 2].ravel()
            parts[i, 0, t, 0], parts[i, 0, t, 5] = block[:5], block[5:]
    stored = f"optimizer.state.fp32_param.{key}"
    from ckptkit.formats.dcp_metadata import Chunk, Stored

    chunks = []
    for start, part in parts.items():
        name = f"part {start}"
        writer.scalar(0, name, TensorValue(F32, (1, 1, 1, len(part)), part.tobytes()))
        chunks.append(Chunk(start, (1, 1, 1, len(part)), writer.index.tensors.pop(name).chunks[0].item))
    writer.index.tensors[stored] = Stored(F32, (2, 1, 2, 8), chunks)
    (tmp_path / "c").mkdir()
    more = {"mcore_data": {stored: {"nd_reformulated_orig_global_shape": (2, 4, 4)}}}
    put(tmp_path / "c", writer, {"iteration": 1}, more)

    values = gather(tmp_path / "c", read(tmp_path / "c", MIXTRAL))

    out = values["layers.1.attn.out", "master"].view(np.float32).reshape(4, 4)
    assert np.array_equal(out, master[1])


def test_buckets_are_laid_as_megatron_lays_them() -> None:
    """Offsets seen in real files: modules a (7x5, 7), b (30x7), c (9x9, 9), one bucket, and buckets of 100 elements."""
    sizes = [35, 7, 210, 81, 9]

    one, several = lay(sizes), lay(sizes, bucket_size=100)

    assert one.offset == [512, 448, 192, 64, 0] and one.unpadded == [547]
    assert several.unpadded == [145, 210, 99] and several.total == 454
    assert several.flat == [145 + 210 + 64, 145 + 210, 145, 64, 0]
    assert lay_as(sizes, [145, 210, 99], "it") == several
    with pytest.raises(FormatError, match="145, 211"):
        lay_as(sizes, [145, 211, 98], "it")


def test_an_embedding_of_two_stages_has_a_bucket_of_its_own() -> None:
    """Before a shared embedding a bucket ends with the gap before it; after it too."""
    laid = lay([100, 10, 20], {0})

    assert laid.bucket == [1, 0, 0] and laid.offset == [0, 64, 0] and laid.unpadded == [128, 100]
    assert lay_as([100, 10, 20], [128, 100], "it") == laid


ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 4, "num_query_groups": 2,
    "group_query_attention": True, "kv_channels": 2, "padded_vocab_size": 256, "vocab_size": 250, "swiglu": True,
    "normalization": "RMSNorm", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "world_size": 8, "use_distributed_optimizer": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "more, kind",
    [
        ({}, "llama"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 6}, "mixtral"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 6, "qk_layernorm": True}, "qwen3_moe"),
        (
            {"num_experts": 4, "moe_shared_expert_intermediate_size": 6, "moe_layer_freq": [0, 1, 1, 1]},
            "qwen2_moe",
        ),
        ({"normalization": "LayerNorm"}, None),
        ({"multi_latent_attention": True}, None),
    ],
)
def test_arguments_tell_the_model(more: dict[str, Any], kind: str | None) -> None:
    """Arguments of known models become configurations that bind; others give none."""
    config = config_of({**ARGS, **more}, [])

    assert (config and config["model_type"]) == kind
    if config is not None:
        model = models.find(config)
        assert model is not None
        bound = model.bind(config)
        assert bound.sizes["vocab"] == 250 and bound.sizes["kv_head"] == 2


def test_arguments_tell_the_layout() -> None:
    """Degrees, uneven stages and the distributed optimizer; a layout given as text is not guessed."""
    assert str(layout_of(ARGS, [])) == "tp=2,pp=2,dp=2,zero=1:megatron"
    assert (
        str(layout_of({**ARGS, "decoder_first_pipeline_num_layers": 1}, []))
        == "tp=2,pp=2:1/3,dp=2,zero=1:megatron"
    )
    warnings: list[str] = []
    assert layout_of({**ARGS, "pipeline_model_parallel_layout": "Et*2|t*2L"}, warnings) is None
    assert "--source-layout" in warnings[0]


def test_arguments_follow_the_layout() -> None:
    """Carried arguments get the new layout's degrees and stages; what only the old one had goes."""
    old = {**ARGS, "decoder_first_pipeline_num_layers": 1, "pipeline_model_parallel_layout": "x", "seed": 7}

    new = args_of(old, None, Layout.parse("tp=4,pp=3:2/1/1,dp=2,zero=1")).attributes

    assert str(layout_of(new, [])) == "tp=4,pp=3:2/1/1,dp=2,zero=1:megatron" and new["seed"] == 7
    assert layout_of(args_of(old, None, Layout.parse("tp=2,pp=2,dp=2")).attributes, []) == Layout.parse(
        "tp=2,pp=2,dp=2"
    )


def test_the_tracker_says_which_iteration(tmp_path: Path) -> None:
    """A run is its tracked iteration; without one, or with one that is not there, it is none. `release` is one too."""
    truth = random_truth(toy(), "megatron")
    truth.extras = Extras({"step": 5}, files={"config.json": json_bytes({**TOY_CONFIG_})})
    write(MegatronFormat(), truth, tmp_path / "run")
    run = tmp_path / "run"
    assert sorted(os.listdir(run)) == ["iter_0000005", "latest_checkpointed_iteration.txt"]

    def again() -> Catalog:
        return MegatronFormat().read(LocalStore(run), ReadOptions(model=TOY))

    same(gather(run, again()), truth.values)
    same(
        gather(
            run / "iter_0000005",
            MegatronFormat().read(LocalStore(run / "iter_0000005"), ReadOptions(model=TOY)),
        ),
        truth.values,
    )
    tracker = run / "latest_checkpointed_iteration.txt"
    for text, error in (
        ("6", ShardMissingError),
        ("../x", FormatError),
        ("-5", FormatError),
        ("", FormatError),
    ):
        tracker.write_text(text)
        with pytest.raises(error):
            again()
    os.rename(run / "iter_0000005", run / "release")
    tracker.write_text("release\n")
    same(gather(run, again()), truth.values)
    (run / "release" / "metadata.json").unlink()
    with pytest.raises(ShardMissingError, match="save did not end"):
        again()


TOY_CONFIG_: dict[str, Any] = {
    "model_type": "toy", "torch_dtype": "bfloat16", "layers": 3, "vocab": 10, "hidden": 6, "kv_head": 2, "group": 4,
    "head_dim": 3, "expert": 4, "gate_up": 2, "ffn": 4,
}  # fmt: skip


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("path", [".metadata", "common.pt"])
def test_hostile_pickles_are_refused(path: str, tmp_path: Path) -> None:
    """A pickle that asks for os.system, in the index or the common state, is named and not run."""
    save(tmp_path / "c", stacked_weights(), {"iteration": 1})
    evil = pickle.dumps({"x": [_Evil(tmp_path / "ran")]}, 2)
    if path == "common.pt":
        with zipfile.ZipFile(tmp_path / "c" / path, "w") as made:
            made.writestr("archive/data.pkl", evil)
            made.writestr("archive/version", b"3\n")
    else:
        (tmp_path / "c" / path).write_bytes(evil)

    with pytest.raises(UnsafeError, match="system"):
        read(tmp_path / "c", MIXTRAL)

    assert not (tmp_path / "ran").exists()


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Files outside the folder, missing parts, foreign tensors, other backends: each with a message of its own."""
    weights = stacked_weights()
    save(tmp_path / "c", weights, {"iteration": 1})

    def broken(change: Any, match: str, error: type[CkptError] = FormatError) -> None:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "c", tmp_path / "b")
        change(tmp_path / "b")
        with pytest.raises(error, match=match):
            read(tmp_path / "b", MIXTRAL)

    broken(lambda b: (b / "common.pt").unlink(), "no common.pt")
    broken(
        lambda b: (b / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "torch_dist is read only"
    )
    broken(lambda b: (b / "metadata.json").write_text("[]"), "does not say")
    broken(lambda b: (b / "__0_0.distcp").unlink(), "is missing", ShardMissingError)
    other = {**MIXTRAL, "num_hidden_layers": 3}
    with pytest.raises(FormatError, match="first axes should be"):
        read(tmp_path / "c", other)

    def rewritten(tensors: dict[str, npt.NDArray[Any]]) -> Any:
        def change(b: Path) -> None:
            shutil.rmtree(b)
            save(b, tensors, {"iteration": 1})

        return change

    broken(rewritten({**weights, "decoder.what": np.zeros(3, np.float32)}), "none of this model's")
    key = "decoder.final_layernorm.weight"
    broken(rewritten({**weights, key: np.zeros(5, np.uint16)}), "has shape")
    writer = ItemWriter()
    for name, array in weights.items():
        writer.scalar(0, name, TensorValue(BF16, array.shape, array.tobytes()))
    stored = writer.index.tensors[key]
    stored.shape = (8,)
    (tmp_path / "d").mkdir()
    put(tmp_path / "d", writer, {"iteration": 1})
    with pytest.raises((CoverageError, FormatError)):
        read(tmp_path / "d", MIXTRAL)


def test_flat_state_without_a_model_is_refused(tmp_path: Path) -> None:
    """Buckets have no names: what they hold is not guessed."""
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    save(tmp_path / "c", {"w": np.zeros(4, np.uint16), key: np.zeros(64, np.float32)}, {"iteration": 1})

    with pytest.raises(FormatError, match="--source-layout"):
        read(tmp_path / "c")


def test_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    """fp32 weights that do not round to the weights are of another order of modules, or were shifted by their writer."""
    weights = stacked_weights()
    master = {f"optimizer.state.param.{k}": widened(v) for k, v in weights.items()}
    save(tmp_path / "good", {**weights, **master}, {"iteration": 1})
    key = "optimizer.state.param.decoder.layers.mlp.experts.experts.linear_fc2.weight"
    master[key] = np.roll(master[key], 1)
    save(tmp_path / "bad", {**weights, **master}, {"iteration": 1})

    assert "master" in {role for _, role in read(tmp_path / "good", MIXTRAL).held}
    with pytest.raises(FormatError, match=r"fp32 weights are not those of layers\.\d\.experts\.down"):
        read(tmp_path / "bad", MIXTRAL)


def test_random_states_go_back_to_their_coordinates(tmp_path: Path) -> None:
    """Where every coordinate has one, they are objects that Megatron loads; else they stay in our own note."""
    truth = Truth(toy().names("megatron"), toy().tensors, *_weights_of_toy(), Extras({"step": 1}))
    truth.extras.by_coordinate = {f"tp={t},pp=0": {"megatron_rng": [{"seed": t}]} for t in range(2)}
    truth.extras.files = {"config.json": json_bytes(TOY_CONFIG_)}

    write(MegatronFormat(), truth, tmp_path / "c", "tp=2,dp=2")
    folder = tmp_path / "c" / "iter_0000001"
    from ckptkit.formats.dcp_metadata import read_index

    assert {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"} <= set(
        read_index(LocalStore(folder)).objects
    )
    found = MegatronFormat().read(LocalStore(tmp_path / "c"), ReadOptions(model=TOY))
    assert found.extras.by_coordinate == truth.extras.by_coordinate


def _weights_of_toy() -> tuple[Any, Any]:
    made = random_truth(toy(), "megatron")
    return made.held, made.values
