"""A ZAYA1 of Transformers through `ckptkit.reshard`, every format and two layouts, and back: bytes, files and logits stay.

Tensors are compared by a reader of safetensors files of a few lines, which shares nothing with ckptkit.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit

TRAINED = "tp=2,pp=2,ep=4,dp=4,zero=1"
SMALLER = "tp=1,pp=3,ep=2,dp=6,zero=1"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 5, "head_dim": 16, "moe_intermediate_size": 48,
        "router_hidden_size": 16, "sliding_window": 4,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"],
    },
    "1 GB": {
        "vocab_size": 32_003, "hidden_size": 1024, "num_hidden_layers": 9, "head_dim": 64, "moe_intermediate_size": 2048,
        "router_hidden_size": 64,
    },
}  # fmt: skip
"""Stages of both layouts are uneven, and the vocabulary needs padding."""


def random_zaya(size: str) -> Any:
    """As it trains: bfloat16, fp32 balancing biases, tied embeddings; every parameter and every bias random."""
    from transformers import ZayaConfig, ZayaForCausalLM

    config = ZayaConfig(
        num_attention_heads=4 if size == "tiny" else 8,
        num_key_value_heads=2,
        num_experts=8,
        eos_token_id=2,
        **SIZES[size],
    )
    model = ZayaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:  # made anew by every load, and in no file
                continue
            tensor.normal_(mean=1.0 if tensor.ndim == 1 else 0.0, std=0.1)
    return model


def stored(folder: Path) -> dict[str, tuple[str, list[int], np.ndarray]]:
    """Name → dtype, shape and bytes of every tensor in a folder's safetensors files."""
    found: dict[str, tuple[str, list[int], np.ndarray]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:start].tobytes()).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                assert name not in found
                found[name] = entry["dtype"], entry["shape"], data[start + first : start + last]
    return found


def loaded(folder: Path, vocab: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """Logits, tensors and what was missing or unexpected, of the model that Transformers loads from a folder."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    words = torch.randint(3, vocab, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(words).logits, model.state_dict(), info


@pytest.mark.parametrize("size", ["tiny", pytest.param("1 GB", marks=pytest.mark.long)])
def test_hf_native_native_hub_hf_changes_nothing(size: str, tmp_path: Path) -> None:
    """Every tensor is bitwise that of the start; Transformers loads all of it, and computes the same logits bit for bit."""
    most = 100_000 if size == "tiny" else 300_000_000
    start, back = tmp_path / "hf", tmp_path / "back"
    model = random_zaya(size)
    model.save_pretrained(start, max_shard_size=most)
    vocab, names = model.config.vocab_size, model.state_dict().keys()
    del model

    a = ckptkit.reshard(str(start), str(tmp_path / "a"), to="native", layout=TRAINED)
    b = ckptkit.reshard(a.url, str(tmp_path / "b"), layout=SMALLER)
    hub = ckptkit.reshard(b.url, str(tmp_path / "hub"), to="hub")
    ckptkit.reshard(hub.url, str(back), to="hf", max_shard_size=most)

    want, got = stored(start), stored(back)
    assert got.keys() == want.keys()
    for name, (dtype, shape, data) in want.items():
        assert got[name][:2] == (dtype, shape), name
        assert np.array_equal(got[name][2], data), name
    assert {"BF16", "F32"} == {dtype for dtype, _, _ in want.values()}
    assert size == "tiny" or sum(len(data) for _, _, data in want.values()) > 990_000_000
    logits, tensors, info = loaded(back, vocab)
    assert not any(info.values()), info
    # Transformers sets the last balancing bias anew whenever it loads, so that its own load of its own files is the judge.
    reference, same, _ = loaded(start, vocab)
    assert names == same.keys() == tensors.keys()
    for name, tensor in same.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert torch.isfinite(logits).all() and torch.equal(logits, reference)
