"""DeepSpeed's checkpoints: ZeRO stages 0 to 3, with the optimizer's state, over data- and tensor-parallel ranks.

`ckptkit.formats.deepspeed_folder` shows the files. Read are the flat partitions of all stages, frozen parameters, experts of
DeepSpeed-MoE and layers of pipeline modules; written are stages 1 to 3. The data-parallel cut is DeepSpeed's own: a layout says
`zero=1:deepspeed`, or `zero=3`.

Sources: DeepSpeed 0.19, `runtime/engine.py`, `runtime/zero/`, `utils/zero_to_fp32.py`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from ckptkit.core.catalog import NAMED_ROLES, Catalog, Checksum
from ckptkit.core.destination import Destination
from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.names import Names, Placement, StoredNames
from ckptkit.core.schema import STATE_ROLES
from ckptkit.errors import CkptError, LayoutError
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.deepspeed_folder import (
    LATEST,
    find_step,
    is_state,
    tag_of,
)
from ckptkit.formats.deepspeed_reader import Reader
from ckptkit.formats.deepspeed_runs import round_robin
from ckptkit.formats.deepspeed_state import State, write_extras
from ckptkit.formats.deepspeed_writer import (
    Draft,
    Member,
    balanced_order,
    experts,
    lay,
    members_of,
    model_dtype,
    model_states,
    model_states_3,
    partition_3,
    partition_12,
    shapes_of,
)
from ckptkit.formats.model_config import small_files
from ckptkit.formats.torch_zip import file_checksums
from ckptkit.stores.base import Store

_STEP = re.compile(r"global_step\d+")
_SIGN = "zero/optimizer_state.pt"  # of the universal form, which has model states as well


class DeepSpeedFormat(Format):
    """Names are those of the module, which are Transformers' where its models are trained."""

    name: ClassVar[str] = "deepspeed"
    names: ClassVar[str] = "transformers"
    parts: ClassVar[tuple[str, ...]] = ("base",)
    roles: ClassVar[tuple[str, ...]] = tuple(role for role in NAMED_ROLES if role != "ema")
    ranks: ClassVar[bool] = True
    extras: ClassVar[bool] = True

    def detect(self, store: Store) -> bool:
        prefix = ""
        if store.exists(LATEST):
            try:
                prefix = f"{tag_of(store)}/"
            except CkptError:  # reading says what is wrong with it
                return any(is_state(path.rpartition("/")[2]) for path in store.files())
        inside = [path.removeprefix(prefix) for path in store.files() if path.startswith(prefix)]
        return any(is_state(path) for path in inside) and _SIGN not in inside

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        here, prefix = find_step(store)
        return Reader(store, here, prefix, options).catalog(self.name)

    def checksums(self, store: Store, catalog: Catalog) -> Iterator[Checksum]:
        return file_checksums(store, (file.path for file in catalog.files))

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """One file of model states a model-parallel rank (stage 3: a rank), one of partitions a rank, and a run around it."""
        layout = destination_layout(shards)
        step = shards.extras.common.get("step")
        tag = f"global_step{step if isinstance(step, int) else 0}"
        alone = _STEP.fullmatch(shards.where.replace("\\", "/").rstrip("/").rpartition("/")[2]) is not None
        prefix = "" if alone else f"{tag}/"
        placed = list(_placements(shards, layout))
        members = [_members(shards, placed, mp, layout) for mp in range(layout.tp)]
        trained = [{m.name: m for m in mine if "master" in m.held} for mine in members]
        state = write_extras(
            shards,
            layout,
            {name: (m.item, {r for r in m.held if r in STATE_ROLES}) for name, m in trained[0].items()},
        )
        if layout.zero < 3 and round_robin(state.model.get("ds_config")):
            for group in state.groups:
                group.names = balanced_order(group.names, layout.cp * layout.dp)
        bf16 = _main_dtype(members, model_dtype(shards)).name == "bfloat16"
        drafts = list(_drafts(prefix, layout, members, trained, state, bf16))
        laid = lay(drafts)
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=[p.local for p in placed],
            files=laid.files, entries=laid.entries, layout=layout, model=shards.model, names=shards.names,
            extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        taken = {LATEST, *(file.path for file in laid.files)}
        finish = [*small_files(shards, taken), *([] if alone else [(LATEST, tag.encode())])]
        return Destination(
            catalog=catalog, literals=laid.literals, fixups=laid.fixups, finish=lambda written: finish
        )


def destination_layout(shards: Catalog) -> Layout:
    """The layout to write, with DeepSpeed's own cut.

    Raises:
        LayoutError: DeepSpeed's files cannot hold it.
    """
    layout = shards.layout or Layout()
    for name, why in (
        ("pp", "pipeline modules number their layers in a way of their own"),
        ("vpp", "it has no virtual stages"),
        ("ep", "experts of its own modules only are spread over ranks"),
        ("etp", "it cuts experts as everything else"),
    ):
        if getattr(layout, name) > 1:
            raise LayoutError(
                f"deepspeed cannot hold {name}={getattr(layout, name)}: {why}. Use tp, dp and zero=1, 2 or 3"
            )
    if layout.zero in (1, 2):
        if layout.rule not in ("even", "deepspeed"):
            raise LayoutError(
                f"deepspeed cuts the optimizer's state by a rule of its own: write zero={layout.zero}:deepspeed, not :{layout.rule}"
            )
        layout = replace(layout, rule="deepspeed")
    return layout


def _placements(shards: Catalog, layout: Layout) -> Iterable[Placement]:
    """Local tensors of the model-parallel ranks, of what is stored."""
    names: Names | StoredNames
    if shards.model is not None:
        names = shards.model.names(shards.names)
    else:
        names = StoredNames(shards.tensors)
    stored = {tensor for tensor, _ in shards.held}
    for placement in names.placements(Layout(tp=layout.tp)):
        if any(segment.tensor in stored for segment in placement.local.segments):
            yield placement


def _members(shards: Catalog, placed: Sequence[Placement], mp: int, layout: Layout) -> list[Member]:
    """What one model-parallel rank holds, in module order."""
    items = ((number, p.local) for number, p in enumerate(placed) if mp in p.ranks)
    return members_of(shards, items, weights=layout.zero < 3)


def _drafts(
    prefix: str,
    layout: Layout,
    members: Sequence[Sequence[Member]],
    trained: Sequence[Mapping[str, Member]],
    state: State,
    bf16: bool,
) -> Iterator[Draft]:
    """Every file, in the order of ranks."""
    ranks = layout.cp * layout.dp
    config: Any = state.model.get("ds_config")
    at = {
        (int(layout.dense["tp"][r]), int(layout.dense["shard"][r])): r
        for r in np.arange(layout.world).tolist()
    }
    for mp, mine in enumerate(members):
        if layout.zero < 3:
            draft = Draft(f"{prefix}mp_rank_{mp:02d}_model_states.pt", at[mp, 0])
            model_states(draft, mine, state, shapes_of(state.groups, trained[mp]))
            apart = experts(prefix, mp, at[mp, 0], mine, draft.value)
            yield draft
            yield from apart
        for d in range(ranks):
            if layout.zero == 3:
                draft = Draft(f"{prefix}zero_pp_rank_{d}_mp_rank_{mp:02d}_model_states.pt", at[mp, d])
                model_states_3(draft, d, ranks, mine, trained[mp], state)
                yield draft
            if not trained[mp]:
                continue
            path = f"{prefix}{'bf16_' if bf16 else ''}zero_pp_rank_{d}_mp_rank_{mp:02d}_optim_states.pt"
            draft = Draft(path, at[mp, d])
            if layout.zero == 3:
                partition_3(draft, d, ranks, trained[mp], state, config)
            else:
                partition_12(draft, d, ranks, trained[mp], state, max(layout.zero, 1), config)
            yield draft


def _main_dtype(members: Sequence[Sequence[Member]], usual: DType) -> DType:
    """The dtype of most weights; `usual` where there are fp32 copies only. DeepSpeed has bfloat16 in the names of files."""
    sizes: dict[DType, int] = {}
    for m in members[0]:
        if "param" in m.held:
            sizes[m.held["param"]] = sizes.get(m.held["param"], 0) + prod(m.item.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default=usual)
