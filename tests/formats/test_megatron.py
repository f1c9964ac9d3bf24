"""Megatron-core's distributed checkpoints: the suite, every form of optimizer state, and what is refused."""

from ckptkit.formats.megatron import MegatronFormat
from ckptkit.formats.suite import FormatSuite


class TestMegatron(FormatSuite):
    make = MegatronFormat
