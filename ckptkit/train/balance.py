"""Balancing of experts: the selection biases follow the load, outside the gradient.

With n_j the tokens of class j in a step (all ranks and micro-batches, skip expert included), f_j = n_j / sum n, and
e_j = (1 - f_skip) / E - f_j for the E experts:

    sign    beta_j += rate * sign(e_j)
    pid     beta_j += kp e_j + ki I_j + kd (e_j - e_j'),  I_j += e_j           e': the step before

then the mean over experts is taken off. The skip expert's bias stays. Counts are whole numbers, so that every rank makes the
same update.
"""

from typing import Any

import torch
import torch.distributed as dist

from ckptkit.train.config import BalanceTable
from ckptkit.train.model import Stage
from ckptkit.train.parallel import Parallel


class Balancer:
    """The balancing biases of a stage's layers.

    Attributes:
        integral, before: State of `pid`, fp32 [layers here, E].
    """

    def __init__(self, stage: Stage, table: BalanceTable) -> None:
        self.stage, self.table = stage, table
        here: Any = stage
        self.biases = [here.model.layers[i].mlp.gate.balancing_biases for i in stage.layers]
        shape = (len(stage.layers), stage.dims.experts)
        self.integral = torch.zeros(shape, device=stage.load.device)
        self.before = torch.zeros(shape, device=stage.load.device)

    def step(self) -> torch.Tensor:
        """Update the biases by the load counted since the last call; returns that load over all ranks [layers, E + 1]."""
        load, parallel = self.stage.load, self.stage.parallel
        if parallel.stage.size > 1:
            dist.all_reduce(load, group=parallel.stage.handle)
        total = load.clone()
        load.zero_()
        if self.table.mode != "none" and len(total):
            share = total.float() / total.sum(1, keepdim=True).clamp_min(1)
            error = (1 - share[:, -1:]) / (share.shape[1] - 1) - share[:, :-1]
            for bias, change in zip(self.biases, self._change(error), strict=True):
                bias[:-1] += change
                bias[:-1] -= bias[:-1].mean()
        return total

    def _change(self, error: torch.Tensor) -> torch.Tensor:
        t = self.table
        if t.mode == "sign":
            return t.rate * error.sign()
        change = t.kp * error + t.ki * self.integral + t.kd * (error - self.before)
        self.integral += error
        self.before = error
        return change


class BalanceState:
    """The state of `pid`, of all layers, as an extra: the same on every rank and in every layout."""

    def __init__(self, balancer: Balancer, parallel: Parallel, layers: int) -> None:
        self.balancer, self.parallel, self.layers = balancer, parallel, layers

    def state_dict(self) -> dict[str, Any]:
        b = self.balancer
        rows = torch.zeros(2, self.layers, b.integral.shape[1])
        if b.stage.layers:
            rows[:, b.stage.layers] = torch.stack([b.integral, b.before]).cpu()
        rows = rows.to(self.parallel.device)
        if self.parallel.pp.size > 1:
            dist.all_reduce(rows, group=self.parallel.pp.handle)
        return {"integral": rows[0].tolist(), "before": rows[1].tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        b = self.balancer
        for name in ("integral", "before"):
            getattr(b, name).copy_(torch.tensor(state[name])[b.stage.layers])
