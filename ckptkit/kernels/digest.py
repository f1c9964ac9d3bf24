"""Leaf digests: XXH3-128 (seed 0, default secret) of each `leaf_nbytes` of a buffer, bit-equal to `xxhash`.

This is the digest that ckptkit's own checkpoints store per leaf, here computed where the bytes are. Within a
block of 1,024 bytes XXH3 only adds, so that its sixteen stripes can be summed at once; blocks follow one another
(a scramble lies between them); leaves are independent of each other and give the parallelism.
Source of the algorithm: the XXH3 part of xxhash.h, https://github.com/Cyan4973/xxHash.
"""

from functools import cache

import numpy as np
import torch
import xxhash

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch

LEAF_NBYTES = 1 << 20
BLOCK_NBYTES = 1024  # sixteen stripes of 64 bytes: what the 192-byte secret serves before a scramble
DIGEST_NBYTES = 16

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MX1 = 0x165667919E3779F9
_START = (P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1)

# Words of `constants`: the secret read at every multiple of 8, and again at the three offsets that are none.
SECRET_AT, START_AT, LAST_AT, LOW_AT, HIGH_AT = 0, 24, 32, 40, 48


@cache
def constants(device: torch.device) -> torch.Tensor:
    """The 56 words that the kernels read, int64, on `device`."""

    def words(offset: int, count: int) -> np.ndarray:
        return np.frombuffer(SECRET, "<u8", count, offset)

    table = np.concatenate(
        [words(0, 24), np.array(_START, "<u8"), words(121, 8), words(11, 8), words(117, 8)],
    )
    return torch.from_numpy(table.view(np.int64).copy()).to(device)


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """`data` as uint8 [nbytes], without a copy.

    Raises:
        UsageError: It is not contiguous, so its bytes are no one range.
    """
    if not data.is_contiguous():
        raise UsageError(f"a tensor of shape {tuple(data.shape)} is not contiguous: digest a contiguous copy")
    if data.dtype == torch.uint8 and data.dim() == 1:
        return data
    if not data.numel():
        return data.new_empty(0, dtype=torch.uint8)
    return (data.detach() if data.requires_grad else data).view(-1).view(torch.uint8)


def leaf_count(nbytes: int, leaf_nbytes: int) -> int:
    """How many leaves `nbytes` have; the last may be short. Leaves are whole blocks.

    Raises:
        UsageError: `leaf_nbytes` is no positive multiple of 1,024.
    """
    if leaf_nbytes <= 0 or leaf_nbytes % BLOCK_NBYTES:
        raise UsageError(f"a leaf is a positive multiple of {BLOCK_NBYTES} bytes, not {leaf_nbytes}")
    return -(-nbytes // leaf_nbytes)


def leaf_digests(
    data: torch.Tensor, leaf_nbytes: int = LEAF_NBYTES, backend: str | None = None
) -> torch.Tensor:
    """XXH3-128 of every leaf of `data`'s bytes.

    Args:
        data: Any contiguous tensor; its bytes in memory order are digested.
        leaf_nbytes: A multiple of 1,024. The last leaf may have any length.
        backend: See `ckptkit.kernels.dispatch`.

    Returns:
        uint8 [leaves, 16] on the device of `data`, each row in xxhash's canonical (big-endian) order.
    """
    digests: torch.Tensor = dispatch.choose("leaf_digests", data.device, backend)(data, leaf_nbytes)
    return digests


def leaf_digests_torch(data: torch.Tensor, leaf_nbytes: int = LEAF_NBYTES) -> torch.Tensor:
    """`leaf_digests` without a kernel: `xxhash` on the CPU; elsewhere torch operations, but for a short last leaf."""
    raw = as_bytes(data)
    count = leaf_count(raw.numel(), leaf_nbytes)
    out = torch.empty(count, DIGEST_NBYTES, dtype=torch.uint8, device=raw.device)
    whole = 0 if raw.device.type == "cpu" else raw.numel() // leaf_nbytes
    if whole:
        out[:whole] = whole_leaf_digests(raw[: whole * leaf_nbytes].view(whole, leaf_nbytes))
    for leaf in range(whole, count):
        part = raw[leaf * leaf_nbytes : (leaf + 1) * leaf_nbytes].cpu().numpy().data
        out[leaf] = torch.frombuffer(bytearray(xxhash.xxh3_128_digest(part)), dtype=torch.uint8)
    return out


def whole_leaf_digests(leaves: torch.Tensor) -> torch.Tensor:
    """XXH3-128 of equally long leaves by torch operations on any device: the plain form that kernels are timed beside.

    Args:
        leaves: uint8 [leaves, leaf_nbytes], contiguous; `leaf_nbytes` a multiple of 1,024.

    Returns:
        uint8 [leaves, 16].
    """
    count, nbytes = leaves.shape
    leaves = leaves if leaves.data_ptr() % 8 == 0 else leaves.clone()
    words = leaves.view(torch.int64).view(count, -1, 16, 8)
    table = constants(leaves.device)
    keys = torch.stack([table[n : n + 8] for n in range(16)])
    acc = table[START_AT : START_AT + 8].expand(count, 8)
    blocks = words.shape[1]
    for block in range(blocks - 1):
        acc = acc + _stripes(words[:, block], keys)
        acc = (acc ^ _shift(acc, 47) ^ table[16:24]) * P32_1
    keys = torch.cat([keys[:15], table[None, LAST_AT : LAST_AT + 8]])  # the last stripe has its own secret
    acc = acc + _stripes(words[:, blocks - 1], keys)
    low = _merge(acc ^ table[LOW_AT : LOW_AT + 8], _wrap(nbytes * P64_1))
    high = _merge(acc ^ table[HIGH_AT : HIGH_AT + 8], _wrap(~(nbytes * P64_2)))
    return torch.stack([high, low], 1).view(torch.uint8).view(count, 2, 8).flip(2).reshape(count, 16)


def _wrap(value: int) -> int:
    """`value` modulo 2^64, as the int64 of the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _stripes(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What sixteen stripes [n, 16, 8] add to the accumulators [n, 8]."""
    mixed = words ^ keys
    products = ((mixed & 0xFFFFFFFF) * _shift(mixed, 32)).sum(1)
    return products + words.sum(1).view(-1, 4, 2).flip(2).reshape(-1, 8)


def _merge(lanes: torch.Tensor, start: int) -> torch.Tensor:
    """Eight keyed accumulators [n, 8] to one word [n]."""
    a, b = lanes[:, 0::2], lanes[:, 1::2]
    total = ((a * b) ^ _multiply_high(a, b)).sum(1) + start
    total = (total ^ _shift(total, 37)) * MX1
    return total ^ _shift(total, 32)


def _multiply_high(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Upper 64 bits of unsigned 64 x 64 products, by halves of 32 bits."""
    low = 0xFFFFFFFF
    a0, a1, b0, b1 = a & low, _shift(a, 32), b & low, _shift(b, 32)
    first = _shift(a0 * b0, 32) + ((a1 * b0) & low) + ((a0 * b1) & low)
    return a1 * b1 + _shift(a1 * b0, 32) + _shift(a0 * b1, 32) + _shift(first, 32)
