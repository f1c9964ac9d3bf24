"""Reading a legacy Megatron checkpoint: every rank's tensors by their own names, then the optimizer's state of all."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import Catalog, File
from ckptkit.core.clips import clip
from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Model
from ckptkit.errors import FormatError, ShardMissingError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import carried
from ckptkit.formats.chunks import plain_local, plain_tensor
from ckptkit.formats.megatron import configuration, first_right
from ckptkit.formats.megatron_buffers import Buffer, Group, buffers
from ckptkit.formats.megatron_entries import Rows
from ckptkit.formats.megatron_flat import bucket_sizes, read_flat
from ckptkit.formats.megatron_keys import Numbered, number_names, spellings
from ckptkit.formats.megatron_legacy_optimizer import is_distributed, plain_groups, read_whole, stripped
from ckptkit.formats.megatron_parts import FLAT, STATE, Held, Part, guess_layout, held_by, parts_of
from ckptkit.formats.megatron_state import Objects, State, read_extras, rng_of
from ckptkit.formats.megatron_tensors import padded
from ckptkit.formats.optimizer_groups import canonical_groups
from ckptkit.formats.plain import to_plain
from ckptkit.formats.standins import StoredTensor
from ckptkit.formats.torch_zip import Archive, open_archive
from ckptkit.stores.base import Store

_FAMILIES = ("megatron", "megatron_grouped")


class Reader:
    """One checkpoint while it is read."""

    def __init__(
        self, store: Store, here: Store, prefix: str, names: Sequence[str], options: ReadOptions
    ) -> None:
        self.store, self.here, self.prefix = store, here, prefix
        self.warnings: list[str] = []
        self.files: list[File] = []
        self.rows = Rows()
        self.dtypes: dict[str, DType] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.roles: dict[str, set[str]] = {}
        self.bound: dict[str, LocalTensor] = {}
        self.order: list[str] = []
        self.rng: dict[str, Any] = {}
        self.distributed = False
        self.groups: list[tuple[dict[str, Any], list[str]]] = []
        with here.open(f"{names[0]}/{STATE}") as reader:
            archive = open_archive(reader, f"{names[0]}/{STATE}")
            self.state = _state(archive, here.url)
            self.first_keys = set(_chunks(archive.value).get(0, {}))
        found = options.layout or self.state.layout(self.warnings) or guess_layout(names)
        self.carried = carried(here, self.warnings)
        config = configuration(self.carried, self.state, options, here.url, self.warnings)
        self.model: Model | None = model_of(config, options, here.url)
        self.layout: Layout = found
        self.parts = parts_of(found)
        self._check_folders(names)

    def _check_folders(self, names: Sequence[str]) -> None:
        wanted = [part.folder for part in self.parts]
        for folder in wanted:
            if folder not in names:
                raise ShardMissingError(
                    f"{folder}/{STATE} is missing from {self.here.url}: layout {self.layout} has {len(wanted)} model-parallel "
                    f"ranks, and {len(set(wanted) & set(names))} are there. Restore it, or give the true layout with "
                    "--source-layout",
                    file=f"{folder}/{STATE}",
                )
        extra = sorted(set(names) - set(wanted))
        if extra:
            raise FormatError(
                f"{extra[0]} of {self.here.url} is no rank of layout {self.layout}. Give the layout that it was saved in with "
                "--source-layout",
                file=extra[0],
            )

    def _check_flat(self, flat: Sequence[Part], held: Mapping[Group, Sequence[Buffer]]) -> None:
        """Every first rank of a group of replicas saves the state of its group."""
        for part in self.parts:
            if part not in flat and any(group in held for group in (part.dense, part.expert)):
                raise ShardMissingError(
                    f"{part.folder}/{FLAT} is missing from {self.here.url}: the optimizer of that rank keeps its state there. "
                    "Restore it",
                    file=f"{part.folder}/{FLAT}",
                )

    def catalog(self) -> Catalog:
        model = self.model
        if model is not None and not set(_FAMILIES) & set(model.families):
            raise FormatError(f"{self.here.url}: {model.schema.id} has no Megatron names")
        family, tables = self._tables()
        for part in self.parts:
            self._read_part(part, tables)
        tensors = (
            model.tensors
            if model is not None
            else {name: plain_tensor(name, item.shape) for name, item in self.bound.items()}
        )
        flat = [part for part in self.parts if self.here.exists(f"{part.folder}/{FLAT}")]
        if (self.distributed or flat) and model is None:
            raise FormatError(
                f"{self.here.url} holds its optimizer's state in flat buffers, which only the model explains. Give its "
                "config.json with --config"
            )
        if (self.distributed or flat) and model is not None:
            self._read_flat(flat, model, family)
        objects = Objects({}, [], {}, {})
        extras = read_extras(self.state, objects, self.bound, self.roles, tensors, self.warnings)
        extras.by_coordinate = {**self.rng, **extras.by_coordinate}
        if self.groups and self.state.note is None:
            extras.common["groups"] = canonical_groups(
                _merged(self.groups), {}, self.roles, self.bound, self.warnings
            )
        extras.files = self.carried
        catalog = Catalog(
            format="megatron-legacy",
            where=self.store.url,
            tensors=tensors,
            locals=self.rows.locals.items,
            files=self.files,
            entries=self.rows.entries(),
            layout=self.layout,
            model=model,
            names=family,
            extras=extras,
            facts={**(self.state.note or {}).get("facts", {}), "warnings": self.warnings},
            identities={file.path: self.store.identity(file.path) for file in self.files},
        )
        if self.state.note is not None:
            return catalog
        return first_right(self.store, lambda order: catalog, [()])

    def _tables(self) -> tuple[str, dict[str, dict[tuple[int, str], Held]]]:
        """What each folder should hold, by model chunk and the rank's own name, in the family that fits best."""
        if self.model is None:
            return "stored", {}
        best: tuple[int, str, dict[str, dict[tuple[int, str], Held]]] = (-1, "", {})
        for family in (f for f in _FAMILIES if f in self.model.families):
            numbered = number_names(self.model, family)
            held = held_by(self.model.names(family), numbered, self.layout, self.parts)
            tables = {folder: _spelled(items, numbered) for folder, items in held.items()}
            hits = len(self.first_keys & {key for chunk, key in tables[self.parts[0].folder] if chunk == 0})
            if hits > best[0]:
                best = hits, family, tables
        return best[1], best[2]

    def _read_part(self, part: Part, tables: Mapping[str, Mapping[tuple[int, str], Held]]) -> None:
        path = f"{part.folder}/{STATE}"
        with self.here.open(path) as reader:
            archive = open_archive(reader, path)
            number = self._file(path, part)
            add = self.rows.adder(number)
            state = _state(archive, self.here.url)
            held = self._weights(part, archive, tables.get(part.folder, {}), add)
            trained = [item for item in held if self._is_trained(item)]
            note = state.note
            told = note.get("optimizers") if note is not None else None
            members = read_whole(
                archive.value.get("optimizer"),
                told,
                trained,
                self.dtypes,
                archive.place,
                self._adder(number),
                path,
            )
            self.distributed |= is_distributed(archive.value.get("optimizer"))
            fields = plain_groups(state.plain(state.fields.get("optimizer")))
            if any(members):
                self.groups += zip(fields, members, strict=True)
            if "rng_state" in state.fields:
                self.rng.update(rng_of(part.tp, part.pp, state.plain(state.fields["rng_state"])))

    def _is_trained(self, item: Held) -> bool:
        return self.model is None or self.model.tensors[_tensor_of(item, self.model)].kind == "param"

    def _adder(self, number: int) -> Any:
        add = self.rows.adder(number)

        def noting(item: Held, role: str, dtype: DType, offset: int) -> None:
            self.roles.setdefault(item.name, set()).add(role)
            add(item.local, role, dtype, offset)

        return noting

    def _file(self, path: str, part: Part) -> int:
        self.files.append(File(self.prefix + path, self.here.size(path), 0, part.ranks[0]))
        return len(self.files) - 1

    def _weights(
        self, part: Part, archive: Archive, table: Mapping[tuple[int, str], Held], add: Any
    ) -> list[Held]:
        """Entries of one rank's weights; what it holds, in the order of its modules."""
        found: list[Held] = []
        problems: list[str] = []
        for chunk, tensors in _chunks(archive.value).items():
            for key, tensor in tensors.items():
                if not isinstance(tensor, StoredTensor) or "_extra_state" in str(key):
                    continue
                if self.model is None:
                    item = plain_local(str(key), tensor.shape)
                    known: Held | None = Held(str(key), str(key), chunk, item, False)
                else:
                    known = table.get((chunk, str(key)))
                    if known is None and self.model.schema.is_harmless(str(key)):
                        self.warnings.append(f"{key} is made anew by every module and was left out")
                        continue
                    if known is not None and known.local.shape != tensor.shape:
                        known = self._repadded(known, tensor.shape, part)
                if known is None:
                    problems.append(f"{key} {tensor.shape}")
                    continue
                if not tensor.contiguous:
                    raise FormatError(
                        f"{part.folder}: {key} is no contiguous tensor. Save it again with Megatron-LM"
                    )
                found.append(known)
                self.dtypes[known.name] = tensor.dtype
                self.bound.setdefault(known.name, known.local)
                role = "param"
                if self.model is not None:
                    role = self.model.tensors[_tensor_of(known, self.model)].kind
                add(known.local, role, tensor.dtype, archive.place(tensor))
        if problems:
            what = self.model.schema.id if self.model is not None else "one model"
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise FormatError(
                f"{part.folder} of {self.here.url} does not hold its share of {what} in layout {self.layout}: "
                f"{'; '.join(problems[:5])}{more} are none of its tensors. Give the right --config or --source-layout, or the "
                "files again"
            )
        self.order += [item.name for item in found]
        return found

    def _repadded(self, item: Held, shape: tuple[int, ...], part: Part) -> Held | None:
        """A tensor with another padding of its vocabulary than this model's rule gives."""
        assert self.model is not None, "only a model knows shapes"
        names = self.model.names(_FAMILIES[0])
        unpadded = {**names.copies, **names.unpadded()}.get(item.name)
        if unpadded is None or not shape or shape[1:] != item.local.shape[1:]:
            return None
        whole = padded(self.model, unpadded, (shape[0] * self.layout.tp, *shape[1:]))
        if whole is None or part.tp >= self.layout.tp:
            return None
        self.shapes[item.name] = whole.shape
        box = Box((shape[0] * part.tp, *(0 for _ in shape[1:])), (shape[0] * (part.tp + 1), *shape[1:]))
        return Held(item.name, item.key, item.chunk, clip(whole, box), item.expert)

    def _read_flat(self, parts: Sequence[Part], model: Model, family: str) -> None:
        """Entries of the distributed optimizer's state."""
        trained = {
            name: dtype
            for name, dtype in self.dtypes.items()
            if model.tensors[_tensor_of_local(self.bound[name], model, name, family)].kind == "param"
            and name not in self.roles  # Muon keeps its state elsewhere
        }
        told = (self.state.note or {}).get("flat")
        if told is not None:
            trained = {name: dtype for name, dtype in trained.items() if name in told}
        names = model.names(family)
        order = list(dict.fromkeys(self.order))
        held = buffers(names, number_names(model, family), self.layout, trained, self.shapes, order)
        self._check_flat(parts, held)
        for part in parts:
            path = f"{part.folder}/{FLAT}"
            with self.here.open(path) as reader:
                archive = open_archive(reader, path)
            number = self._file(path, part)
            add = self.rows.adder(number)
            states = archive.value if isinstance(archive.value, list) else [archive.value]
            for group, state in zip((part.dense, part.expert), states, strict=False):
                if state is None:
                    continue
                if group is None or group not in held:
                    raise FormatError(
                        f"{path} holds optimizer state that no parameters of this model and layout have. Give the layout and "
                        "configuration that it was saved with (--source-layout, --config)",
                        file=path,
                    )
                dp = self.layout.edp if group.expert else self.layout.cp * self.layout.dp
                read_flat(state, held[group], bucket_sizes(self.state.args, dp), archive.place, add, path)
                for buffer in held[group]:
                    for item in buffer.members:
                        self.roles.setdefault(item.key, set()).update(("master", "exp_avg", "exp_avg_sq"))


def _state(archive: Archive, where: str) -> State:
    """A rank's training state without its weights and optimizer tensors; tensors of the rest are read."""
    value = archive.value
    if not isinstance(value, dict):
        raise FormatError(f"{archive.where} of {where} holds no dictionary of state", file=archive.where)
    rest = {k: v for k, v in value.items() if not str(k).startswith("model") and k != "optimizer"}
    if "optimizer" in value:
        rest["optimizer"] = stripped(value["optimizer"])
    known: dict[StoredTensor, bytes] = {}
    to_plain(rest, lambda tensor: known.setdefault(tensor, archive.content(tensor)))
    return State(rest, known.__getitem__)


def _chunks(value: Mapping[Any, Any]) -> dict[int, Mapping[Any, Any]]:
    """The state dictionaries of a rank's model chunks. Raises FormatError for names of before megatron-core."""
    found: dict[int, Mapping[Any, Any]] = {}
    for key, chunk in value.items():
        text = str(key)
        if text == "model" or (text.startswith("model") and text[5:].isdigit()):
            if isinstance(chunk, dict) and "language_model" in chunk:
                raise FormatError(
                    "the checkpoint is of a model of before megatron-core (language_model.encoder). Convert it with "
                    "Megatron-LM's tools/checkpoint/convert.py first"
                )
            if isinstance(chunk, dict):
                found[int(text[5:] or 0)] = chunk
    return found


def _spelled(items: Sequence[Held], numbered: Mapping[str, Numbered]) -> dict[tuple[int, str], Held]:
    """Tensors by model chunk and name, under other spellings of norms too."""
    found = {(item.chunk, item.key): item for item in items}
    for item in items:
        parts = numbered[item.name]
        for other in spellings(parts.rest):
            key = item.key.removesuffix(parts.rest) + other
            found.setdefault((item.chunk, key), item)
    return found


def _tensor_of(item: Held, model: Model) -> str:
    """A canonical tensor of a name; a rank may hold nothing but padding of it."""
    if item.local.segments:
        return item.local.segments[0].tensor
    names = model.names(_FAMILIES[0])
    return {**names.copies, **names.whole}[item.name].segments[0].tensor


def _tensor_of_local(item: LocalTensor, model: Model, name: str, family: str) -> str:
    if item.segments:
        return item.segments[0].tensor
    names = model.names(family)
    return {**names.copies, **names.whole}[name].segments[0].tensor


def _merged(
    groups: Sequence[tuple[dict[str, Any], list[str]]],
) -> list[tuple[dict[str, Any], list[str]]]:
    """Groups of all ranks: equal fields make one."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for fields, names in groups:
        same = next((members for known, members in found if known == fields), None)
        if same is None:
            found.append((fields, list(names)))
        else:
            same += [name for name in names if name not in same]
    return found
