"""Checkpoints written and read by the plainest means, to test formats against: numpy views of whole files in memory, one piece at a time.

Nothing here is shared with planner and engine but the catalog. `TOY` is a small model with everything that is hard about models.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit import models
from ckptkit.core.adapters import possible, with_adapters
from ckptkit.core.catalog import ITEMSIZE, LEAF, ROLES, Catalog, Extras, Leaves
from ckptkit.core.destination import Destination, Written
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import OPTIMIZER_ROLES, Declare, Family, Model, Name, Schema, StoredNames, Tensor
from ckptkit.core.shards import shards
from ckptkit.formats.base import Format, WriteOptions

Key = tuple[str, str]
Values = dict[Key, npt.NDArray[Any]]
"""Canonical tensor and role to its stored elements, as unsigned integers of their width."""

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _wide(item: int) -> np.dtype[Any]:
    return np.dtype(BITS[item]) if item in BITS else np.dtype((np.void, item))


def _families() -> tuple[Family, ...]:
    """Three namings of the toy that move, merge, split and transpose what the canonical ones hold."""
    qk = "(kv_head [layers.{i}.q: group head_dim | layers.{i}.k: head_dim]) hidden"
    return (
        Family(
            "transformers",
            (Name("embed.weight", "embed: vocab hidden"),),
            (
                Name("h.{i}.qk.weight", qk),
                Name("h.{i}.norm.weight", "layers.{i}.norm: hidden"),
                Name("h.{i}.mlp.up", "layers.{i}.experts.up: expert hidden (gate_up ffn)"),
                Name("h.{i}.bias", "layers.{i}.bias: hidden"),
            ),
            (Name("norm.weight", "norm: hidden"), Name("scale", "scale:")),
        ),
        Family(
            "hub",
            (Name("wte", "embed: vocab hidden"),),
            (
                Name("layers.{2i}.q", "layers.{i}.q: (kv_head group head_dim) hidden"),
                Name("layers.{2i}.k", "layers.{i}.k: (kv_head head_dim) hidden"),
                Name("layers.{2i}.norm", "layers.{i}.norm: hidden"),
                Name(
                    "layers.{2i+1}.experts.{e}.up", "layers.{i}.experts.up: expert={e} (gate_up ffn) hidden"
                ),
                Name("layers.{2i+1}.bias", "layers.{i}.bias: hidden"),
            ),
            (Name("ln_f", "norm: hidden"), Name("factor", "scale:")),
        ),
        Family(
            "megatron",
            (Name("embedding.weight", "embed: vocab hidden"),),
            (
                Name("decoder.{i}.qk", qk),
                Name("decoder.{i}.norm", "layers.{i}.norm: hidden"),
                Name("decoder.{i}.experts.{e}.up", "layers.{i}.experts.up: expert={e} (gate_up ffn) hidden"),
                Name("decoder.{i}.bias", "layers.{i}.bias: hidden"),
            ),
            (Name("final_norm", "norm: hidden"), Name("scale", "scale:")),
        ),
    )


_TOY_SIZES = {
    "layers": 3, "vocab": 10, "hidden": 6, "kv_head": 2, "group": 4, "head_dim": 3, "expert": 4, "gate_up": 2, "ffn": 4,
}  # fmt: skip
TOY = Schema(
    id="toy@1",
    model_types=("toy",),
    first=(Declare("embed", "vocab hidden"),),
    layer=(
        Declare("layers.{i}.q", "kv_head group head_dim hidden", optimizer="muon"),
        Declare("layers.{i}.k", "kv_head head_dim hidden", optimizer="muon"),
        Declare("layers.{i}.norm", "hidden"),
        Declare("layers.{i}.experts.up", "expert gate_up ffn hidden"),
        Declare("layers.{i}.bias", "hidden", kind="buffer"),
    ),
    last=(Declare("norm", "hidden"), Declare("scale", "")),
    rules={
        "vocab": "tp:pad=4",
        "kv_head": "tp:replicate",
        "group": "tp:inner=kv_head",
        "expert": "ep",
        "ffn": "etp",
    },
    families=_families(),
    sizes=lambda config: {name: config[name] for name in _TOY_SIZES},
)
"""A model with everything that is hard about models, and 5,000 elements."""

TOY_CONFIG: dict[str, Any] = {"model_type": "toy", "torch_dtype": "bfloat16", **_TOY_SIZES}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ZAYA_CONFIG: dict[str, Any] = {
    "model_type": "zaya", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 16,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 4, "tie_word_embeddings": True,
    "rope_parameters": {"hybrid": _ROPE, "hybrid_sliding": _ROPE},
}  # fmt: skip


def toy() -> Model:
    return TOY.bind(TOY_CONFIG)


def tiny_zaya() -> Model:
    return models.named("zaya").bind(ZAYA_CONFIG)


def json_bytes(value: object) -> bytes:
    return json.dumps(value).encode()


@dataclass
class Truth:
    """A checkpoint as arrays: what a format must give back.

    Attributes:
        names: The family it is written in (a bound model's, or stored names).
        values: By canonical tensor and role.
    """

    names: Any
    tensors: Mapping[str, Tensor]
    held: dict[Key, DType]
    values: Values
    extras: Extras = field(default_factory=Extras)

    @property
    def stored(self) -> dict[str, Tensor]:
        """The tensors that it holds."""
        return {name: self.tensors[name] for name, _ in self.held}


def adapted(model: Model, family: str = "transformers") -> Model:
    """The model with an adapter of rank 2 at every matrix that a family names, and a trained copy of every vector."""
    found: dict[str, int] = {}
    for slot in possible(model, family).values():
        for tensor in slot.tensors:
            if tensor.endswith((".lora_A", ".lora_B")):
                found[tensor] = 2
            elif tensor.endswith("norm.lora_saved"):
                found[tensor] = 0
    return with_adapters(model, found)


def random_truth(
    model: Model,
    family: str,
    *,
    state: bool = False,
    seed: int = 0,
    param: str = "bfloat16",
    parts: Sequence[str] = ("base", "adapter"),
) -> Truth:
    """Every tensor of the `parts` of a model in random bits: parameters in `param`, buffers and optimizer state in float32."""
    held: dict[Key, DType] = {}
    for tensor in model.tensors.values():
        if tensor.part not in parts:
            continue
        if tensor.kind == "buffer":
            held[tensor.name, "buffer"] = dtype_named("float32")
            continue
        held[tensor.name, "param"] = dtype_named(param)
        for role in OPTIMIZER_ROLES[tensor.optimizer] if state else ():
            held[tensor.name, role] = dtype_named("float32")
    return Truth(model.names(family), model.tensors, held, random_values(model.tensors, held, seed))


def random_values(tensors: Mapping[str, Tensor], held: Mapping[Key, DType], seed: int = 0) -> Values:
    rng = np.random.default_rng(seed)
    return {
        key: np.frombuffer(
            rng.bytes(int(np.prod(tensors[key[0]].shape)) * dtype.itemsize), _wide(dtype.itemsize)
        )
        .reshape(tensors[key[0]].shape)
        .copy()
        for key, dtype in held.items()
    }


def stored_truth(shapes: Mapping[str, tuple[tuple[int, ...], DType]], seed: int = 0) -> Truth:
    """Tensors of no known model, under their own names."""
    tensors = {
        name: Tensor(name, tuple(f"d{d}" for d in range(len(shape))), shape)
        for name, (shape, _) in shapes.items()
    }
    held = {(name, "param"): dtype for name, (_, dtype) in shapes.items()}
    return Truth(StoredNames(tensors), tensors, held, random_values(tensors, held, seed))


def write(
    format: Format, truth: Truth, root: Path, layout: str = "tp=1", options: WriteOptions = WriteOptions()
) -> Destination:
    """Write a checkpoint by the plainest means. Returns what the format laid out."""
    wanted = shards(truth.names, Layout.parse(layout), truth.held, truth.tensors, pad=format.ranks)
    wanted.extras = truth.extras
    destination = format.lay_out(wanted, options)
    catalog = destination.catalog
    files = [bytearray(file.size) for file in catalog.files]
    for key, region, box in regions(catalog, files):
        region[...] = truth.values[key][box]
    written = []
    root.mkdir(parents=True, exist_ok=True)
    for number, (file, data) in enumerate(zip(catalog.files, files, strict=True)):
        for literal in destination.literals.get(number, ()):
            data[literal.offset : literal.offset + len(literal.data)] = literal.data
        for fixup in destination.fixups.get(number, ()):
            assert fixup.kind == "crc32", f"the suite knows no fix-up {fixup.kind}"
            for offset in fixup.offsets:
                data[offset : offset + 4] = zlib.crc32(data[fixup.start : fixup.stop]).to_bytes(4, "little")
        _put(root / file.path, bytes(data))
        leaves = leaf_digests(bytes(data), file.data_start) if destination.digests else None
        written.append(Written(file.path, file.size, leaves))
    for path, content in destination.finish(written):
        _put(root / path, content)
    return destination


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def leaf_digests(data: bytes, start: int) -> Leaves:
    """Digests of a file's leaves, one call of xxhash each."""
    parts = [xxhash.xxh3_128_digest(data[at : at + LEAF]) for at in range(start, len(data), LEAF)]
    return Leaves(start, len(data) - start, np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 16))


def regions(
    catalog: Catalog, files: list[bytearray]
) -> Iterator[tuple[Key, npt.NDArray[Any], tuple[slice, ...]]]:
    """Each piece as a writable view of its file, with its key and box."""
    pieces, segments, entries = catalog.pieces, catalog.segments, catalog.entries
    for k in range(len(pieces)):
        s, e = int(pieces.segment[k]), int(pieces.entry[k])
        tensor = catalog.tensor_list[int(segments.tensor[s])]
        axes, item = len(tensor.shape), int(ITEMSIZE[entries.dtype[e]])
        lo, hi = pieces.lo[k, :axes].tolist(), pieces.hi[k, :axes].tolist()
        strides = segments.strides[s, :axes].tolist()
        element = (
            int(segments.base[s])
            + sum(a * b for a, b in zip(lo, strides, strict=True))
            - int(entries.first[e])
        )
        number = int(entries.file[e])
        view: npt.NDArray[Any] = np.ndarray(
            tuple(b - a for a, b in zip(lo, hi, strict=True)),
            _wide(item),
            files[number],
            catalog.files[number].data_start + int(entries.offset[e]) + element * item,
            tuple(n * item for n in strides),
        )
        yield (
            (tensor.name, ROLES[entries.role[e]]),
            view,
            tuple(slice(a, b) for a, b in zip(lo, hi, strict=True)),
        )


def gather(root: Path, catalog: Catalog) -> Values:
    """Every tensor of a checkpoint, put together from its pieces. Fails where elements are missing or replicas differ."""
    files = [bytearray((root / file.path).read_bytes()) for file in catalog.files]
    values = {
        (name, role): np.zeros(catalog.tensors[name].shape, _wide(dtype.itemsize))
        for (name, role), dtype in catalog.held.items()
    }
    seen = {key: np.zeros(array.shape, bool) for key, array in values.items()}
    for key, region, box in regions(catalog, files):
        before = seen[key][box]
        assert np.array_equal(values[key][box][before], region[before]), f"replicas of {key} differ"
        values[key][box] = region
        seen[key][box] = True
    for key, mask in seen.items():
        assert mask.all(), f"{key} has {int((~mask).sum())} elements that no piece holds"
    return values


def same(left: Values, right: Values) -> None:
    """Fail unless two checkpoints hold the same tensors with the same bits."""
    assert left.keys() == right.keys()
    for key, array in left.items():
        assert array.shape == right[key].shape and array.tobytes() == right[key].tobytes(), f"{key} differs"
