"""ZAYA1 as Transformers builds it, through every format and layout and back: bits and logits stay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.core.catalog import ROLES, Catalog
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import make_plan
from ckptkit.core.schema import OPTIMIZER_ROLES
from ckptkit.core.shards import shards
from ckptkit.engine.run import run
from ckptkit.formats.base import WriteOptions
from ckptkit.formats.hf import HfFormat
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.reference import Truth, gather, random_truth, same, write
from ckptkit.formats.registry import by_name, detect
from ckptkit.stores.local import LocalStore

NATIVE = ("tp=2,pp=2,ep=4,dp=4,zero=1", "tp=1,pp=3,ep=2,dp=6,zero=1")


def tiny_zaya() -> Any:
    """A ZAYA1 of 46,000 elements, every parameter and buffer random, biases too."""
    from transformers import ZayaConfig, ZayaForCausalLM

    config = ZayaConfig(
        vocab_size=70, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        moe_intermediate_size=24, num_experts=4, router_hidden_size=16, sliding_window=4, eos_token_id=2,
        layer_types=["hybrid", "hybrid_sliding", "hybrid"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = ZayaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.3 + (1.0 if tensor.ndim == 1 else 0.0))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(2, 18).reshape(2, 8)).logits


def reshard(source: Path, target: Path, to: str, layout: str = "tp=1", **options: Any) -> Catalog:
    """One step of the chain, through planner and engine. Returns the destination, opened again."""
    store = LocalStore(source)
    catalog = detect(store).read(store)
    format = by_name(to)
    assert catalog.model is not None
    names = catalog.model.names("canonical" if to == "native" else format.names)
    wanted = shards(names, Layout.parse(layout), catalog.held, catalog.tensors, pad=format.ranks)
    wanted.extras = catalog.extras
    destination = format.lay_out(wanted, WriteOptions(**options))
    run(make_plan(catalog, destination.catalog), destination, store, str(target), threads=1)
    return format.read(LocalStore(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_transformers_survives_every_format(dtype: torch.dtype, tmp_path: Path) -> None:
    """hf → native → another native layout → hub → hf: every tensor bitwise, no key missing or unexpected, the same logits."""
    from transformers import AutoModelForCausalLM

    model = tiny_zaya().to(dtype)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    start = HfFormat().read(LocalStore(tmp_path / "hf"))

    reshard(tmp_path / "hf", tmp_path / "n1", "native", NATIVE[0])
    reshard(tmp_path / "n1", tmp_path / "n2", "native", NATIVE[1])
    hub = reshard(tmp_path / "n2", tmp_path / "hub", "hub")
    back = reshard(tmp_path / "hub", tmp_path / "back", "hf", max_shard_size=50_000)

    assert hub.names == "hub"
    same(gather(tmp_path / "back", back), gather(tmp_path / "hf", start))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype="auto", output_loading_info=True
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    # The judge is what Transformers loads from its own files: it sets one balancing bias anew whenever it loads.
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    want, got = again.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys() == model.state_dict().keys()
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype and torch.equal(tensor, got[name]), name
    assert torch.equal(logits(loaded), logits(again))


def tiny(kind: str) -> Any:
    """Other models of Transformers, as small as they go."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    experts = {
        "num_local_experts": 4,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(1)
    return {
        "zaya": tiny_zaya,
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)),
        "llama tied": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, tie_word_embeddings=True)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**common, **experts)),
        "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**common, **experts, head_dim=8)
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["zaya", "llama", "llama tied"])
def test_shards_and_index_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Written from native, shards, index and configuration equal what `save_pretrained` wrote."""
    tiny(kind).save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    reshard(tmp_path / "hf", tmp_path / "native", "native", "tp=2,pp=3,dp=2,zero=1")

    reshard(tmp_path / "native", tmp_path / "back", "hf", max_shard_size=30_000)

    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 3
    for name in names:
        ours, theirs = ((tmp_path / folder / name).read_bytes() for folder in ("back", "hf"))
        if name.endswith(".json"):
            assert json.loads(ours) == json.loads(theirs), name
        else:
            assert ours == theirs, name


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_models_whose_experts_are_split_on_saving(kind: str, tmp_path: Path) -> None:
    """Transformers saves these in another order than it holds them; tensors and configuration equal its own, and it loads them."""
    from transformers import AutoModelForCausalLM

    tiny(kind).save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    reshard(tmp_path / "hf", tmp_path / "native", "native", "tp=2,pp=3,ep=2,dp=2,zero=1")

    back = reshard(tmp_path / "native", tmp_path / "back", "hf", max_shard_size=30_000)

    start = HfFormat().read(LocalStore(tmp_path / "hf"))
    same(gather(tmp_path / "back", back), gather(tmp_path / "hf", start))
    assert {item.key for item in back.locals} == {item.key for item in start.locals}
    assert dict(back.extras.files) == dict(start.extras.files)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))


def test_training_state_survives_changes_of_layout(tmp_path: Path) -> None:
    """Masters, moments and momenta move with their parameters between layouts, padded vocabulary and tied head included."""
    from ckptkit.models import named

    model = named("zaya").bind(json.loads(tiny_zaya().config.to_json_string()))
    truth: Truth = random_truth(model, "megatron", state=True)
    truth.extras.common = {"step": 5}
    write(NativeFormat(), truth, tmp_path / "0", NATIVE[0])

    for number, layout in enumerate(
        (NATIVE[1], "tp=2,pp=3:0/2/1,ep=2,etp=2,dp=2,zero=1:whole", "dp=5,zero=3", "tp=1")
    ):
        found = reshard(tmp_path / str(number), tmp_path / str(number + 1), "native", layout)

        same(gather(tmp_path / str(number + 1), found), truth.values)
        assert found.step == 5
        assert not list(NativeFormat().problems(LocalStore(tmp_path / str(number + 1)), found))
    roles = {ROLES[code] for code in np.unique(found.entries.role)}
    assert roles == {"param", "buffer", *OPTIMIZER_ROLES["adamw"], *OPTIMIZER_ROLES["muon"]}
