"""Files that travel with weights: configuration, tokenizer, templates, licences. Read when asked for."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from ckptkit.errors import UnsafeError
from ckptkit.stores.base import Store

PATTERNS = (
    "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files of the root that are carried. Python files are those of models with code of their own; they are copied, never run."""

NOT_CARRIED = ("*.index.json", "manifest.json", "metadata.json", "trainer_state.json", "zarr.json")
"""What describes the files of one checkpoint, and would be wrong beside others."""

LARGEST = 64 << 20
"""Bytes of one carried file; a larger one is no configuration."""


class CarriedFiles(Mapping[str, bytes]):
    """Small files of a store, name to content, each read when it is asked for."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self._store = store
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return self._store.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def carried(store: Store, warnings: list[str]) -> CarriedFiles:
    """What to carry from the root of a checkpoint. Files that are too large are left out with a warning."""
    names = []
    for path in store.files():
        if "/" in path or not _matches(path, PATTERNS) or _matches(path, NOT_CARRIED):
            continue
        size = store.size(path)
        if size > LARGEST:
            warnings.append(
                f"{path} has {size} bytes, too many for a file that is carried along; it was left out"
            )
        else:
            names.append(path)
    return CarriedFiles(store, names)


def check_names(files: Mapping[str, bytes], taken: Collection[str] = frozenset()) -> None:
    """Raise UnsafeError for carried files that would be written outside a checkpoint's folder, or over its weights."""
    for name in files:
        if (
            "/" in name
            or "\\" in name
            or name in ("", ".", "..")
            or "\0" in name
            or name in taken
            or name.startswith(".")
        ):
            raise UnsafeError(
                f"the source carries a file called {name!r}, which would overwrite something else. Nothing was written; do not "
                "trust this checkpoint before you know why",
                file=name,
            )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
