"""The flat state of Megatron's distributed optimizer as entries: `distrib_optim.pt`, and the objects that hold the same.

    {"buckets_coalesced": True, <buffer>: {(<param dtype>, <grad dtype>): {"param": f32[n], "exp_avg": ..., "exp_avg_sq": ...}}}

A list of those has one for each optimizer of a chain. Source: megatron-core 0.16.1, `DistributedOptimizer.get_parameter_state_dp_zero`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.core.dtypes import DType
from ckptkit.core.local import LocalTensor
from ckptkit.errors import FormatError
from ckptkit.formats.megatron_buffers import SLOTS, Buffer, lay
from ckptkit.formats.standins import StoredTensor

Add = Callable[[LocalTensor, str, DType, int], None]
"""Takes a whole local tensor, its role and dtype, and the byte where it starts in its file."""

DEFAULT_BUCKET = 40_000_000


def bucket_sizes(args: Mapping[str, Any], dp: int) -> list[int | None]:
    """What bucket sizes a run may have had, the likeliest first; None is one bucket for all."""
    told = args.get("ddp_bucket_size")
    usual = max(DEFAULT_BUCKET, 1_000_000 * dp)
    with_overlap: list[int | None] = [told if isinstance(told, int) and told > 0 else usual]
    return [*with_overlap, None] if args.get("overlap_grad_reduce") else [None, *with_overlap]


def read_flat(
    state: Any,
    buffers: Sequence[Buffer],
    sizes: Sequence[int | None],
    place: Callable[[StoredTensor], int],
    add: Add,
    what: str,
) -> None:
    """Add the entries of one optimizer's flat state.

    Args:
        state: The dictionary of the module docstring, as its pickle has it.
        buffers: The buffers of its model-parallel group.
        sizes: Bucket sizes to try: the first one whose total fits is right, as equal totals mean equal places.
        place: Where a tensor starts in its file.

    Raises:
        FormatError: it has other buffers than the model comes to.
    """
    if not isinstance(state, dict):
        raise FormatError(f"{what} holds no state of a distributed optimizer")
    if not state.get("buckets_coalesced"):
        raise FormatError(
            f"{what} is in the form from before February 2024, whose buckets depend on the run. Convert it with Megatron-LM's "
            "--ckpt-convert-update-legacy-dist-opt-format"
        )
    numbered = {key: value for key, value in state.items() if type(key) is int}
    if sorted(numbered) != list(range(len(buffers))):
        raise FormatError(
            f"{what} has the buffers {sorted(numbered)}, but the parameters of this model and layout make {len(buffers)}. "
            "Give the layout and configuration that it was saved with (--source-layout, --config)"
        )
    for number, buffer in enumerate(buffers):
        kinds = numbered[number]
        if not isinstance(kinds, dict) or len(kinds) != 1:
            raise FormatError(f"{what}: buffer {number} does not have one element type")
        ((kind, tensors),) = kinds.items()
        if not isinstance(kind, tuple) or not kind or not isinstance(tensors, dict):
            raise FormatError(f"{what}: buffer {number} is not what it should be")
        if kind[0] is not buffer.dtype:
            raise FormatError(
                f"{what}: buffer {number} is of {kind[0]} parameters, but the weights are {buffer.dtype}"
            )
        _buffer(tensors, buffer, sizes, place, add, f"{what}, buffer {number}")


def _buffer(
    tensors: Mapping[Any, Any], buffer: Buffer, sizes: Sequence[int | None],
    place: Callable[[StoredTensor], int], add: Add, what: str,
) -> None:  # fmt: skip
    members = [item.size for item in buffer.members]
    options = [lay(members, buffer.alone, size) for size in sizes]
    for slot, role in SLOTS.items():
        tensor = tensors.get(slot)
        if not isinstance(tensor, StoredTensor) or len(tensor.shape) != 1 or not tensor.contiguous:
            raise FormatError(f"{what} has no flat tensor {slot!r}")
        laid = next((option for option in options if option.total == tensor.shape[0]), None)
        if laid is None:
            totals = " or ".join(str(option.total) for option in options)
            raise FormatError(
                f"{what}: {slot} has {tensor.shape[0]} elements, but the parameters of this model and layout come to {totals}. "
                "Give the layout and configuration that it was saved with (--source-layout, --config)"
            )
        start = place(tensor)
        for item, offset in zip(buffer.members, laid.flat, strict=True):
            add(item, role, tensor.dtype, start + offset * tensor.dtype.itemsize)
