"""One file as a checkpoint of its own: its folder, without the other files of weights."""

from collections.abc import Sequence

from ckptkit.errors import StoreError
from ckptkit.stores.base import Reader, Store

WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".index.json", ".distcp")
"""Ends of names of files that hold weights, or tell which files do."""


class SingleFileStore(Store):
    """One file, with the small files beside it (a configuration, a tokenizer).

    Args:
        folder: The folder that it lies in; need not list what lies in folders below.
        url: Of the file. `name`: its name in the folder.
    """

    def __init__(self, folder: Store, url: str, name: str) -> None:
        self.folder, self.url, self._name = folder, url, name
        self.parallel, self.readers = folder.parallel, folder.readers

    def files(self) -> Sequence[str]:
        """The file, and what beside it holds no weights."""
        try:
            beside = self.folder.files()
        except StoreError:  # a web server need not list its folders
            beside = []
        return sorted({self._name, *filter(self._is_part, beside)})

    def exists(self, path: str) -> bool:
        return self._is_part(path) and self.folder.exists(path)

    def size(self, path: str) -> int:
        return self.folder.size(path)

    def identity(self, path: str) -> str:
        return self.folder.identity(path)

    def open(self, path: str) -> Reader:
        return self.folder.open(path)

    def refresh(self) -> None:
        self.folder.refresh()

    def age_s(self) -> float:
        return self.folder.age_s()

    def local_path(self, path: str) -> str | None:
        return self.folder.local_path(path)

    def _is_part(self, name: str) -> bool:
        return name == self._name or not (name.endswith(WEIGHTS) or "/" in name or name.startswith("."))
