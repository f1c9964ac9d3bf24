"""`reshard --engine ray` with a real Ray and four local workers: the same bytes as one process, also when workers die."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit import ops
from ckptkit.engine.ray_executor import run_parts
from ckptkit.errors import CorruptionError, FormatError, StoreError, UsageError
from tests.ops.making import contents, flip, make

ray: Any = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # Ray's own: unclosed files of its processes
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One node with four workers."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        num_cpus=4,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    size = {"hidden_size": 512, "num_hidden_layers": 4}
    return make(tmp_path_factory.mktemp("ray") / "a", settings=size, layout="tp=2,dp=2,zero=1")


@pytest.mark.parametrize(
    ("to", "layout"), [("native", "dp=6,zero=3"), ("dcp", "dp=3,zero=3"), ("hf", "tp=1")]
)
def test_the_result_is_that_of_one_process_bit_for_bit(
    source: str, tmp_path: Path, to: str, layout: str
) -> None:
    options: dict[str, Any] = {"to": to, "layout": layout, "drop_extras": True, "drop_optimizer": to == "hf"}
    alone = ops.reshard(source, str(tmp_path / "alone"), max_shard_size=4 << 20, **options)
    seen: list[tuple[int, int]] = []

    result = ops.reshard(
        source, str(tmp_path / "ray"), engine="ray", workers=4, max_shard_size=4 << 20,
        progress=lambda done, total: seen.append((done, total)), **options,
    )  # fmt: skip

    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
    assert result.digests == alone.digests
    assert result.files == alone.files and seen[-1][0] == seen[-1][1]
    assert sorted(os.listdir(tmp_path)) == ["alone", "ray"]


class _Slow:
    """A part of a real reshard that says who does it, and takes its time before it ends."""

    def __init__(self, source: str, target: str, notes: str) -> None:
        self.source, self.target, self.notes = source, target, notes

    def __call__(self, number: int, count: int) -> dict[str, Any]:
        with open(f"{self.notes}/{number}", "a") as file:
            file.write(f"{os.getpid()}\n")
        first = len(Path(self.notes, str(number)).read_text().split()) == 1
        time.sleep(3 if first and number in (2, 3) else 0)
        result = ops.reshard(
            self.source, self.target, layout="dp=6,zero=3", drop_extras=True, part=f"{number}/{count}"
        )
        return {"committed": result.committed, "digests": result.digests}


def test_workers_that_are_killed_are_replaced_and_the_result_is_the_same(source: str, tmp_path: Path) -> None:
    alone = ops.reshard(source, str(tmp_path / "alone"), layout="dp=6,zero=3", drop_extras=True)
    notes = tmp_path / "notes"
    notes.mkdir()
    killed: list[int] = []

    def kill() -> None:
        """The workers of two parts, once each is at work."""
        for number in (2, 3):
            while not (notes / str(number)).exists() or not (notes / str(number)).read_text().endswith("\n"):
                time.sleep(0.05)
            killed.append(int((notes / str(number)).read_text().split()[0]))
            os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    results = run_parts(_Slow(source, str(tmp_path / "ray"), str(notes)), 4)
    killer.join()

    assert len(killed) == 2
    for number in (2, 3):
        assert len((notes / str(number)).read_text().split()) == 2
    assert [part["committed"] for part in results].count(True) >= 1
    assert {k: v for part in results for k, v in part["digests"].items()} == alone.digests
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")


def test_a_damaged_source_is_told_by_its_part_and_nothing_is_in_place(source: str, tmp_path: Path) -> None:
    broken = ops.copy(source, str(tmp_path / "broken")).url
    flip(Path(broken) / "rank-00002.safetensors", -1)

    with pytest.raises(CorruptionError, match="rank-00002"):
        ops.reshard(
            broken, str(tmp_path / "out"), layout="dp=6,zero=3", drop_extras=True, engine="ray", workers=3
        )

    assert not (tmp_path / "out").exists()


class _Dies:
    def __call__(self, number: int, count: int) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class _Raises:
    def __call__(self, number: int, count: int) -> dict[str, Any]:
        raise FormatError(f"part {number} says no", file="x")


def test_a_part_whose_workers_all_die_is_an_error_that_names_it() -> None:
    with pytest.raises(StoreError, match=r"part 1/1 was lost 4 times"):
        run_parts(_Dies(), 1)


def test_an_error_of_a_part_is_the_error_of_the_call_and_is_not_retried() -> None:
    with pytest.raises(FormatError, match="part 1 says no") as caught:
        run_parts(_Raises(), 1)

    assert caught.value.facts["file"] == "x"


def test_wrong_uses(source: str, tmp_path: Path) -> None:
    for wrong in ({"workers": 0}, {"part": "1/2"}, {"overwrite": True}):
        with pytest.raises(UsageError):
            ops.reshard(source, str(tmp_path / "out"), layout="tp=1", engine="ray", drop_extras=True, **wrong)
    with pytest.raises(UsageError, match="local"):
        ops.reshard(source, "memory://out", layout="tp=1", engine="ray", drop_extras=True)
    ops.reshard(source, str(tmp_path / "out"), layout="tp=1", drop_extras=True)
    with pytest.raises(StoreError, match="exists"):
        ops.reshard(source, str(tmp_path / "out"), layout="tp=1", engine="ray", drop_extras=True)
