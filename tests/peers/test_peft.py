"""peft as the judge: adapters that it saved come back through any layout as the bytes they were, and load into equal outputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit import ops
from ckptkit.errors import CkptError
from ckptkit.formats.peft_names import in_file, plain, spell
from ckptkit.formats.reference import ZAYA_CONFIG
from tests.formats import dcp_jobs

peft: Any = pytest.importorskip("peft")
torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")

from tests.peers import peft_jobs

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # peft warns about what is asked of it here: embeddings, copies
]

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 48,
}  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))


def zaya() -> Any:
    fields = {name: value for name, value in ZAYA_CONFIG.items() if name != "model_type"}
    return transformers.ZayaForCausalLM(
        transformers.ZayaConfig(**fields, eos_token_id=None, pad_token_id=None, bos_token_id=None)
    )


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama": (
        llama,
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "layers.2.mlp.down_proj": 6},
            "modules_to_save": ["lm_head"],
        },
    ),
    "some layers": (llama, {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2], "use_dora": True}),
    "biases": (llama, {"target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "lora_only", "lora_bias": True}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "mixtral": (
        mixtral,
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "zaya": (
        zaya,
        {
            "target_modules": ["q_proj", "o_proj", "fc1", "v_proj_current"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "one parameter": (zaya, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
}  # fmt: skip


def adapted(name: str, base: Path, to: Path) -> tuple[Any, dict[str, Any]]:
    """A model with an adapter in random values, both saved; the logits of some tokens, and the adapter's tensors."""
    torch.manual_seed(len(name))
    make, options = MODELS[name]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    model.save_pretrained(base)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options)
    ).eval()
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1) if "magnitude" not in key else parameter.mul_(1.25)
    wrapped.save_pretrained(to)
    return logits(wrapped), safetensors.load_file(to / "adapter_model.safetensors")


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).reshape(2, 6) * 5 % 64).logits


def loaded(name: str, base: Path, adapter: Path) -> Any:
    """The logits of the saved model with an adapter that peft loaded."""
    model = MODELS[name][0]().from_pretrained(base)
    return logits(peft.PeftModel.from_pretrained(model, adapter).eval())


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert tensor.dtype == right[key].dtype and torch.equal(tensor, right[key]), key


@pytest.fixture(params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path, Any, dict[str, Any]]:
    """Name, folder of the model, folder of its adapter, logits with both, tensors."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    return request.param, base, adapter, *adapted(request.param, base, adapter)


def test_an_adapter_comes_back_from_any_layout(saved: Any, tmp_path: Path) -> None:
    """peft → native, expert and tensor parallel → FSDP's chunks → one file → peft: every byte, and equal logits."""
    name, base, adapter, expected, tensors = saved
    experts = "ep=2,dp=2" if name in ("mixtral", "zaya", "one parameter") else "dp=1"
    names = {"names": "stacked"} if name == "mixtral" else {}
    steps: list[dict[str, Any]] = [
        {"to": "native", "layout": f"tp=2,pp=3,{experts}", "config": str(base)},
        {"to": "dcp", "layout": "dp=3,zero=3", **names},
        {"to": "torch", "drop_extras": True, **names},
        {"to": "zarr", **names},
        {"to": "peft", "drop_extras": True, **names},
    ]
    here = adapter
    for number, step in enumerate(steps):
        there = tmp_path / f"{number}-{step['to']}"
        ops.reshard(str(here), str(there), **step)
        here = there

    same(safetensors.load_file(here / "adapter_model.safetensors"), tensors)
    assert json.loads((here / "adapter_config.json").read_bytes()) == json.loads(
        (adapter / "adapter_config.json").read_bytes()
    )
    assert torch.equal(loaded(name, base, here), expected)


def test_without_the_model_an_adapter_is_cut_by_rows_only(saved: Any, tmp_path: Path) -> None:
    """Without the configuration of the model that it adapts, tensors keep their names, in layouts that need no model."""
    name, base, adapter, expected, tensors = saved
    ops.reshard(str(adapter), str(tmp_path / "rows"), to="dcp", layout="dp=2,zero=3")
    with pytest.raises(CkptError, match="--model"):
        ops.reshard(str(adapter), str(tmp_path / "no"), to="native", layout="tp=2")

    ops.reshard(str(tmp_path / "rows"), str(tmp_path / "back"), to="peft", drop_extras=True)

    same(safetensors.load_file(tmp_path / "back" / "adapter_model.safetensors"), tensors)
    assert torch.equal(loaded(name, base, tmp_path / "back"), expected)


def test_names_are_those_that_peft_gives(saved: Any) -> None:
    """Names in memory and in files, both ways, are peft's own for every kind of adapter."""
    name, _, _, _, tensors = saved
    make, options = MODELS[name]
    wrapped = peft.get_peft_model(
        make(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options), adapter_name="mine"
    )
    in_memory = [key for key in wrapped.state_dict() if not key.endswith("_extra_state")]
    whole = set(make().state_dict())

    names = {key: plain(key)[0] for key in in_memory}
    assert {plain(key)[1] for key in in_memory} == {"", "mine"}
    if not any(".base_layer.lora_A" in key or "experts.lora_A" in key for key in in_memory):
        assert spell(names.values(), "mine", whole) == {here: key for key, here in names.items()}
        adapters = [here for key, here in names.items() if ".mine" in key]
        assert {key for key in in_file(adapters, whole).values()} <= tensors.keys()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What FSDP2 saved of a model that peft wraps: all of it, and only what is trained (`peft_jobs.save`)."""
    root = tmp_path_factory.mktemp("fsdp")
    dcp_jobs.run(2, root / "meeting", peft_jobs.save, root)
    return root


@pytest.mark.parametrize("what", ["all", "trained"])
def test_an_adapter_that_fsdp_sharded_becomes_pefts(sharded: Path, what: str, tmp_path: Path) -> None:
    """The adapter inside a distributed checkpoint is, as a folder, what peft itself saves of it; what stays behind is listed."""
    source, base = str(sharded / what), str(sharded / "base")
    with pytest.raises(CkptError, match="peft holds no exp_avg"):
        ops.reshard(source, str(tmp_path / "no"), to="peft", config=base)
    if what == "all":
        with pytest.raises(CkptError, match="peft holds no weights"):
            ops.reshard(source, str(tmp_path / "no"), to="peft", config=base, drop_optimizer=True)

    only = ["*.lora_*"] if what == "all" else []
    ops.reshard(source, str(tmp_path / "a"), to="peft", config=base, only=only, drop_optimizer=True)

    same(
        safetensors.load_file(tmp_path / "a" / "adapter_model.safetensors"),
        safetensors.load_file(sharded / "adapter" / "adapter_model.safetensors"),
    )


@pytest.mark.parametrize("what", ["all", "trained"])
def test_fsdp_loads_adapters_that_were_cut_otherwise(sharded: Path, what: str, tmp_path: Path) -> None:
    """Through tensor parallel ranks and back into chunks for three ranks: torch loads every weight and moment over NaN."""
    source, base = str(sharded / what), str(sharded / "base")
    ops.reshard(source, str(tmp_path / "tp"), to="native", layout="tp=2,pp=2,zero=1", config=base)
    ops.reshard(str(tmp_path / "tp"), str(tmp_path / "back"), to="dcp", layout="dp=3,zero=3")

    dcp_jobs.run(
        3, tmp_path / "meeting", peft_jobs.load, tmp_path / "back", what == "trained", what == "trained"
    )

    loaded = torch.load(tmp_path / "back" / "loaded.pt")
    whole = torch.load(sharded / "whole.pt")
    keys = loaded["model"].keys()
    assert {key for key in keys if "lora_" in key} and (what == "trained" or keys == whole["model"].keys())
    for key in keys:
        assert torch.equal(loaded["model"][key], whole["model"][key]), key
    flat = {
        f"state.{name}.{slot}": value
        for name, slots in whole["optimizer"]["state"].items()
        for slot, value in slots.items()
    }
    state = loaded["optimizer"]
    held = flat if what == "trained" else whole["optimizer"]["state"]
    assert set(held) <= set(state if what == "trained" else state["state"])
    for key, value in flat.items():
        name, slot = key.removeprefix("state.").rsplit(".", 1)
        found = state[key] if what == "trained" else state["state"][name][slot]
        assert torch.equal(found, value), key
