"""PyTorch DCP through ckptkit: `dcp.save` and `dcp.load` write and read native steps.

    dcp.save(state_dict, storage_writer=CkptKitWriter("s3://runs/x", step=100))
    dcp.load(state_dict, storage_reader=CkptKitReader("s3://runs/x"))

Tensors are named as in the state dict, with their global shapes; replicas are written once, digested, and committed as everything else that
ckptkit saves. What is no tensor is kept as the bytes that DCP makes of it, and never opened here.
"""

import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptkit import ops
from ckptkit.errors import FormatError
from ckptkit.hooks.checkpointer import Checkpointer
from ckptkit.hooks.extras import unpack_value
from ckptkit.hooks.holdings import Places, explicit
from ckptkit.hooks.placement import Held
from ckptkit.hooks.restoring import restore_tensors
from ckptkit.hooks.table import Table


class CkptKitWriter(StorageWriter):
    """Writes one step of a run.

    Args:
        url: Of the run.
        step: Completed optimizer steps.
        options: As `Checkpointer` takes them.
    """

    def __init__(self, url: str, step: int, **options: Any) -> None:
        self.url, self.step = url, step
        self.options = {"cache": "off", **options}

    def reset(self, checkpoint_id: Any = None) -> None:
        """The run and the step say where it goes; a `checkpoint_id` is not used."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        held: list[Held] = []
        objects: dict[str, Any] = {}
        results = []
        for item in plan.items:
            name = item.index.fqn
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                objects[name] = data.getvalue()
                size = len(objects[name])
            else:
                assert isinstance(data, torch.Tensor) and item.tensor_data is not None
                chunk = item.tensor_data.chunk
                tensor = data.detach()
                held.append(
                    Held(
                        name, "param", tensor, shape=tuple(item.tensor_data.size), start=tuple(chunk.offsets)
                    )
                )
                size = tensor.numel() * tensor.element_size()
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=None))
        with Checkpointer(self.url, **self.options) as ckpt:
            ckpt.register(tensors=held or [_NOTHING], loader=_Objects(objects), rng=False)
            ckpt.on_step_end(self.step)
            ckpt.save()
            ckpt.wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The step is whole already: its manifest was written when every rank's part was durable."""

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


_NOTHING = Held("__none__", "param", torch.zeros(0))


class _Objects:
    """The objects that this rank writes, kept for each rank as loaders' states are."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def state_dict(self) -> dict[str, Any]:
        return dict(self.objects)

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CkptKitReader(StorageReader):
    """Reads a step: a run (its newest), `RUN@STEP`, or a checkpoint of any format that ckptkit reads.

    Only what ckptkit saved through DCP has objects beside its tensors.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self) -> Metadata:
        source = self._source = ops.open(self.url)
        catalog = source.catalog
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for (name, role), dtype in catalog.held.items():
            if role not in ("param", "buffer"):
                continue
            size = torch.Size(catalog.tensors[name].shape)
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=getattr(torch, dtype.name))
            found[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
        self._objects: dict[str, bytes] = {}
        for state in catalog.extras.by_sample:
            plain = unpack_value(state)
            if isinstance(plain, dict):
                self._objects.update({k: v for k, v in plain.items() if isinstance(v, bytes)})
        found.update({name: BytesStorageMetadata() for name in self._objects})
        return Metadata(state_dict_metadata=found, storage_data={MetadataIndex(name): None for name in found})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        held: list[Held] = []
        targets: list[tuple[Any, torch.Tensor]] = []
        source = getattr(self, "_source", None) or ops.open(self.url)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                if name not in self._objects:
                    raise FormatError(f"{self.url} holds no object {name}")
                planner.load_bytes(item, io.BytesIO(self._objects[name]))
                continue
            tensor = planner.resolve_tensor(item).detach()
            targets.append((item, tensor))
            shape = source.catalog.tensors[name].shape
            held.append(Held(name, "param", tensor, shape=shape, start=tuple(item.storage_offsets)))
        if held:
            places = Places(None)
            table = Table(explicit(held, places), [])
            restore_tensors(
                table, places, source.catalog, source.store, rank=0, strict=True, weights_only=False
            )
        for item, tensor in targets:
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
