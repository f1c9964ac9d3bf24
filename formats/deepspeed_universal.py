"""DeepSpeed's universal checkpoints: every parameter whole, with its fp32 copy and moments in a folder of its own.

    latest_universal                            (a run) the folder to load; written last
    <tag>/mp_rank_00_model_states.pt            the module, as in an ordinary checkpoint
          zero/optimizer_state.pt               what is common to all parameters: groups, loss scaler
          zero/<name>/fp32.pt                   {"param": tensor, "cat_dim": ...}
          zero/<name>/exp_avg.pt, exp_avg_sq.pt
          zero/<name>/step.pt                   a scalar tensor

DeepSpeed loads it at any data-parallel degree and stage, with `"checkpoint": {"load_universal": true}`.
Sources: DeepSpeed 0.19, `checkpoint/ds_to_universal.py`, `checkpoint/universal_checkpoint.py`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from ckptkit.core.boxes import row_major_strides
from ckptkit.core.catalog import NAMED_ROLES, ROLE_CODE, Catalog, Checksum, Entries, File
from ckptkit.core.destination import Destination
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import STATE_ROLES, Model, Tensor
from ckptkit.errors import FormatError, LayoutError, ShardMissingError
from ckptkit.formats import model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.chunks import Locals, bind_names, plain_local
from ckptkit.formats.deepspeed_folder import LATEST, StateFile, carried_files, find_step, open_all
from ckptkit.formats.deepspeed_runs import shapes_of
from ckptkit.formats.deepspeed_state import OURS, SCALER, State, read_extras, step_value, write_extras
from ckptkit.formats.deepspeed_writer import Draft, Member, lay, members_of, model_states, zero_stage
from ckptkit.formats.deepspeed_writer import shapes_of as written_shapes
from ckptkit.formats.model_config import small_files
from ckptkit.formats.plain import scalar
from ckptkit.formats.standins import Ordered, StoredTensor
from ckptkit.formats.stored_keys import SLOT_OF, SLOTS
from ckptkit.formats.torch_zip import file_checksums
from ckptkit.formats.torch_zip_writer import zip_bytes
from ckptkit.stores.base import Store

TRACKER = "latest_universal"
COMMON = "zero/optimizer_state.pt"
_STATE = re.compile(r"zero/(?P<name>[^/]+)/(?P<slot>[A-Za-z_]\w*)\.pt")
_STEP = re.compile(r"global_step\d+\w*")
_WEIGHT = "fp32"
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class DeepSpeedUniversalFormat(Format):
    """Whole tensors under the names of the module, which are Transformers' where its models are trained."""

    name: ClassVar[str] = "deepspeed-universal"
    names: ClassVar[str] = "transformers"
    parts: ClassVar[tuple[str, ...]] = ("base",)
    roles: ClassVar[tuple[str, ...]] = tuple(role for role in NAMED_ROLES if role != "ema")
    extras: ClassVar[bool] = True

    def detect(self, store: Store) -> bool:
        # Where a run has both forms, the ordinary one is what training goes on from.
        return store.exists(COMMON) or (store.exists(TRACKER) and not store.exists(LATEST))

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        here, prefix = find_step(store, TRACKER, COMMON)
        warnings: list[str] = []
        files = carried_files(store, warnings)
        model = model_of(model_config.read_config(files, options, store.url), options, store.url)
        step = _Step(here, warnings)
        weights = step.weights()
        shapes = {name: tensor.shape for name, (_, tensor, _) in weights.items()}
        for (name, _), (file, tensor) in step.state.items():
            if shapes.setdefault(name, tensor.shape) != tensor.shape:
                raise FormatError(
                    f"{file.path} has shape {tensor.shape}, but {name} has {shapes[name]}",
                    file=file.path,
                    tensor=name,
                )
        family = model.family_of(shapes, store.url) if model is not None else "stored"
        bound: Mapping[str, LocalTensor]
        if model is not None:
            bound = bind_names(model, family, shapes, store.url, warnings)
        else:
            bound = {name: plain_local(name, shape) for name, shape in shapes.items()}
        tensors: Mapping[str, Tensor] = (
            model.tensors
            if model is not None
            else {
                n: Tensor(
                    n, tuple(f"d{d}" for d in range(len(s))), s, weights[n][2] if n in weights else "param"
                )
                for n, s in shapes.items()
            }
        )
        paths: dict[str, int] = {}
        locals_ = Locals()
        rows = []
        placed = [(name, "param", file, tensor) for name, (file, tensor, _) in weights.items()]
        placed += [(name, role, file, tensor) for (name, role), (file, tensor) in step.state.items()]
        for name, role, file, tensor in placed:
            if name not in bound:
                continue
            item = bound[name]
            strides = None if tensor.contiguous else tensor.strides
            number, first, last = locals_.chunk(item, (0,) * len(tensor.shape), tensor.shape, strides)
            code = ROLE_CODE[tensors[item.segments[0].tensor].kind if role == "param" else role]
            offset = file.place(tensor) if tensor.size else 0
            path = paths.setdefault(file.path, len(paths))
            rows.append((path, number, code, tensor.dtype.code, first, last, offset))
        roles: dict[str, set[str]] = {}
        for name, role in step.state:
            roles.setdefault(name, set()).add(role)
        groups = step.groups()
        extras = read_extras(step.first, step.scaler(), groups, step.steps, roles, bound, warnings)
        extras.files = files
        sources = [TRACKER] if prefix else []
        return Catalog(
            format=self.name, where=store.url, tensors=tensors, locals=locals_.items,
            files=[File(prefix + path, here.size(path), 0, 0) for path in paths],
            entries=Entries(*np.asarray(rows, np.int64).reshape(-1, 7).T), layout=Layout(), model=model, names=family,
            extras=extras, facts={"warnings": warnings},
            identities={p: store.identity(p) for p in [*sources, *(prefix + path for path in [*paths, COMMON])]},
        )  # fmt: skip

    def checksums(self, store: Store, catalog: Catalog) -> Iterator[Checksum]:
        return file_checksums(store, (file.path for file in catalog.files))

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """One file of model states, one a parameter and slot, and a run around them."""
        if shards.layout is not None and shards.layout.world != 1:
            raise LayoutError(
                f"format {self.name} holds whole tensors, not those of {shards.layout.world} ranks; leave out --layout"
            )
        step = shards.extras.common.get("step")
        tag = f"global_step{step if isinstance(step, int) else 0}_universal"
        alone = _STEP.fullmatch(shards.where.replace("\\", "/").rstrip("/").rpartition("/")[2]) is not None
        prefix = "" if alone else f"{tag}/"
        members = members_of(shards, enumerate(shards.locals), weights=True)
        trained = {m.name: m for m in members if "master" in m.held}
        for name in trained:
            if "/" in name or name in (".", ".."):
                raise LayoutError(
                    f"{name!r} cannot be the name of a folder, as {self.name} needs it", tensor=name
                )
        state = write_extras(
            shards,
            Layout(),
            {name: (m.item, {r for r in m.held if r in STATE_ROLES}) for name, m in trained.items()},
        )
        drafts = list(_drafts(prefix, members, trained, state, shards.model))
        laid = lay(drafts)
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=shards.locals, files=laid.files,
            entries=laid.entries, layout=shards.layout, model=shards.model, names=shards.names, extras=shards.extras,
            facts=shards.facts,
        )  # fmt: skip
        finish = [
            *((prefix + path, content) for path, content in _small(trained, state)),
            *small_files(shards, {TRACKER, "zero", *(file.path for file in laid.files)}),
            *([] if alone else [(TRACKER, tag.encode())]),
        ]
        return Destination(
            catalog=catalog, literals=laid.literals, fixups=laid.fixups, finish=lambda written: finish
        )


class _Step:
    """The files of one universal checkpoint.

    Attributes:
        first: Model states of the first rank.
        state: By name and role, the file and its tensor.
        steps: By name.
    """

    def __init__(self, here: Store, warnings: list[str]) -> None:
        self.here, self.warnings = here, warnings
        if not here.exists(COMMON):
            raise ShardMissingError(
                f"{here.url} has no {COMMON}: it is no universal checkpoint, or its conversion did not end",
                file=COMMON,
            )
        self.common = StateFile(here, COMMON)
        self.first = StateFile(here, _model_states(here, self._ours))
        self.listed = shapes_of(self.first)
        self.state: dict[tuple[str, str], tuple[StateFile, StoredTensor]] = {}
        self.steps: dict[str, float] = {}
        self.alone: dict[str, StateFile] = {}  # fp32 of what has no other state
        self._read()

    @property
    def _ours(self) -> bool:
        return type(self.common.value.get(OURS)) is int

    def _read(self) -> None:
        paths: dict[tuple[str, str], str] = {}
        for path in self.here.files():
            match = _STATE.fullmatch(path)
            if match is not None:
                paths[match["name"], match["slot"]] = path
        self._check_files(paths)
        opened = open_all(self.here, paths)
        # A converter leaves an fp32 copy even of what has no state; ckptkit does not.
        held = {name for name, slot in paths if slot != _WEIGHT or self._ours}
        unknown = set()
        for (name, slot), file in opened.items():
            if slot == "step":
                number = scalar(file.plain(file.value.get("", file.value.get("param"))))
                if number is not None:
                    self.steps[name] = number
                continue
            role = "master" if slot == _WEIGHT else SLOTS.get(slot)
            if role is None:
                unknown.add(slot)
            elif slot == _WEIGHT and name not in held:
                self.alone[name] = file
            else:
                self.state[name, role] = file, self._param(name, file)
        if self.state and not self.steps and (common := self._common_step()) is not None:
            self.steps = {name: common for name, _ in self.state}
        if unknown:
            self.warnings.append(
                f"optimizer tensors of unknown meaning were left out: {', '.join(sorted(unknown)[:5])}"
            )

    def _check_files(self, paths: Mapping[tuple[str, str], str]) -> None:
        """Raise ShardMissingError where a parameter lacks a file that others of its group have."""
        slots: dict[str, set[str]] = {}
        for name, slot in paths:
            slots.setdefault(name, set()).add(slot)
        for group in self.listed:
            wanted = set().union(*(slots.get(name, set()) for name in group))
            for name in group:
                have = slots.get(name, set())
                # What never got a gradient has nothing but its weight.
                if have != {_WEIGHT} and (lacking := sorted((wanted | {_WEIGHT}) - have)):
                    raise ShardMissingError(
                        f"{self.here.url} lacks zero/{name}/{lacking[0]}.pt, which others of its group have. Restore it from "
                        "another copy, or convert again",
                        file=f"zero/{name}/{lacking[0]}.pt",
                    )
        told = self.common.value.get(OURS)
        if self._ours and len(paths) != told:
            raise ShardMissingError(
                f"{self.here.url} has {len(paths)} of the {told} files of parameters that were written. Restore it from another copy",
                file=self.here.url,
            )

    def weights(self) -> dict[str, tuple[StateFile, StoredTensor, str]]:
        """Weights and buffers by name, with their kind: of the module, else in fp32."""
        buffers = self.first.value.get("buffer_names")
        buffers = set(buffers) if isinstance(buffers, list) else set()
        found: dict[str, tuple[StateFile, StoredTensor, str]] = {}
        module = self.first.value.get("module")
        partial = self.first.value.get("mp_world_size", 1) != 1
        for name, tensor in (module if isinstance(module, dict) else {}).items():
            if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
                self.warnings.append(f"{str(name)[:80]} of {self.first.path} is no tensor and was left out")
            elif name in buffers:
                found[name] = self.first, tensor, "buffer"
            elif not partial and (tensor.size or not self._has_elements(name)):
                found[name] = self.first, tensor, "param"
        for name, file in self.alone.items():
            if name not in found:
                found[name] = file, self._param(name, file), "buffer" if name in buffers else "param"
        return found

    def _param(self, name: str, file: StateFile) -> StoredTensor:
        """The tensor of a parameter's file. Those converted from stage 3 are bare and flat."""
        value = file.value.get("param", file.value.get(""))
        if not isinstance(value, StoredTensor):
            raise FormatError(f"{file.path} holds no tensor 'param'", file=file.path)
        shape = next((group[name] for group in self.listed if name in group), value.shape)
        if value.shape != shape and value.shape == (prod(shape),) and value.contiguous:
            strides = row_major_strides(tuple(max(n, 1) for n in shape))
            return StoredTensor(value.storage, value.dtype, value.offset, shape, strides)
        return value

    def _common_step(self) -> float | None:
        """The step of all parameters, where they have none of their own: as converted from stage 3."""
        inner = self.common.value.get("optimizer_state_dict")
        state = inner.get("state") if isinstance(inner, dict) else None
        first = (
            next((slots for slots in state.values() if isinstance(slots, dict)), {})
            if isinstance(state, dict)
            else {}
        )
        return scalar(self.common.plain(first.get("step")))

    def _has_elements(self, name: str) -> bool:
        """Whether a tensor without elements is a placeholder of one that has some."""
        held = self.state.get((name, "master"))
        return held is not None and held[1].size > 0

    def groups(self) -> list[tuple[dict[str, Any], Sequence[str]]]:
        """Plain groups, with the names that the model states list for each."""
        listed = self.common.value.get("param_groups")
        if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
            return []
        if len(listed) != len(self.listed):
            self.warnings.append(
                f"{COMMON} has {len(listed)} optimizer groups, the model states list {len(self.listed)}: none was kept"
            )
            return []
        return [
            ({k: self.common.plain(v) for k, v in group.items() if k != "params"}, list(names))
            for group, names in zip(listed, self.listed, strict=True)
        ]

    def scaler(self) -> dict[str, Any]:
        return {n: self.common.plain(self.common.value[n]) for n in SCALER if n in self.common.value}


def _model_states(here: Store, ours: bool) -> str:
    """Model states of the first rank: those of stages 0 to 2 where there are such, as always in files of `ours`."""
    found = next((name for name in _MODELS[: 1 if ours else 2] if here.exists(name)), None)
    if found is None:
        raise ShardMissingError(
            f"{here.url} has no model states of rank 0. Restore them from another copy", file=here.url
        )
    return found


def _drafts(
    prefix: str, members: Sequence[Member], trained: Mapping[str, Member], state: State, model: Model | None
) -> Iterator[Draft]:
    """Every file with tensors."""
    draft = Draft(f"{prefix}{_MODELS[0]}", 0)
    model_states(draft, members, state, written_shapes(state.groups, trained))
    yield draft
    # Stage 3 has model states under another name, with nothing where a parameter would be.
    third = Draft(f"{prefix}{_MODELS[1]}", 0)
    module = Ordered()
    for m in members:
        if m.weight == "buffer":
            module[m.name] = third.whole(m, "buffer")
        elif m.weight:
            module[m.name] = third.tensor(m.held[m.weight], (0,))
    third.value = {**draft.value, "module": module, "param_shapes": written_shapes(state.groups, trained)}
    yield third
    for name, member in trained.items():
        for role in ("master", *(role for role in SLOT_OF if role in member.held and role != "master")):
            slot = _WEIGHT if role == "master" else SLOT_OF[role]
            draft = Draft(f"{prefix}zero/{name}/{slot}.pt", 0)
            draft.value = {"param": draft.whole(member, role), **_cut(member.item, model)}
            yield draft


def _cut(item: LocalTensor, model: Model | None) -> dict[str, Any]:
    """How tensor-parallel ranks share a parameter, in DeepSpeed's terms; what it cannot say is left out."""
    found: dict[str, Any] = {"cat_dim": 0}
    if model is None or len(item.segments) != 1:
        return found
    (segment,) = item.segments
    axes = model.tensors[segment.tensor].axes
    for axis, dim, step in zip(axes, segment.dim, segment.step, strict=True):
        rule = model.rules.get(axis)
        if rule is None or rule.mesh_axis != "tp" or dim < 0 or rule.inner:
            continue
        found["cat_dim"] = dim
        if rule.pad and dim == 0:
            found["vocab_tensor"] = True
        before = [
            n
            for n, d, s in zip(segment.box.shape, segment.dim, segment.step, strict=True)
            if d == dim and s > step
        ]
        parts = int(np.prod(before, dtype=np.int64))
        if parts > 1:
            found["param_n_sub_params"] = parts
        break
    return found


def _small(trained: Mapping[str, Member], state: State) -> Iterator[tuple[str, bytes]]:
    """Files without tensors: steps, and what is common."""
    count = 0
    for group in state.groups:
        for name in group.names:
            held = trained[name].held
            count += sum(role in held for role in SLOT_OF)
            if group.step is not None:
                count += 1
                yield f"zero/{name}/step.pt", zip_bytes(step_value(group.step))
    groups = [{**group.fields, "params": [k]} for k, group in enumerate(state.groups)]
    common = {
        **state.scaler,
        "zero_stage": zero_stage(1),
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "ds_version": state.model["ds_version"],
        "param_groups": groups,
        # Stage 3 looks for the step and groups here.
        "optimizer_state_dict": {
            "state": {k: {"step": step_value(group.step)} for k, group in enumerate(state.groups)},
            "param_groups": groups,
        },
        OURS: count,
    }
    yield COMMON, zip_bytes(common)
