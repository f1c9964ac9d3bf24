"""Tensor parallel inside, FSDP2 outside: a mesh of two axes, and parameters cut along both.

    torchrun --nproc-per-node 4 examples/tp_dp.py RUN          # dp=2 x tp=2
    torchrun --nproc-per-node 2 examples/tp_dp.py RUN --tp 1   # goes on with dp=2 x tp=1

Both degrees may change from one start to the next.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import STEPS, Loader, Net, join, report, world

import ckptkit


def main(run: str, tp: int) -> None:
    device = join()
    mesh = init_device_mesh(device.type, (world()[1] // tp, tp), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    model = Net().to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = Loader(dp.get_local_rank(), dp.size(), device)  # tp ranks see the same data

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
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--tp", type=int, default=2)
    main(**vars(parser.parse_args()))
