"""Injection: each fault happens as it says, to the real thing, and a plan is replayed exactly."""

import http.client
import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import StoreError, UsageError
from ckptkit.faults.crash.scenarios.base import contents, synth
from ckptkit.faults.inject import fuse, netem, processes
from ckptkit.faults.inject.memory import draw_flips, flip_array, flip_file
from ckptkit.faults.inject.network import Behaviour, Proxy
from ckptkit.faults.inject.plan import Choice, Fault, FaultPlan, Schedule
from ckptkit.faults.inject.program import environment
from ckptkit.faults.inject.storage import EFFECTS, Rule, Rules
from ckptkit.faults.interpose import Interposer

MENU = [
    Choice("kill", ["rank 0", "rank 1"], weight=3),
    Choice("slow", ["node 0"], values={"share": (0.1, 0.5), "seconds": (1, 9)}),
    Choice("write", ["disk"], values={"effect": ["enospc", "eio"], "times": 2}),
]


# Plans


def test_a_plan_is_its_seed(tmp_path) -> None:
    one, same, other = (FaultPlan.draw(seed, MENU, 20, 5, 100, apart=2) for seed in (7, 7, 8))

    assert one == same and one.text() == same.text()
    assert one != other
    whens = [fault.when for fault in one.faults]
    assert whens == sorted(whens) and min(whens) >= 5 and max(whens) <= 100
    assert all(b - a >= 1 for a, b in pairwise(whens))
    assert {fault.kind for fault in one.faults} == {"kill", "slow", "write"}
    for fault in one.faults:
        if fault.kind == "slow":
            assert 0.1 <= float(fault.values["share"]) <= 0.5 and fault.values["seconds"] in range(1, 10)


def test_what_was_printed_is_replayed() -> None:
    plan = FaultPlan.draw(3, MENU, 6, 0, 50)

    again = FaultPlan.parse(plan.to_json())

    assert again == plan and again.text() == plan.text()
    assert again.to_json() == plan.to_json()
    assert len(plan.without(2).faults) == 5
    assert plan.text().splitlines()[0] == "seed 3"


@pytest.mark.parametrize(
    "text", ["", "{}", '{"seed": 1, "faults": [[1, 2]]}', '{"seed": null, "faults": [["x", "a", "k", {}]]}']
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no fault plan"):
        FaultPlan.parse(text)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit"):
        FaultPlan.draw(0, MENU, 10, 0, 5, apart=1)
    with pytest.raises(UsageError, match="needs a menu"):
        FaultPlan.draw(0, [], 1, 0, 5)
    with pytest.raises(UsageError, match="in order of time"):
        FaultPlan((Fault(2, "a", "kill"), Fault(1, "a", "kill")))


def test_a_schedule_gives_each_fault_once() -> None:
    schedule = Schedule(FaultPlan.of(Fault(5, "b", "kill"), Fault(2, "a", "kill"), Fault(2, "c", "hang")))

    assert [fault.target for fault in schedule.due(1)] == []
    assert [fault.target for fault in schedule.due(3)] == ["a", "c"]
    assert not schedule.over
    assert [fault.target for fault in schedule.due(100)] == ["b"]
    assert schedule.over


# Storage


@pytest.mark.parametrize(
    ("effect", "calls"),
    [("enospc", "write"), ("eio", "datasync"), ("eio", "sync"), ("erofs", "rename"), ("enospc", "allocate")],
)
def test_a_reshard_on_a_failing_disk_says_so_and_goes_on_later(
    tmp_path: Path, effect: str, calls: str
) -> None:
    """StoreError with advice, nothing at the destination; without the fault the same command ends well."""
    synth(str(tmp_path / "source"), 2)
    (tmp_path / "disk").mkdir()
    target = str(tmp_path / "disk" / "out")
    rules = Rules([Rule(effect, calls, after=1)])

    with Interposer(str(tmp_path / "disk"), rules), pytest.raises(StoreError, match=r"cannot .* /.*\. [A-Z]"):
        ops.reshard(str(tmp_path / "source"), target, to="native", layout="ep=2,dp=2", threads=1)

    assert len(rules.met) == 1
    assert not os.path.exists(target)
    ops.reshard(str(tmp_path / "source"), target, to="native", layout="ep=2,dp=2", threads=1)
    assert ops.verify(target).exit_code == 0


def test_short_and_slow_writes_change_nothing(tmp_path: Path) -> None:
    synth(str(tmp_path / "source"), 2)
    (tmp_path / "disk").mkdir()
    ops.reshard(str(tmp_path / "source"), str(tmp_path / "plain"), to="native", fingerprint=True)
    rules = Rules([Rule("short", times=-1, after=2), Rule("slow", "sync", seconds=0.01)])

    with Interposer(str(tmp_path / "disk"), rules):
        ops.reshard(str(tmp_path / "source"), str(tmp_path / "disk" / "out"), to="native", fingerprint=True)

    assert contents(str(tmp_path / "disk" / "out")) == contents(str(tmp_path / "plain"))
    assert {effect for effect, _, _ in rules.met} == {"short", "slow"}


def test_rules_count_calls_and_paths() -> None:
    from ckptkit.faults.interpose import Call

    rules = Rules([Rule("slow", "write,rename", "*/manifest.json*", after=1, times=2)])

    def go(kind: str, path: str, other: str = "") -> None:
        rules(Call(kind, path, other), lambda call: None)

    for _ in range(4):
        go("write", "/a/manifest.json")
    go("write", "/a/other")
    go("rename", "/a/x", "/a/manifest.json")

    assert [kind for _, kind, _ in rules.met] == ["write", "write"]


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(UsageError, match="effects are"):
        Rule("melt")
    with pytest.raises(UsageError, match="calls"):
        Rule("eio", "read")
    with pytest.raises(UsageError, match="no color"):
        Rule.of({"effect": "eio", "color": 1})
    assert {"short", "slow", "kill", "hang", "eio"} <= set(EFFECTS)


# Programs, by their environment


def python(code: str, env: dict[str, str], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **more,
    )  # type: ignore[call-overload]


def test_a_program_is_killed_at_its_nth_call(tmp_path: Path) -> None:
    code = f"import os\nfor k in range(5):\n    open({str(tmp_path)!r} + f'/{{k}}', 'w').write('x')"

    done = python(code, environment(str(tmp_path), [Rule("kill", "open", after=3)]))

    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def test_children_meet_the_same_faults_and_others_none(tmp_path: Path) -> None:
    inner = f"open({str(tmp_path / 'f')!r}, 'w').write('x')"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"

    faulty = python(code, environment(str(tmp_path), [Rule("enospc", "open")]))
    plain = python(code, dict(os.environ))

    assert faulty.returncode == 1 and "No space left on device" in faulty.stderr
    assert plain.returncode == 0


def test_a_clock_that_jumped_fools_the_wall_clock_alone() -> None:
    code = "import time, datetime, json; print(json.dumps([time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp(), time.monotonic()]))"

    wall, nanoseconds, today, monotonic = json.loads(python(code, environment(clock_s=3600)).stdout)

    assert all(abs(value - time.time() - 3600) < 60 for value in (wall, nanoseconds, today))
    assert abs(monotonic - time.monotonic()) < 60


# Processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child
    processes.go_on(child.pid)
    child.kill()
    child.wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(pid: int, letters: str) -> None:
    until = time.monotonic() + 30
    while state(pid) not in letters and time.monotonic() < until:
        time.sleep(0.005)
    assert state(pid) in letters


def test_hang_and_go_on_and_kill(sleeper: subprocess.Popen[bytes]) -> None:
    processes.hang(sleeper.pid)
    wait_for(sleeper.pid, "T")
    processes.go_on(sleeper.pid)
    wait_for(sleeper.pid, "RS")
    processes.kill(sleeper.pid)

    assert sleeper.wait(30) == -signal.SIGKILL
    processes.kill(sleeper.pid)  # gone already: nothing happens


def test_a_slow_process_is_stopped_now_and_then(sleeper: subprocess.Popen[bytes]) -> None:
    slow = processes.Slow(sleeper.pid, share=0.2)
    seen: set[str] = set()
    until = time.monotonic() + 30
    while not {"T", "R"} <= seen and time.monotonic() < until:
        seen.add(state(sleeper.pid))
        time.sleep(0.003)
    slow.end()

    assert {"T", "R"} <= seen
    wait_for(sleeper.pid, "RS")


def test_a_lost_node_takes_its_memory_along(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "0000.dat").write_bytes(b"x")

    processes.lose_node([sleeper.pid], [str(tmp_path / "slots")], lambda: [sleeper.wait()])  # type: ignore[arg-type]

    assert sleeper.returncode == -signal.SIGKILL
    assert not (tmp_path / "slots").exists()


def test_memory_runs_out() -> None:
    code = "import sys; sys.stdin.readline(); x = bytearray(4 << 30)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        processes.limit_memory(child.pid, 1 << 30)

        _, said = child.communicate("go\n")

    assert child.returncode == 1 and "MemoryError" in said


# Memory


def test_a_flip_changes_one_bit_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "slot").write_bytes(bytes(100))

    flip = flip_file(str(tmp_path / "slot"), -1, 3)

    assert (tmp_path / "slot").read_bytes() == bytes(99) + b"\x08"
    assert flip.text() == f"bit 3 of byte 99 of {tmp_path / 'slot'}"
    with pytest.raises(UsageError, match="100 bytes"):
        flip_file(str(tmp_path / "slot"), 100)


def test_flips_of_arrays_are_drawn_and_in_place() -> None:
    array = np.zeros((4, 5), np.float32)

    flip = flip_array(array, random.Random(1))

    bits = np.unpackbits(array.reshape(-1).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [8 * flip.offset + flip.bit]
    with pytest.raises(UsageError, match="not contiguous"):
        flip_array(array.T[1:], random.Random(1))


def test_drawn_flips_cover_all_files_by_size(tmp_path: Path) -> None:
    for name, size in (("large", 9000), ("small", 1000), ("empty", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    paths = [str(tmp_path / name) for name in ("large", "small", "empty")]

    flips = draw_flips(paths, 500, 3)

    assert flips == draw_flips(paths, 500, 3)
    assert 400 < sum(flip.where.endswith("large") for flip in flips) < 500
    assert all(flip.offset < os.path.getsize(flip.where) for flip in flips)


# Network


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"0123456789" * 1000
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with Proxy(("127.0.0.1", server.server_address[1])) as made:
        yield made
    server.shutdown()
    server.server_close()
    thread.join()


def get(proxy: Proxy, timeout: float = 20) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*proxy.address, timeout=timeout)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_proxy_passes_on_and_heals(proxy: Proxy) -> None:
    whole = get(proxy)
    proxy.behave(Behaviour(partition=True))
    with pytest.raises(TimeoutError):
        get(proxy, timeout=0.3)
    proxy.behave()

    assert whole == (200, b"0123456789" * 1000)
    assert get(proxy) == whole


def test_answers_are_truncated_flipped_delayed_or_made_up(proxy: Proxy) -> None:
    status, body = get(proxy)
    proxy.behave(Behaviour(truncate=4000))
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        get(proxy)
    proxy.behave(Behaviour(flip_at=5000))
    _, flipped = get(proxy)
    proxy.behave(Behaviour(status=503))
    refused, nothing = get(proxy)
    proxy.behave(Behaviour(delay_s=0.05, rate=1e6))

    assert get(proxy) == (status, body)
    assert sum(a != b for a, b in zip(flipped, body, strict=True)) == 1
    assert (refused, nothing) == (503, b"")


def test_connections_are_refused_or_reset(proxy: Proxy) -> None:
    with socket.create_connection(proxy.address, 20) as open_one:
        open_one.sendall(b"GET / HTTP/1.1\r\n")
        until = time.monotonic() + 20
        while not proxy._pairs and time.monotonic() < until:
            time.sleep(0.005)
        proxy.behave(Behaviour(reset=True))
        with pytest.raises(ConnectionError):
            while open_one.recv(100):
                pass
            raise ConnectionAbortedError  # an orderly end is no reset, but no answer either

    proxy.behave(Behaviour(refuse=True))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(proxy)


@pytest.fixture
def namespace() -> Iterator[netem.Namespace]:
    try:
        made = netem.Namespace()
    except (UsageError, OSError) as error:
        pytest.skip(str(error))
    yield made
    made.close()


LOOPBACK = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname(), 2); print('through')"


def test_a_namespace_s_link_goes_down_and_up(namespace: netem.Namespace) -> None:
    def through() -> bool:
        done = subprocess.run(
            namespace.command([sys.executable, "-c", LOOPBACK]), capture_output=True, check=False
        )
        return done.stdout == b"through\n"

    assert through()
    namespace.partition()
    assert not through()
    namespace.partition(False)
    assert through()


def test_a_namespace_s_rate_is_shaped(namespace: netem.Namespace) -> None:
    namespace.shape(rate=1e6)
    shown = subprocess.run(
        namespace.command([netem.TC, "qdisc", "show", "dev", "lo"]),
        capture_output=True,
        text=True,
        check=True,
    )
    namespace.shape()

    assert "tbf" in shown.stdout and "8Mbit" in shown.stdout


@pytest.mark.skipif(not netem.has_netem(), reason="no netem in this kernel, or no namespaces")
def test_a_namespace_delays_and_loses(namespace: netem.Namespace) -> None:
    namespace.shape(delay_s=0.05, loss=0.1)
    shown = subprocess.run(
        namespace.command([netem.TC, "qdisc", "show", "dev", "lo"]),
        capture_output=True,
        text=True,
        check=True,
    )

    assert "delay 50ms" in shown.stdout and "loss 10%" in shown.stdout


# FUSE

needs_fuse = pytest.mark.skipif(bool(fuse.missing()), reason=fuse.missing() or "there is FUSE")


@needs_fuse
def test_power_loss_under_a_real_reshard(tmp_path: Path) -> None:
    """The step that was committed is whole afterwards, whatever was drawn; what was not synced may be gone."""
    lost = 0
    for seed in range(4):
        backing, at = tmp_path / f"b{seed}", tmp_path / f"m{seed}"
        backing.mkdir()
        at.mkdir()
        with fuse.Mount(str(backing), str(at)) as mount:
            synth(str(at / "run" / "step-1"), 1)
            wanted = contents(str(at / "run" / "step-1"))
            for number in range(20):
                (at / f"unsynced-{number}").write_bytes(b"x" * 100)
            mount.power_loss(seed)

        assert contents(str(backing / "run" / "step-1")) == wanted
        assert ops.newest(str(backing / "run")).path == str(backing / "run" / "step-1")
        lost += 20 - sum((backing / f"unsynced-{n}").exists() for n in range(20))
    assert lost > 0


@needs_fuse
def test_rules_hold_for_any_program_below_the_mount(tmp_path: Path) -> None:
    """`dd` knows nothing of Python."""
    for name in ("b", "m"):
        (tmp_path / name).mkdir()
    rules = (Rule("enospc", "write", "*/full"), Rule("eio", "sync,datasync", "*/broken"))

    with fuse.Mount(str(tmp_path / "b"), str(tmp_path / "m"), rules):
        done = [
            subprocess.run(["dd", "if=/dev/zero", f"of={tmp_path / 'm' / name}", "bs=4096", "count=4", "conv=fsync"],
                           capture_output=True, text=True, check=False)
            for name in ("full", "broken", "fine")
        ]  # fmt: skip

    assert [run.returncode for run in done] == [1, 1, 0]
    assert "No space left" in done[0].stderr and "Input/output error" in done[1].stderr
    assert (tmp_path / "b" / "fine").stat().st_size == 4 * 4096


@needs_fuse
def test_overwrite_goes_the_other_way_where_folders_cannot_be_exchanged(tmp_path: Path) -> None:
    for name in ("b", "m"):
        (tmp_path / name).mkdir()
    with fuse.Mount(str(tmp_path / "b"), str(tmp_path / "m")):
        out = str(tmp_path / "m" / "out")
        synth(out, 1)
        synth(out, 2, overwrite=True)

        assert ops.verify(out).exit_code == 0
    assert os.listdir(tmp_path / "b") == ["out"]
