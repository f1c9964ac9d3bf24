"""Forward and backward over the micro-batches of a step, through one stage or several (`torch.distributed.pipelining`)."""

from collections.abc import Callable
from typing import Any

import torch

from ckptkit.train.stages import AnyStage


class Pipeline:
    """Runs a stage over micro-batches and adds up gradients.

    Args:
        stage: This rank's.
        micro_batches: How many a step has.
        micro_batch: Sequences of each.
        tokens: Tokens of a step over all ranks, by which the summed loss is divided.
    """

    def __init__(self, stage: AnyStage, micro_batches: int, micro_batch: int, tokens: int) -> None:
        self.stage, self.count, self.tokens = stage, micro_batches, tokens
        self.schedule = None if stage.parallel.pp.size == 1 else self._schedule(micro_batch)

    def _loss(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.stage.loss(h, targets) / self.tokens

    def _schedule(self, micro_batch: int) -> Any:
        """1F1B, or all forward and then all backward where there are fewer micro-batches than stages."""
        from torch.distributed import pipelining  # takes a second to import

        stage, p = self.stage, self.stage.parallel
        context, width = stage.context, stage.state_width
        tokens = torch.zeros(micro_batch, context.tokens, dtype=torch.int64, device=p.device)
        shape = (micro_batch, context.tokens // p.tp.size)
        residual = torch.zeros(*shape, stage.dims.hidden, device=p.device, requires_grad=True)
        state = torch.zeros(*shape, width, device=p.device, dtype=stage.dtype, requires_grad=True)
        last = torch.zeros_like(residual, dtype=stage.dtype, requires_grad=True)
        wrapped = pipelining.PipelineStage(
            stage,
            p.pp.index,
            p.pp.size,
            p.device,
            input_args=(tokens,) if p.is_first else (residual, state),
            output_args=(last,) if p.is_last else (residual, state),
            group=p.pp.handle,
        )
        kind: Callable[..., Any] = (
            pipelining.Schedule1F1B if self.count >= p.pp.size else pipelining.ScheduleGPipe
        )
        return kind(wrapped, self.count, loss_fn=self._loss, scale_grads=False)

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Adds this step's gradients; returns the loss of this rank's tokens, over all tokens of the step (fp32).

        Args:
            tokens: int64 [micro-batches * micro-batch, T]; used on the first stage.
            targets: Likewise; used on the last. Elsewhere the loss is zero.
        """
        losses: list[torch.Tensor] = []
        if self.schedule is None:
            for x, y in zip(tokens.chunk(self.count), targets.chunk(self.count), strict=True):
                loss = self._loss(self.stage(x), y)
                loss.backward()
                losses.append(loss.detach())
        else:
            p = self.stage.parallel
            inputs = (tokens,) if p.is_first else ()
            target = targets if p.is_last else None
            self.schedule.step(
                *inputs, target=target, losses=losses if p.is_last else None, return_outputs=False
            )
        if not losses:
            return torch.zeros((), device=self.stage.parallel.device)
        return torch.stack([loss.detach() for loss in losses]).sum()
