"""What DeepSpeed itself does in the tests: run as a script, one process a rank, with a JSON of jobs.

    python deepspeed_jobs.py JOBS.json        (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them)

`save` trains two steps, saves, goes on for one step, and dumps both states. `load` fills a new engine with NaN, loads, dumps,
takes the step, dumps. Every rank sees the same data, so that mean gradients do not depend on the number of ranks.
"""

import argparse
import json
import os
import re
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

DECAYS = 0.1, 0.0
EXPERTS = 4


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, two optimizer groups, and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(5, 7)
        self.b = torch.nn.Linear(7, 7, bias=False)
        self.c = torch.nn.Linear(7, 3)
        self.register_buffer("seen", torch.arange(4.0))

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).float().pow(2).mean()


class Experts(torch.nn.Module):
    """Four experts of DeepSpeed-MoE, over `ep` ranks."""

    def __init__(self, ep):
        super().__init__()
        self.a = torch.nn.Linear(5, 6)
        expert = torch.nn.Linear(6, 6)
        self.moe = MoE(6, expert, num_experts=EXPERTS, ep_size=ep, k=1, min_capacity=0, use_rts=False)
        # They start as copies of each other.
        for number, weight in enumerate(self.moe.deepspeed_moe.experts.parameters()):
            weight.data += number + 8 * torch.distributed.get_rank()
        self.register_buffer("seen", torch.arange(4.0))

    def forward(self, x):
        return self.moe(torch.relu(self.a(x)))[0].float().pow(2).mean()


def engine_of(job, seed):
    torch.manual_seed(seed)
    net = Experts(job["ep"]) if "ep" in job else Net()
    if job.get("frozen"):
        net.get_parameter("b.weight").requires_grad_(False)
    held = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": DECAYS[0]},
        {"params": [p for p in held if p.ndim < 2], "weight_decay": DECAYS[1]},
    ]
    if "ep" in job:
        groups = split_params_into_different_moe_groups_for_optimizer({"params": held, "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": job["bf16"]},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": job["stage"],
            "stage3_param_persistence_threshold": 0,
            **job.get("zero", {}),
        },
        **({"checkpoint": {"load_universal": True}} if job.get("universal") else {}),
    }
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]


def step(engine, number):
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(x.to(torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)))
    engine.step()


def dump(engine, path):
    """Masters and moments of all ranks, buffers and the step, as they are in memory."""
    found = {
        ("seen", "buffer"): engine.module.seen.clone(),
        ("step", ""): torch.tensor(float(engine.global_steps)),
    }
    gather = stage3 if engine.zero_optimization_partition_weights() else stage12
    found.update(gather(engine))
    if torch.distributed.get_rank() == 0:
        torch.save(found, path)


def stage3(engine):
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield (name, "master"), safe_get_full_fp32_param(parameter).clone()
            for slot in ("exp_avg", "exp_avg_sq"):
                yield (name, slot), safe_get_full_optimizer_state(parameter, slot).clone()


def stage12(engine):
    """The ranks' parts one after the other are the group's parameters one after the other, in the order it has them."""
    zero = engine.optimizer
    for number, group in enumerate(zero.round_robin_bit16_groups):
        (flat,) = zero.optimizer.param_groups[number]["params"]
        state = zero.optimizer.state[flat]
        for slot, mine in (
            ("master", flat),
            ("exp_avg", state["exp_avg"]),
            ("exp_avg_sq", state["exp_avg_sq"]),
        ):
            parts = [torch.empty_like(mine.data) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, mine.data)
            names = [zero.param_names[parameter] for parameter in group]
            own = {int(n) for name in names for n in re.findall(r"deepspeed_experts\.(\d+)\.", name)}
            apart = 0 < len(own) < EXPERTS  # then the ranks have experts of their own, under the same names
            for rank, whole in enumerate(parts if apart else [torch.cat(parts)]):
                start = 0
                for name, parameter in zip(names, group, strict=True):
                    size = parameter.numel()
                    found = name
                    if apart:
                        found = renumbered(name, rank * len(own))
                    yield (found, slot), whole[start : start + size].view(parameter.shape).clone()
                    start += size


def renumbered(name, by):
    """The name of an expert that counts from another rank's first."""
    head, mark, tail = name.partition("deepspeed_experts.")
    number, _, rest = tail.partition(".")
    return f"{head}{mark}{int(number) + by}.{rest}"


def sentinels(engine):
    """NaN wherever a value should come from the checkpoint."""
    optimizer = engine.optimizer
    name = (
        "fp32_partitioned_groups_flat"
        if engine.zero_optimization_partition_weights()
        else "single_partition_of_fp32_groups"
    )
    for flat in getattr(optimizer, name):
        flat.data.fill_(float("nan"))
    if (
        not engine.load_universal_checkpoint()
    ):  # which leaves buffers as they are, whatever the checkpoint holds
        engine.module.seen.fill_(float("nan"))


def save(job):
    engine = engine_of(job, 0)
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(job["root"])
    dump(engine, job["out"] + ".loaded.pt")
    step(engine, 2)
    dump(engine, job["out"] + ".stepped.pt")


def load(job):
    engine = engine_of(job, 7)
    sentinels(engine)
    path, _ = engine.load_checkpoint(job["root"])
    assert path is not None, "nothing was loaded"
    if engine.load_universal_checkpoint() and engine.zero_optimization_partition_weights():
        # DeepSpeed then gives every group the hyper-parameters of the first, and all of them one tensor as their step.
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
        for group, decay in zip(engine.optimizer.optimizer.param_groups, DECAYS, strict=True):
            group["weight_decay"] = decay
    dump(engine, job["out"] + ".loaded.pt")
    step(engine, 2)
    dump(engine, job["out"] + ".stepped.pt")


def fp32(job):
    torch.save(get_fp32_state_dict_from_zero_checkpoint(job["root"]), job["out"] + ".fp32.pt")


def universal(job):
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=job["root"], output_folder=job["out"], num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=job["inject"],
        )
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    deepspeed.init_distributed("gloo")
    for one in jobs:
        print("job", one, flush=True)
        {"save": save, "load": load, "fp32": fp32, "universal": universal}[one["do"]](one)
        torch.distributed.barrier()
