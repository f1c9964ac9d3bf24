"""`manifest.json`, which makes a native checkpoint whole, and the ranks' `.extras`.

Both are JSON. The manifest is indented, its keys sorted but for `checksum`, which comes last: the xxh3-128 of the file with its
32 hex digits as zeros.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ckptkit.core.catalog import Extras
from ckptkit.core.layouts import Layout
from ckptkit.errors import CorruptionError, FormatError, LayoutError, UnsafeError
from ckptkit.formats.carried import check_names
from ckptkit.formats.native_columns import RANK_FILE, file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.stores.base import Store

NAME = "manifest.json"
INDEX = "index.npz"
FORMAT = "ckptkit-native"
VERSION = 1
_ZEROS = "0" * 32
_TAIL = '"\n}\n'
_PRINT = re.compile("[0-9a-f]{16}")


_KINDS: dict[str, tuple[type, ...]] = {
    "index": (str,), "names": (str,), "schema": (str, type(None)), "model": (dict, type(None)), "step": (int, type(None)),
    "epoch": (int,), "incarnation": (str,), "lineage": (list,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's files, as the manifest lists them. Digests are 32 hex digits."""

    path: str
    size: int
    digest: str
    extras: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        index: xxh3-128 of `index.npz`, in hex.
        files: By rank.
        layout: As `--layout` takes it.
        names: Family of names that local tensors have.
        schema: `name@version`, or None where the model is unknown.
        model: The model's configuration, or None.
        step: Completed optimizer steps, or None.
        epoch: How often the run was restarted from an earlier step.
        incarnation: 32 hex digits that tell one start of the run from another, or empty.
        lineage: Where it comes from, the nearest source first: url, format, layout, content digests.
        fingerprints: `tensor/role` to 16 hex digits (`ckptkit.core.fingerprints`), or None where they were not taken.
    """

    index: str
    files: Sequence[RankFile]
    layout: Layout
    names: str
    schema: str | None = None
    model: Mapping[str, Any] | None = None
    step: int | None = None
    epoch: int = 0
    incarnation: str = ""
    lineage: Sequence[Any] = field(default_factory=list)
    fingerprints: Mapping[str, str] | None = None

    def to_bytes(self) -> bytes:
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "index": self.index,
            "world": len(self.files),
            "files": [
                {"path": f.path, "size": f.size, "digest": f.digest, "extras": f.extras} for f in self.files
            ],
            "layout": str(self.layout),
            "layout_fields": self.layout.as_dict(),
            "zero": {"stage": self.layout.zero, "rule": self.layout.rule},
            "names": self.names,
            "schema": self.schema,
            "model": self.model,
            "step": self.step,
            "epoch": self.epoch,
            "incarnation": self.incarnation,
            "lineage": list(self.lineage),
        }
        if self.fingerprints is not None:
            plain["fingerprints"] = dict(self.fingerprints)
        head = json.dumps(plain, indent=1, sort_keys=True, allow_nan=False)[:-2] + ',\n "checksum": "'
        digest = xxhash.xxh3_128_hexdigest((head + _ZEROS + _TAIL).encode())
        return (head + digest + _TAIL).encode()

    @classmethod
    def read(cls, store: Store) -> "Manifest":
        """The manifest of a checkpoint.

        Raises:
            ShardMissingError: there is none.
            CorruptionError: it does not match its checksum.
            FormatError: it is of another format or version, or does not make sense.
            UnsafeError: it names a file outside the checkpoint.
        """
        return cls.parse(f"{store.url}/{NAME}", store.read(NAME))

    @classmethod
    def parse(cls, path: str, data: bytes) -> "Manifest":
        """As `read`, from bytes; `path` is for messages."""
        plain = load_json(path, data)
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise FormatError(f"{path} is no manifest of a native checkpoint", file=path)
        if plain.get("version") != VERSION:
            raise FormatError(
                f"{path} has format version {plain.get('version')!r}; this ckptkit reads {VERSION}. Update ckptkit",
                file=path,
            )
        tail = len(_TAIL)
        stated = data[-32 - tail : -tail].decode("ascii", "replace")
        if plain.get("checksum") != stated or stated != xxhash.xxh3_128_hexdigest(
            data[: -32 - tail] + (_ZEROS + _TAIL).encode()
        ):
            raise CorruptionError(
                f"{path} does not match its checksum: it was changed after it was written", file=path
            )
        try:
            found = cls(
                index=plain["index"],
                files=[RankFile(f["path"], f["size"], f["digest"], f["extras"]) for f in plain["files"]],
                layout=Layout.parse(plain["layout"]),
                fingerprints=plain.get("fingerprints"),
                **{
                    name: plain[name]
                    for name in ("names", "schema", "model", "step", "epoch", "incarnation", "lineage")
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path} does not make sense: {error}", file=path) from None
        found._check(path)
        return found

    def _check(self, path: str) -> None:
        for name, kinds in _KINDS.items():
            if type(getattr(self, name)) not in kinds:
                raise FormatError(f"{path}: {name} is {getattr(self, name)!r}", file=path)
        for rank, file in enumerate(self.files):
            if not isinstance(file.path, str) or not RANK_FILE.fullmatch(file.path):
                raise UnsafeError(
                    f"{path} names the file {file.path!r}, which no native checkpoint has", file=path
                )
            if file.path != file_name(rank) or type(file.size) is not int:
                raise FormatError(f"{path}: file {rank} is called {file.path!r}", file=path)
        prints = self.fingerprints if isinstance(self.fingerprints, dict) else {"": self.fingerprints}
        wrong = [v for v in prints.values() if not (isinstance(v, str) and _PRINT.fullmatch(v))]
        if self.fingerprints is not None and wrong:
            raise FormatError(f"{path}: {wrong[0]!r} is no fingerprint", file=path)
        if len(self.files) != self.layout.world:
            raise FormatError(
                f"{path} lists {len(self.files)} rank files for {self.layout.world} ranks", file=path
            )


def load_json(path: str, data: bytes) -> Any:
    """Parse a JSON file of ours. Raises FormatError that names the file."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path} is not valid JSON ({error}); it was damaged or cut short", file=path
        ) from None


def extras_name(file: str) -> str:
    """`rank-00003.extras` of `rank-00003.safetensors`."""
    return file.removesuffix(".safetensors") + ".extras"


def digests_name(file: str) -> str:
    """`rank-00003.digests` of `rank-00003.safetensors`."""
    return file.removesuffix(".safetensors") + ".digests"


def extras_bytes(
    extras: Extras,
    layout: Layout,
    rank: int,
    about: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> bytes:
    """The `.extras` file of one rank: what belongs to its coordinate, and on rank 0 all that belongs to none.

    Args:
        about: Of `about`. On rank 0 it is carried along, so that rank files, digests and extras are enough to make the manifest.
        own: What a trainer's rank says for itself: `by_sample`, a list with its loader's state, and `by_tensor`, by canonical name
            what its optimizer keeps of one tensor beside arrays (a `step` other than the group's).

    Raises:
        LayoutError: a value is no plain JSON, or a coordinate is none of the layout's.
    """
    plain: dict[str, Any] = {"version": VERSION, "rank": rank}
    here = coordinate_name(layout, rank)
    if here in extras.by_coordinate:
        plain["by_coordinate"] = {here: extras.by_coordinate[here]}
    if rank == 0:
        plain |= {"common": extras.common, "by_sample": extras.by_sample}
        plain["files"] = {name: _as_json(data) for name, data in extras.files.items()}
        if about is not None:
            plain["about"] = dict(about)
    plain |= own or {}
    try:
        return json.dumps(
            plain, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise LayoutError(f"extras of rank {rank} are no plain JSON: {error}") from None


def about(layout: Layout, names: str, schema: str | None, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a manifest says about the whole checkpoint that no digest file says; the same for every step of a layout."""
    return {"layout": str(layout), "names": names, "schema": schema, "model": model}


def manifest_of(
    path: str, extras: bytes, digests: Sequence[RankDigests], lineage: Sequence[Any] = ()
) -> Manifest:
    """The manifest of rank files that lie somewhere without one.

    Args:
        path: For messages.
        extras: The `.extras` of rank 0, compared with its digest here.
        digests: Of all ranks, in order.

    Raises:
        FormatError: ranks are missing or belong to different checkpoints, or rank 0's extras do not describe the checkpoint.
        CorruptionError: the extras are not those that rank 0's digests name.
    """
    first = digests[0]
    ours = [(d.rank, d.world, d.index, d.step, d.epoch, d.incarnation) for d in digests]
    if ours != [
        (rank, len(digests), first.index, first.step, first.epoch, first.incarnation)
        for rank in range(first.world)
    ]:
        raise FormatError(
            f"{path}: its {len(digests)} digest files are not those of all ranks of one step", file=path
        )
    files = [
        RankFile(file_name(d.rank), d.data_start + d.data_size, d.content.hex(), d.extras.hex())
        for d in digests
    ]
    return assembled(
        path, extras, files, index=first.index.hex(), step=first.step, epoch=first.epoch,
        incarnation=first.incarnation.hex() if any(first.incarnation) else "", lineage=lineage,
    )  # fmt: skip


def assembled(
    path: str, extras: bytes, files: Sequence[RankFile], *, index: str, step: int | None, epoch: int, incarnation: str,
    lineage: Sequence[Any] = (),
) -> Manifest:  # fmt: skip
    """As `manifest_of`, from what the digests of all ranks say."""
    if xxhash.xxh3_128_hexdigest(extras) != files[0].extras:
        raise CorruptionError(
            f"{path}: the extras of rank 0 are not what was written: their digest differs", file=path
        )
    plain = load_json(path, extras)
    try:
        said = plain["about"]
        found = Manifest(
            index=index, files=list(files), layout=Layout.parse(said["layout"]), names=said["names"], schema=said["schema"],
            model=said["model"], step=step, epoch=epoch, incarnation=incarnation, lineage=list(lineage),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path}: the extras of rank 0 do not say what the checkpoint is ({error!r})", file=path
        ) from None
    found._check(path)
    return found


def check_extras(extras: Extras, layout: Layout) -> None:
    """Raise LayoutError, before any byte moves, for extras that `extras_bytes` could not write."""
    check_names(extras.files)
    known = {coordinate_name(layout, rank) for rank in range(layout.world)}
    strange = sorted(extras.by_coordinate.keys() - known)
    if strange:
        raise LayoutError(
            f"extras of coordinate {strange[0]} have no rank in layout {layout}; drop or rename them"
        )
    empty = Extras(extras.common, {}, extras.by_sample, {})
    extras_bytes(empty, layout, 0)
    for rank in range(layout.world) if extras.by_coordinate else ():
        extras_bytes(Extras({}, extras.by_coordinate), layout, rank)


def coordinate_name(layout: Layout, rank: int) -> str:
    """`tp=0,pp=1,cp=0,dp=3`: how extras are keyed."""
    return ",".join(f"{axis}={index}" for axis, index in layout.coordinate(rank).items())


def read_extras(store: Store, files: Sequence[RankFile]) -> Extras:
    """The extras of all ranks together.

    Raises:
        ShardMissingError: a rank's file is absent.
        CorruptionError: one does not match the manifest.
    """
    extras = Extras()
    by_tensor: dict[str, dict[str, Any]] = {}

    def load(file: RankFile) -> dict[str, Any]:
        path = extras_name(file.path)
        data = store.read(path)
        if xxhash.xxh3_128_hexdigest(data) != file.extras:
            raise CorruptionError(
                f"{path} in {store.url} is not what was written: its digest differs", file=path
            )
        plain = load_json(path, data)
        return plain if isinstance(plain, dict) else {}

    with ThreadPoolExecutor(max(1, min(store.parallel, len(files)))) as pool:
        for file, plain in zip(files, pool.map(load, files), strict=True):
            try:
                extras.common.update(plain.get("common", {}))
                extras.by_coordinate.update(plain.get("by_coordinate", {}))
                extras.by_sample.extend(plain.get("by_sample", []))
                for tensor, facts in plain.get("by_tensor", {}).items():
                    by_tensor.setdefault(tensor, {}).update(facts)
                extras.files = {
                    **extras.files,
                    **{k: _from_json(v) for k, v in plain.get("files", {}).items()},
                }
            except (AttributeError, TypeError, KeyError, ValueError) as error:
                path = extras_name(file.path)
                raise FormatError(f"{path} does not make sense: {error}", file=path) from None
    check_names(extras.files)
    if by_tensor:
        extras.common["by_tensor"] = by_tensor
        _uneven_steps(extras.common.get("groups"), by_tensor)
    return extras


def _uneven_steps(groups: Any, by_tensor: Mapping[str, Mapping[str, Any]]) -> None:
    """Tell the optimizer groups of tensors that were stepped another number of times than their group."""
    for group in groups if isinstance(groups, list) else ():
        uneven = {
            name: by_tensor[name]["step"]
            for name in group.get("tensors", ())
            if "step" in by_tensor.get(name, {})
        }
        if uneven:
            group["steps"] = {**group.get("steps", {}), **uneven}


def _as_json(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _from_json(value: Mapping[str, str]) -> bytes:
    if "text" in value:
        return value["text"].encode()
    return base64.b64decode(value["base64"], validate=True)
