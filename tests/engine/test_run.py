"""Runs of real plans on real files: every byte is as the oracle says, and every fault leaves nothing half done."""

import os
import subprocess
import sys
import textwrap
import zlib

import ml_dtypes
import numpy as np
import pytest

from ckptkit.core.catalog import LEAF, Catalog
from ckptkit.core.destination import Fixup, Written
from ckptkit.core.plan import Plan, make_plan
from ckptkit.engine.run import RunResult, run
from ckptkit.errors import (
    CorruptionError,
    FormatError,
    InterruptedRunError,
    LayoutError,
    StoreError,
    UsageError,
)
from ckptkit.stores.base import Reader
from ckptkit.stores.local import LocalStore
from tests.engine.toy import BF16, FAMILIES, LAYOUTS, Toy, destination, leaves_of, write

RAGGED = "tp=2,pp=2,ep=4,dp=4,zero=1"
OTHER = "ep=2,dp=6,zero=1"


class Case:
    """A source on disk, a destination laid out, and the plan between them."""

    def __init__(
        self, path, toy: Toy, source: Catalog, target: Catalog, *, digests: bool = False, **more
    ) -> None:
        self.toy, self.source, self.target, self.path = toy, source, target, path
        self.files = toy.bytes_of(source)
        write(str(path / "src"), source, self.files)
        self.plan: Plan = make_plan(source, target)
        self.destination = destination(target, digests=digests, **more)

    def run(self, **options) -> RunResult:
        return run(
            self.plan, self.destination, LocalStore(self.path / "src"), str(self.path / "out"), **options
        )

    def found(self, number: int) -> np.ndarray:
        return np.fromfile(self.path / "out" / self.target.files[number].path, np.uint8)

    def check(self, values=None) -> None:
        for number, want in enumerate(self.toy.bytes_of(self.target, values)):
            assert np.array_equal(self.found(number), want), self.target.files[number].path
        assert sorted(os.listdir(self.path)) == ["out", "src"]
        assert sorted(os.listdir(self.path / "out")) == sorted(
            [*(f.path for f in self.target.files), "done.json"]
        )

    def nothing_left(self) -> bool:
        return os.listdir(self.path) == ["src"]


def simple(path, **more) -> Case:
    toy = Toy()
    return Case(path, toy, toy.catalog(RAGGED, "megatron", 64), toy.catalog(OTHER, "canonical", 64), **more)


@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_becomes_any_other(tmp_path, source) -> None:
    """Names and headers change with it; padding is zero, tensors without elements are no trouble."""
    toy = Toy()
    for number, target in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        before = toy.catalog(source, FAMILIES[number % 3], (0, 13, 4096)[number % 3])
        after = toy.catalog(target, FAMILIES[(number + 1) % 3], (7, 4096, 0)[number % 3])
        case = Case(folder, toy, before, after)

        case.run(direct=bool(number % 2))

        case.check()


def test_values_are_cast_on_the_way(tmp_path) -> None:
    toy = Toy()
    case = Case(tmp_path, toy, toy.catalog(RAGGED), toy.catalog(OTHER, "transposed", 7, BF16))

    case.run()

    case.check(
        {k: v.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16) for k, v in toy.values.items()}
    )


def test_inner_cuts_of_many_blocks(tmp_path) -> None:
    """Rows of a few KiB over several blocks and slabs: gathered, and put back together."""
    toy = Toy(sizes={"hidden": 700, "vocab": 1100, "layers": 1}, roles=("param",))
    one, many = toy.catalog("tp=1", "transposed", 4096), toy.catalog("tp=4", "transposed", 4096)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, file.size, np.uint8) for file in one.files]
    for data in values:
        data[:4096] = 0xAA
    for folder in ("there", "back"):
        (tmp_path / folder).mkdir()
    write(str(tmp_path / "there" / "src"), one, values)

    split = destination(many)
    run(
        make_plan(one, many),
        split,
        LocalStore(tmp_path / "there" / "src"),
        str(tmp_path / "middle"),
        memory=16 << 20,
    )
    run(make_plan(many, one), destination(one), LocalStore(tmp_path / "middle"), str(tmp_path / "end"))

    assert sum(file.size for file in one.files) > 3 * LEAF
    # Padded rows of the vocabulary hold no element, and come out as zeros.
    pieces, entries, segments = one.pieces, one.entries, one.segments
    for piece in range(len(pieces)):
        entry, segment = pieces.entry[piece], pieces.segment[piece]
        local = one.locals[entries.local[entry]]
        start = one.files[0].data_start + int(entries.offset[entry])
        rank = len(one.tensor_list[segments.tensor[segment]].shape)
        base = int(segments.base[segment]) * 4
        strides = [int(s) * 4 for s in segments.strides[segment][:rank]]
        shape = (pieces.hi[piece] - pieces.lo[piece])[:rank].tolist()
        before, after = (
            np.ndarray(shape, np.uint32, data.tobytes(), start + base, strides)
            for data in (values[0], np.fromfile(tmp_path / "end" / one.files[0].path, np.uint8))
        )
        assert np.array_equal(before, after), local.key


def test_digests_are_those_of_the_definition(tmp_path) -> None:
    toy = Toy(sizes={"hidden": 256, "vocab": 4500, "layers": 1}, roles=("param",))
    source, target = toy.catalog("tp=1"), toy.catalog("dp=2,zero=3", "canonical", 4096)
    rng = np.random.default_rng(0)
    write(str(tmp_path / "src"), source, [rng.integers(0, 256, file.size, np.uint8) for file in source.files])
    seen: list[Written] = []

    def finish(written):
        seen.extend(written)
        return [("a", b"1"), ("b", b"2")]

    plan = destination(target, digests=True)
    plan.finish = finish
    run(make_plan(source, target), plan, LocalStore(tmp_path / "src"), str(tmp_path / "out"))

    assert max(file.size for file in target.files) > LEAF
    for file, written in zip(target.files, seen, strict=True):
        want = leaves_of(np.fromfile(tmp_path / "out" / file.path, np.uint8), 4096)
        assert (written.path, written.size) == (file.path, file.size)
        assert written.leaves is not None and written.leaves.size == want.size
        assert np.array_equal(written.leaves.digests, want.digests)


def test_checksum_fields_are_filled_in(tmp_path) -> None:
    """Also where a digest covers the field."""
    toy = Toy()
    source, target = toy.catalog("tp=1"), toy.catalog("dp=2,zero=3", "canonical", 64)
    size = target.files[1].size
    fixups = {1: [Fixup("crc32", 70, size - 9, (4, size - 6)), Fixup("crc32", 66, 66, (20,))]}
    case = Case(tmp_path, toy, source, target, digests=True, fixups=fixups)

    result = case.run()

    data, want = case.found(1), toy.bytes_of(target)[1]
    crc = zlib.crc32(want[70 : size - 9].tobytes()).to_bytes(4, "little")
    for offset, value in ((4, crc), (size - 6, crc), (20, bytes(4))):
        want[offset : offset + 4] = np.frombuffer(value, np.uint8)
    assert np.array_equal(data, want)
    leaves = result.written[1].leaves
    assert leaves is not None and np.array_equal(leaves.digests, leaves_of(want, 64).digests)


def test_a_flipped_bit_of_the_source_is_found_and_named(tmp_path) -> None:
    case = simple(tmp_path)
    case.source.leaves = lambda n: leaves_of(case.files[n], 64)
    path = tmp_path / "src" / case.source.files[3].path
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(bytes(data))

    with pytest.raises(
        CorruptionError, match=rf"leaf 0 of {path.name}.*\[.*xxh3 is [0-9a-f]+, its digest file says"
    ):
        case.run()

    assert case.nothing_left()
    assert case.run(verify_source=False).checked_leaves == 0


def test_every_leaf_of_a_good_source_is_checked(tmp_path) -> None:
    case = simple(tmp_path)
    case.source.leaves = lambda n: leaves_of(case.files[n], 64)

    result = case.run()

    case.check()
    assert result.checked_leaves == sum(len(leaves_of(data, 64).digests) for data in case.files)


def test_replicas_that_differ_are_refused_with_both_files(tmp_path) -> None:
    """Two files that both hold the embedding; --replicas first takes the first."""
    toy = Toy(roles=("param",))
    source, target = replicated(toy), toy.catalog("tp=1")
    case = Case(tmp_path, toy, source, target)
    assert len(case.plan.replicas[0])
    good = case.run()
    assert good.compared_bytes > 0
    case.check()
    (tmp_path / "out").rename(tmp_path / "good")

    path = tmp_path / "src" / source.files[1].path
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))

    with pytest.raises(CorruptionError, match=r"differ: .*\[.*part-000.bin, and .* in part-001.bin"):
        case.run()
    case.run(replicas="first")
    assert np.array_equal(case.found(0), np.fromfile(tmp_path / "good" / target.files[0].path, np.uint8))


def replicated(toy: Toy) -> Catalog:
    """The toy on one rank, and a second file with the same once more."""
    from ckptkit.core.catalog import Entries, File

    catalog = toy.catalog("tp=1")
    again = catalog.entries.take(np.arange(len(catalog.entries)))
    again.file[:] = 1
    catalog.entries = Entries.concat([catalog.entries, again])
    catalog.files.append(File("part-001.bin", catalog.files[0].size, 0))
    return catalog


class ChangingStore(LocalStore):
    """Touches a file after its first read."""

    touched = False

    def open(self, path: str) -> Reader:  # type: ignore[override]
        reader = super().open(path)
        if not self.touched:
            self.touched = True
            os.utime(os.path.join(self.root, path), ns=(1, 1))
        return reader


def test_a_source_that_changes_meanwhile_is_not_committed(tmp_path) -> None:
    case = simple(tmp_path)

    with pytest.raises(FormatError, match="changed while it was read"):
        run(case.plan, case.destination, ChangingStore(tmp_path / "src"), str(tmp_path / "out"))

    assert case.nothing_left()


def test_a_source_that_changed_since_it_was_planned_is_refused(tmp_path) -> None:
    case = simple(tmp_path)
    case.source.identities = {file.path: "of before" for file in case.source.files}

    with pytest.raises(FormatError, match="changed"):
        case.run()

    assert case.nothing_left()


def test_a_truncated_source_is_refused(tmp_path) -> None:
    case = simple(tmp_path)
    path = tmp_path / "src" / case.source.files[2].path
    os.truncate(path, case.source.files[2].size - 10)

    with pytest.raises(FormatError, match="truncated"):
        case.run()

    assert case.nothing_left()


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path) -> None:
    case = simple(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")

    with pytest.raises(StoreError, match="exists"):
        case.run()
    assert os.listdir(tmp_path / "out") == ["mine"]

    case.run(overwrite=True)
    case.check()


def test_arguments_that_make_no_sense_are_refused(tmp_path) -> None:
    case = simple(tmp_path)
    for options in ({"replicas": "some"}, {"direct": "maybe"}):
        with pytest.raises(UsageError):
            case.run(**options)
    toy = Toy()
    whole = toy.catalog("tp=1")
    whole.entries.dtype[:] = 6  # int16, half as wide
    plan = make_plan(case.source, toy.catalog("tp=1"))
    plan.destination = whole
    with pytest.raises(LayoutError, match="cannot be cast"):
        run(plan, destination(whole), LocalStore(tmp_path / "src"), str(tmp_path / "out"))
    assert case.nothing_left()


def test_an_interrupt_keeps_the_work_and_the_next_call_ends_it(tmp_path) -> None:
    case = simple(tmp_path)
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="Run the same command to go on"):
        case.run(progress=interrupt)
    assert len(os.listdir(tmp_path)) == 2 and not (tmp_path / "out").exists()

    result = case.run(progress=lambda done, total: calls.append((done, total)))

    case.check()
    total = sum(file.size for file in case.target.files)
    assert result.reused_bytes > 0
    assert calls[-1] == (total, total)
    assert result.bytes_out == total + 2


def test_restart_and_other_arguments_use_nothing_of_before(tmp_path) -> None:
    case = simple(tmp_path)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        case.run(progress=interrupt)
    assert case.run(restart=True).reused_bytes == 0
    case.check()

    (tmp_path / "out").rename(tmp_path / "src" / "aside")
    with pytest.raises(InterruptedRunError):
        case.run(progress=interrupt)
    os.utime(tmp_path / "src" / case.source.files[0].path, ns=(1, 1))
    result = case.run()
    assert result.reused_bytes == 0
    assert "left by an interrupted run" in result.notes[0]
    case.check()


@pytest.mark.parametrize("limit", [0, 900])
def test_a_destination_that_fails_in_the_middle_says_what_to_do(tmp_path, limit) -> None:
    """A limit on file sizes stands in for a full disk. What is durable is kept, and used again."""
    case = simple(tmp_path)
    script = textwrap.dedent(
        f"""
        import resource, signal, sys
        sys.path.insert(0, {os.getcwd()!r})
        from pathlib import Path
        from ckptkit.errors import StoreError
        from tests.engine.test_run import simple
        case = simple(Path(sys.argv[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        try:
            case.run()
        except StoreError as error:
            print(error)
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert "cannot" in ran.stdout and "Files may not grow that large" in ran.stdout
    assert not (tmp_path / "out").exists()
    case.run()
    assert not [name for name in os.listdir(tmp_path) if name not in ("src", "out")]


def test_memory_is_bounded_however_large_the_files_are(tmp_path) -> None:
    """600 MB with 64 MiB of buffers: the peak grows by little more than the buffers."""
    script = textwrap.dedent(
        f"""
        import os, resource, sys
        sys.path.insert(0, {os.getcwd()!r})
        from ckptkit.core.plan import make_plan
        from ckptkit.engine.run import run
        from ckptkit.stores.local import LocalStore
        from tests.engine.toy import Toy, destination
        folder, to = sys.argv[1:]
        toy = Toy(sizes={{"hidden": 8, "vocab": 8}})
        sizes = dict(toy.model.sizes, hidden=4096, vocab=16000, ffn=256)
        big = toy.model.schema.bind(sizes)
        toy.model = big
        source, target = toy.catalog("tp=1", "canonical"), toy.catalog(to, "transposed", 4096)
        os.mkdir(folder + "/src")
        for file in source.files:
            os.truncate(os.open(folder + "/src/" + file.path, os.O_CREAT | os.O_RDWR), file.size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = run(make_plan(source, target), destination(target, digests=True), LocalStore(folder + "/src"),
                     folder + "/out", memory=64 << 20)
        print(result.bytes_out, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "tp=2"], capture_output=True, text=True, check=True
    )

    nbytes, grown = map(int, ran.stdout.split())
    assert nbytes > 600e6
    assert grown < (64 + 32) << 20


def test_a_run_in_memory_is_not_direct(tmp_path) -> None:
    """tmpfs has no disk to write to directly; the choice is reported."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    case = simple(tmp_path)
    target = f"/dev/shm/ckptkit-test-{os.getpid()}"
    try:
        result = run(case.plan, case.destination, LocalStore(tmp_path / "src"), target)
        assert not result.direct
    finally:
        subprocess.run(["rm", "-rf", target], check=True)


def test_every_byte_is_synced_before_the_rename_and_the_marker_comes_last(tmp_path) -> None:
    """The order of calls, as the process makes them."""
    case = simple(tmp_path)
    script = textwrap.dedent(
        f"""
        import os, sys
        sys.path.insert(0, {os.getcwd()!r})
        from pathlib import Path
        calls = []
        def traced(name):
            real = getattr(os, name)
            def call(*args, **kwargs):
                what = os.readlink(f"/proc/self/fd/{{args[0]}}") if isinstance(args[0], int) else args[0]
                result = real(*args, **kwargs)
                calls.append(f"{{name}} {{os.path.basename(what)}}")
                return result
            setattr(os, name, call)
        for name in ("pwrite", "fsync", "fdatasync", "rename", "unlink"):
            traced(name)
        from tests.engine.test_run import simple
        simple(Path(sys.argv[1])).run(threads=1)
        print("\\n".join(calls))
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )

    calls = ran.stdout.split("\n")[:-1]
    rename = next(k for k, call in enumerate(calls) if call.startswith("rename .out."))
    work = calls[rename].removeprefix("rename ")
    last = {call: k for k, call in enumerate(calls)}
    for file in case.target.files:
        assert last[f"pwrite {file.path}"] < last[f"fdatasync {file.path}"] < last["pwrite done.json"]
    assert (
        last["pwrite done.json"]
        < last["fdatasync done.json"]
        < last["unlink .journal"]
        < last[f"fsync {work}"]
        < rename
    )
    assert calls[rename + 1 :] == [f"fsync {tmp_path.name}"]
