"""The device's way of copying, run on CPU tensors: the same tables, rings and digests, another copy engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.catalog import LEAF
from ckptkit.core.copies import copies_into
from ckptkit.core.plan import make_plan
from ckptkit.errors import CorruptionError
from ckptkit.formats.chunks import plain_local
from ckptkit.formats.native import NativeFormat
from ckptkit.hooks import Checkpointer, Held
from ckptkit.hooks.buffers import HostBuffer, segments
from ckptkit.hooks.holdings import Holding, Places, catalog_of, explicit
from ckptkit.hooks.loading import _per_leaf, direct_rows, load
from ckptkit.hooks.moving import Ring, Snapshot, Streams
from ckptkit.hooks.parts import Part, parts_of
from ckptkit.hooks.planning import Move
from ckptkit.stores.local import LocalStore

CPU = torch.device("cpu")
START = 4096


def drawn(nbytes: int, seed: int, shift: int = 0) -> torch.Tensor:
    """Random bytes that begin `shift` bytes after a multiple of 16."""
    room = torch.randint(
        0, 256, (nbytes + 32,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    begin = (-room.data_ptr()) % 16 + shift
    return room[begin : begin + nbytes]


@st.composite
def files(draw: st.DrawFn) -> tuple[list[Part], int]:
    """Parts of a rank file with gaps: many small ones, some of several leaves, some shifted, some changed by others."""
    parts: list[Part] = []
    at = 0
    for k in range(draw(st.integers(1, 12))):
        nbytes = draw(
            st.sampled_from(
                [1, 4, 100, 1024, 5000, 70_000, LEAF // 2, LEAF, LEAF + 8, 2 * LEAF, 3 * LEAF - 40]
            )
        )
        if draw(st.booleans()) and nbytes % LEAF == 0:
            at = -(-at // LEAF) * LEAF
        shift = draw(st.sampled_from([0, 0, 0, 1, 8]))
        tensor = drawn(nbytes, k, (at + shift) % 16)
        parts.append(Part(tensor, START + at, draw(st.integers(0, 5)) == 0))
        at += nbytes + draw(st.sampled_from([0, 0, 4, 60]))
    return parts, at


def image(parts: list[Part], size: int) -> bytes:
    whole = bytearray(size)
    for part in parts:
        whole[part.offset - START : part.offset - START + part.nbytes] = part.source.numpy().tobytes()
    return bytes(whole)


@settings(max_examples=40, deadline=None)
@given(files(), st.sampled_from([1, 3]))
def test_a_snapshot_is_the_file_and_its_digests(file: tuple[list[Part], int], ring: int) -> None:
    """Every byte lies in its place, gaps are zeros, and the device's digests are those of the bytes in the buffer."""
    parts, size = file
    buffer = HostBuffer.own(START + size)
    snapshot = Snapshot(parts, CPU, START, size, packs=True, ring=Ring(CPU, ring * LEAF))

    snapshot.copy_late(buffer)
    snapshot.run(buffer, Streams())

    raw = bytes(buffer.memory[START : START + size])
    assert raw == image(parts, size)
    if snapshot.digests is not None:
        for leaf, digest in zip(snapshot.device_leaves.tolist(), snapshot.digests.numpy(), strict=True):
            assert digest.tobytes() == xxhash.xxh3_128_digest(raw[leaf * LEAF : (leaf + 1) * LEAF])


@settings(max_examples=30, deadline=None)
@given(files())
def test_late_tensors_are_taken_at_once(file: tuple[list[Part], int]) -> None:
    """What others than the optimizer change is copied before `copy_late` returns, even where the device digests it later."""
    parts, size = file
    before = image(parts, size)
    buffer = HostBuffer.own(START + size)
    snapshot = Snapshot(parts, CPU, START, size, packs=True)

    snapshot.copy_late(buffer)
    for part in parts:
        if part.late:
            part.source.add_(1)
    snapshot.run(buffer, Streams())

    assert bytes(buffer.memory[START : START + size]) == before


@settings(max_examples=30, deadline=None)
@given(files())
def test_loading_brings_everything_back_and_checks_it(file: tuple[list[Part], int]) -> None:
    """Tensors are filled from the buffer; every leaf is compared; a changed byte is found."""
    parts, size = file
    parts = [Part(p.source, p.offset) for p in parts]
    raw = image(parts, size)
    buffer = HostBuffer.own(START + size)
    buffer.tensor[START : START + size].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    leaves = [xxhash.xxh3_128_digest(raw[at : at + LEAF]) for at in range(0, size, LEAF)]
    expected = np.frombuffer(b"".join(leaves), np.uint8).reshape(-1, 16)
    snapshot = Snapshot(parts, CPU, START, size, packs=True, ring=Ring(CPU, 2 * LEAF))
    own = [p for p in parts if len(snapshot.device_leaves)]
    kept = [p.source.clone() for p in own]
    for part in own:
        part.source.zero_()

    good = snapshot.load(buffer, expected, Streams())

    assert bool(good.all())
    device = set(snapshot.device_leaves.tolist())
    for part, before in zip(own, kept, strict=True):
        inside = range((part.offset - START) // LEAF, -(-(part.offset + part.nbytes - START) // LEAF))
        if set(inside) <= device:
            assert torch.equal(part.source, before)
    if device:
        leaf = max(device)
        buffer.tensor[START + leaf * LEAF] ^= 1
        assert not bool(snapshot.load(buffer, expected, Streams()).all())


@pytest.mark.parametrize("batch", [LEAF, 64 * LEAF])
def test_a_file_in_memory_is_loaded_directly_in_the_same_layout(batch: int, tmp_path: Path) -> None:
    """All copies of a restart in the same layout go directly, in one batch or in several that cut tensors; a flipped byte is named
    by its leaf."""
    torch.manual_seed(0)
    tensors = {"big": torch.randn(3, LEAF // 4), "odd": torch.randn(1000, 333), "small": torch.randn(17)}
    held = [Held(name, "param", tensor) for name, tensor in tensors.items()]
    ckpt = Checkpointer(str(tmp_path), cache="off")
    ckpt.register(tensors=held)
    ckpt.restore()
    ckpt.on_step_end(1)
    ckpt.save()
    ckpt.close()
    folder = tmp_path / "step-00000001.e1"
    raw = (folder / "rank-00000.safetensors").read_bytes()
    buffer = HostBuffer.own(len(raw))
    buffer.tensor[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    source = NativeFormat().read(LocalStore(folder))
    places = Places(None)
    holdings = explicit(held, places)
    target = catalog_of(holdings, places, 0, "here")
    copies = copies_into(make_plan(source, target))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()

    direct = direct_rows(copies, source, 0, target.entries.offset.tolist(), holdings, CPU)
    compared = load(direct, buffer, source, 0, CPU, packs=True, batch=batch)

    assert len(direct.rows) == len(copies) == 3
    assert compared == -(-(len(raw) - source.files[0].data_start) // LEAF)
    assert all(torch.equal(tensors[name], kept[name]) for name in tensors)
    buffer.tensor[-9] ^= 4
    with pytest.raises(CorruptionError, match=r"leaf 4 of rank-00000\.safetensors"):
        load(direct, buffer, source, 0, CPU, packs=True, batch=batch)


@given(st.lists(st.tuples(st.integers(0, 9 * LEAF), st.integers(0, 3 * LEAF)), max_size=12))
def test_bytes_of_leaves_are_counted_as_a_loop_would(ranges: list[tuple[int, int]]) -> None:
    """The sweep over edges against counting range by range."""
    disjoint = []
    at = 0
    for gap, size in ranges:
        low = at + gap % (LEAF + 7)
        disjoint.append((low, low + size))
        at = low + size
    size = max(at, 1)
    bounds = np.asarray(disjoint, np.int64).reshape(-1, 2)

    found = _per_leaf(bounds[:, 0], bounds[:, 1], size)

    want = [
        sum(max(0, min(b, (leaf + 1) * LEAF) - max(a, leaf * LEAF)) for a, b in disjoint)
        for leaf in range(-(-size // LEAF))
    ]
    assert found.tolist() == want


def test_a_part_does_not_span_two_registrations() -> None:
    """A tensor that lies across the edge of 1 GiB in the file is copied as several parts, whatever its strides."""
    edge = 1 << 30
    tensor = torch.arange(60.0).reshape(6, 10)
    whole = Holding(
        "w", plain_local("w", (6, 10)), 0, 60, "param", (6, 10), tensor.dtype, CPU, tensor, fenced=True
    )

    for strided in (tensor, tensor.t().contiguous().t()):
        parts = parts_of([Move(0, 0, 60, edge - 100)], [whole], [strided])

        assert len(parts) > 1
        assert all(part.offset >= edge or part.offset + part.nbytes <= edge for part in parts)
        assert [part.offset for part in parts] == np.cumsum(
            [edge - 100, *(p.nbytes for p in parts[:-1])]
        ).tolist()
        assert torch.equal(torch.cat([part.source.reshape(-1) for part in parts]), tensor.reshape(-1))


def test_ranges_are_cut_at_the_edges_of_registrations() -> None:
    """No copy spans two registrations of 1 GiB."""
    gib = 1 << 30

    assert list(segments(gib - 10, 30)) == [(gib - 10, 10), (gib, 20)]
    assert list(segments(5, 2 * gib)) == [(5, gib - 5), (gib, gib), (2 * gib, 5)]
