"""A toy model and headerless files, to run real plans against an oracle that looks at one element at a time."""

import itertools
import os
from collections.abc import Mapping

import numpy as np
import xxhash

from ckptkit.core.catalog import LEAF, ROLES, Catalog, Leaves
from ckptkit.core.destination import Destination, Literal
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Declare, Family, Name, Schema
from ckptkit.core.shards import shards

F32 = dtype_named("float32")
BF16 = dtype_named("bfloat16")
MEGATRON = (
    Name("l.{i}.qk", "(kv_head [layers.{i}.q: group head_dim | layers.{i}.k: head_dim]) hidden"),
    Name("l.{i}.norm", "layers.{i}.norm: hidden"),
    Name("l.{i}.e.{e}.gu", "layers.{i}.experts.gu: expert={e} (gate_up ffn) hidden"),
    Name("l.{i}.b", "layers.{i}.b: hidden"),
    Name("l.{i}.none", "layers.{i}.none: nothing hidden"),
)
TRANSPOSED = (
    Name("l.{i}.qk", "(kv_head [layers.{i}.q: group head_dim | layers.{i}.k: head_dim]) hidden"),
    Name("l.{i}.norm", "layers.{i}.norm: hidden"),
    Name("l.{i}.gu", "layers.{i}.experts.gu: expert hidden (gate_up ffn)"),
    Name("l.{i}.b", "layers.{i}.b: hidden"),
    Name("l.{i}.none", "layers.{i}.none: nothing hidden"),
)
SCHEMA = Schema(
    id="toy@1",
    first=(Declare("embed", "vocab hidden"),),
    layer=(
        Declare("layers.{i}.q", "kv_head group head_dim hidden", optimizer="muon"),
        Declare("layers.{i}.k", "kv_head head_dim hidden"),
        Declare("layers.{i}.norm", "hidden"),
        Declare("layers.{i}.experts.gu", "expert gate_up ffn hidden"),
        Declare("layers.{i}.b", "hidden", kind="buffer"),
        Declare("layers.{i}.none", "nothing hidden", kind="buffer"),
    ),
    last=(Declare("norm", "hidden"),),
    rules={
        "vocab": "tp:pad=4",
        "kv_head": "tp:replicate",
        "group": "tp:inner=kv_head",
        "expert": "ep",
        "ffn": "etp",
    },
    families=(
        Family("megatron", (Name("emb", "embed: vocab hidden"),), MEGATRON, (Name("n", "norm: hidden"),)),
        Family("transposed", (Name("emb", "embed: hidden vocab"),), TRANSPOSED, (Name("n", "norm: hidden"),)),
    ),
    sizes=dict,
)
SIZES = {
    "layers": 2, "vocab": 10, "hidden": 6, "kv_head": 2, "group": 4, "head_dim": 3,
    "expert": 4, "gate_up": 2, "ffn": 4, "nothing": 0,
}  # fmt: skip
LAYOUTS = (
    "tp=1",
    "tp=2,pp=2,ep=4,dp=4,zero=1",
    "ep=2,dp=6,zero=1",
    "tp=2,dp=3,zero=3",
    "tp=4,ep=2,dp=2,etp=2,zero=1:whole",
    "dp=5,zero=3",
    "tp=8,cp=2,dp=1,ep=2",
    "pp=2,tp=2,ep=2,dp=2,zero=2:megatron",
)
FAMILIES = ("canonical", "megatron", "transposed")
WIDTH = {4: np.uint32, 2: np.uint16}


class Toy:
    """Values of every tensor and role, as bits."""

    def __init__(
        self, seed: int = 0, sizes: Mapping[str, int] = SIZES, roles: tuple[str, ...] = ("param", "master")
    ):
        self.model = SCHEMA.bind({**SIZES, **sizes})
        rng = np.random.default_rng(seed)
        self.held: dict[tuple[str, str], DType] = {}
        self.values: dict[tuple[str, str], np.ndarray] = {}
        for tensor in self.model.tensors.values():
            for role in ("buffer",) if tensor.kind == "buffer" else roles:
                self.held[tensor.name, role] = F32
                self.values[tensor.name, role] = (
                    rng.standard_normal(tensor.shape).astype(np.float32).view(np.uint32)
                )

    def catalog(
        self, layout: str, family: str = "canonical", start: int = 0, dtype: DType | None = None
    ) -> Catalog:
        """A laid out catalog: entries one after the other, `start` bytes of header."""
        held = self.held if dtype is None else dict.fromkeys(self.held, dtype)
        catalog = shards(self.model.names(family), Layout.parse(layout), held, self.model.tensors)
        used: dict[int, int] = {}
        for k, nbytes in enumerate(catalog.entries.nbytes.tolist()):
            where = int(catalog.entries.file[k])
            catalog.entries.offset[k] = used.get(where, 0)
            used[where] = used.get(where, 0) + nbytes
        for number, file in enumerate(catalog.files):
            file.path, file.data_start = f"part-{number:03}.bin", start
            file.size = start + used.get(number, 0)
        return catalog

    def bytes_of(self, catalog: Catalog, values: Mapping | None = None) -> list[np.ndarray]:
        """What each file must hold, element by element; headers 0xAA, padding zero."""
        values = self.values if values is None else values
        files = [np.zeros(file.size, np.uint8) for file in catalog.files]
        for file, data in zip(catalog.files, files, strict=True):
            data[: file.data_start] = 0xAA
        segments, entries, pieces = catalog.segments, catalog.entries, catalog.pieces
        for k in range(len(pieces)):
            segment, entry = pieces.segment[k], pieces.entry[k]
            tensor = catalog.tensor_list[segments.tensor[segment]]
            bits = values[tensor.name, ROLES[entries.role[entry]]]
            item = bits.dtype.itemsize
            start = catalog.files[entries.file[entry]].data_start + int(entries.offset[entry])
            rank = len(tensor.shape)
            for index in itertools.product(*map(range, pieces.lo[k][:rank], pieces.hi[k][:rank])):
                place = segments.base[segment] + sum(np.multiply(index, segments.strides[segment][:rank]))
                at = start + item * int(place - entries.first[entry])
                files[entries.file[entry]][at : at + item] = np.frombuffer(bits[index].tobytes(), np.uint8)
        return files


def write(folder: str, catalog: Catalog, files: list[np.ndarray]) -> None:
    """Put files on disk."""
    os.makedirs(folder, exist_ok=True)
    for file, data in zip(catalog.files, files, strict=True):
        with open(os.path.join(folder, file.path), "wb") as out:
            out.write(data.tobytes())


def destination(catalog: Catalog, *, digests: bool = False, **more) -> Destination:
    """Every file with its header as a literal, and one small file at the end."""
    literals = {
        n: [Literal(0, b"\xaa" * file.data_start)] for n, file in enumerate(catalog.files) if file.data_start
    }
    return Destination(
        catalog, literals=literals, digests=digests, finish=lambda written: [("done.json", b"{}")], **more
    )


def leaves_of(data: np.ndarray, start: int) -> Leaves:
    """Digests of a file's data, by the definition."""
    body = data.tobytes()[start:]
    rows = [xxhash.xxh3_128_digest(body[k : k + LEAF]) for k in range(0, len(body), LEAF)]
    return Leaves(start, len(body), np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16))
