"""Adapters: what peft's folders hold, and what becomes of adapters in other formats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import models, ops
from ckptkit.core.adapters import possible, ranks_of, with_adapters
from ckptkit.core.catalog import Extras
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.errors import CkptError, FormatError, LayoutError, UsageError
from ckptkit.formats.peft import PeftFormat
from ckptkit.formats.reference import ZAYA_CONFIG as ZAYA
from ckptkit.formats.reference import Truth, gather, json_bytes, random_truth, same, write
from ckptkit.formats.registry import by_name, detect
from ckptkit.formats.suite import FormatSuite
from ckptkit.stores.local import LocalStore

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 16, "tie_word_embeddings": False,
}  # fmt: skip


class TestPeft(FormatSuite):
    """Adapters of every matrix of the model, and trained copies of its norms."""

    make = PeftFormat
    stored = False
    files = {"adapter_config.json": json_bytes(LORA)}  # noqa: RUF012


def llama(**ranks: int) -> Model:
    """A Llama with adapters: `layer0_attn_q=4` has `layers.0.attn.q.lora_A` and `.lora_B` of rank 4."""
    found = {}
    for place, rank in ranks.items():
        site = place.replace("_", ".").replace("layer", "layers.").replace("gate.up", "gate_up")
        found.update({f"{site}.lora_A": rank, f"{site}.lora_B": rank})
    return with_adapters(models.named("llama").bind(LLAMA), found)


def truth_of(
    model: Model,
    config: dict[str, Any],
    parts: tuple[str, ...] = ("adapter",),
    state: bool = False,
    names: str = "transformers",
) -> Truth:
    made = random_truth(model, names, parts=parts, state=state)
    made.extras = Extras(files={"config.json": json_bytes(LLAMA), "adapter_config.json": json_bytes(config)})
    return made


def test_adapters_are_cut_as_their_matrices_are() -> None:
    """B follows a column-parallel matrix, A a row-parallel one; the other half is whole on every rank, and so is the rank's axis."""
    model = llama(layer0_attn_q=4, layer1_mlp_down=2, layer2_mlp_gate_up_1=2)

    held = {
        p.local.key: (p.local.shape, len(p.ranks))
        for p in model.names("transformers").placements(Layout.parse("tp=2"))
    }

    at = "model.layers."
    assert held[at + "0.self_attn.q_proj.lora_A.weight"] == ((4, 8), 2)
    assert held[at + "0.self_attn.q_proj.lora_B.weight"] == ((4, 4), 1)
    assert held[at + "1.mlp.down_proj.lora_A.weight"] == ((2, 6), 1)
    assert held[at + "1.mlp.down_proj.lora_B.weight"] == ((8, 2), 2)
    assert held[at + "2.mlp.up_proj.lora_B.weight"] == ((6, 2), 1)


def test_ranks_may_differ_by_layer_and_are_found_again() -> None:
    """The model that stored tensors tell is the one that was declared."""
    model = llama(layer0_attn_q=4, layer1_attn_q=2, layer0_mlp_gate_up_0=3)

    found = ranks_of((tensor.name, tensor.axes) for tensor in model.tensors.values())

    assert with_adapters(model, found).tensors == model.tensors
    assert model.tensors["layers.0.attn.q.lora_A"].shape == (4, 8)
    assert model.tensors["layers.1.attn.q.lora_A"].shape == (2, 8)


def test_an_adapter_of_nothing_is_refused() -> None:
    """Norms have no low rank, and layers end."""
    with pytest.raises(LayoutError, match=r"no matrix that layers\.7\.attn\.q\.lora_A"):
        llama(layer7_attn_q=2)
    with pytest.raises(LayoutError, match=r"no matrix that layers\.0\.attn\.norm\.lora_A"):
        llama(layer0_attn_norm=2)


def test_every_family_names_an_adapter_once() -> None:
    """No two possible names are of the same matrix, but for experts, each with its own; none hides a weight's name."""
    for name in ("llama", "zaya"):
        config = LLAMA if name == "llama" else dict(models.named(name).bind(ZAYA).config)
        model = models.named(name).bind(config)
        for family in model.families:
            names = possible(model, family)
            assert not names.keys() & model.names(family).keys
            dense = [
                slot.tensors for key, slot in names.items() if "experts" not in key and "to_save" not in key
            ]
            assert len(set(dense)) == len(dense)


def test_with_the_base_model_each_format_gets_its_part(tmp_path: Path) -> None:
    """A checkpoint of weights and adapters: hf and peft hold one part each, and the other is left behind only when asked."""
    model = llama(layer0_attn_q=2, layer2_mlp_down=2)
    truth = truth_of(model, LORA, ("base", "adapter"))
    write(by_name("native"), truth, tmp_path / "all", "tp=2,dp=2,zero=1")
    with pytest.raises(UsageError, match="hf holds no adapters"):
        ops.reshard(str(tmp_path / "all"), str(tmp_path / "hf"), to="hf")
    with pytest.raises(UsageError, match="peft holds no weights"):
        ops.reshard(str(tmp_path / "all"), str(tmp_path / "peft"), to="peft")

    ops.reshard(str(tmp_path / "all"), str(tmp_path / "hf"), to="hf", drop=["*.lora_*"])
    ops.reshard(str(tmp_path / "all"), str(tmp_path / "peft"), to="peft", only=["*.lora_*"])

    found = {
        name: gather(tmp_path / name, detect(LocalStore(tmp_path / name)).read(LocalStore(tmp_path / name)))
        for name in ("hf", "peft")
    }
    assert not found["hf"].keys() & found["peft"].keys()
    same(found["hf"] | found["peft"], truth.values)


def test_one_adapter_for_a_fused_matrix_becomes_one_each(tmp_path: Path) -> None:
    """What Megatron adapts as one matrix has, in other names, the same A in each projection and its own rows of B."""
    base = models.named("llama").bind(LLAMA)
    together = {f"layers.1.attn.q+k+v.{part}": 2 for part in ("lora_A", "q.lora_B", "k.lora_B", "v.lora_B")}
    together |= {"layers.0.mlp.gate_up.lora_A": 2, "layers.0.mlp.gate_up.lora_B": 2}
    model = with_adapters(base, together)
    truth = truth_of(model, LORA, names="megatron")
    write(by_name("native"), truth, tmp_path / "fused", "tp=2")

    report = ops.plan(str(tmp_path / "fused"), str(tmp_path / "peft"), to="peft")
    ops.reshard(str(tmp_path / "fused"), str(tmp_path / "peft"), to="peft")

    assert any("become one each" in note for note in report.notes)
    values = gather(tmp_path / "peft", PeftFormat().read(LocalStore(tmp_path / "peft")))
    fused = {name: array for (name, _), array in truth.values.items()}
    for part in "qkv":
        assert np.array_equal(
            values[f"layers.1.attn.{part}.lora_A", "param"], fused["layers.1.attn.q+k+v.lora_A"]
        )
        assert np.array_equal(
            values[f"layers.1.attn.{part}.lora_B", "param"], fused[f"layers.1.attn.q+k+v.{part}.lora_B"]
        )
    for half in range(2):
        assert np.array_equal(
            values[f"layers.0.mlp.gate_up.{half}.lora_A", "param"], fused["layers.0.mlp.gate_up.lora_A"]
        )
        assert np.array_equal(
            values[f"layers.0.mlp.gate_up.{half}.lora_B", "param"], fused["layers.0.mlp.gate_up.lora_B"][half]
        )


def test_optimizer_state_of_an_adapter_travels_with_it(tmp_path: Path) -> None:
    """Moments of adapters are cut as they are, in formats that hold them."""
    model = llama(layer0_attn_q=2, layer1_attn_out=2)
    truth = truth_of(model, LORA, state=True)
    truth.extras.common = {
        "step": 3,
        "groups": [{"kind": "adamw", "lr": 0.1, "step": 3, "tensors": sorted(truth.stored)}],
    }
    write(by_name("native"), truth, tmp_path / "a", "tp=2,dp=2,zero=1")
    here = tmp_path / "a"

    for number, (to, layout) in enumerate(
        (("dcp", "dp=3,zero=3"), ("torch", ""), ("megatron", "tp=2,pp=3,zero=1"), ("native", "dp=2"))
    ):
        there = tmp_path / f"{number}"
        ops.reshard(str(here), str(there), to=to, layout=layout or None)
        here = there

    same(gather(here, detect(LocalStore(here)).read(LocalStore(here))), truth.values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"peft_type": "LORA"}, "no rank"),
        ({**LORA, "r": 3}, "gives its module rank 3"),
        ({**LORA, "rank_pattern": {"self_attn.q_proj": 4}}, "gives its module rank 4"),
        ([], "only LoRA"),
    ],
)
def test_a_configuration_of_something_else_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    """Before anything is written: another method, another rank, no rank."""
    model = llama(layer0_attn_q=2)

    with pytest.raises(CkptError, match=message):
        write(PeftFormat(), truth_of(model, config), tmp_path / "c")


def test_without_the_scaling_no_adapter_is_written(tmp_path: Path) -> None:
    """lora_alpha is in no tensor, and a guess would change the model's outputs."""
    truth = truth_of(llama(layer0_attn_q=2), LORA)
    truth.extras = Extras(files={"config.json": json_bytes(LLAMA)})

    with pytest.raises(LayoutError, match="lora_alpha"):
        write(PeftFormat(), truth, tmp_path / "c")


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("base_model.model.model.layers.0.self_attn.x_proj.lora_A.weight", [2, 8], "adapts no matrix"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", [2, 9], "shape"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", [0, 8], "no rank"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", [8], "shape"),
        ("base_model.model.model.layers.9.mlp.experts.lora_A.weight", [2, 8], "adapts no matrix"),
    ],
)
def test_adapters_of_another_model_are_refused(
    key: str, shape: list[int], message: str, tmp_path: Path
) -> None:
    """Names and shapes are compared with the model's; the first that is wrong is named."""
    size = 4 * int(np.prod(shape))
    text = json.dumps({key: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    (tmp_path / "adapter_config.json").write_bytes(json_bytes(LORA))
    (tmp_path / "config.json").write_bytes(json_bytes(LLAMA))

    with pytest.raises(FormatError, match=message):
        PeftFormat().read(LocalStore(tmp_path))
