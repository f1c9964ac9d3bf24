"""What ranks do in the tests of the hooks' integrations, one process a rank:

python hooks_jobs.py RANK WORLD MEETING JOB       (JOB in JSON)
"""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch

from ckptkit.hooks import Checkpointer


def _join(rank: int, world: int, meeting: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_SIZE=str(world))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def megatron(job: dict[str, Any], rank: int, world: int, meeting: str) -> None:
    """Values of Megatron's model and optimizer saved in one layout, and judged bit by bit in another."""
    import megatron_jobs as judge

    from ckptkit.hooks.integrations.megatron import register

    judge._shims()
    _join(rank, world, meeting)
    with torch.no_grad():
        chunks, optimizer = judge.build(job)
        judge._set_groups(optimizer, 0.01 if job["save"] else 77.0, 0.1 if job["save"] else 77.0)
        for _, tensor, expected in judge.states(chunks, optimizer):
            tensor.copy_(expected if job["save"] else torch.full_like(expected, float("nan")))
        ckpt = Checkpointer(job["url"], cache="off", timeout_s=60)
        register(ckpt, chunks, optimizer)
        step = ckpt.restore()
        if job["save"]:
            ckpt.on_step_end(judge.STEP)
            ckpt.save()
        else:
            assert step == judge.STEP
            for name, tensor, expected in judge.states(chunks, optimizer):
                assert torch.equal(tensor, expected), f"{name} is not what was saved"
            for one in optimizer.chained_optimizers:
                assert all(group["lr"] == 0.01 for group in one.optimizer.param_groups)
        ckpt.close()


def deepspeed(job: dict[str, Any], rank: int, world: int, meeting: str) -> None:
    """Trains upto some steps from where the run is, saving each; dumps the state and the losses."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job["port"]),
    )
    import deepspeed_jobs as judge

    from ckptkit.hooks.integrations.deepspeed import register

    judge.deepspeed.init_distributed("gloo")
    engine = judge.engine_of(job, job["seed"])
    ckpt = Checkpointer(job["url"], cache="off", every=1, busy="wait", timeout_s=60)
    register(ckpt, engine)
    first = ckpt.restore()
    assert engine.global_steps == first == job["first"]
    for number in range(first, job["upto"]):
        judge.step(engine, number)
        ckpt.on_step_end(engine.global_steps)
    ckpt.close()
    judge.dump(engine, job["out"])
    torch.distributed.barrier()


def trainer(job: dict[str, Any], rank: int, world: int, meeting: str) -> None:
    """Hugging Face's Trainer on a small model, up to some steps."""
    from transformers import Trainer, TrainingArguments

    from ckptkit.hooks.integrations.hf_trainer import CkptKitCallback

    if world > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job["port"]),
        )

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.two(torch.tanh(self.one(x)))[:, 0]
            return {"loss": (out - y).pow(2).mean(), "logits": out}

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 8, generator=generator), torch.randn(40, generator=generator)
    data = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    net = Net()
    args = TrainingArguments(
        output_dir=job["folder"], max_steps=job["upto"], per_device_train_batch_size=4 // world, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, learning_rate=0.05, lr_scheduler_type="constant_with_warmup", warmup_steps=3, disable_tqdm=True,
        seed=3,
    )  # fmt: skip
    callback = (
        CkptKitCallback(job["url"], every=job["every"], busy="wait", timeout_s=60) if job["url"] else None
    )
    run = Trainer(model=net, args=args, train_dataset=data, callbacks=[callback] if callback else [])
    run.train(resume_from_checkpoint=callback.resume(args.output_dir) if callback else None)
    if rank == 0:
        losses = {row["step"]: row["loss"] for row in run.state.log_history if "loss" in row}
        state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
        torch.save({"losses": losses, "state": state}, job["out"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[4])
    {"megatron": megatron, "deepspeed": deepspeed, "trainer": trainer}[given["do"]](
        given, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    )
    sys.stdout.flush()
    os._exit(0)
