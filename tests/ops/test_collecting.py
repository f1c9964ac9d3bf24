"""`gc`: what it keeps against a plain statement of the rules, and what a crash leaves."""

import fcntl
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit import ops
from ckptkit.errors import FormatError, StoreError, UsageError
from ckptkit.ops.bans import Ban, ban
from ckptkit.stores.removal import remove_folder
from tests.ops.making import flip, make


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make(tmp_path_factory.mktemp("gc") / "step", optimizer="none", layout="tp=1"))


def add(step: Path, run: Path, name: str) -> Path:
    """A whole step that shares its files with `step`."""
    return Path(shutil.copytree(step, run / name, copy_function=os.link))


def names(run: Path) -> set[str]:
    return set(os.listdir(run))


def test_the_newest_stay_and_multiples_and_pins(step: Path, tmp_path: Path) -> None:
    for number in (10, 20, 25, 30, 40, 50):
        add(step, tmp_path, f"step-{number:08d}.e0")

    dry = ops.gc(str(tmp_path), keep_last=2, keep_every=20, pins=[25], dry_run=True)
    assert len(names(tmp_path)) == 6
    report = ops.gc(str(tmp_path), keep_last=2, keep_every=20, pins=[25])

    assert names(tmp_path) == {f"step-{n:08d}.e0" for n in (20, 25, 40, 50)}
    assert [row.step for row in dry.removed] == [row.step for row in report.removed] == [10, 30]
    assert report.freed == sum(row.nbytes for row in report.removed) > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 12), st.sampled_from(["whole", "whole", "broken"])),
        min_size=1,
        max_size=7,
        unique_by=lambda row: row[:2],
    ),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_what_stays_is_what_the_rules_say(
    step: Path,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[int, int, str]],
    keep_last: int,
    keep_every: int | None,
) -> None:
    run = tmp_path_factory.mktemp("run")
    for epoch, number, state in drawn:
        folder = add(step, run, f"step-{number:08d}.e{epoch}")
        if state == "broken":
            (folder / "manifest.json").unlink()

    ops.gc(str(run), keep_last=keep_last, keep_every=keep_every, quick=True)

    there = {(e, s): state for e, s, state in drawn}
    whole = sorted(key for key, state in there.items() if state == "whole")
    kept = set(there)
    if whole:
        top = whole[-1]
        lowest = min(s for e, s in there if e == top[0])
        for key, state in there.items():
            young = key >= whole[-keep_last:][0] if state == "whole" else key > whole[-keep_last:][0]
            multiple = state == "whole" and keep_every is not None and key[1] % keep_every == 0
            if not (young or multiple or (key[0] < top[0] and key[1] > lowest)):
                kept.discard(key)
    assert names(run) == {f"step-{s:08d}.e{e}" for e, s in kept}
    assert not whole or f"step-{whole[-1][1]:08d}.e{whole[-1][0]}" in names(run)


def test_a_run_started_anew_by_mistake_does_not_age_out_the_real_one(step: Path, tmp_path: Path) -> None:
    for number, epoch in ((11900, 0), (12000, 0), (100, 1), (200, 1), (300, 1)):
        add(step, tmp_path, f"step-{number:08d}.e{epoch}")

    ops.gc(str(tmp_path), keep_last=1)

    assert names(tmp_path) == {"step-00011900.e0", "step-00012000.e0", "step-00000300.e1"}


def test_a_newest_step_that_is_damaged_is_not_counted_on(step: Path, tmp_path: Path) -> None:
    """Its structure is sound; the bytes are not. What would be the last good step stays."""
    add(step, tmp_path, "step-00000010.e0")
    bad = tmp_path / "step-00000020.e0"
    shutil.copytree(step, bad)
    flip(bad / "rank-00000.safetensors", -1)

    report = ops.gc(str(tmp_path), keep_last=1)

    assert names(tmp_path) == {"step-00000010.e0", "step-00000020.e0"}
    assert next(row.why for row in report.kept if row.step == 20).startswith(
        "newer than the newest whole step"
    )


def test_banned_steps_do_not_count_among_the_newest(step: Path, tmp_path: Path) -> None:
    """Nobody restores them: the last one that somebody would stays."""
    for number in (10, 20, 30):
        add(step, tmp_path, f"step-{number:08d}.e0")
    ban(str(tmp_path), Ban(0, 20, newer=True, why="nan"))

    ops.gc(str(tmp_path), keep_last=1)

    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        f"step-{number:08d}.e0" for number in (10, 20, 30)
    }


def test_without_a_whole_step_nothing_goes(step: Path, tmp_path: Path) -> None:
    for number in (10, 20):
        (add(step, tmp_path, f"step-{number:08d}.e0") / "manifest.json").unlink()

    report = ops.gc(str(tmp_path), keep_last=1)

    assert len(names(tmp_path)) == 2 and not report.removed and report.notes


def test_abandoned_folders_go_when_nobody_holds_them_and_they_are_old(step: Path, tmp_path: Path) -> None:
    add(step, tmp_path, "step-00000010.e0")
    for name in ("aa", "bb", "cc"):
        (tmp_path / f".step-00000020.e0.{name}.unfinished").mkdir()
    set_aside = add(step, tmp_path, ".step-00000030.e0.dd.replaced.unfinished")
    for name in ("aa", "bb"):
        os.utime(tmp_path / f".step-00000020.e0.{name}.unfinished", (0, 0))
    held = os.open(tmp_path / ".step-00000020.e0.bb.unfinished", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        report = ops.gc(str(tmp_path), keep_last=1)
    finally:
        os.close(held)

    assert [row.name for row in report.removed] == [".step-00000020.e0.aa.unfinished"]
    assert set_aside.exists()
    assert {row.why for row in report.kept} > {"a writer is at work on it"}


def test_a_removal_that_stops_anywhere_leaves_nothing_that_looks_whole(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker goes first; the next gc takes the rest."""
    add(step, tmp_path, "step-00000010.e0")
    add(step, tmp_path, "step-00000020.e0")

    def killed(path: object, *rest: object) -> None:
        raise OSError(5, "stopped here")

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(StoreError, match="run gc again"):
        ops.gc(str(tmp_path), keep_last=1)
    monkeypatch.undo()

    states = {row.step: row.state for row in ops.steps(str(tmp_path)).steps}
    assert states == {10: "unfinished", 20: "whole"}
    ops.gc(str(tmp_path), keep_last=1)
    assert names(tmp_path) == {"step-00000020.e0"}


def test_gc_killed_at_any_call_leaves_only_steps_that_are_whole_or_known_not_to_be(
    step: Path, tmp_path: Path
) -> None:
    """At renames, unlinks, rmdirs and syncs in turn; the next gc does the rest."""
    plain = Path(make(tmp_path / "plain", optimizer="none", layout="tp=1", to="hf"))
    moment, status = 0, 1
    while status:
        moment += 1 + moment // 6  # all of the first ones, then some
        run = tmp_path / f"run{moment}"
        for number in (10, 20, 30):
            add(step, run, f"step-{number:08d}.e0")
        add(plain, run, "checkpoint-5")

        status = killed_gc(run, moment)

        for row in ops.steps(str(run)).steps:
            assert row.state != "whole" or ops.verify(row.path, quick=True).exit_code == 0
        assert ops.newest(str(run), quick=True).step.step == 30  # type: ignore[union-attr]
        ops.gc(str(run), keep_last=2, quick=True, abandoned_s=0)
        assert names(run) == {"step-00000020.e0", "step-00000030.e0"}
    assert moment > 10


def killed_gc(run: Path, moment: int) -> int:
    """Run gc in a child that ends itself at its `moment`-th call; 0 where it came to its end before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of a linear algebra library
        child = os.fork()
    if child == 0:
        left = [moment]

        def dying(real: Callable[..., object]) -> Callable[..., object]:
            def call(*given: object, **named: object) -> object:
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return real(*given, **named)

            return call

        for name in ("rename", "unlink", "rmdir", "fsync"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            ops.gc(str(run), keep_last=2, quick=True)
        finally:
            os._exit(0 if left[0] > 0 else 1)
    return os.waitpid(child, 0)[1]


def test_a_format_without_a_marker_is_renamed_before_it_is_removed(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(weights, tmp_path / "checkpoint-10")

    def killed(path: object, *rest: object) -> None:
        raise OSError(5, "stopped here")

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(StoreError):
        remove_folder(str(tmp_path / "checkpoint-10"), None)

    (left,) = os.listdir(tmp_path)
    assert left.startswith(".checkpoint-10.") and left.endswith(".unfinished")


def test_a_remote_run_is_collected_with_its_marker_first(trained: str) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    removed: list[str] = []

    for number in (10, 20):
        ops.reshard(trained, f"memory://gc-run/step-{number:08d}.e0", layout="tp=1")
    plain = MemoryFileSystem.rm_file

    def rm_file(self: MemoryFileSystem, path: str) -> None:
        removed.append(path)
        plain(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm_file", rm_file)
        ops.gc("memory://gc-run", keep_last=1, quick=True)

    assert removed[0].endswith("step-00000010.e0/manifest.json")
    assert [row.step for row in ops.steps("memory://gc-run").steps] == [20]


def test_wrong_numbers_remove_nothing(step: Path, tmp_path: Path) -> None:
    add(step, tmp_path, "step-00000010.e0")

    for wrong in ({"keep_last": 0}, {"keep_last": 1, "keep_every": 0}, {"keep_last": 1, "pins": [11]}):
        with pytest.raises(UsageError):
            ops.gc(str(tmp_path), **wrong)
    with pytest.raises(FormatError, match="holds no step"):
        ops.gc(str(step), keep_last=1)
    with pytest.raises(StoreError):
        ops.gc(str(tmp_path / "nothing"), keep_last=1)

    assert names(tmp_path) == {"step-00000010.e0"}
