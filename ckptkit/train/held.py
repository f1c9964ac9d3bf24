"""What a rank holds: the local tensors of one family of names, as modules and as views in canonical axes.

The schema of a model (`ckptkit.models`) is the only place that knows names and shapes. A stage's parameters are made from it,
and are therefore the pieces of a checkpoint already: saving and restoring convert nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.names import Placement
from ckptkit.core.schema import Model, Tensor

_FAMILIES = {"zaya": "transformers", "mixtral": "stacked"}


@dataclass(frozen=True)
class Holding:
    """One local tensor of this rank.

    Attributes:
        placement: The local tensor, and every rank that holds it.
        tensor: The canonical tensor that it is made of (the first of them): how it is trained.
        copy: Whether another stage holds the same under another name (a tied output layer).
    """

    placement: Placement
    tensor: Tensor
    copy: bool

    @property
    def key(self) -> str:
        return self.placement.local.key

    @property
    def local(self) -> LocalTensor:
        return self.placement.local


def family(model: Model) -> str:
    """The names that training uses for a model: those of its parameters in Transformers."""
    return _FAMILIES[model.schema.name]


def held(model: Model, layout: Layout, rank: int) -> list[Holding]:
    """The local tensors of a rank in module order. Raises LayoutError when the layout does not fit the model."""
    found = []
    names = model.names(family(model))
    copies = names.copies
    for placement in names.placements(layout):
        if rank in placement.ranks:
            first = placement.local.segments[0].tensor
            found.append(Holding(placement, model.tensors[first], placement.local.key in copies))
    return found


def box_view(data: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The elements of a segment in canonical axes, as a view [shape of its box] of a contiguous local tensor."""
    base, strides = segment.flat(tuple(data.shape))
    origin = base + sum(lo * stride for lo, stride in zip(segment.box.start, strides, strict=True))
    return data.as_strided(segment.box.shape, strides, data.storage_offset() + origin)


class Node(nn.Module):
    """A part of the module tree that names make; its children are attributes, numbered ones are items."""

    def __getitem__(self, index: int) -> Any:
        return getattr(self, str(index))


def add(root: nn.Module, key: str, value: torch.Tensor) -> None:
    """Put a parameter or buffer at a dotted name below `root`."""
    *path, name = key.split(".")
    node = root
    for part in path:
        if not hasattr(node, part):
            node.add_module(part, Node())
        node = getattr(node, part)
    if isinstance(value, nn.Parameter):
        node.register_parameter(name, value)
    else:
        node.register_buffer(name, value)
