"""megatron-core: a GPT, tensor parallel, with the distributed optimizer over the data-parallel ranks.

    torchrun --nproc-per-node 2 examples/megatron_core.py RUN --tp 2
    torchrun --nproc-per-node 4 examples/megatron_core.py RUN --tp 2     # goes on with dp=2 x tp=2

What a rank holds, model and optimizer, is read from Megatron's own sharded state. Any tp, pp, ep and dp goes on.
"""

import argparse

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron_cpu import pretend
from toy import BATCH, STEPS, join, report

import ckptkit
from ckptkit.hooks.integrations.megatron import register

VOCAB, LENGTH = 64, 16


def tokens(step: int) -> torch.Tensor:
    """A batch of sequences that count up by a stride of their own."""
    seeded = torch.Generator().manual_seed(step)
    start, stride = torch.randint(VOCAB, (2, BATCH, 1), generator=seeded)
    return (start + stride % 4 * torch.arange(LENGTH + 1)) % VOCAB


def main(run: str, tp: int) -> None:
    device = join()
    pretend(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=tp, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, LENGTH).to(device)
    how = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = [DistributedDataParallel(config, how, model)]
    adam = OptimizerConfig(
        optimizer="adam", lr=3e-3, min_lr=0.0, clip_grad=1.0, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(adam, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=3e-3, min_lr=0.0, lr_warmup_steps=5, lr_decay_steps=STEPS, lr_decay_style="cosine",
        start_wd=0.01, end_wd=0.01, wd_incr_steps=STEPS, wd_incr_style="constant",
    )  # fmt: skip

    ckpt = ckptkit.Checkpointer(run, every=10, busy="wait")  # toy steps are faster than any disk
    register(ckpt, chunks, optimizer, scheduler)
    share, shares = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    places = torch.arange(LENGTH, device=device)[None]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)[None, None]
    for step in range(ckpt.restore(), STEPS):
        batch = tokens(step).chunk(shares)[share].to(device)
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        loss = chunks[0](batch[:, :-1], places, mask, labels=batch[:, 1:]).mean()
        loss.backward()
        finalize_model_grads(chunks)
        optimizer.step()
        scheduler.step(1)
        ckpt.on_step_end(step + 1)
        report(step + 1, loss)
    ckpt.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--tp", type=int, default=1)
    main(**vars(parser.parse_args()))
