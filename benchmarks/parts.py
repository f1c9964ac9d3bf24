"""Several processes against one: `reshard --part`, four processes with one killed in the middle, and Ray with four workers.

    python benchmarks/parts.py PATH                    256 MB, three runs each
    python benchmarks/parts.py PATH --gb 8 --ray       Ray too (extra ckptkit[ray]), one worker killed in the middle

Every run reshards one synthetic native checkpoint with optimizer state (ZAYA1, `tp=2,pp=2,ep=4,dp=4,zero=1` to `tp=1,pp=3,ep=2,dp=6,zero=1`). The sides take
turns; medians are compared with that of one process, start of Python included, with as many threads in all. In the runs with a kill one of the
four is killed with SIGKILL once a quarter of all bytes is durable, and started again at once; Ray starts its own again. Time for Ray's own start is
left out and printed. Digests of all rank files must be those of one process every time.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ckptkit.engine.writer import SEGMENT

PER_LAYER, BASE = 0.5384, 0.9403  # GB of a source: BASE + layers * PER_LAYER
SMALL = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "moe_intermediate_size": 512,
    "vocab_size": 8192,
}
BEFORE, AFTER = "tp=2,pp=2,ep=4,dp=4,zero=1", "tp=1,pp=3,ep=2,dp=6,zero=1"
COUNT = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder on the file system to measure; made if it is missing")
    parser.add_argument("--gb", type=float, default=0.25, help="size of the source (0.25)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="also Ray, with four workers")
    options = parser.parse_args()
    from ckptkit import ops
    from ckptkit.engine.executor import usable_cpus
    from ckptkit.engine.shapes import default_threads

    root = Path(options.path).absolute() / "ckptkit-bench-parts"
    root.mkdir(parents=True, exist_ok=True)
    try:
        layers = max(1, round((options.gb - BASE) / PER_LAYER))
        large = options.gb > 1
        settings: dict[str, Any] = {"num_hidden_layers": layers} if large else SMALL
        ops.synth(
            str(root / "src"), model="zaya-1gb" if large else "zaya-tiny", settings=settings, layout=BEFORE
        )
        nbytes = sum(file.stat().st_size for file in (root / "src").iterdir())
        threads = default_threads(direct=True)
        print(
            f"{nbytes / 1e9:.2f} GB, {usable_cpus()} CPUs, load {os.getloadavg()[0]:.1f}; {threads} threads in all"
        )
        sides = {"one process": _one, "4 processes": _four, "4, one killed": _four_killed}
        if options.ray:
            sides |= {"ray, 4 workers": _on_ray, "ray, one killed": _on_ray_killed}
            _start_ray()
        times: dict[str, list[float]] = {name: [] for name in sides}
        expected: dict[str, str] = {}
        for _ in range(options.runs):
            for name, side in sides.items():
                shutil.rmtree(root / "dst", ignore_errors=True)
                began = time.monotonic()
                side(root / "src", root / "dst", threads)
                times[name].append(time.monotonic() - began)
                found = ops.open(str(root / "dst")).catalog.facts["digests"]
                expected = expected or found
                if found != expected:
                    sys.exit(f"{name}: digests differ from those of one process")
        one = statistics.median(times["one process"])
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(f"{name:16} {middle:7.2f} s ({spread})  {middle / one:5.2f} of one process")
        print("digests: the same in every run")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _start(src: Path, dst: Path, threads: int, part: str = "") -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "ckptkit",
        "reshard",
        str(src),
        str(dst),
        "--layout",
        AFTER,
        "--threads",
        str(threads),
    ]
    return subprocess.Popen(
        command + (["--part", part] if part else []), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    if any(process.wait() for process in processes):
        sys.exit(f"a process ended with {[process.returncode for process in processes]}")


def _one(src: Path, dst: Path, threads: int) -> None:
    _end([_start(src, dst, threads)])


def _four(src: Path, dst: Path, threads: int) -> None:
    _end([_start(src, dst, max(1, threads // COUNT), f"{k}/{COUNT}") for k in range(1, COUNT + 1)])


def _four_killed(src: Path, dst: Path, threads: int) -> None:
    each = max(1, threads // COUNT)
    running = {k: _start(src, dst, each, f"{k}/{COUNT}") for k in range(1, COUNT + 1)}
    _wait_for_quarter(src, dst, lambda: all(process.poll() is not None for process in running.values()))
    victim = next((k for k, process in running.items() if process.poll() is None), 1)
    running[victim].send_signal(signal.SIGKILL)
    running[victim].wait()
    running[victim] = _start(src, dst, each, f"{victim}/{COUNT}")
    _end(list(running.values()))


def _wait_for_quarter(src: Path, dst: Path, over: Any) -> None:
    """Until a quarter of the segments is in the logs, or nothing is left to wait for."""
    files = [file.stat().st_size for file in src.glob("*.safetensors")]
    every = len(files) + sum(-(-size // SEGMENT) for size in files)
    while not over():
        rows = [json.loads(line) for line in _lines(dst)]
        if len({(row["file"], row["segment"]) for row in rows}) >= every // 4:
            return
        time.sleep(0.02)


def _lines(dst: Path) -> list[bytes]:
    from ckptkit.stores.parts import logs_of

    return [line for log in logs_of(str(dst)) for line in log.split(b"\n")[1:-1]]


def _start_ray() -> None:
    import ray

    began = time.monotonic()
    ray.init(
        num_cpus=COUNT,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )

    @ray.remote
    def warm() -> None:
        import ckptkit.ops.resharding  # noqa: F401

        time.sleep(0.5)

    ray.get([warm.remote() for _ in range(COUNT)])
    print(f"Ray's own start, with four workers: {time.monotonic() - began:.1f} s (left out below)")


def _on_ray(src: Path, dst: Path, threads: int) -> None:
    from ckptkit import ops

    each = max(1, threads // COUNT)
    ops.reshard(
        str(src), str(dst), layout=AFTER, engine="ray", workers=COUNT, threads=each if each == 1 else None
    )


def _on_ray_killed(src: Path, dst: Path, threads: int) -> None:
    done = threading.Event()

    def kill() -> None:
        _wait_for_quarter(src, dst, done.is_set)
        for pid in _holders(dst)[:1]:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        _on_ray(src, dst, threads)
    finally:
        done.set()
        killer.join()


def _holders(dst: Path) -> list[int]:
    """Other processes that hold a part's lock."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(f".{dst.name}." in link and "/.lock." in link for link in links):
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
