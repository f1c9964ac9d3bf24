"""What real torch does in the tests of distributed checkpoints, run on gloo ranks of their own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SENTINEL = float("nan")


class Net(nn.Module):
    """Rows that divide by no number of ranks, a buffer, and a layer with fewer rows than ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)])
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 2))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.get_buffer("scale")


def build(seed: int) -> tuple[Net, torch.optim.AdamW]:
    """The model cut by FSDP2, and its optimizer: two groups, as trainers make them."""
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def step(model: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One update on a batch that every rank sees whole: with a power of two of them, their mean is exact."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 2, generator=generator)
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()


def full(value: Any) -> Any:
    """Nested state with whole tensors."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list):
        return [full(item) for item in value]
    return value


def keep(value: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)


def save(root: Path) -> None:
    """Train two steps, save in every convention, then train one more; whole states go beside."""
    model, optimizer = build(0)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer)
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    keep(full({"model": weights, "optimizer": state}), root / "whole.pt")
    extra = {"lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01, 0.01]}, "step": 2}
    dcp.save({"model": weights, "optimizer": state, **extra}, checkpoint_id=root / "nested")
    loader = {f"dp_rank_{dist.get_rank()}": {"position": 7 * dist.get_rank()}}
    dcp.save({**weights, "optimizer": flat, "dataloader": loader}, checkpoint_id=root / "flat")
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=root / "alone", use_collectives=False)
    dcp.save(
        {"model": weights}, storage_writer=dcp.FileSystemWriter(root / "many", single_file_per_rank=False)
    )
    dcp.save(dict(weights), storage_writer=HuggingFaceStorageWriter(str(root / "hf"), save_distributed=True))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(6, 10)
    tp = {
        "column": distribute_tensor(whole, mesh, [Shard(1)]),
        "cube": distribute_tensor(whole.reshape(3, 4, 5), mesh, [Shard(1)]),
        "replica": distribute_tensor(whole, mesh, [Replicate()]),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "strided": whole.t(),
        "fp8": torch.arange(6.0).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False]),
    }
    dcp.save(tp, checkpoint_id=root / "tp")
    keep(full(tp), root / "tp.pt")
    step(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    keep(full({"model": weights, "optimizer": state}), root / "next.pt")


def load(root: Path, flat: bool, prefix: str) -> None:
    """Load into a model and an optimizer that hold other values everywhere, then train one step."""
    model, optimizer = build(99)
    step(model, optimizer, 98)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    spoil(weights)
    spoil(state)
    wanted: dict[str, Any] = (
        {"model": weights, "optimizer": state} if prefix else {**weights, "optimizer": state}
    )
    dcp.load(wanted, checkpoint_id=root)
    state = wanted.pop("optimizer")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=wanted["model"] if prefix else wanted,
        optim_state_dict=state,
        options=options,
    )
    weights, state = get_state_dict(model, optimizer)
    keep(full({"model": weights, "optimizer": state}), root / "loaded.pt")
    step(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    keep(full({"model": weights, "optimizer": state}), root / "next.pt")


def spoil(value: Any) -> None:
    """Fill every tensor with a value that no checkpoint holds."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.fill_(SENTINEL if value.is_floating_point() else 77)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)


def _main(rank: int, ranks: int, meeting: str, job: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        job(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(ranks: int, meeting: Path, job: Callable[..., None], *args: Any) -> None:
    """Run a job on some gloo ranks, each a process."""
    torch.multiprocessing.spawn(_main, (ranks, str(meeting), job, args), nprocs=ranks)
