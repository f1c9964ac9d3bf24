"""Several processes write one destination: the same bytes as one process, in place only when all are done, whoever dies."""

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.plan import make_plan
from ckptkit.engine.parts import files_of
from ckptkit.engine.run import RunResult, run
from ckptkit.errors import CorruptionError, StoreError, UsageError
from ckptkit.stores.durable import tidy
from ckptkit.stores.local import LocalStore
from ckptkit.stores.parts import Part, PartFolder
from tests.engine.jobs import Job, forked
from tests.engine.test_run import replicated
from tests.engine.toy import Toy, destination, write


@given(st.lists(st.integers(0, 10_000), max_size=30), st.integers(1, 9))
def test_every_file_is_in_one_part_and_parts_are_even(sizes: list[int], count: int) -> None:
    """No part exceeds its share by more than one file."""
    column = np.asarray(sizes, np.int64)

    masks = [files_of(column, Part(number, count)) for number in range(1, count + 1)]

    assert (np.sum(masks, axis=0) == 1).all()
    for mask in masks:
        assert column[mask].sum() <= column.sum() / count + column.max(initial=0)


class PartsJob(Job):
    """12 files, with fingerprints, too."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, "tp=2,pp=2,dp=3,ep=2,zero=1")
        self.destination.fingerprints = True
        self.alone = self.run(None, out=folder + "/alone").written

    def run(self, part: Part | None, *, slow: bool = False, out: str = "") -> RunResult:
        return self.reshard(slow=slow, out=out, threads=1, part=part)

    def fork(self, part: Part, slow: bool = True, before: Callable[[], object] = lambda: None) -> int:
        def work() -> None:
            before()
            self.run(part, slow=slow)

        return forked(work)

    def check(self) -> None:
        """The same files as those of one process, and nothing beside them."""
        alone, found = Path(self.folder, "alone"), Path(self.out)
        names = sorted(os.listdir(alone))
        assert sorted(os.listdir(found)) == names
        for name in names:
            assert (found / name).read_bytes() == (alone / name).read_bytes(), name
        assert sorted(os.listdir(self.folder)) == ["alone", "out", "src"]


@pytest.fixture
def job(tmp_path: Path) -> PartsJob:
    return PartsJob(str(tmp_path))


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_parts_in_any_order_make_the_same_files_and_the_last_puts_them_in_place(
    job: PartsJob, count: int
) -> None:
    """Parts without a file included."""
    order = random.Random(count).sample(range(1, count + 1), count)

    results = []
    for number in order:
        assert not os.path.exists(job.out)
        results.append(job.run(Part(number, count)))

    assert [result.committed for result in results] == [False] * (count - 1) + [True]
    assert [len(result.waiting_for) for result in results] == list(range(count - 1, -1, -1))
    written = {w.path: w for result in results for w in result.written}
    assert len(written) == len(job.alone) == sum(len(result.written) for result in results)
    for one in job.alone[1:]:  # the first has its checksum filled in at the end
        same = written[one.path].leaves
        assert one.leaves is not None and same is not None
        assert np.array_equal(one.leaves.digests, same.digests)
        assert one.fingerprints == written[one.path].fingerprints
    job.check()


def test_processes_that_are_killed_at_any_moment_are_run_again(tmp_path: Path) -> None:
    """Four at a time; each is killed until all have ended well. Nothing is in place before."""
    rng = random.Random(4)
    job = PartsJob(str(tmp_path))
    kills = rounds = 0
    while kills <= 10 or rounds < 6:  # a fast machine has ended more of them before their moment comes
        rounds += 1
        assert rounds < 200
        shutil.rmtree(job.out, ignore_errors=True)
        left = {Part(number, 4) for number in range(1, 5)}
        while left:
            running = {job.fork(part): part for part in left}
            time.sleep(rng.uniform(0, 0.12))
            for child in running:
                if rng.random() < 0.7:
                    os.kill(child, signal.SIGKILL)
            for child, part in running.items():
                _, status = os.waitpid(child, 0)
                kills += os.WIFSIGNALED(status)
                if status == 0:
                    left.discard(part)
                assert os.WIFSIGNALED(status) or status == 0
            # The engine refuses a part of what is in place; `ops.reshard` tells it as done. So a part that was done when its
            # process was killed is not run beside others. Where all are done and none put it in place, any one does.
            done = {part for part in left if os.path.lexists(_mark(job, part))}
            left = left - done or (set() if os.path.exists(job.out) else set(list(done)[:1]))
            if left and any(not os.path.lexists(_mark(job, part)) for part in left):
                assert not os.path.exists(job.out)
        tidy(job.out)  # as a part that is run again does, where the last was killed after the rename
        job.check()


def _mark(job: PartsJob, part: Part) -> str:
    folders = [name for name in os.listdir(job.folder) if name.endswith(".unfinished")]
    return f"{job.folder}/{folders[0]}/.part.{part.number}-of-{part.count}" if folders else job.out


def test_several_that_end_at_once_put_it_in_place_once(tmp_path: Path) -> None:
    job = PartsJob(str(tmp_path))
    for _ in range(10):
        shutil.rmtree(job.out, ignore_errors=True)
        read, wrote = os.pipe()
        children = [
            job.fork(Part(number, 4), slow=False, before=partial(os.read, read, 1)) for number in range(1, 5)
        ]
        os.write(wrote, b"goes")

        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        os.close(read)
        os.close(wrote)
        job.check()


def test_a_last_process_that_dies_while_it_puts_it_in_place_leaves_that_to_the_next(
    job: PartsJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename, unlink and file sync of the last part in turn."""
    calls = {"left": 0}

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            calls["left"] -= 1
            if calls["left"] == 0:
                os._exit(9)
            return real(*given, **named)

        return call

    for moment in range(1, 400):
        shutil.rmtree(job.out, ignore_errors=True)
        job.run(Part(1, 2))

        def prepare(moment: int = moment) -> None:
            calls["left"] = moment
            for name in ("rename", "unlink", "fdatasync", "fsync"):
                setattr(os, name, dying(getattr(os, name)))

        _, status = os.waitpid(job.fork(Part(2, 2), slow=False, before=prepare), 0)
        if status == 0:
            break
        if not os.path.exists(job.out):
            job.run(Part(2, 2))
        tidy(job.out)
        job.check()
    assert status == 0 and moment > 10


def test_another_number_of_parts_goes_on_with_what_is_durable(job: PartsJob) -> None:
    first = job.run(Part(1, 2))

    results = [job.run(Part(number, 3)) for number in (1, 2, 3)]

    assert sum(result.reused_bytes for result in results) == first.bytes_out
    assert results[-1].committed
    job.check()


def test_one_process_ends_what_parts_began_and_the_other_way_round(job: PartsJob) -> None:
    """With a log of each in the folder; nothing of them stays behind."""

    def killed(part: Part | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            job.run(part, slow=True)
            os._exit(0)
        deadline = time.monotonic() + 10
        while not any(name.startswith(".journal") for name in _unfinished(job)):
            assert time.monotonic() < deadline
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    killed(None)
    job.run(Part(2, 2))
    job.run(None)
    job.check()

    shutil.rmtree(job.out)
    killed(None)
    for number in (1, 2):
        job.run(Part(number, 2))
    job.check()


def _unfinished(job: PartsJob) -> list[str]:
    return [
        name
        for folder in os.listdir(job.folder)
        if folder.endswith(".unfinished")
        for name in os.listdir(f"{job.folder}/{folder}")
    ]


def test_one_process_does_not_go_on_while_parts_are_at_work_nor_twice_the_same_part(job: PartsJob) -> None:
    def hold() -> None:
        """Stop when all is written, before the part is told to be done."""
        PartFolder.mark_done = lambda self: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]

    child = job.fork(Part(1, 2), before=hold)
    try:
        os.waitpid(child, os.WUNTRACED)
        with pytest.raises(StoreError, match="another run is writing"):
            job.run(None)
        with pytest.raises(StoreError, match="part 1/2"):
            job.run(Part(1, 2))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    job.run(Part(1, 2))
    job.run(Part(2, 2))
    job.check()


def test_unequal_replicas_in_one_part_s_share_keep_all_from_being_put_in_place(tmp_path: Path) -> None:
    """Whichever part compares them."""
    toy = Toy(roles=("param",))
    twice, target = replicated(toy), toy.catalog("tp=2,dp=2,zero=1", start=64)
    data = toy.bytes_of(twice)
    data[-1][-1] ^= 1
    write(str(tmp_path / "src"), twice, data)
    plan, made = make_plan(twice, target), destination(target, digests=True)

    outcomes: list[bool | None] = []
    for number in (1, 2, 3):
        part = Part(number, 3)
        try:
            result = run(plan, made, LocalStore(str(tmp_path / "src")), str(tmp_path / "out"), part=part)
            outcomes.append(result.committed)
        except CorruptionError:
            outcomes.append(None)

    assert outcomes.count(None) == 1 and True not in outcomes
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1", "1/0", "a/b", "1/2/3", "-1/2", "1 / 2"])
def test_parts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--part"):
        Part.parse(text)


def test_a_slurm_task_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert Part.parse("slurm") == Part(1, 8)

    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(UsageError, match="srun"):
        Part.parse("slurm")


def test_parts_write_to_a_shared_path_that_is_free(job: PartsJob) -> None:
    for wrong in ({"overwrite": True}, {"target": "memory://out"}):
        with pytest.raises(UsageError, match="local path"):
            run(
                job.plan,
                job.destination,
                LocalStore(job.folder + "/src"),
                wrong.pop("target", job.out),  # type: ignore[arg-type]
                part=Part(1, 2),
                **wrong,
            )
