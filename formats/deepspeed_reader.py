"""Reading a DeepSpeed checkpoint: its files, what their tensors are in the model, and entries for all of them.

A model-parallel rank's tensors are those that the model's names give it at that tensor- (and pipeline-) parallel degree. Without
a model tensors keep their names, and only one model-parallel rank can be read: nothing in the files tells which axis was cut.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ckptkit.core.catalog import ROLE_CODE, Catalog, Entries, Extras, File
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import FormatError, LayoutError, ShardMissingError
from ckptkit.formats import model_config
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.chunks import Locals, bind_names, plain_local, plain_tensor
from ckptkit.formats.deepspeed_folder import LATEST, StateFile, carried_files, list_files, open_all
from ckptkit.formats.deepspeed_runs import (
    STATE,
    Found,
    Run,
    flat_tensor,
    read_stage3,
    read_stage12,
    shapes_of,
)
from ckptkit.formats.deepspeed_state import SCALER, WEIGHTS, layout_of, note_of, read_extras
from ckptkit.formats.standins import StoredTensor
from ckptkit.formats.torch_state import name_numbered
from ckptkit.stores.base import Store

_SLICE = re.compile(r".*\bdeepspeed_moe\.experts\.deepspeed_experts\.\d+\..+")

Shapes = dict[str, tuple[int, ...]]


class Reader:
    """One checkpoint.

    Args:
        store: Its root.
        here, prefix: The folder of the step in it, and what paths begin with.
    """

    def __init__(self, store: Store, here: Store, prefix: str, options: ReadOptions) -> None:
        self.store, self.here, self.prefix, self.options = store, here, prefix, options
        self.warnings: list[str] = []
        self.files = list_files(here)
        self.models = self._open_models()
        self.first = self.models[0, 0]
        self.note = note_of(self.first) or {}
        self.mp = self._degree("mp_world_size", 1 + max(mp for mp, _ in self.files.models))
        self.dp = self._degree("dp_world_size", 1 + max((d for _, d in self.files.optims), default=0))
        self.optims: dict[tuple[int, int], StateFile] = {}
        self.locals = Locals()
        self.paths: dict[str, int] = {}
        self.rows: list[tuple[int, int, int, int, int, int, int]] = []
        self.roles: dict[str, set[str]] = {}

    def catalog(self, name: str) -> Catalog:
        """The catalog of everything."""
        self._check_models()
        self.optims = self._open_optims()
        files = carried_files(self.store, self.warnings)
        config = model_config.read_config(files, self.options, self.store.url)
        model = model_of(config, self.options, self.store.url)
        weights = [self._weights(mp) for mp in range(self.mp)]
        shapes = [self._shapes(mp, weights[mp]) for mp in range(self.mp)]
        layout = self._layout()
        family, bound = self._bind(model, shapes, layout)
        buffers = set(self.first.value.get("buffer_names") or ()) if model is None else set()
        tensors: Mapping[str, Tensor] = (
            model.tensors
            if model is not None
            else {
                n: Tensor(t.name, t.axes, t.shape, "buffer" if n in buffers else "param")
                for n, t in ((n, plain_tensor(n, shape)) for n, shape in shapes[0].items())
            }
        )
        found = Found()
        for mp in range(self.mp):
            for path_file, key, tensor in weights[mp]:
                self._add_whole(path_file, bound[mp], key, tensor, tensors)
            read = self._state(mp, bound[mp], shapes[mp])
            for run in read.runs:
                self._add_run(run, bound[mp])
            if mp == 0:
                found = read
            if self.files.stage3:
                self._add_fragments(mp, bound[mp])
        if found.unknown:
            self.warnings.append(
                f"optimizer tensors of unknown meaning were left out: {', '.join(sorted(found.unknown)[:5])}"
            )
        extras = self._extras(found, bound[0])
        extras.files = files
        return Catalog(
            format=name, where=self.store.url, tensors=tensors, locals=self.locals.items,
            files=[File(self.prefix + path, self.here.size(path), 0, self._ranks.get(path, 0)) for path in self.paths],
            entries=Entries(*np.asarray(self.rows, np.int64).reshape(-1, 7).T), layout=layout, model=model, names=family,
            extras=extras, facts={"warnings": self.warnings},
            identities={path: self.store.identity(path) for path in self._sources()},
        )  # fmt: skip

    # Files

    def _open_models(self) -> dict[tuple[int, int], StateFile]:
        if (0, 0) not in self.files.models:
            raise ShardMissingError(
                f"{self.here.url} has no model states of rank 0. Restore them from another copy",
                file=self.here.url,
            )
        return open_all(self.here, self.files.models)

    def _degree(self, name: str, seen: int) -> int:
        """A number of ranks: as the model states tell, else as files show."""
        told = self.first.value.get(name)
        return told if type(told) is int and 0 < told <= 1 << 22 else seen

    def _check_models(self) -> None:
        ranks = range(self.dp) if self.files.stage3 else range(1)
        wanted = [(mp, d) for mp in range(self.mp) for d in ranks]
        self._check(self.files.models, wanted, "model states")

    def _open_optims(self) -> dict[tuple[int, int], StateFile]:
        """Every partition, where there are any or should be."""
        value = self.first.value
        if not self.files.optims:
            if value.get("param_shapes") and not isinstance(value.get("optimizer"), dict):
                raise ShardMissingError(
                    f"{self.here.url} was saved with ZeRO, but has no …_optim_states.pt. Restore them; where weights are enough "
                    "and the stage was not 3, copy mp_rank_00_model_states.pt to a folder of its own and read that with --from torch",
                    file=self.here.url,
                )
            if self.files.expert_optims:
                self.warnings.append(
                    f"the optimizer's state of experts in {len(self.files.expert_optims)} files was left out: it is numbered, "
                    "not named"
                )
            return {}
        wanted = [(mp, d) for mp in range(self.mp) for d in range(self.dp)]
        self._check(self.files.optims, wanted, "partitions of the optimizer's state")
        return open_all(self.here, {rank: self.files.optims[rank] for rank in wanted})

    def _check(
        self, have: Mapping[tuple[int, int], str], wanted: Sequence[tuple[int, int]], what: str
    ) -> None:
        missing = [rank for rank in wanted if rank not in have]
        if missing:
            mp, d = missing[0]
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ShardMissingError(
                f"{self.here.url} has {len(wanted) - len(missing)} of {len(wanted)} {what}: data-parallel rank {d} of "
                f"mp_rank {mp} is missing{more}. Restore it from another copy",
                file=self.here.url,
            )
        extra = sorted(set(have) - set(wanted))
        if extra:
            self.warnings.append(
                f"{len(extra)} files of ranks beyond the {len(wanted)} that saved were left out, such as {have[extra[0]]}"
            )

    def _sources(self) -> list[str]:
        tracker = [LATEST] if self.prefix and self.store.exists(LATEST) else []
        opened = [*self.models.values(), *self.optims.values()]
        paths = dict.fromkeys([*self.paths, *(file.path for file in opened)])
        return [*tracker, *(self.prefix + path for path in paths)]

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """Ranks by path, in Megatron's order: model-parallel ones are neighbours."""
        every = [*self.files.models.items(), *self.files.optims.items()]
        return {path: d * self.mp + mp for (mp, d), path in every}

    # Names and shapes

    def _weights(self, mp: int) -> list[tuple[StateFile, str, StoredTensor]]:
        """Whole weights of one model-parallel rank: of the module, of experts, and of pipeline layers."""
        file = self.models[mp, 0]
        module = file.value.get("module")
        found: dict[str, tuple[StateFile, str, StoredTensor]] = {}
        partitioned = {n for g in shapes_of(file) for n in g} if self.files.stage3 else set()
        if self.files.stage3:
            partitioned |= {n for g in shapes_of(file, "frozen_param_shapes") for n in g}
        for key, tensor in (module or {}).items() if isinstance(module, dict) else ():
            if key in partitioned:
                continue  # a placeholder
            self._one(found, file, key, tensor)
        more = {n: path for n, path in self.files.experts.items() if n[2] == mp}
        for _, expert in sorted(open_all(self.here, more).items()):
            for key, tensor in expert.value.items():
                self._one(found, expert, key, tensor)
        layers = {n: path for n, path in self.files.layers.items() if self.mp == 1}
        if self.files.layers and not layers:
            raise FormatError(
                f"{self.here.url} is of a pipeline module over {self.mp} model-parallel ranks, whose layers are numbered, not "
                "named. Convert it to the universal form with DeepSpeed's ds_to_universal.py",
                file=self.here.url,
            )
        for (number, _), layer in sorted(open_all(self.here, layers).items()):
            for key, tensor in layer.value.items():
                self._one(found, layer, f"{number}.{key}", tensor)
        if not isinstance(module, dict) and not found:
            raise FormatError(f"{file.path} holds no module", file=file.path)
        return list(found.values())

    def _one(
        self, found: dict[str, tuple[StateFile, str, StoredTensor]], file: StateFile, key: Any, tensor: Any
    ) -> None:
        if not isinstance(key, str) or not isinstance(tensor, StoredTensor):
            self.warnings.append(f"{str(key)[:80]} of {file.path} is no tensor and was left out")
            return
        if key in found:
            raise FormatError(
                f"{key} is in {found[key][0].path} and in {file.path}: they are no parts of one checkpoint",
                file=file.path,
                tensor=key,
            )
        found[key] = file, key, tensor

    def _shapes(self, mp: int, weights: Sequence[tuple[StateFile, str, StoredTensor]]) -> Shapes:
        """Shapes by name of everything that one model-parallel rank has."""
        file = self.models[mp, 0]
        found: Shapes = {key: tensor.shape for _, key, tensor in weights}
        listed = [*shapes_of(file), *(shapes_of(file, "frozen_param_shapes") if self.files.stage3 else ())]
        for key, shape in ((k, s) for group in listed for k, s in group.items()):
            if _SLICE.fullmatch(key) and key not in found:
                continue  # the first rank's own expert, under its number there
            if found.setdefault(key, shape) != shape:
                raise FormatError(
                    f"{file.path}: {key} has shape {found[key]}, but param_shapes says {shape}",
                    file=file.path,
                    tensor=key,
                )
        return found

    def _layout(self) -> Layout:
        if self.options.layout is not None:
            return self.options.layout
        noted = layout_of(self.note, self.first.path)
        if noted is not None:
            return noted
        told = self.first.value.get("checkpoint_parallel_dimensions")
        pp = told.get("pp_degree") if isinstance(told, dict) else 1
        pp = pp if type(pp) is int and pp > 0 and self.mp % pp == 0 else 1
        stage = 3 if self.files.stage3 else self._stage() if self.optims else 0
        return Layout(
            tp=self.mp // pp, pp=pp, dp=self.dp, zero=stage, rule="deepspeed" if stage in (1, 2) else "even"
        )

    def _stage(self) -> int:
        value = self.optims[0, 0].field(STATE, dict).get("zero_stage", 1)
        number = value.args[0] if getattr(value, "args", ()) else value
        return number if number in (1, 2) else 1

    def _bind(
        self, model: Model | None, shapes: Sequence[Shapes], layout: Layout
    ) -> tuple[str, list[dict[str, LocalTensor]]]:
        """The family of names, and what each model-parallel rank's names are."""
        if model is None:
            if self.mp > 1:
                raise LayoutError(
                    f"{self.store.url} has {self.mp} model-parallel ranks, and no schema fits it to tell how they cut tensors; "
                    "give the model's configuration with --config, or convert it with DeepSpeed's ds_to_universal.py"
                )
            return "stored", [{name: plain_local(name, shape) for name, shape in shapes[0].items()}]
        family = model.family_of({key for mine in shapes for key in mine}, self.store.url)
        if self.mp == 1:
            return family, [bind_names(model, family, shapes[0], self.store.url, self.warnings)]
        if layout.tp * layout.pp != self.mp:
            raise LayoutError(
                f"{self.store.url} has {self.mp} model-parallel ranks, not tp={layout.tp} times pp={layout.pp}; give the layout "
                "of the save with --source-layout"
            )
        # The order of ranks puts tensor parallel ones first, so that these are mp_rank.
        cut = Layout(tp=layout.tp, pp=layout.pp, stages=layout.stages)
        bound: list[dict[str, LocalTensor]] = [{} for _ in range(self.mp)]
        for placement in model.names(family).placements(cut):
            for mp in placement.ranks.tolist():
                bound[mp][placement.local.key] = placement.local
        copies = model.names(family).copies
        for mp, mine in enumerate(shapes):
            kept: dict[str, LocalTensor] = {}
            for name, shape in mine.items():
                item = bound[mp].get(name)
                if item is not None and item.shape == shape:
                    kept[name] = item
                elif model.schema.is_harmless(name) or (item is None and name in copies):
                    self.warnings.append(
                        f"{name} of mp_rank {mp} is made anew by every module and was left out"
                    )
                else:
                    has = "which is none of this model's" if item is None else f"instead of {item.shape}"
                    raise FormatError(
                        f"{self.store.url} does not hold the model of its configuration ({model.schema.id}, names {family}): "
                        f"mp_rank {mp} has {name} {shape}, {has}. Give the right --config",
                        tensor=name,
                    )
            bound[mp] = kept
        return family, bound

    # Entries

    def _add(
        self,
        file: StateFile,
        item: LocalTensor,
        role: str,
        tensor: StoredTensor,
        start: int,
        first: int,
        last: int,
    ) -> None:
        number = self.locals.exact(item) if self.mp > 1 else self.locals.whole(item)
        path = self.paths.setdefault(file.path, len(self.paths))
        offset = (file.place(tensor) if tensor.size else 0) + start * tensor.dtype.itemsize
        self.rows.append((path, number, ROLE_CODE[role], tensor.dtype.code, first, last, offset))

    def _add_whole(
        self,
        file: StateFile,
        bound: Mapping[str, LocalTensor],
        key: str,
        tensor: StoredTensor,
        tensors: Mapping[str, Tensor],
    ) -> None:
        item = bound.get(key)
        if item is None:
            return
        role = tensors[item.segments[0].tensor].kind
        if tensor.contiguous:
            self._add(file, item, role, tensor, 0, 0, item.size)
            return
        number, first, last = self.locals.chunk(item, (0,) * len(tensor.shape), tensor.shape, tensor.strides)
        path = self.paths.setdefault(file.path, len(self.paths))
        self.rows.append((path, number, ROLE_CODE[role], tensor.dtype.code, first, last, file.place(tensor)))

    def _add_run(self, run: Run, bound: Mapping[str, LocalTensor]) -> None:
        item = bound.get(run.name)
        if item is None:
            return
        self.roles.setdefault(run.name, set()).add(run.role)
        self._add(run.file, item, run.role, run.tensor, run.start, run.first, run.last)

    def _state(self, mp: int, bound: Mapping[str, LocalTensor], shapes: Shapes) -> Found:
        """What the optimizer holds of one model-parallel rank's parameters."""
        if not self.optims:
            return self._numbered(mp, bound)
        mine = [self.optims[mp, d] for d in range(self.dp)]
        listed = shapes_of(self.models[mp, 0])
        if self.files.stage3:
            return read_stage3(mine, listed)
        found = read_stage12(mine, listed, {name: prod(shape) for name, shape in shapes.items()})
        for name, shape in ((n, s) for group in listed for n, s in group.items()):
            if not prod(shape):
                self._no_elements(found, name, mine[0], listed)
        return found

    def _no_elements(
        self, found: Found, name: str, file: StateFile, listed: Sequence[Mapping[str, Any]]
    ) -> None:
        """State of a parameter without elements is like that of others of its group."""
        group = next(group for group in listed if name in group)
        for role, run in {r.role: r for r in found.runs if r.name in group and r.file is file}.items():
            found.runs.append(Run(name, role, file, run.tensor, 0, 0, 0))

    def _numbered(self, mp: int, bound: Mapping[str, LocalTensor]) -> Found:
        """The optimizer's state without ZeRO: whole tensors, whose parameters are numbered."""
        found = Found()
        file = self.models[mp, 0]
        optimizer = file.value.get("optimizer")
        if not isinstance(optimizer, dict) or not optimizer:
            return found
        state = name_numbered({"model": file.value.get("module"), "optimizer": optimizer}, self.warnings).get(
            "optimizer"
        )
        if state is None or not isinstance(state.get("state"), dict):
            return found
        for name, slots in state["state"].items():
            if name not in bound or not isinstance(slots, dict):
                continue
            flat, step = [], None
            for slot, value in slots.items():
                if isinstance(value, StoredTensor) and value.shape == bound[name].shape and value.shape:
                    flat.append(
                        (slot, StoredTensor(value.storage, value.dtype, value.offset, (value.size,), (1,)))
                    )
                elif slot == "step":
                    step = value
            mine, number = found.slots(file, {**dict(flat), "step": step}, bound[name].size)
            for role, tensor in mine:
                found.runs.append(Run(name, role, file, tensor, 0, 0, bound[name].size))
            if number is not None:
                found.steps[name] = number
        for group in state.get("param_groups") or ():
            names = [n for n in group.get("params", ()) if n in bound]
            found.groups.append(({k: v for k, v in group.items() if k != "params"}, names))
        return found

    def _add_fragments(self, mp: int, bound: Mapping[str, LocalTensor]) -> None:
        """Stage 3: parts of parameters that are not trained, and of weights that ckptkit keeps."""
        for d in range(self.dp):
            file = self.models[mp, d]
            for field, role in (("frozen_param_fragments", "param"), (WEIGHTS, "param")):
                held = file.value.get(field)
                if held is None:
                    continue
                if not isinstance(held, dict):
                    raise FormatError(f"{file.path}: {field} is no dictionary", file=file.path)
                for name, tensor in held.items():
                    item = bound.get(name)
                    if item is None:
                        continue
                    run = -(-item.size // self.dp)
                    first, last = min(d * run, item.size), min((d + 1) * run, item.size)
                    flat = StoredTensor(tensor.storage, tensor.dtype, tensor.offset, (tensor.size,), (1,)) if (
                        isinstance(tensor, StoredTensor) and tensor.contiguous
                    ) else tensor  # fmt: skip
                    checked = flat_tensor(file, flat, f"the part of {name}", last - first)
                    if first < last or (not item.size and not d):
                        self._add(file, item, role, checked, 0, first, last)

    def _extras(self, found: Found, bound: Mapping[str, LocalTensor]) -> Extras:
        file = self.optims.get((0, 0))
        scaler: dict[str, Any] | None = None
        groups = [(hyper, names) for hyper, names in found.groups]
        if file is not None:
            state = file.field(STATE, dict)
            scaler = {name: file.plain(state[name]) for name in SCALER if name in state}
        plain = [
            ({k: (file or self.first).plain(v) for k, v in hyper.items()}, names) for hyper, names in groups
        ]
        return read_extras(self.first, scaler, plain, found.steps, self.roles, bound, self.warnings)
