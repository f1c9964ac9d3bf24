"""Every format, by name and by what a folder looks like."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from ckptkit.errors import FormatError, UsageError
from ckptkit.formats.base import Format
from ckptkit.stores.base import Store

_HOMES = {
    "native": "native:NativeFormat",
    "dcp": "dcp:DcpFormat",
    "megatron": "megatron:MegatronFormat",
    "megatron-legacy": "megatron_legacy:MegatronLegacyFormat",
    "deepspeed-universal": "deepspeed_universal:DeepSpeedUniversalFormat",
    "deepspeed": "deepspeed:DeepSpeedFormat",
    "zarr": "zarr_v3:ZarrFormat",
    "peft": "peft:PeftFormat",
    "hf": "hf:HfFormat",
    "hub": "hub:HubFormat",
    "torch": "torch_file:TorchFormat",
}
"""In the order of detection: those with a marker of their own come first, what takes longer to import after them."""


class _Formats(Mapping[str, Format]):
    """Name to format; modules are imported when asked for."""

    def __getitem__(self, name: str) -> Format:
        return _load(_HOMES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


FORMATS: Mapping[str, Format] = _Formats()


@cache
def _load(home: str) -> Format:
    module, _, name = home.partition(":")
    made: Format = getattr(import_module(f"ckptkit.formats.{module}"), name)()
    return made


def by_name(name: str) -> Format:
    """The format called `name`. Raises UsageError that lists the known ones."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def looks_like(store: Store) -> Format | None:
    """The first format that a folder looks like, or None."""
    return next((format for format in FORMATS.values() if format.detect(store)), None)


def detect(store: Store) -> Format:
    """The format of a folder.

    Raises:
        FormatError: it looks like none; says what is there.
    """
    found = looks_like(store)
    if found is not None:
        return found
    files = store.files()
    seen = ", ".join(files[:8]) + (f" and {len(files) - 8} more" if len(files) > 8 else "") or "no file"
    hints = []
    if any(path.endswith(".safetensors") for path in files):
        hints.append(
            "several safetensors files without an index (model.safetensors.index.json) belong to no checkpoint"
        )
    if any("/" in path for path in files):
        hints.append("a checkpoint may lie in a folder below")
    raise FormatError(
        f"{store.url} is no checkpoint of a known format ({', '.join(FORMATS)}): it has {seen}. "
        + "; ".join(hints or ["give the folder that holds the weights, or the format with --from"]),
        file=store.url,
    )
