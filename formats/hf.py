"""Checkpoints as Hugging Face Transformers writes them: safetensors files with its names, and configuration and tokenizer files."""

from typing import ClassVar

from ckptkit.formats.safetensors_folder import SafetensorsFolder


class HfFormat(SafetensorsFolder):
    """Names of Transformers. Also reads other families' names but the hub's, and models that no schema covers."""

    name: ClassVar[str] = "hf"
    names: ClassVar[str] = "transformers"

    def accepts(self, family: str) -> bool:
        return family != "hub"
