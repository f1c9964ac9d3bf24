"""Leaf digests, pack with digests, and unpack with verification: one Triton kernel in three modes.

One program digests one leaf. Where a block's bytes come from, and where they go, is an address: `base` plus the
position (FLAT), the leaf's own address from a table (LEAVES), or the block's (BLOCKS); see `ckptkit.kernels.pack`.
A whole leaf's blocks are read `GROUP` at a time, all before the first is used, so that one warp has several KiB
in flight. Addresses in tables are multiples of 16. Nothing depends on the width of a warp or wave.
"""

from typing import Any

import torch

from ckptkit.kernels import digest as plain
from ckptkit.kernels._triton import tl, triton
from ckptkit.kernels.pack import PackPlan

P32_1 = tl.constexpr(plain.P32_1)
P32_2 = tl.constexpr(plain.P32_2)
P64_1 = tl.constexpr(plain.P64_1)
P64_2 = tl.constexpr(plain.P64_2)
P64_4 = tl.constexpr(plain.P64_4)
MX1 = tl.constexpr(plain.MX1)
MX2 = tl.constexpr(0x9FB21C651E98DF25)
P64_3 = tl.constexpr(plain.P64_3)

FLAT = tl.constexpr(0)
LEAVES = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
NOWHERE = tl.constexpr(3)

# What a program of the kernel is given unless a caller tunes it; docs/kernels.md has the measurements.
DIGEST = {"GROUP": 4, "num_warps": 1}
PACK = {"GROUP": 2, "num_warps": 1}


@triton.jit
def _swap_bytes(x):
    """Big-endian bytes of a word, as a little-endian machine stores them."""
    x = ((x & 0x00FF00FF00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF00FF00FF)
    x = ((x & 0x0000FFFF0000FFFF) << 16) | ((x >> 16) & 0x0000FFFF0000FFFF)
    return (x << 32) | (x >> 32)


@triton.jit
def _avalanche(x):
    x = (x ^ (x >> 37)) * MX1
    return x ^ (x >> 32)


@triton.jit
def _avalanche64(x):
    """XXH64's own, which inputs of at most three bytes use."""
    x = (x ^ (x >> 33)) * P64_2
    x = (x ^ (x >> 29)) * P64_3
    return x ^ (x >> 32)


@triton.jit
def _fold(a, b):
    """Both halves of a 64 x 64 product, xored."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _read64(address):
    """Eight bytes at any address, little-endian."""
    lane = tl.arange(0, 8)
    parts = tl.load((address + lane).to(tl.pointer_type(tl.uint8))).to(tl.uint64)
    return tl.sum(parts << (8 * lane).to(tl.uint64), 0)


@triton.jit
def _read32(address):
    lane = tl.arange(0, 4)
    parts = tl.load((address + lane).to(tl.pointer_type(tl.uint8))).to(tl.uint64)
    return tl.sum(parts << (8 * lane).to(tl.uint64), 0)


@triton.jit
def _mix16(address, key):
    return _fold(_read64(address) ^ _read64(key), _read64(address + 8) ^ _read64(key + 8))


@triton.jit
def _mix32(low, high, first, second, key):
    low = (low + _mix16(first, key)) ^ (_read64(second) + _read64(second + 8))
    high = (high + _mix16(second, key + 16)) ^ (_read64(first) + _read64(first + 8))
    return low, high


@triton.jit
def _short(at, n, key):
    """XXH3-128 of `n` <= 240 bytes at address `at`; `key` is the secret's address. Scalars throughout."""
    length = n.to(tl.uint64)
    low = length * 0
    high = length * 0
    if n > 128:
        low = length * P64_1
        for i in range(4):
            low, high = _mix32(low, high, at + 32 * i, at + 32 * i + 16, key + 32 * i)
        low = _avalanche(low)
        high = _avalanche(high)
        for i in range(4, n // 32):
            low, high = _mix32(low, high, at + 32 * i, at + 32 * i + 16, key + 3 + 32 * (i - 4))
        low, high = _mix32(low, high, at + n - 16, at + n - 32, key + 103)
    elif n > 16:
        low = length * P64_1
        for j in range((n - 1) // 32 + 1):
            i = (n - 1) // 32 - j
            low, high = _mix32(low, high, at + 16 * i, at + n - 16 * (i + 1), key + 32 * i)
    if n > 16:
        total = low + high
        rest = low * P64_1 + high * P64_4 + length * P64_2
        low = _avalanche(total)
        high = 0 - _avalanche(rest)
    elif n > 8:
        last = _read64(at + n - 8)
        mixed = _read64(at) ^ last ^ _read64(key + 32) ^ _read64(key + 40)
        last = last ^ _read64(key + 48) ^ _read64(key + 56)
        low = mixed * P64_1 + ((length - 1) << 54)
        high = tl.umulhi(mixed, P64_1 + length * 0) + last + (last & 0xFFFFFFFF) * (P32_2 - 1)
        low = low ^ _swap_bytes(high)
        high = _avalanche(tl.umulhi(low, P64_2 + length * 0) + high * P64_2)
        low = _avalanche(low * P64_2)
    elif n > 3:
        mixed = (_read32(at) + (_read32(at + n - 4) << 32)) ^ _read64(key + 16) ^ _read64(key + 24)
        factor = P64_1 + (length << 2)
        low = mixed * factor
        high = tl.umulhi(mixed, factor) + (low << 1)
        low = low ^ (high >> 3)
        low = (low ^ (low >> 35)) * MX2
        low = low ^ (low >> 28)
        high = _avalanche(high)
    else:
        byte = tl.pointer_type(tl.uint8)
        first = tl.load(at.to(byte)).to(tl.uint64)
        middle = tl.load((at + n // 2).to(byte)).to(tl.uint64)
        last = tl.load((at + n - 1).to(byte)).to(tl.uint64)
        low = (first << 16) | (middle << 24) | last | (length << 8)
        high = _swap_bytes(low) >> 32
        high = ((high << 13) | (high >> 19)) & 0xFFFFFFFF
        low = _avalanche64(low ^ _read32(key) ^ _read32(key + 4))
        high = _avalanche64(high ^ _read32(key + 8) ^ _read32(key + 12))
    return low, high


@triton.jit
def _stripes(words, keys):
    """What stripes [16, 8] add to the accumulators [8]."""
    mixed = words ^ keys
    # Neighbouring words lie in one thread, so that swapping them before the sum costs nothing and saves a reduction.
    even, odd = tl.split(tl.reshape(words, (16, 4, 2)))
    swapped = tl.reshape(tl.join(odd, even), (16, 8))
    return tl.sum(swapped + mixed.to(tl.uint32).to(tl.uint64) * (mixed >> 32), 0)


@triton.jit
def _merge(acc, keys, start):
    a, b = tl.split(tl.reshape(acc ^ keys, (4, 2)))
    return _avalanche(start + tl.sum(_fold(a, b), 0))


@triton.jit
def _block_at(base, table, row, leaf, block, leaf_nbytes, MODE: tl.constexpr):
    """Address of a leaf's block; `row` is the program's row of the table."""
    if MODE == FLAT:
        return base + leaf * leaf_nbytes + block * 1024
    elif MODE == LEAVES:
        return tl.load(table + row) + block * 1024
    else:
        return tl.load(table + row * (leaf_nbytes // 1024) + block)


@triton.jit
def _words_of(address, tile):
    """Pointers to the words of the block at `address`, which is a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), [16]) + tile


@triton.jit
def leaf_kernel(
    src,  # address of the bytes (SRC = FLAT)
    src_table,  # int64: addresses of leaves [programs] or of their blocks [programs, leaf_nbytes / 1024]
    dst,  # the same two for the bytes' destination
    dst_table,
    leaves,  # int32 [programs]: which leaves; unused where EVERY
    consts,  # int64 [56], ckptkit.kernels.digest.constants
    digests,  # int64 [all leaves, 2]: written, or compared with where CHECK
    good,  # uint8 [all leaves], written where CHECK: 1 for a leaf whose bytes have their digest
    nbytes,  # of all leaves together
    leaf_nbytes,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    EVERY: tl.constexpr,
    CHECK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if EVERY:
        leaf = row
    else:
        leaf = tl.load(leaves + row).to(tl.int64)
    n = tl.minimum(nbytes - leaf * leaf_nbytes, leaf_nbytes)
    words = consts.to(tl.pointer_type(tl.uint64))
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    tile = stripe[:, None] * 8 + lane[None, :]
    low = n.to(tl.uint64) * 0
    high = low
    if n > 240:
        keys = tl.load(words + stripe[:, None] + lane[None, :])
        scramble = tl.load(words + 16 + lane)
        acc = tl.load(words + 24 + lane)
        blocks = ((n - 1) // 1024).to(tl.int32)
        for group in range(blocks // GROUP):
            block = group * GROUP
            w0 = tl.load(_words_of(_block_at(src, src_table, row, leaf, block, leaf_nbytes, SRC), tile))
            if GROUP > 1:
                w1 = tl.load(
                    _words_of(_block_at(src, src_table, row, leaf, block + 1, leaf_nbytes, SRC), tile)
                )
            if GROUP > 2:
                w2 = tl.load(
                    _words_of(_block_at(src, src_table, row, leaf, block + 2, leaf_nbytes, SRC), tile)
                )
                w3 = tl.load(
                    _words_of(_block_at(src, src_table, row, leaf, block + 3, leaf_nbytes, SRC), tile)
                )
            if DST != NOWHERE:
                tl.store(_words_of(_block_at(dst, dst_table, row, leaf, block, leaf_nbytes, DST), tile), w0)
                if GROUP > 1:
                    tl.store(
                        _words_of(_block_at(dst, dst_table, row, leaf, block + 1, leaf_nbytes, DST), tile), w1
                    )
                if GROUP > 2:
                    tl.store(
                        _words_of(_block_at(dst, dst_table, row, leaf, block + 2, leaf_nbytes, DST), tile), w2
                    )
                    tl.store(
                        _words_of(_block_at(dst, dst_table, row, leaf, block + 3, leaf_nbytes, DST), tile), w3
                    )
            acc += _stripes(w0, keys)
            acc = (acc ^ (acc >> 47) ^ scramble) * P32_1
            if GROUP > 1:
                acc += _stripes(w1, keys)
                acc = (acc ^ (acc >> 47) ^ scramble) * P32_1
            if GROUP > 2:
                acc += _stripes(w2, keys)
                acc = (acc ^ (acc >> 47) ^ scramble) * P32_1
                acc += _stripes(w3, keys)
                acc = (acc ^ (acc >> 47) ^ scramble) * P32_1
        for block in range(blocks // GROUP * GROUP, blocks):
            w = tl.load(_words_of(_block_at(src, src_table, row, leaf, block, leaf_nbytes, SRC), tile))
            if DST != NOWHERE:
                tl.store(_words_of(_block_at(dst, dst_table, row, leaf, block, leaf_nbytes, DST), tile), w)
            acc += _stripes(w, keys)
            acc = (acc ^ (acc >> 47) ^ scramble) * P32_1
        # The last block: its whole stripes but the last, then the last 64 bytes of the leaf, which may begin
        # anywhere and, in a short leaf, lie in two blocks.
        whole = (n - 1 - blocks.to(tl.int64) * 1024) // 64
        here = (stripe[:, None] + lane[None, :] * 0) < whole
        at = _block_at(src, src_table, row, leaf, blocks, leaf_nbytes, SRC)
        w = tl.load(_words_of(at, tile), mask=here, other=0)
        acc += _stripes(w, tl.where(here, keys, 0))
        byte = lane[:, None] * 8 + lane[None, :]
        position = n - 64 + byte
        if SRC == FLAT:
            address = src + leaf * leaf_nbytes + position
        elif SRC == LEAVES:
            address = tl.load(src_table + row) + position
        else:
            address = tl.load(src_table + row * (leaf_nbytes // 1024) + position // 1024) + position % 1024
        parts = tl.load(address.to(tl.pointer_type(tl.uint8))).to(tl.uint64)
        last = tl.sum(parts << (8 * lane[None, :]).to(tl.uint64), 1)
        mixed = last ^ tl.load(words + 32 + lane)
        even, odd = tl.split(tl.reshape(last, (4, 2)))
        acc += (mixed & 0xFFFFFFFF) * (mixed >> 32) + tl.reshape(tl.join(odd, even), (8,))
        low = _merge(acc, tl.load(words + 40 + lane), n.to(tl.uint64) * P64_1)
        high = _merge(acc, tl.load(words + 48 + lane), 0 - n.to(tl.uint64) * P64_2 - 1)
    else:
        low, high = _short(_block_at(src, src_table, row, leaf, 0, leaf_nbytes, SRC), n, consts.to(tl.int64))
    if DST != NOWHERE:
        # What follows the blocks that the loop has moved, byte by byte: 1,024 bytes of a leaf at most.
        block = (n - 1) // 1024
        byte = tl.arange(0, 1024)
        here = block * 1024 + byte < n
        at = _block_at(src, src_table, row, leaf, block, leaf_nbytes, SRC) + byte
        to = _block_at(dst, dst_table, row, leaf, block, leaf_nbytes, DST) + byte
        parts = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=here)
        tl.store(to.to(tl.pointer_type(tl.uint8)), parts, mask=here)
    low = _swap_bytes(low)
    high = _swap_bytes(high)
    out = digests.to(tl.pointer_type(tl.uint64)) + leaf * 2
    if CHECK:
        same = (tl.load(out) == high) & (tl.load(out + 1) == low)
        tl.store(good + leaf, same.to(tl.uint8))
    else:
        tl.store(out, high)
        tl.store(out + 1, low)


@triton.jit
def fragment_kernel(src_table, dst_table, sizes, width, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Copies one run of at most 1,024 bytes per program, in units of WIDTH bytes (`width`: a pointer of that type)."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, LANES)
    here = unit * WIDTH < tl.load(sizes + row)
    src = tl.load(src_table + row).to(width.dtype) + unit
    dst = tl.load(dst_table + row).to(width.dtype) + unit
    tl.store(dst, tl.load(src, mask=here), mask=here)


def _launch(
    device: torch.device,
    programs: int,
    src: Any,
    dst: Any,
    leaves: torch.Tensor | None,
    digests: torch.Tensor,
    good: torch.Tensor | None,
    nbytes: int,
    leaf_nbytes: int,
    tuning: dict[str, int],
) -> None:
    """One launch; `src` and `dst` are an address, a table [programs], a table [programs, blocks], or None."""
    if not programs:
        return
    table = plain.constants(device)

    def side(value: Any) -> tuple[int, torch.Tensor, int]:
        if value is None:
            return 0, table, NOWHERE.value
        if isinstance(value, int):
            return value, table, FLAT.value
        return 0, value, (LEAVES if value.ndim == 1 else BLOCKS).value

    src_base, src_table, src_mode = side(src)
    dst_base, dst_table, dst_mode = side(dst)
    leaf_kernel[(programs,)](
        src_base,
        src_table,
        dst_base,
        dst_table,
        table if leaves is None else leaves,
        table,
        digests.view(torch.int64),
        digests if good is None else good,
        nbytes,
        leaf_nbytes,
        SRC=src_mode,
        DST=dst_mode,
        EVERY=leaves is None,
        CHECK=good is not None,
        **tuning,
    )


def leaf_digests(
    data: torch.Tensor, leaf_nbytes: int = plain.LEAF_NBYTES, tuning: dict[str, int] = DIGEST
) -> torch.Tensor:
    """See `ckptkit.kernels.digest.leaf_digests`. Bytes that begin at no multiple of 16 are copied first."""
    raw = plain.as_bytes(data)
    count = plain.leaf_count(raw.numel(), leaf_nbytes)
    if raw.data_ptr() % 16:
        raw = raw.clone()
    out = torch.empty(count, plain.DIGEST_NBYTES, dtype=torch.uint8, device=raw.device)
    _launch(raw.device, count, raw.data_ptr(), None, None, out, None, raw.numel(), leaf_nbytes, tuning)
    return out


def _move_fragments(plan: PackPlan, inward: bool) -> None:
    """Between tensors and staging: what shares a 1 KiB block with another tensor, or lies at another offset in it."""
    for width, fragments in plan.fragments.items():
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        src, dst = (fragments.outer, fragments.staged) if inward else (fragments.unstaged, fragments.outer)
        fragment_kernel[(len(fragments.sizes),)](
            src,
            dst,
            fragments.sizes,
            plan.staging.view(kind),
            WIDTH=width,
            LANES=1024 // width,
            num_warps=1,
        )


def pack(plan: PackPlan, out: torch.Tensor, digests: torch.Tensor, tuning: dict[str, int] = PACK) -> None:
    """See `ckptkit.kernels.pack.pack`."""
    _move_fragments(plan, inward=True)
    at = out.data_ptr()
    whole, ragged = plan.whole, plan.ragged
    size, leaf = plan.nbytes, plan.leaf_nbytes
    _launch(out.device, len(whole), plan.whole_at, at, whole, digests, None, size, leaf, tuning)
    _launch(out.device, len(ragged), plan.blocks_in, at, ragged, digests, None, size, leaf, tuning)


def digest_in_place(plan: PackPlan, digests: torch.Tensor, tuning: dict[str, int] = DIGEST) -> None:
    """See `ckptkit.kernels.pack.digest_in_place`."""
    _move_fragments(plan, inward=True)
    whole, ragged = plan.whole, plan.ragged
    size, leaf = plan.nbytes, plan.leaf_nbytes
    _launch(digests.device, len(whole), plan.whole_at, None, whole, digests, None, size, leaf, tuning)
    _launch(digests.device, len(ragged), plan.blocks_in, None, ragged, digests, None, size, leaf, tuning)


def unpack(
    plan: PackPlan, packed: torch.Tensor, digests: torch.Tensor, tuning: dict[str, int] = PACK
) -> torch.Tensor:
    """See `ckptkit.kernels.pack.unpack`."""
    good = torch.zeros(plan.leaf_count, dtype=torch.uint8, device=packed.device)
    at = packed.data_ptr()
    whole, ragged = plan.whole, plan.ragged
    size, leaf = plan.nbytes, plan.leaf_nbytes
    _launch(packed.device, len(whole), at, plan.whole_at, whole, digests, good, size, leaf, tuning)
    _launch(packed.device, len(ragged), at, plan.blocks_out, ragged, digests, good, size, leaf, tuning)
    _move_fragments(plan, inward=False)
    return good.view(torch.bool)
