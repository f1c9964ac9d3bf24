"""Flat buffers: parameters and gradients of one kind, laid out so that one collective serves all of them.

Parameters are views of a buffer, in the order and with the cuts of `ckptkit.core.zero`, which is also how checkpoints
describe the optimizer's state. Under ZeRO-1 the buffer consists of equal sections, one a rank: gradients are
reduce-scattered, each rank updates its section, and sections are gathered. Otherwise gradients are all-reduced.

Gradients are fp32 and are added up over micro-batches; weights in bfloat16 have fp32 masters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from ckptkit.core import zero
from ckptkit.core.layouts import Layout
from ckptkit.train.collectives import gather_flat, reduce_scatter_flat
from ckptkit.train.held import Holding
from ckptkit.train.parallel import Group

ALIGNED = 16
"""Elements; the start of a parameter is a multiple of it where it can be, as fast matrix products and compilers want it."""


@dataclass(frozen=True)
class Run:
    """Elements [first, last) of a local tensor, at `offset` in its owner's section."""

    item: Holding
    first: int
    last: int
    offset: int

    @property
    def here(self) -> slice:
        return slice(self.offset, self.offset + self.last - self.first)


def sections(items: Sequence[Holding], layout: Layout, ranks: int) -> tuple[list[list[Run]], int]:
    """The runs of each of `ranks` ranks, and the size of a section. Without ZeRO every rank has all: one section."""
    shapes = [item.local.shape for item in items]
    if not layout.zero:
        cut = zero.cut("whole", shapes, 1)
        ranks = 1
    else:
        cut = zero.cut(layout.rule, shapes, ranks)
    found: list[list[Run]] = [[] for _ in range(ranks)]
    rows = zip(cut.rank.tolist(), cut.tensor.tolist(), cut.first.tolist(), cut.last.tolist(), strict=True)
    for rank, tensor, first, last in sorted(rows):
        runs = found[rank]
        offset = runs[-1].here.stop if runs else 0
        if (
            not layout.zero
        ):  # a tensor cut over two sections must lie in one stretch, so that there nothing is padded
            offset = -(-offset // ALIGNED) * ALIGNED
        runs.append(Run(items[tensor], first, last, offset))
    # Tensors cut over two ranks must be whole in memory, so that a section that continues in the next is full.
    size = max((runs[-1].here.stop for runs in found if runs), default=0)
    return found, size


class Buffer:
    """Parameters of one kind (by optimizer, dense or expert) on one rank.

    Args:
        items: Their local tensors, in module order.
        params: Their parameters by key; they become views of `param`.
        layout: Of the run.
        group: Ranks that hold the same tensors.

    Attributes:
        runs: What this rank updates.
        param, grad: All sections; weights in their dtype, gradients fp32.
        master: This rank's section of the weights, fp32: a view of `param` where that is fp32.
        section: Gradients of this rank's section, after `reduce`.
    """

    def __init__(
        self, items: Sequence[Holding], params: dict[str, torch.nn.Parameter], layout: Layout, group: Group
    ) -> None:
        self.items, self.group, self.cut = list(items), group, bool(layout.zero)
        every, size = sections(items, layout, group.size)
        index = group.index if self.cut else 0
        self.every, self.runs = every, every[index]
        first = next(iter(params.values()))
        self.param = torch.zeros(len(every) * size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(len(every) * size, dtype=torch.float32, device=first.device)
        self.grads: dict[str, torch.Tensor] = {}
        for rank, runs in enumerate(every):
            for run in (run for run in runs if run.first == 0):
                key, shape = run.item.key, run.item.local.shape
                at = slice(rank * size + run.offset, rank * size + run.offset + prod(shape))
                self._adopt(params[key], self.param[at].view(shape), self.grad[at].view(shape))
                self.grads[key] = self.grad[at].view(shape)
        mine = slice(index * size, (index + 1) * size)
        self.own = self.param[mine]
        self.master = self.own if self.own.dtype == torch.float32 else self.own.float()
        self.section = (
            self.grad[mine] if group.size == 1 or not self.cut else torch.zeros_like(self.grad[mine])
        )

    def _adopt(self, param: torch.nn.Parameter, data: torch.Tensor, grad: torch.Tensor) -> None:
        """Move a parameter into the buffer, and its gradients with it."""
        data.copy_(param.detach())
        param.data = data
        if param.dtype == torch.float32:
            param.grad = grad
            return

        def add(p: torch.Tensor) -> None:
            assert p.grad is not None
            grad.add_(p.grad)
            p.grad = None

        param.register_post_accumulate_grad_hook(add)

    def reduce(self) -> None:
        """Sum gradients over the group; this rank's part is then in `section`."""
        if self.group.size == 1:
            return
        if self.cut:
            reduce_scatter_flat(self.grad.view(self.group.size, -1), self.group, self.section)
        else:
            dist.all_reduce(self.grad, group=self.group.handle)

    def publish(self) -> None:
        """Round masters to weights, and give every rank of the group what the others updated."""
        if self.master is not self.own:
            self.own.copy_(self.master)
        if self.cut and self.group.size > 1:
            self.param.copy_(gather_flat(self.own, self.group).view(-1))

    def refresh(self) -> None:
        """Make masters of weights that were loaded without them."""
        if self.master is not self.own:
            self.master.copy_(self.own)
