"""One file as a checkpoint of its own: its folder, without the other files of weights."""

import os
from collections.abc import Sequence

from ckptkit.stores.local import LocalStore

WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".index.json", ".distcp")
"""Ends of names of files that hold weights, or tell which files do."""


class SingleFileStore(LocalStore):
    """The file at `path`, with the small files beside it (a configuration, a tokenizer)."""

    def __init__(self, path: str) -> None:
        folder, self._name = os.path.split(os.path.abspath(path))
        super().__init__(folder)
        self.url = path

    def files(self) -> Sequence[str]:
        """The file, and what beside it holds no weights. Nothing of folders below."""
        beside = (entry.name for entry in os.scandir(self.root) if entry.is_file())
        return sorted(name for name in beside if self._is_part(name))

    def exists(self, path: str) -> bool:
        return self._is_part(path) and super().exists(path)

    def _is_part(self, name: str) -> bool:
        return name == self._name or not (name.endswith(WEIGHTS) or "/" in name or name.startswith("."))
