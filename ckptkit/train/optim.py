"""The optimizer of a rank: gradients summed over whom they belong to, clipped, then Muon for matrices and AdamW for the rest.

Every rank of a stage has tokens of its own, so that each gradient is partial everywhere:

    tied embedding             summed over first and last stage, and there over `cp x dp`
    replicated over tp         summed over the tensor-parallel ranks that hold it
    all                        summed over `cp x dp` (experts: over their data-parallel group) by flat buffers

The norm for clipping counts each element of the model once, whoever holds copies of it.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import cos, pi, sqrt
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.core.boxes import row_major_strides
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError
from ckptkit.hooks import Held
from ckptkit.kernels.adamw import AdamWTable, Hyper, adamw_step
from ckptkit.train.config import OptimizerTable
from ckptkit.train.flat import Buffer, Run, sections
from ckptkit.train.held import Holding, family, held
from ckptkit.train.model import dtype_of
from ckptkit.train.muon import Orthogonalizer
from ckptkit.train.parallel import Group
from ckptkit.train.stages import AnyStage


def rate(step: int, table: OptimizerTable, steps: int) -> float:
    """What learning rates are multiplied by at a step (from 0): a linear warm-up, then down to `min_ratio`."""
    if step < table.warmup:
        return (step + 1) / table.warmup
    if table.decay == "constant":
        return 1.0
    done = min(1.0, (step - table.warmup) / max(1, steps - table.warmup))
    return table.min_ratio + (1 - table.min_ratio) * (1 + cos(pi * done)) / 2


class Adam:
    """AdamW of one buffer."""

    def __init__(self, buffer: Buffer, table: OptimizerTable, kernels: str | None) -> None:
        self.buffer, self.table, self.kernels = buffer, table, kernels
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(buffer.master), torch.zeros_like(buffer.master)
        self.groups = []
        for decay in (True, False):
            at = [run.here for run in buffer.runs if run.item.tensor.decay == decay]
            columns = (buffer.master, buffer.section, self.exp_avg, self.exp_avg_sq)
            if at:
                self.groups.append(
                    (AdamWTable(*([c[s] for s in at] for c in columns)), table.weight_decay * decay)
                )

    def step(self, count: int, scale: torch.Tensor | None, ratio: float) -> None:
        """The `count`th step (from 1), with gradients times `scale` and the rate times `ratio`."""
        t = self.table
        for group, decay in self.groups:
            hyper = Hyper(t.adamw_lr * ratio, count, t.beta1, t.beta2, t.eps, decay)
            adamw_step(group, hyper, scale, self.kernels)

    def state(self) -> list[tuple[str, torch.Tensor]]:
        return [("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)]


class Muon:
    """Muon of one buffer."""

    def __init__(
        self,
        buffer: Buffer,
        table: OptimizerTable,
        orthogonalise: Orthogonalizer,
        whole: Mapping[str, LocalTensor],
    ) -> None:
        self.buffer, self.table, self.orthogonalise = buffer, table, orthogonalise
        self.momentum = torch.zeros_like(buffer.master)
        self.shape = {run.item.key: whole[run.item.key].shape[-2:] for run in buffer.runs}

    def step(self, count: int, scale: torch.Tensor | None, ratio: float) -> None:
        """As `Adam.step`."""
        t, lr = self.table, self.table.muon_lr * ratio
        gradient = self.buffer.section if scale is None else self.buffer.section * scale
        self.momentum.lerp_(gradient, 1 - t.muon_momentum)
        update = self.orthogonalise(gradient.lerp(self.momentum, t.muon_momentum))
        weights = self.buffer.master
        weights.mul_(1 - lr * t.muon_weight_decay)
        for run in self.buffer.runs:
            weights[run.here].add_(update[run.here], alpha=-lr * self._adjust(*self.shape[run.item.key]))

    def _adjust(self, rows: int, columns: int) -> float:
        if self.table.muon_adjust == "original":
            return sqrt(max(1, rows / columns))
        return 0.2 * sqrt(max(rows, columns))

    def state(self) -> list[tuple[str, torch.Tensor]]:
        return [("momentum", self.momentum)]


class Groups(torch.optim.Optimizer):
    """What a checkpointer sees of the optimizer: which parameters have which settings, and that a step begins.

    State is not here: it lies in flat buffers, and is registered tensor by tensor (`Optimizer.saved`).
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Runs the hooks of a step, which wait for what is not saved yet."""


class Optimizer:
    """Everything that changes weights of a stage. `reduce`, `norm_sq` and `step`, in this order, once a step."""

    def __init__(self, stage: AnyStage, model: Model, table: OptimizerTable) -> None:
        self.stage, self.table, parallel = stage, table, stage.parallel
        self.parallel = parallel
        layout = parallel.layout
        params = dict(stage.named_parameters())
        items = [item for item in stage.holds.values() if item.tensor.kind == "param"]
        tensors = {name: tensor.shape for name, tensor in model.tensors.items()}
        whole = model.names(family(model)).whole
        shapes = {key: local.shape for key, local in whole.items()}
        dtype = dtype_of(table.muon_dtype, parallel.device)
        # Whose runs make whole matrices: those of its tensor-parallel peers, and under ZeRO all that share them.
        group = {
            False: parallel.stage if layout.zero else parallel.tp,
            True: parallel.edp if layout.zero else Group((parallel.rank,), 0),
        }
        peers = {
            r: [i for i in held(model, layout, r) if i.tensor.kind == "param"] for r in parallel.tp.ranks
        }
        self.parts: list[Adam | Muon] = []
        for expert in (False, True):
            for kind in ("adamw", "muon"):
                mine = [i for i in items if i.placement.expert == expert and i.tensor.optimizer == kind]
                if not mine:
                    continue
                buffer = Buffer(mine, params, layout, parallel.edp if expert else parallel.shard)
                if kind == "adamw":
                    self.parts.append(Adam(buffer, table, stage.kernels))
                    continue
                runs = buffer.every if expert else self._runs_of(peers, group[False], kind)
                if not layout.zero:
                    runs = [buffer.runs] if expert else runs
                work = Orthogonalizer(buffer, group[expert], runs, shapes, tensors, dtype, stage.kernels)
                self.parts.append(Muon(buffer, table, work, whole))
        self.groups = Groups(self._settings(params))
        self.grads = {key: grad for part in self.parts for key, grad in part.buffer.grads.items()}
        holders: dict[tuple[str, object], list[int]] = defaultdict(list)
        for rank, theirs in peers.items():
            for item in theirs:
                for segment in (s for s in item.local.segments if s.box.size):
                    holders[segment.tensor, segment.box].append(rank)
        self._sums = self._replicated(items, holders)
        self._counted = [self._once(part.buffer, holders) for part in self.parts]

    def _settings(self, params: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Groups in the terms of torch's own optimizers."""
        t, found = self.table, []
        adamw = {"lr": t.adamw_lr, "betas": (t.beta1, t.beta2), "eps": t.eps}
        muon = {
            "lr": t.muon_lr, "momentum": t.muon_momentum, "form": "lerp", "nesterov": True, "ns_steps": 5,
            "adjust_lr_fn": t.muon_adjust, "weight_decay": t.muon_weight_decay,
        }  # fmt: skip
        for kind, decay in (("muon", None), ("adamw", True), ("adamw", False)):
            keys = [
                key
                for key, item in self.stage.holds.items()
                if item.tensor.optimizer == kind and decay in (None, item.tensor.decay)
            ]
            more = muon if kind == "muon" else {**adamw, "weight_decay": t.weight_decay * bool(decay)}
            if keys:
                found.append({"params": [params[key] for key in keys], **more})
        return found

    def _runs_of(self, peers: Mapping[int, list[Holding]], group: Group, kind: str) -> list[list[Run]]:
        """What each rank of a group updates of the dense tensors of one kind, whose items each tensor-parallel rank has."""
        layout, mesh = self.parallel.layout, self.parallel.layout.dense
        by_tp: dict[int, list[list[Run]]] = {}
        for rank, items in peers.items():
            chosen = [i for i in items if not i.placement.expert and i.tensor.optimizer == kind]
            by_tp[int(mesh["tp"][rank])] = sections(chosen, layout, self.parallel.shard.size)[0]
        shard = (lambda rank: int(mesh["shard"][rank])) if layout.zero else (lambda rank: 0)
        return [by_tp[int(mesh["tp"][rank])][shard(rank)] for rank in group.ranks]

    def _replicated(
        self, items: list[Holding], holders: Mapping[tuple[str, object], list[int]]
    ) -> dict[int, tuple[Group, list[torch.Tensor]]]:
        """Gradients to be summed over tensor-parallel ranks: by how many hold them, the group and views of them."""
        found: dict[int, tuple[Group, list[torch.Tensor]]] = {}
        for item in items:
            if item.placement.expert:
                continue
            for segment in (s for s in item.local.segments if s.box.size):
                ranks = holders[segment.tensor, segment.box]
                if len(ranks) > 1:
                    group = self.parallel.neighbours(len(ranks))
                    if list(group.ranks) != sorted(ranks):
                        raise LayoutError(
                            f"{segment.tensor} is on ranks {ranks}, which are no neighbours",
                            tensor=segment.tensor,
                        )
                    first, last = interval(item.local, segment)
                    views = found.setdefault(len(ranks), (group, []))[1]
                    views.append(self.grads[item.key].view(-1)[first:last])
        return found

    def _once(self, buffer: Buffer, holders: Mapping[tuple[str, object], list[int]]) -> list[slice]:
        """Parts of a buffer's section that this rank counts in the norm."""
        if not buffer.cut and buffer.group.index:
            return []
        found: list[slice] = []
        for run in buffer.runs:
            if run.item.copy:
                continue
            for segment in (s for s in run.item.local.segments if s.box.size):
                if (
                    not run.item.placement.expert
                    and holders[segment.tensor, segment.box][0] != self.parallel.rank
                ):
                    continue
                first, last = interval(run.item.local, segment)
                first, last = max(first, run.first), min(last, run.last)
                if first < last:
                    at = run.offset - run.first
                    if found and found[-1].stop == at + first:
                        found[-1] = slice(found[-1].start, at + last)
                    else:
                        found.append(slice(at + first, at + last))
        return found

    def zero(self) -> None:
        """Forget gradients."""
        for part in self.parts:
            part.buffer.grad.zero_()

    def reduce(self) -> None:
        """Sum gradients over all ranks that hold the same values."""
        if self.parallel.ends.size > 1 and self.stage.dims.tied:
            self._sum_tied(
                self.grads["model.embed_tokens.weight" if self.parallel.is_first else "lm_head.weight"]
            )
        for _, (group, views) in sorted(self._sums.items()):
            flat = torch.cat(views)
            dist.all_reduce(flat, group=group.handle)
            torch._foreach_copy_(views, list(flat.split([len(view) for view in views])))
        for part in self.parts:
            part.buffer.reduce()

    def _sum_tied(self, grad: torch.Tensor) -> None:
        """Sum the gradient of the embedding over the first and the last stage, and over their data-parallel ranks.

        Both stages must round alike, or their copies drift apart; sums in flat buffers depend on where in them a tensor
        lies. So the whole sum is made here, and kept by one rank of each stage's group: what the buffers add to it is zero.
        """
        shard = self.parallel.shard
        if shard.size > 1:
            dist.reduce(grad, dst=shard.ranks[0], group=shard.handle)
        if shard.index == 0:
            dist.all_reduce(grad, group=self.parallel.ends.handle)
        else:
            grad.zero_()

    def norm_sq(self) -> torch.Tensor:
        """This rank's part of the squared norm of the whole gradient, float64; parts add up over all ranks."""
        views = [
            part.buffer.section[s] for part, at in zip(self.parts, self._counted, strict=True) for s in at
        ]
        if not views:
            return torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        return torch.stack(torch._foreach_norm(views)).double().square().sum()

    def step(self, count: int, norm: torch.Tensor | None, ratio: float) -> None:
        """Update weights: the `count`th step (from 1), with the gradient's whole norm and the rate times `ratio`."""
        self.groups.step()
        for group in self.groups.param_groups:
            group["lr"] = ratio * (self.table.muon_lr if "ns_steps" in group else self.table.adamw_lr)
        scale = None
        if self.table.clip and norm is not None:
            scale = (self.table.clip / (norm + 1e-6)).clamp(max=1.0).float()
        for part in self.parts:
            part.step(count, scale, ratio)
            part.buffer.publish()

    def saved(self) -> list[Held]:
        """State and masters of this rank, as a checkpoint has them."""
        found = []
        for part in self.parts:
            kept = part.state()
            if part.buffer.master is not part.buffer.own:
                kept = [("master", part.buffer.master), *kept]
            for role, flat in kept:
                found += [Held(r.item.key, role, flat[r.here], r.first, r.last) for r in part.buffer.runs]
        return found

    def refresh(self) -> None:
        """Make masters of weights that were loaded without them."""
        for part in self.parts:
            part.buffer.refresh()


def interval(local: LocalTensor, segment: Segment) -> tuple[int, int]:
    """Elements [first, last) of a local tensor that a segment fills: all of it where it is the only one."""
    if len(local.segments) == 1:
        return 0, local.size
    base, strides = segment.flat(local.shape)
    wanted = row_major_strides(segment.box.shape)
    shape = segment.box.shape
    if any(a != b for a, b, size in zip(strides, wanted, shape, strict=True) if size > 1):
        raise LayoutError(
            f"{segment.tensor} does not lie in one stretch of {local.key}", tensor=segment.tensor
        )
    first = base + sum(lo * stride for lo, stride in zip(segment.box.start, strides, strict=True))
    return first, first + segment.box.size
