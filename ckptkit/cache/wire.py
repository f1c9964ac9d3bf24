"""Messages on the daemon's Unix socket: one JSON line each, then the bytes it announces.

    {"id": 7, "call": "seal", "slot": 2, …, "blobs": [16160, 812]}\n   16160 bytes, 812 bytes

`blobs` gives the sizes of byte strings that follow the line, `fds` how many descriptors came along (SCM_RIGHTS). A reply
repeats the `id`; it has `error: {code, detail}` where the call was refused, with the codes of HTTP. Messages without an `id` are
events of the daemon. Both sides keep to limits of size, so that a stranger cannot make the other side hold much memory.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import StoreError

PROTOCOL = 1
"""Version of calls and messages. A daemon speaks this one and the one before."""

OLDEST = 1
"""The oldest version that is still spoken."""

LINE_LIMIT = 4 << 20
"""Bytes of the longest line: `join` of a job of some ten thousand ranks."""

REPLY_BLOB_LIMIT = 1 << 30
"""Bytes of the largest answer: an index."""


@dataclass
class Message:
    """One message. `fds` are owned by whoever takes the message."""

    fields: dict[str, Any]
    blobs: list[bytes] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)


class WireError(StoreError):
    """The other side sent what is no message, or too much; the connection is of no further use."""


def encode(fields: Mapping[str, Any], blobs: Sequence[bytes] = (), fds: int = 0) -> bytes:
    """A message as bytes; the descriptors themselves go with the first of them."""
    plain = dict(fields)
    if blobs:
        plain["blobs"] = [len(blob) for blob in blobs]
    if fds:
        plain["fds"] = fds
    line = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return b"".join((line, *blobs))


class Decoder:
    """Cuts a stream into messages.

    Args:
        line_limit, blob_limit: Bytes of the longest line and of all blobs of one message together.
    """

    def __init__(self, line_limit: int = LINE_LIMIT, blob_limit: int = REPLY_BLOB_LIMIT) -> None:
        self.line_limit, self.blob_limit = line_limit, blob_limit
        self._data = bytearray()
        self._fds: list[int] = []
        self._fields: dict[str, Any] | None = None
        self._sizes: list[int] = []

    @property
    def empty(self) -> bool:
        """Whether no part of a message is waiting for its rest."""
        return not self._data and self._fields is None

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        self._data += data
        self._fds += fds

    def take(self) -> Message | None:
        """The next whole message, or None where more bytes are needed. Raises WireError."""
        if self._fields is None:
            end = self._data.find(b"\n", 0, self.line_limit + 1)
            if end < 0:
                if len(self._data) > self.line_limit:
                    raise WireError(f"a message has more than {self.line_limit} bytes in its line")
                return None
            self._fields, self._sizes = self._parse(bytes(self._data[:end]))
            del self._data[: end + 1]
        if len(self._data) < sum(self._sizes):
            return None
        blobs, at = [], 0
        for size in self._sizes:
            blobs.append(bytes(self._data[at : at + size]))
            at += size
        del self._data[:at]
        fields, self._fields, self._sizes = self._fields, None, []
        count = fields.pop("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._fds):
            raise WireError(f"a message announces {count!r} descriptors, {len(self._fds)} came")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return Message(fields, blobs, fds)

    def _parse(self, line: bytes) -> tuple[dict[str, Any], list[int]]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message is no JSON ({error})") from None
        if not isinstance(fields, dict):
            raise WireError("a message is no JSON object")
        sizes = fields.pop("blobs", [])
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes) or len(sizes) > 8:
            raise WireError("a message announces bytes that make no sense")
        if sum(sizes) > self.blob_limit:
            raise WireError(f"a message announces {sum(sizes)} bytes; at most {self.blob_limit} are taken")
        return fields, sizes
