"""Files written from first byte to last: fields filled in on the way, tasks only so far apart, every byte as in any other order."""

import random
import threading
import zlib

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.destination import Fixup
from ckptkit.engine.executor import Window, run_tasks
from ckptkit.engine.ordered import Fields


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30))
def test_fields_are_filled_in_wherever_the_bytes_are_cut(seed: int) -> None:
    """Ranges, gaps, fields that follow at once or much later, cut in the middle of a field: as if done to the whole file."""
    draw = random.Random(seed)
    size, at, fixups = 400, 0, []
    ends: list[tuple[int, int]] = []
    for _ in range(draw.randrange(6)):
        start = at + draw.randrange(5)
        stop = start + draw.randrange(1, 40)
        ends.append((start, stop))
        at = stop + 4
    for number, (start, stop) in enumerate(ends):
        fixups.append(Fixup("crc32", start, stop, (stop, 300 + 5 * number)))
    plain = bytearray(draw.randbytes(size))
    whole = bytearray(plain)
    for fixup in fixups:
        for offset in fixup.offsets:
            whole[offset : offset + 4] = zlib.crc32(plain[fixup.start : fixup.stop]).to_bytes(4, "little")

    fields, passed, at = Fields(draw.sample(fixups, len(fixups))), bytearray(), 0
    while at < size:
        stop = min(at + draw.randrange(1, 60), size)
        piece = bytearray(plain[at:stop])
        fields.fill(at, memoryview(piece))
        passed += piece
        at = stop

    assert passed == whole


def test_a_field_before_its_data_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be filled in as bytes pass"):
        Fields([Fixup("crc32", 10, 20, (4, 30))])


@pytest.mark.parametrize("window", [1, 2, 5])
def test_tasks_begin_in_order_and_only_so_far_apart(window: int) -> None:
    """No task begins while one `window` or more before it runs; all are done once."""
    lock, running, begun = threading.Lock(), set[int](), list[int]()
    pause = np.random.default_rng(0).uniform(0, 0.002, 60)

    def work(task: int, worker: int) -> None:
        with lock:
            running.add(task)
            begun.append(task)
            assert task - min(running) < window
        threading.Event().wait(pause[task])
        with lock:
            running.remove(task)

    run_tasks(60, 4, work, threading.Event(), window=window)

    assert sorted(begun) == list(range(60))


def test_a_worker_that_waits_for_its_turn_ends_when_the_run_stops() -> None:
    stop = threading.Event()
    window = Window(10, 1, stop)
    assert window.next(0) == 0
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(window.next(1)))
    thread.start()
    stop.set()
    thread.join(10)
    assert found == [None]


def test_an_error_of_one_task_ends_those_that_wait() -> None:
    def work(task: int, worker: int) -> None:
        if task == 3:
            raise OSError("fault")

    with pytest.raises(OSError, match="fault"):
        run_tasks(1000, 4, work, threading.Event(), window=2)


def test_the_library_of_urls_is_not_loaded_for_local_files() -> None:
    """`fsspec` is there; what is local does not import it (nor wait for it)."""
    import subprocess
    import sys

    code = "import sys, ckptkit.engine.run, ckptkit.stores as s; s.open_store('/'); print('fsspec' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert fsspec.__version__ and done.stdout.strip() == "False"
