"""Megatron's legacy checkpoints: the suite, golden buffers, and what is refused."""

from ckptkit.formats.megatron_legacy import MegatronLegacyFormat
from ckptkit.formats.suite import FormatSuite


class TestMegatronLegacy(FormatSuite):
    make = MegatronLegacyFormat
