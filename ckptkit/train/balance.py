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
from ckptkit.train.stages import AnyStage


class Balancer:
    """The balancing biases of a stage's layers. Its state, that of `pid`, is of all layers and equal on every rank.

    Attributes:
        integral, before: I and e', fp32 [layers, E].
    """

    def __init__(self, stage: AnyStage, table: BalanceTable) -> None:
        self.stage, self.table = stage, table
        here: Any = stage
        gates = {i: here.model.layers[i].mlp.gate for i in stage.layers}
        # Routers of other models have none: for those the load is counted only.
        self.biases = {
            i: gate.balancing_biases for i, gate in gates.items() if hasattr(gate, "balancing_biases")
        }
        self.integral = torch.zeros(stage.dims.layers, stage.dims.experts, device=stage.load.device)
        self.before = torch.zeros_like(self.integral)

    def step(self) -> torch.Tensor:
        """Update the biases by the load counted since the last call; returns that load, int64 [all layers, E + 1]."""
        load = self.stage.load.new_zeros(self.stage.dims.layers, self.stage.dims.experts + 1)
        load[self.stage.layers] = self.stage.load
        self.stage.load.zero_()
        if self.stage.parallel.world.size > 1:
            dist.all_reduce(load)
        if self.table.mode != "none" and self.biases:
            share = load.float() / load.sum(1, keepdim=True).clamp_min(1)
            error = (1 - share[:, -1:]) / (share.shape[1] - 1) - share[:, :-1]
            change = self._change(error)
            for layer, bias in self.biases.items():
                bias[:-1] += change[layer]
                bias[:-1] -= bias[:-1].mean()
        return load

    def _change(self, error: torch.Tensor) -> torch.Tensor:
        t = self.table
        if t.mode == "sign":
            return t.rate * error.sign()
        change = t.kp * error + t.ki * self.integral + t.kd * (error - self.before)
        self.integral += error
        self.before.copy_(error)
        return change

    def state_dict(self) -> dict[str, Any]:
        return (
            {"integral": self.integral.tolist(), "before": self.before.tolist()}
            if self.table.mode == "pid"
            else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(torch.tensor(value))
