"""The folders of a legacy Megatron checkpoint: which rank's state each one is, and what that rank calls its tensors.

    mp_rank_TT              one folder for each tensor-parallel rank
    mp_rank_TT_PPP          with pipeline stages
    mp_rank_TT_EEE          with expert parallelism, on one stage: only the layout tells it from the one before
    mp_rank_TT_PPP_EEE      with both

Inside, layers and experts are numbered from 0 on each rank, and each virtual stage is a model of its own.
Source: Megatron-LM, `megatron/training/checkpointing.py` (`get_checkpoint_name`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.names import Names
from ckptkit.errors import FormatError, LayoutError
from ckptkit.formats.megatron_buffers import Group, chunk_of, padded_placements
from ckptkit.formats.megatron_keys import Numbered

STATE = "model_optim_rng.pt"
FLAT = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True, slots=True)
class Part:
    """One folder: the model-parallel coordinate of its ranks.

    Attributes:
        ranks: Ranks whose state it is; the first one stands for all.
        dense, expert: The model-parallel groups whose flat optimizer state lies here, or None.
    """

    tp: int
    pp: int
    ep: int
    folder: str
    ranks: tuple[int, ...]
    dense: Group | None
    expert: Group | None


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of one folder: its family's name, the rank's own name for it, its model chunk, and what it is."""

    name: str
    key: str
    chunk: int
    local: LocalTensor
    expert: bool


def parts_of(layout: Layout) -> list[Part]:
    """Every folder of a layout: one for each coordinate at which a rank saves.

    Raises:
        LayoutError: two ranks of one coordinate hold different experts.
    """
    dense, expert = layout.dense, layout.expert
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world):
        if dense["shard"][rank] == 0 or expert["shard"][rank] == 0:
            at = int(dense["tp"][rank]), int(dense["pp"][rank]), int(expert["ep"][rank])
            found.setdefault(at, []).append(rank)
    made = []
    for (tp, pp, ep), ranks in sorted(found.items()):
        if len({int(expert["etp"][rank]) for rank in ranks}) > 1:
            raise LayoutError(
                f"layout {layout}: ranks of tensor-parallel rank {tp} hold different shares of an expert, which the folders of "
                "this format cannot tell apart; choose an etp that divides tp"
            )
        folder = f"mp_rank_{tp:02d}"
        folder += f"_{pp:03d}" if layout.pp > 1 else ""
        folder += f"_{ep:03d}" if layout.ep > 1 else ""
        owners = [rank for rank in ranks if expert["shard"][rank] == 0]
        here = any(dense["shard"][rank] == 0 for rank in ranks)
        etp = int(expert["etp"][owners[0]]) if owners else 0
        made.append(
            Part(
                tp, pp, ep, folder, tuple(ranks), Group(False, pp * layout.tp + tp) if here else None,
                Group(True, (pp * layout.ep + ep) * layout.etp + etp) if owners and layout.ep > 1 else None,
            )
        )  # fmt: skip
    return made


def folders(paths: Sequence[str]) -> list[str]:
    """The folders of ranks among a checkpoint's files, sorted."""
    found = (path.rpartition("/") for path in paths)
    return sorted(folder for folder, _, name in found if name == STATE and _FOLDER.fullmatch(folder))


def guess_layout(names: Sequence[str]) -> Layout:
    """The layout of folders whose files do not tell: second numbers are pipeline stages.

    Raises:
        FormatError: no layout has these folders.
    """
    numbers = [_FOLDER.fullmatch(name) for name in names]
    tp, pp, ep = (1 + max(int(m[k] or 0) for m in numbers if m is not None) for k in (1, 2, 3))
    try:
        return Layout(tp=tp, pp=pp, ep=ep, dp=max(1, -(-ep // tp)) if ep > 1 else 1)
    except LayoutError as error:
        raise FormatError(
            f"the folders {', '.join(names[:4])} are of no layout: {error}. Give it with --source-layout"
        ) from None


def held_by(
    names: Names,
    numbered: Mapping[str, Numbered],
    layout: Layout,
    parts: Sequence[Part],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    order: Sequence[str] = (),
) -> dict[str, list[Held]]:
    """What every folder holds, in module order (`order` where that is not the family's).

    `shapes` are those of whole tensors whose padding is not this model's usual one.
    """
    part_of = {part.ranks[0]: part for part in parts}
    experts = names.model.sizes.get("expert", 0) // layout.ep
    placements = list(padded_placements(names, layout, shapes or {}))
    stage_of = layout.dense["pp"]
    first: dict[tuple[int, int], int] = {}
    for p in placements:
        number = numbered[p.local.key].number
        if number >= 0:
            at = int(stage_of[p.ranks[0]]), chunk_of(numbered[p.local.key], names.model.layers, layout)
            first[at] = min(number, first.get(at, number))
    found: dict[str, list[Held]] = {part.folder: [] for part in parts}
    for p in placements:
        n = numbered[p.local.key]
        chunk = chunk_of(n, names.model.layers, layout)
        for rank in p.ranks.tolist():
            part = part_of.get(rank)
            if part is None:
                continue
            number = n.number - first[part.pp, chunk] if n.number >= 0 else -1
            key = n.local(number, n.expert - part.ep * experts)
            found[part.folder].append(Held(n.name, key, chunk, p.local, p.expert))
    if order:
        place = {name: k for k, name in enumerate(order)}
        for items in found.values():
            items.sort(key=lambda item: place[item.name])
    return found
