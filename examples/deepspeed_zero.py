"""DeepSpeed with ZeRO-1: optimizer state in flat partitions, one a rank.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py RUN

Each partition is saved as what it is: ranges of parameters, under their names. So another number of ranks goes on from it.
"""

import os
import sys

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from toy import BATCH, STEPS, Loader, Net, join, report, world

import ckptkit
from ckptkit.hooks.integrations.deepspeed import register


def main(run: str) -> None:
    device = join()
    rank, ranks = world()
    model = Net().to(device)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // ranks,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    loader = Loader(rank, ranks, device)

    ckpt = ckptkit.Checkpointer(run, every=10, busy="wait")  # toy steps are faster than any disk
    register(ckpt, engine, loader=loader)
    for step in range(ckpt.restore(), STEPS):
        x, y = next(loader)
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        ckpt.on_step_end(engine.global_steps)
        report(step + 1, loss)
    ckpt.close()


if __name__ == "__main__":
    main(sys.argv[1])
