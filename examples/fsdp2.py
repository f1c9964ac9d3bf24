"""FSDP2: parameters, gradients and optimizer state sharded over all ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py RUN

Nothing says how the model is sharded: `register` reads it from the DTensors. Start it again on 1, 4 or 8 ranks and it goes on.
"""

import sys

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import STEPS, Loader, Net, join, report, world

import ckptkit


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

    ckpt = ckptkit.Checkpointer(run, every=10, busy="wait")  # toy steps are faster than any disk
    ckpt.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for step in range(ckpt.restore(), STEPS):
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ckpt.on_step_end(step + 1)
        report(step + 1, loss)
    ckpt.close()


if __name__ == "__main__":
    main(sys.argv[1])
