"""One rank of a run: model, optimizer, balancing and data, and what one step does.

trainer = Trainer(config, parallel)
while trainer.done < config.train.steps:
    result = trainer.step()
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ckptkit import models
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError, TrainingError, UsageError
from ckptkit.train import context, data
from ckptkit.train import parallel as groups
from ckptkit.train.balance import Balancer
from ckptkit.train.config import Config
from ckptkit.train.held import family
from ckptkit.train.optim import Optimizer, rate
from ckptkit.train.parallel import Parallel
from ckptkit.train.pipeline import Pipeline
from ckptkit.train.stages import STAGES


@dataclass(frozen=True)
class Result:
    """What one step came to; the same on every rank but for `seconds`.

    Attributes:
        step: Completed steps.
        loss: Mean cross-entropy over the step's tokens.
        norm: Norm of the whole gradient before clipping.
        ratio: What learning rates were multiplied by.
        load: int64 [layers, E + 1]: tokens of each class.
        stop: Whether some rank was asked to stop.
        seconds: Wall time of the step.
    """

    step: int
    loss: float
    norm: float
    ratio: float
    load: torch.Tensor
    stop: bool
    seconds: float


class Trainer:
    """A rank's part of a run.

    Args:
        config: Of the run.
        parallel: This rank's groups.

    Raises:
        UsageError: sizes that do not go together.
        LayoutError: the layout does not fit the model, the batch or the sequence.
    """

    def __init__(self, config: Config, parallel: Parallel) -> None:
        self.config, self.parallel = config, parallel
        self.model = bind(config)
        check(config, self.model, parallel.layout)
        t = config.train
        share = t.batch // parallel.layout.dp
        self.loader = data.Loader(data.sources(config.data), t.seq_len, t.batch, config.data.seed)
        self.stage = STAGES[self.model.schema.name](config, self.model, parallel)
        self.optimizer = Optimizer(self.stage, self.model, config.optimizer)
        self.balancer = Balancer(self.stage, config.balance)
        self.pipeline = Pipeline(self.stage, share // t.micro_batch, t.micro_batch, t.batch * t.seq_len)
        self.done = 0

    def step(self, stop: bool = False) -> Result:
        """Take one optimizer step.

        Args:
            stop: Whether this rank was asked to stop; every rank hears of it in the result.

        Raises:
            TrainingError: the loss or the gradient is not finite; weights are those of the step before.
        """
        begin = time.perf_counter()
        tokens, targets = self.loader.next(
            self.parallel.dp_index, self.parallel.layout.dp, self.stage.context.positions
        )
        self.optimizer.zero()
        loss = self.pipeline.run(tokens, targets)
        self.optimizer.reduce()
        # Tensor-parallel ranks have the same loss: one of them tells it.
        mine = loss.double() if self.parallel.tp.index == 0 else torch.zeros_like(loss, dtype=torch.float64)
        sums = torch.stack([mine, self.optimizer.norm_sq(), torch.full_like(mine, float(stop))])
        if self.parallel.world.size > 1:
            dist.all_reduce(sums)
        total, square, stops = sums.tolist()
        if not (abs(total) < float("inf") and square < float("inf")):
            raise TrainingError(
                f"step {self.done + 1}: the loss is {total} and the squared norm of the gradient {square}; nothing was "
                f"updated. Weights are still those of step {self.done}: lower the learning rates or look at the data, and "
                "start again from an earlier step",
                step=self.done + 1,
                loss=total,
            )
        ratio = rate(self.done, self.config.optimizer, self.config.train.steps)
        self.optimizer.step(self.done + 1, sums[1].sqrt(), ratio)
        load = self.balancer.step()
        self.done += 1
        return Result(self.done, total, square**0.5, ratio, load, stops > 0, time.perf_counter() - begin)


def bind(config: Config) -> Model:
    """The model of a configuration. Raises UsageError where training does not know its kind."""
    schema = models.find(config.model)
    if schema is None or schema.name not in STAGES:
        raise UsageError(
            f"training knows {' and '.join(STAGES)} models, not model_type {config.model.get('model_type')!r}"
        )
    return schema.bind(config.model)


def check(config: Config, model: Model, layout: Layout) -> None:
    """Raise LayoutError or UsageError where sizes of the run do not go together, before anything is made."""
    t = config.train
    groups.check(layout)
    STAGES[model.schema.name].dims_of(model)
    if t.batch % (layout.dp * t.micro_batch):
        raise LayoutError(
            f"a batch of {t.batch} sequences does not divide into dp={layout.dp} shares of micro-batches of "
            f"{t.micro_batch}; make [train] batch a multiple of {layout.dp * t.micro_batch}"
        )
    if config.checkpoint.init and not config.checkpoint.root:
        raise UsageError("[checkpoint] init is read by the run's checkpointer; give a root (--root), too")
    if layout.pp > model.layers:
        raise LayoutError(
            f"layout {layout}: pp={layout.pp} stages need as many layers, the model has {model.layers}"
        )
    if model.sizes["vocab"] < 256:
        raise UsageError(
            f"tokens are bytes, and the model's vocabulary has {model.sizes['vocab']}; it needs 256"
        )
    _ = sum(1 for _ in model.names(family(model)).placements(layout))  # every axis divides
    context.check(layout, t.seq_len)
