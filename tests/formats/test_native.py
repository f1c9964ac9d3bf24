"""The native format."""

from ckptkit.formats.native import NativeFormat
from ckptkit.formats.suite import FormatSuite


class TestNative(FormatSuite):
    make = NativeFormat
    digests = True
