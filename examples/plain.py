"""A plain PyTorch loop, with DistributedDataParallel where there is more than one process.

    python examples/plain.py RUN
    torchrun --nproc-per-node 2 examples/plain.py RUN

RUN is a folder or a URL. Kill it anywhere and start it again, on as many processes as you like: it goes on.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from toy import STEPS, Loader, Net, join, report, world

import ckptkit


def main(run: str) -> None:
    device = join()
    rank, ranks = world()
    model: torch.nn.Module = Net().to(device)
    if ranks > 1:
        model = DistributedDataParallel(model)
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
