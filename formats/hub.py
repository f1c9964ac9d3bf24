"""Checkpoints under the names of a model's original release, where these are not those of Transformers (ZAYA1-base)."""

from typing import ClassVar

from ckptkit.formats.safetensors_folder import SafetensorsFolder


class HubFormat(SafetensorsFolder):
    """Original names: safetensors files with their index, as `hf`."""

    name: ClassVar[str] = "hub"
    names: ClassVar[str] = "hub"
