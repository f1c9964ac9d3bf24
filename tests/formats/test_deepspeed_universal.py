"""DeepSpeed's universal checkpoints: the suite; real files are tried in tests/peers."""

from ckptkit.formats.deepspeed_universal import DeepSpeedUniversalFormat
from ckptkit.formats.suite import FormatSuite


class TestDeepSpeedUniversal(FormatSuite):
    make = DeepSpeedUniversalFormat
