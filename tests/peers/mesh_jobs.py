"""Training on device meshes in the tests of distributed checkpoints: a real Llama, on gloo ranks of their own.

Kinds of meshes: `fsdp` cuts rows over all ranks, `hsdp` over pairs of ranks that repeat each other, `tp` also cuts matrices by
tensor parallelism (2 x 2). Matrices of layers are trained by Muon, the rest by AdamW.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.formats.dcp_jobs import full, keep, spoil

CONFIG: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 500, "intermediate_size": 28, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_TP: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel, "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}  # fmt: skip


class Training:
    """A model on a mesh, and its optimizers."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        ranks = dist.get_world_size()
        self.model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        names = ("replicate", "shard") if kind == "hsdp" else ("dp", "tp") if kind == "tp" else ("dp",)
        sizes = (ranks // 2, 2) if len(names) == 2 else (ranks,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        layers = self.model.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        if kind == "tp":
            for layer in layers:
                parallelize_module(layer, mesh["tp"], {name: style() for name, style in _TP.items()})
        data = mesh["dp"] if kind == "tp" else mesh
        for layer in layers:
            fully_shard(layer, mesh=data)
        fully_shard(self.model, mesh=data)
        matrices = [p for n, p in self.model.named_parameters() if ".layers." in n and p.ndim == 2]
        others = [p for n, p in self.model.named_parameters() if ".layers." not in n or p.ndim != 2]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.02),
            torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.95)),
        ]
        if kind == "tp":  # its Newton-Schulz steps take no matrix that is cut both ways
            self.optimizers = [torch.optim.AdamW([*matrices, *others], lr=0.01, betas=(0.8, 0.95))]

    def step(self, seed: int) -> None:
        """One update on tokens that every rank sees alike: with a power of two of them, their mean is exact."""
        tokens = torch.randint(0, CONFIG["vocab_size"], (2, 6), generator=torch.Generator().manual_seed(seed))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self, flat: bool = False) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, state = get_state_dict(self.model, self.optimizers, options=options)
        return {"model": weights, "optimizer": state}

    def restore(self, state: dict[str, Any], flat: bool) -> None:
        set_state_dict(
            self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )  # fmt: skip


def titan(training: Training) -> dict[str, Any]:
    """State as torchtitan lays it out: weights at the top, the optimizer flattened, loaders by rank, counts and logs as bytes."""
    logs = io.BytesIO()
    torch.save([1, 2], logs)
    state = training.state(flat=True)
    rank = dist.get_rank()
    return {
        **state["model"],
        "optimizer": state["optimizer"],
        "lr_scheduler": {"last_epoch": 2, "_last_lr": [0.01]},
        "dataloader": {f"dp_rank_{rank}": pickle.dumps({"position": 7 * rank}), "world_size": dist.get_world_size()},
        "train_state": {
            "step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(24), "log_steps": logs,
        },
    }  # fmt: skip


def save(root: Path, kind: str) -> None:
    """Train two steps, save in every convention, train one more; whole states go beside."""
    training = Training(kind, 0)
    training.step(1)
    training.step(2)
    keep(full(training.state()), root / "whole.pt")
    dcp.save(training.state(), checkpoint_id=root / "nested")
    dcp.save(titan(training), checkpoint_id=root / "titan")
    weights = dict(training.state()["model"])
    for name, joined in (("hf-shards", False), ("hf-joined", True)):
        writer = HuggingFaceStorageWriter(
            str(root / name), save_distributed=True, enable_consolidation=joined
        )
        dcp.save(weights, storage_writer=writer)
    training.step(3)
    keep(full(training.state()), root / "next.pt")


def load(root: Path, kind: str, form: str, steps: bool) -> None:
    """Load over NaN into a model that was trained otherwise, then train a step."""
    training = Training(kind, 99)
    training.step(98)
    flat = form == "titan"
    state = training.state(flat)
    spoil(state)
    rank = f"dp_rank_{dist.get_rank()}"
    more: dict[str, Any] = {}
    if flat:
        more = {
            "train_state": {"step": torch.tensor(-1, dtype=torch.int32), "ntokens_seen": torch.tensor(-1), "log_steps": 0},
            "lr_scheduler": {"last_epoch": -1, "_last_lr": [-1.0]},
        }  # fmt: skip
    wanted: dict[str, Any] = {**state["model"], "optimizer": state["optimizer"], **more} if flat else state
    dcp.load(wanted, checkpoint_id=root)
    if flat:
        assert int(more["train_state"]["step"]) == 2 and int(more["train_state"]["ntokens_seen"]) == 24, rank
        wanted["train_state"]["log_steps"].seek(0)
        assert torch.load(wanted["train_state"]["log_steps"], weights_only=False) == [1, 2]
        assert wanted["lr_scheduler"] == {"last_epoch": 2, "_last_lr": [0.01]}
    state = {
        "model": {name: wanted[name] for name in state["model"]} if flat else wanted["model"],
        "optimizer": wanted["optimizer"],
    }
    training.restore(state, flat)
    keep(full(training.state()), root / "loaded.pt")
    if steps:
        training.step(3)
        keep(full(training.state()), root / "next.pt")


def load_hf(root: Path, kind: str) -> None:
    """torch's own reader of safetensors folders loads weights over NaN."""
    training = Training(kind, 99)
    weights = dict(training.state()["model"])
    spoil(weights)
    dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(root)))
    keep(full(weights), root / "loaded.pt")


def each(jobs: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Several of these jobs one after the other: ranks take longer to start than to do one."""
    for name, args in jobs:
        JOBS[name](*args)


JOBS: dict[str, Callable[..., None]] = {"save": save, "load": load, "load_hf": load_hf}
