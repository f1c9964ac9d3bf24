"""Folders of safetensors files: `hf` and `hub`."""

from ckptkit.formats.hf import HfFormat
from ckptkit.formats.hub import HubFormat
from ckptkit.formats.suite import FormatSuite


class TestHf(FormatSuite):
    make = HfFormat


class TestHub(FormatSuite):
    make = HubFormat
