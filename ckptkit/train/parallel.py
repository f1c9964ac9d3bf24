"""Ranks of a layout as process groups, and what this rank is in each of them.

Groups come from `Layout` itself, which also says where a checkpoint's pieces lie, so that there is one description of who
holds what. The residual stream is cut along the sequence over `cp` and `tp` (sequence parallel): every rank of a stage has
tokens of its own, and the experts' groups run through all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckptkit.core.layouts import Layout
from ckptkit.errors import LayoutError


@dataclass(frozen=True)
class Group:
    """Some ranks, this one among them. `handle` is torch's process group, None for a group of one."""

    ranks: tuple[int, ...]
    index: int
    handle: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Parallel:
    """The groups of one rank.

    Attributes:
        tp, cp, pp, ep: The groups of these mesh axes.
        shard: Ranks with the same dense tensors (`cp x dp`): gradients are summed over them, ZeRO cuts over them.
        edp: The same for experts.
        stage: All ranks of this pipeline stage.
        ends: This rank's peer on the first and on the last stage, which share a tied embedding.
        dp_index: Which share of the batch is this rank's.
    """

    def __init__(self, layout: Layout, rank: int = 0, device: str = "cpu") -> None:
        check(layout)
        self.layout, self.rank, self.device = layout, rank, torch.device(device)
        self._made: dict[tuple[int, ...], Any] = {}
        dense, expert = layout.dense, layout.expert
        self.tp = self._group([dense["pp"], dense["dp"], dense["cp"]])
        self.cp = self._group([dense["pp"], dense["dp"], dense["tp"]])
        self.pp = self._group([dense["dp"], dense["cp"], dense["tp"]])
        self.ep = self._group([expert["pp"], expert["edp"], expert["etp"]])
        self.shard = self._group([dense["pp"], dense["tp"]])
        self.edp = self._group([expert["pp"], expert["ep"], expert["etp"]])
        self.stage = self._group([dense["pp"]])
        self.world = self._group([])
        middle = np.where((dense["pp"] == 0) | (dense["pp"] == layout.pp - 1), -1, np.arange(layout.world))
        self.ends = self._group([dense["dp"], dense["cp"], dense["tp"], middle])
        self.dp_index = int(dense["dp"][rank])
        self.is_first, self.is_last = self.pp.index == 0, self.pp.index == self.pp.size - 1

    def _group(self, same: Sequence[Any]) -> Group:
        """This rank's group: all that agree with it in every column of `same`. Every rank makes its groups in one order."""
        alike = np.ones(self.layout.world, bool)
        for column in same:
            alike &= column == column[self.rank]
        ranks = tuple(np.flatnonzero(alike).tolist())
        if len(ranks) > 1 and ranks not in self._made:
            # Only members meet to make it: with thousands of groups in a run, others have better things to do.
            whole = len(ranks) == self.layout.world
            self._made[ranks] = (
                dist.group.WORLD if whole else dist.new_group(list(ranks), use_local_synchronization=True)
            )
        return Group(ranks, ranks.index(self.rank), self._made.get(ranks))

    def neighbours(self, count: int) -> Group:
        """This rank's group of `count` successive tensor-parallel ranks. Every rank calls it alike."""
        mesh = self.layout.dense
        return self._group([mesh["pp"], mesh["dp"], mesh["cp"], mesh["tp"] // count])

    def barrier(self) -> None:
        if self.world.size > 1:
            dist.barrier()


def start(layout: Layout, rank: int, address: str, device: str, timeout_s: float = 600.0) -> Parallel:
    """Join this process to the run and make its groups.

    Args:
        layout: Of the run; its size must be that of the run.
        rank: Of this process.
        address: `tcp://HOST:PORT`, `file:///PATH` or `env://`, as `torch.distributed` takes it.
        device: `cpu`, or `cuda:N` (CUDA and ROCm alike): decides between gloo and nccl.
        timeout_s: How long a collective waits for the other ranks.
    """
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if layout.world > 1:
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            init_method=address,
            rank=rank,
            world_size=layout.world,
            timeout=timedelta(seconds=timeout_s),
        )
    return Parallel(layout, rank, device)


def stop() -> None:
    """Leave the run."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check(layout: Layout) -> None:
    """Raise LayoutError for a layout that training has no form of."""
    for name, why in (("etp", "experts are not cut inside"), ("vpp", "a stage is one run of layers")):
        if getattr(layout, name) > 1:
            raise LayoutError(
                f"layout {layout}: training takes {name}=1 ({why}); use tp, pp, ep, cp, dp and zero"
            )
    if layout.zero > 1 or layout.rule not in ("even", "whole"):
        raise LayoutError(
            f"layout {layout}: training takes zero=0, zero=1 (optimizer state in equal flat ranges) or zero=1:whole (whole "
            "tensors dealt out)"
        )
