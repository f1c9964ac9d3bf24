"""PyTorch DCP: `dcp.save` and `dcp.load` as you have them, with ckptkit's writer and reader.

    torchrun --nproc-per-node 2 examples/dcp.py RUN

A step is written as ckptkit's other steps are: replicas once, digests, committed as a whole; any number of ranks reads it.
"""

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import STEPS, Loader, Net, join, report, world

from ckptkit.hooks.integrations.dcp import CkptKitReader, CkptKitWriter
from ckptkit.ops.runs import has_steps


def main(run: str) -> None:
    device = join()
    rank, ranks = world()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp",))
    model = Net().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = Loader(rank, ranks, device)

    def state(step: int) -> dict[str, Any]:
        tensors, moments = get_state_dict(model, optimizer)
        plain = {"step": step, "scheduler": scheduler.state_dict(), "loader": loader.state_dict()}
        return {"model": tensors, "optimizer": moments, "plain": plain}

    first = 0
    if has_steps(run):
        saved = state(0)
        dcp.load(saved, storage_reader=CkptKitReader(run))
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        scheduler.load_state_dict(saved["plain"]["scheduler"])
        loader.load_state_dict(saved["plain"]["loader"])
        first = saved["plain"]["step"]
    for step in range(first, STEPS):
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % 10 == 0:
            dcp.save(state(step + 1), storage_writer=CkptKitWriter(run, step=step + 1))
        report(step + 1, loss)


if __name__ == "__main__":
    main(sys.argv[1])
