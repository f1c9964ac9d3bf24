"""What FSDP2 and peft do together in the tests of adapters, on gloo ranks of their own."""

from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.formats.dcp_jobs import full, keep, spoil

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 48,
}  # fmt: skip


def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A Llama with an adapter, cut by FSDP2; its optimizer trains what peft lets it."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.normal_(0, 0.05)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in wrapped.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    return wrapped, torch.optim.AdamW(trained, lr=0.01)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(12).reshape(2, 6) * 5 % 64
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def state_of(model: Any, optimizer: torch.optim.Optimizer, flat: bool, adapters_only: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat, ignore_frozen_params=adapters_only)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state}


def save(root: Path) -> None:
    """One step, then the whole model, and what is trained alone; the trained state goes beside, and peft's own folder."""
    model, optimizer = build(0)
    step(model, optimizer)
    dcp.save(state_of(model, optimizer, False, False), checkpoint_id=root / "all")
    dcp.save(state_of(model, optimizer, True, True), checkpoint_id=root / "trained")
    weights = full(state_of(model, optimizer, False, False))
    keep(weights, root / "whole.pt")
    if dist.get_rank() == 0:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        made.config.save_pretrained(root / "base")
        wrapped = peft.get_peft_model(made, model.peft_config["default"])
        wrapped.load_state_dict(weights["model"])
        wrapped.save_pretrained(root / "adapter")
        (root / "base" / "adapter_config.json").write_bytes(
            (root / "adapter" / "adapter_config.json").read_bytes()
        )
    step(model, optimizer)
    keep(full(state_of(model, optimizer, False, False)), root / "next.pt")


def load(root: Path, flat: bool, adapters_only: bool) -> None:
    """Load into a model that holds other values everywhere, then train one step."""
    model, optimizer = build(99)
    step(model, optimizer)
    wanted = state_of(model, optimizer, flat, adapters_only)
    spoil(wanted)
    dcp.load(wanted, checkpoint_id=root)
    keep(full(wanted), root / "loaded.pt")
