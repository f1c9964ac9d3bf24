"""Holdings: the live tensors of one rank, and which canonical elements each of them is.

A holding is a run of a local tensor, as in a native rank file; its bytes lie in a torch tensor. Whatever a trainer is made of, saving
and restoring see nothing but a list of these.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.core.catalog import ROLE_CODE, Catalog, Entries, File
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import LayoutError, UsageError
from ckptkit.formats.chunks import Locals, bind_names, family_of, plain_local, plain_tensor
from ckptkit.hooks.placement import Held, SchemaPlacement

_TORCH_DTYPE: dict[str, torch.dtype] = {
    name: found for name in BY_NAME if isinstance(found := getattr(torch, name, None), torch.dtype)
}
_OURS: dict[torch.dtype, DType] = {dtype: BY_NAME[name] for name, dtype in _TORCH_DTYPE.items()}


def dtype_of(tensor_dtype: torch.dtype, name: str) -> DType:
    """Our element type. Raises UsageError for one that no file can hold."""
    found = _OURS.get(tensor_dtype)
    if found is None:
        raise UsageError(f"{name} has elements of {tensor_dtype}, which checkpoints cannot hold", tensor=name)
    return found


@dataclass(slots=True)
class Holding:
    """A run of a local tensor that this rank holds.

    Attributes:
        name: As the trainer knows it, for messages.
        local, first, last: Elements `[first, last)` of a local tensor.
        role: What its values are.
        shape, dtype, device: Of the live tensor.
        tensor: The live tensor; None for optimizer state that is not there yet.
        fenced: Whether only the optimizer's step changes it.
        owner, key, item: Where the trainer keeps it: `owner[key]` was `item` at registration. None where it cannot be replaced.
        source: Of optimizer state: the optimizer that holds it, and the parameter.
        make: Puts a zero tensor into the trainer, for state that is not there yet.
    """

    name: str
    local: LocalTensor
    first: int
    last: int
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None
    fenced: bool
    owner: MutableMapping[Any, Any] | None = None
    key: Any = None
    item: Any = None
    source: Any = None
    make: Callable[[], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * dtype_of(self.dtype, self.name).itemsize

    @property
    def what(self) -> str:
        return f"{self.name} ({self.role})"


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank stores: a DTensor's local part, anything else itself."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if local is None else local.detach()


def box_of(tensor: torch.Tensor, name: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """`(global shape, start, sizes)` of the part of a tensor that this rank holds.

    Raises:
        UsageError: its placement is none of Replicate and Shard, or its part is no box.
    """
    if getattr(tensor, "_local_tensor", None) is None:
        return tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = tensor
    if any(placement.is_partial() for placement in spec.placements):
        raise UsageError(
            f"{name} is a DTensor of partial sums {spec.placements}; checkpoints hold values: redistribute it first",
            tensor=name,
        )
    sizes, start = compute_local_shape_and_global_offset(
        tuple(tensor.shape), spec.device_mesh, spec.placements
    )
    local = tuple(spec._local_tensor.shape)
    if tuple(sizes) != local:
        raise UsageError(
            f"{name}: its DTensor {spec.placements} should hold {tuple(sizes)} here, but holds {local}; say its place with "
            "tensors=",
            tensor=name,
        )
    return tuple(tensor.shape), tuple(int(x) for x in start), local


class Places:
    """Gives names their local tensors: by a trainer's schema, by the model's configuration, or as whole tensors of their own."""

    def __init__(self, placement: SchemaPlacement | None, model: Model | None = None) -> None:
        self.placement = placement
        self.model = placement.model if placement is not None else model
        self.names = placement.names if placement is not None else "stored"
        self.tensors: dict[str, Tensor] = {}
        self._whole: dict[str, LocalTensor] = {}
        self._locals = Locals()
        self._boxes: dict[str, LocalTensor] = {}

    def bind(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Try to read names as those of the model's configuration; gives why not, or nothing.

        Without a schema that fits every name, tensors are known by their own names.
        """
        if self.placement is not None or self.model is None:
            return ""
        try:
            self.names = family_of(self.model, shapes, "the model")
            self._whole = bind_names(self.model, self.names, shapes, "the model", [])
            missing = shapes.keys() - self._whole.keys()
            if missing:
                raise LayoutError(f"{min(missing)} is none of its names")
        except Exception as error:  # noqa: BLE001  (any reason is reason enough to go without)
            self.model, self.names, self._whole = None, "stored", {}
            return str(error)
        return ""

    def place(
        self, name: str, shape: tuple[int, ...], start: tuple[int, ...], sizes: tuple[int, ...]
    ) -> tuple[LocalTensor, int, int]:
        """The run of a local tensor that the box `[start, start + sizes)` of a tensor of `shape` is.

        Raises:
            UsageError: the placement has no such name on this rank.
            LayoutError: shapes differ.
        """
        if self.placement is not None:
            key = self.placement.rename(name)
            local = self.placement.locals.get(key)
            if local is None:
                raise UsageError(
                    f"{name} is called {key!r} in {self.names} names, but rank {self.placement.rank} of layout "
                    f"{self.placement.mesh} holds no such tensor; mend the names (rename=) or the layout",
                    tensor=name,
                )
            if local.shape != sizes:
                raise LayoutError(
                    f"{name} has shape {sizes}, but in layout {self.placement.mesh} rank {self.placement.rank} holds "
                    f"{local.shape} of it",
                    tensor=name,
                )
            self._note(local, self.placement.model.tensors)
            return local, 0, local.size
        whole = self._whole.get(name)
        if whole is None:
            whole = self._whole[name] = plain_local(name, shape)
            self.tensors.setdefault(name, plain_tensor(name, shape))
        if whole.shape != shape:
            raise LayoutError(f"{name} has shape {shape} here and {whole.shape} elsewhere", tensor=name)
        if self.model is not None:
            self._note(whole, self.model.tensors)
        number, first, last = self._locals.chunk(whole, start, sizes)
        local = self._locals.items[number]
        if local is not whole and self._boxes.setdefault(name, local) != local:
            # A file calls two boxes of one tensor by different names (layers that a trainer stacks along an axis).
            local = local.renamed(f"{name}[{','.join(map(str, start))}]", [s.tensor for s in local.segments])
        return local, first, last

    def beside(self, local: LocalTensor, state: str) -> LocalTensor:
        """Optimizer state without a role of its own, of the same shape as its parameter."""
        names = [f"{segment.tensor}@{state}" for segment in local.segments]
        for segment, name in zip(local.segments, names, strict=True):
            like = self.tensors[segment.tensor]
            self.tensors.setdefault(name, Tensor(name, like.axes, like.shape, optimizer="none"))
        return local.renamed(f"{local.key}@{state}", names)

    def _note(self, local: LocalTensor, known: Mapping[str, Tensor]) -> None:
        for segment in local.segments:
            if segment.tensor in known:
                self.tensors.setdefault(segment.tensor, known[segment.tensor])


def explicit(held: Sequence[Held], places: Places) -> list[Holding]:
    """Holdings that the trainer says one by one. Raises UsageError or LayoutError where one cannot be."""
    found = []
    for one in held:
        if one.role not in ROLE_CODE:
            raise UsageError(f"{one.name}: {one.role!r} is no role; roles are {', '.join(ROLE_CODE)}")
        tensor = shard_of(one.tensor)
        name = f"{one.name}"
        if places.placement is not None:
            key = places.placement.rename(one.name)
            local = places.placement.locals.get(key)
            shape = local.shape if local is not None else tuple(tensor.shape)
            local, first, last = places.place(one.name, shape, (0,) * len(shape), shape)
            first, last = one.first, local.size if one.last is None else one.last
        elif one.shape is not None:
            start = one.start or (0,) * len(one.shape)
            sizes = one.sizes or (one.shape if one.last is not None else tuple(tensor.shape))
            local, first, last = places.place(one.name, one.shape, start, sizes)
            if one.last is not None:
                first, last = first + one.first, first + one.last
        else:
            local, first, last = places.place(one.name, *box_of(one.tensor, one.name))
            if one.last is not None or one.first:
                raise UsageError(f"{one.name}: a run (first, last) needs a placement, or shape")
        if not 0 <= first <= last <= local.size or last - first != tensor.numel():
            raise LayoutError(
                f"{one.name} ({one.role}) has {tensor.numel()} elements, but is said to be elements {first}:{last} of "
                f"{local.shape}",
                tensor=one.name,
            )
        if one.role == "state":
            raise UsageError(
                f"{one.name}: state of any name comes from a torch optimizer; give a role that has a name"
            )
        found.append(
            Holding(
                name, local, first, last, one.role, tuple(tensor.shape), tensor.dtype, tensor.device, tensor,
                fenced=one.role != "buffer", item=one.tensor,
            )
        )  # fmt: skip
    return found


def catalog_of(
    holdings: Sequence[Holding], places: Places, rank: int, where: str, data_start: int = 0
) -> Catalog:
    """The catalog of one rank's holdings, in order, in one file.

    Offsets are multiples of 64 bytes, so that elements stay aligned.
    """
    locals_: dict[LocalTensor, int] = {}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    at = 0
    for one in holdings:
        number = locals_.setdefault(one.local, len(locals_))
        dtype = dtype_of(one.dtype, one.name)
        rows.append((0, number, ROLE_CODE[one.role], dtype.code, one.first, one.last, at))
        at += -(-one.nbytes // 64) * 64
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(7)]
    return Catalog(
        format="live", where=where, tensors=_used(locals_, places), locals=list(locals_),
        files=[File("live", data_start + at, data_start, rank)], entries=Entries(*columns), model=places.model,
        names=places.names,
    )  # fmt: skip


def _used(locals_: Iterable[LocalTensor], places: Places) -> dict[str, Tensor]:
    """The canonical tensors of some local tensors, in the model's order where it is known."""
    names = {segment.tensor for local in locals_ for segment in local.segments}
    order = places.model.tensors if places.model is not None else {}
    first = [name for name in order if name in names]
    return {
        name: places.tensors[name]
        for name in [*first, *(n for n in places.tensors if n in names and n not in order)]
    }
