"""DeepSpeed's folders: a run with a tag, and the files of one step by rank.

    latest                                                   (a run) the tag of the newest step; written last
    <tag>/mp_rank_<mm>_model_states.pt                       stages 0 to 2: one a model-parallel rank
          zero_pp_rank_<d>_mp_rank_<mm>_model_states.pt      stage 3: one a rank
          [bf16_]zero_pp_rank_<d>_mp_rank_<mm>_optim_states.pt
          layer_<l>_expert_<e>_mp_rank_<mm>_model_states.pt  DeepSpeed-MoE: one an expert
          expp_rank_<x>_mp_rank_<mm>_optim_states.pt         DeepSpeed-MoE without ZeRO
          layer_<ll>-model_<mm>-model_states.pt              pipeline modules: one a layer

What the names call `pp_rank` is the data-parallel rank. Source: DeepSpeed 0.19, `runtime/engine.py`, `runtime/pipe/module.py`.
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.errors import FormatError, ShardMissingError, UnsafeError
from ckptkit.formats.carried import CarriedFiles, carried
from ckptkit.formats.megatron_folder import Subfolder
from ckptkit.formats.plain import to_plain
from ckptkit.formats.standins import StoredTensor
from ckptkit.formats.torch_zip import Window, open_archive
from ckptkit.stores.base import Store

LATEST = "latest"
MODEL = re.compile(r"mp_rank_(?P<mp>\d{1,6})_model_states\.pt")
MODEL_3 = re.compile(r"zero_pp_rank_(?P<dp>\d{1,7})_mp_rank_(?P<mp>\d{1,6})_model_states\.pt")
OPTIM = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d{1,7})_mp_rank_(?P<mp>\d{1,6})_?optim_states\.pt")
EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_model_states\.pt"
)
EXPERT_OPTIM = re.compile(r"expp_rank_(?P<ep>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_optim_states\.pt")
LAYER = re.compile(r"layer_(?P<layer>\d{1,6})-model_(?P<mp>\d{1,6})-model_states\.pt")


class StateFile:
    """An opened `.pt` file: its value with stand-ins, and where its tensors lie. Keeps no file open."""

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path = store, path
        with store.open(path) as reader:
            self.archive = open_archive(reader, path)
        self.value: dict[Any, Any] = self.archive.value
        if isinstance(self.archive.value, StoredTensor):
            self.value = {"": self.archive.value}  # a step of the universal form
        elif not isinstance(self.archive.value, dict):
            raise FormatError(
                f"{path} holds a {type(self.archive.value).__name__}, not a dictionary", file=path
            )

    def place(self, tensor: StoredTensor) -> int:
        """Where a tensor's first element is in the file."""
        return self.archive.place(tensor)

    def plain(self, value: Any) -> Any:
        """A value as JSON, small tensors with their content."""
        with self.store.open(self.path) as reader:
            archive = replace(self.archive, window=Window(reader, 0, reader.size, self.path))
            return to_plain(value, archive.content)

    def field(self, name: str, kind: type | tuple[type, ...], of: Any = None) -> Any:
        """A field of the file's dictionary, or of one inside it. Raises FormatError where it is absent or of another kind."""
        inside = self.value if of is None else of
        found = inside.get(name) if isinstance(inside, dict) else None
        if not isinstance(found, kind):
            raise FormatError(f"{self.path} has no {name!r} as DeepSpeed writes it", file=self.path)
        return found


@dataclass
class Files:
    """Paths of one step. Keys are `(mp, dp)`; where there is one file for all data-parallel ranks, `dp` is 0."""

    models: dict[tuple[int, int], str] = field(default_factory=dict)
    optims: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)  # (layer, expert, mp)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)  # (layer, mp)
    expert_optims: list[str] = field(default_factory=list)
    bf16: bool = False
    stage3: bool = False


def list_files(store: Store) -> Files:
    """Sort the files of a step's folder.

    Raises:
        FormatError: files of two saves lie in it.
    """
    found = Files()
    kinds = set()
    for path in store.files():
        if match := MODEL.fullmatch(path):
            found.models[int(match["mp"]), 0] = path
            kinds.add("mp_rank_…_model_states.pt")
        elif match := MODEL_3.fullmatch(path):
            found.models[int(match["mp"]), int(match["dp"])] = path
            found.stage3 = True
            kinds.add("zero_pp_rank_…_model_states.pt")
        elif match := OPTIM.fullmatch(path):
            rank = int(match["mp"]), int(match["dp"])
            if rank in found.optims:
                raise FormatError(
                    f"{store.url} has both {found.optims[rank]} and {path}: two saves lie in one folder. Keep one of them",
                    file=path,
                )
            found.optims[rank] = path
            found.bf16 = found.bf16 or match["bf16"] is not None
        elif match := EXPERT.fullmatch(path):
            found.experts[int(match["layer"] or 0), int(match["expert"]), int(match["mp"])] = path
        elif match := LAYER.fullmatch(path):
            found.layers[int(match["layer"]), int(match["mp"])] = path
        elif EXPERT_OPTIM.fullmatch(path):
            found.expert_optims.append(path)
    if len(kinds) > 1:
        raise FormatError(
            f"{store.url} has {' and '.join(sorted(kinds))}: saves of two ZeRO stages lie in one folder. Keep one of them",
            file=store.url,
        )
    return found


def open_all(store: Store, paths: Mapping[Any, str]) -> dict[Any, StateFile]:
    """Open files in parallel."""
    with ThreadPoolExecutor(min(store.parallel, 16)) as pool:
        opened = pool.map(lambda path: StateFile(store, path), paths.values())
        return dict(zip(paths, opened, strict=True))


def tag_of(store: Store, tracker: str = LATEST) -> str | None:
    """The folder that a run's tracker names, or None where there is no tracker.

    Raises:
        UnsafeError: the tracker points out of the run's folder.
    """
    if not store.exists(tracker):
        return None
    text = store.read(tracker, 0, min(store.size(tracker), 512)).decode("utf-8", "replace").strip()
    if not text:
        raise FormatError(
            f"{tracker} of {store.url} is empty. Write the tag of a whole step into it", file=tracker
        )
    if text in (".", "..") or any(sign in text for sign in "/\\\0\n"):
        raise UnsafeError(
            f"{tracker} of {store.url} names {text[:60]!r}, which is no folder of it; nothing was read",
            file=tracker,
        )
    return text


def find_step(store: Store, tracker: str = LATEST, sign: str | None = None) -> tuple[Store, str]:
    """The folder of the step that a run or folder means: a store, and what its paths begin with.

    Args:
        sign: A file that a step's own folder has, beside those of model states.

    Raises:
        ShardMissingError: there is no tracker and no file of a step, or the tracker names a folder that is not there.
    """
    tag = tag_of(store, tracker)
    if tag is None:
        here = store.files()
        if any(is_state(path) for path in here) and (sign is None or sign in here):
            return store, ""
        raise ShardMissingError(
            f"{store.url} has no {tracker}, which is written last: the save did not end, or this is no DeepSpeed checkpoint. "
            "Give the folder of one step",
            file=tracker,
        )
    found = Subfolder(store, tag)
    if not found.files():
        raise ShardMissingError(
            f"{tracker} of {store.url} says {tag}, which is not there. Restore that folder, or write the tag of a step that "
            "is there into it",
            file=tag,
        )
    return found, found.prefix


def carried_files(store: Store, warnings: list[str]) -> CarriedFiles:
    """Files that travel with the weights; not the scripts that DeepSpeed puts into every run."""
    every = carried(store, warnings)
    return CarriedFiles(
        store, [name for name in every if name not in ("zero_to_fp32.py", "zero_to_torch.py")]
    )


def is_state(path: str) -> bool:
    """Whether a file is one of model states."""
    return any(pattern.fullmatch(path) for pattern in (MODEL, MODEL_3))
