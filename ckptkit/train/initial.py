"""Initial weights, equal whatever the layout: each canonical tensor's values depend on the seed and its name alone."""

import zlib
from collections.abc import Mapping

import torch

from ckptkit.core.schema import Tensor
from ckptkit.train.held import Holding, box_view

_ONES = ("norm", "temp", "states_scale", "hidden_states_scale", "residual_scale")


def initial(tensor: Tensor, seed: int, std: float, device: torch.device) -> torch.Tensor:
    """The whole initial value of a canonical tensor of ZAYA, fp32.

    Matrices, convolutions and the embedding are normal, norms, scales and temperatures one, biases zero. (Transformers starts
    temperatures at zero, where keys, and thus all gradients of queries, would be zero at first.) The skip expert's balancing
    bias is -1, so that it cannot be chosen before the others' fall.
    """
    name = tensor.name.rpartition(".")[2]
    if name == "balancing":
        value = torch.zeros(tensor.shape, device=device)
        value[-1] = -1.0
        return value
    if name in _ONES:
        return torch.ones(tensor.shape, device=device)
    if name.endswith("bias"):
        return torch.zeros(tensor.shape, device=device)
    generator = torch.Generator(device).manual_seed(
        zlib.crc32(tensor.name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF)
    )
    return torch.empty(tensor.shape, device=device).normal_(0.0, std, generator=generator)


@torch.no_grad()
def fill(
    holds: list[Holding],
    data: Mapping[str, torch.Tensor],
    tensors: Mapping[str, Tensor],
    seed: int,
    std: float,
) -> None:
    """Write initial values into local tensors `data` (by key). Padding becomes zero."""
    made: tuple[str, torch.Tensor] | None = None
    for item in holds:
        local = data[item.key]
        local.zero_()
        for segment in item.local.segments:
            if made is None or made[0] != segment.tensor:
                made = segment.tensor, initial(tensors[segment.tensor], seed, std, local.device)
            box_view(local, segment).copy_(made[1][tuple(map(slice, segment.box.start, segment.box.stop))])
