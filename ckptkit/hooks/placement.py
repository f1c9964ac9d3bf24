"""What a trainer's tensors are in the global model, where the trainer says so itself.

Trainers that place tensors by a model schema need no introspection: a local tensor has the name that the schema's family
gives it in a layout, and that name, the layout and the rank say which canonical elements it holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ckptkit import models
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Model
from ckptkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that this rank holds: all of a local tensor, or one run of it.

    Attributes:
        name: The local tensor, by the placement's family of names.
        role: `param`, `buffer`, `master`, `exp_avg`, `exp_avg_sq`, `momentum` or `ema`.
        tensor: The live tensor; saved from and restored into in place. Any shape where it holds a run.
        first, last: Elements `[first, last)` of the local tensor in row-major order (ZeRO-1, flat buffers); the whole
            unless given.
        shape, start, sizes: Without a placement: the global tensor's shape, where in it this rank's box begins, and the box's
            shape; the tensor's own unless given, the whole's where it is a run. Without a shape it is whole, or the part that a
            DTensor says.
    """

    name: str
    role: str
    tensor: torch.Tensor
    first: int = 0
    last: int | None = None
    shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SchemaPlacement:
    """Where a rank of a layout has what, by a model's schema.

    Attributes:
        config: The model's configuration, as in `config.json`; its `model_type` names the schema.
        layout: Of the run, or its text (`tp=2,dp=4,zero=1`).
        rank: This process in the layout.
        names: The family whose names local tensors have.
        rename: From a module's parameter name to the family's.
    """

    config: Mapping[str, Any]
    layout: Layout | str
    rank: int
    names: str = "canonical"
    rename: Callable[[str], str] = field(default=lambda name: name)

    @cached_property
    def mesh(self) -> Layout:
        """The layout, parsed, with its stage sizes written out."""
        layout = Layout.parse(self.layout) if isinstance(self.layout, str) else self.layout
        return layout.with_stages(self.model.layers)

    @cached_property
    def model(self) -> Model:
        """The bound model. Raises UsageError where no schema fits the configuration."""
        schema = models.find(self.config)
        if schema is None:
            raise UsageError(
                f"no schema has the model_type {self.config.get('model_type')!r}; known models: "
                f"{', '.join(models.schemas())}"
            )
        return schema.bind(self.config)

    @cached_property
    def locals(self) -> dict[str, LocalTensor]:
        """The local tensors of this rank by name, in module order."""
        if not 0 <= self.rank < self.mesh.world:
            raise UsageError(f"rank {self.rank} is none of layout {self.mesh}, which has {self.mesh.world}")
        return {
            placed.local.key: placed.local
            for placed in self.model.names(self.names).placements(self.mesh)
            if self.rank in placed.ranks
        }
