"""Resharding against `cp -r`: ratios of times from interleaved runs, on whatever disk PATH is.

    python benchmarks/reshard.py PATH                 8 GB, three cases, three runs each
    python benchmarks/reshard.py PATH --gb 16 --case layout --runs 5
    python benchmarks/reshard.py /dev/shm/x --gb 2 --threads 2

Each run resharding a synthetic native checkpoint is one process (`ckptkit.ops.reshard`: digests checked and computed, every
byte synced, the result opened again) and stands beside a `cp -r` of as many bytes, with `sync` where PATH is on a disk.
The two take turns, and the medians are compared; sources were just read, so they are in the page cache if that is large
enough. `call` is the library call, `process` the whole process with its imports. Cases:

    layout  ZAYA1 with the optimizer's state: tp=2,pp=2,ep=4,dp=4,zero=1 to tp=1,pp=3,ep=2,dp=6,zero=1
    inner   Llama, with state: tp=1 to tp=4, which cuts the rows of half of its matrices
    hf      ZAYA1 weights: native, cut by ep and dp, to a Transformers folder

The target is 0.9 on a disk and 1.0 in memory, with two CPUs. Everything made is removed, unless --keep.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

PER_LAYER = {"layout": 0.5384, "inner": 0.8138, "hf": 0.1074}
BASE = {"layout": 0.9403, "inner": 0.9396, "hf": 0.1353}
"""GB of a source: BASE + layers * PER_LAYER."""

CASES: dict[str, dict] = {
    "layout": {
        "model": "zaya-1gb", "optimizer": "muon+adamw", "settings": {},
        "before": "tp=2,pp=2,ep=4,dp=4,zero=1", "after": {"layout": "tp=1,pp=3,ep=2,dp=6,zero=1"},
    },
    "inner": {
        "model": "llama", "optimizer": "adamw", "before": "tp=1", "after": {"layout": "tp=4"},
        "settings": {
            "vocab_size": 16384, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 128,
        },
    },
    "hf": {
        "model": "zaya-1gb", "optimizer": "none", "settings": {}, "before": "ep=4,dp=4",
        "after": {"to": "hf", "drop_extras": True, "drop_optimizer": True},
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder on the file system to measure; made if it is missing")
    parser.add_argument("--gb", type=float, default=8.0, help="size of the source (8)")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--cgroup-mb", type=int, default=512, help="one more run inside a memory cgroup of this size"
    )
    parser.add_argument("--keep", action="store_true", help="keep the sources for the next time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.path, json.loads(options.child))
        return
    from ckptkit.engine.executor import usable_cpus
    from ckptkit.stores.system import MEMORY_FILE_SYSTEMS, file_system

    root = Path(options.path.removeprefix("file://")).absolute() / "ckptkit-bench"
    root.mkdir(parents=True, exist_ok=True)
    kind = file_system(str(root))
    in_memory = kind in MEMORY_FILE_SYSTEMS
    print(
        f"{root}: {kind}, {'in memory' if in_memory else 'a disk'}; {usable_cpus()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB of memory"
    )
    try:
        for name in CASES if options.case == "all" else [options.case]:
            measure(name, root, in_memory, options)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)


def measure(name: str, root: Path, in_memory: bool, options: argparse.Namespace) -> None:
    """Make the source of one case, then let both sides take turns."""
    case = CASES[name]
    layers = max(2, round((options.gb - BASE[name]) / PER_LAYER[name]))
    source, target = root / f"{name}-{layers}", root / "out"
    if not source.exists():
        settings = {**case["settings"], "num_hidden_layers": layers}
        making = {
            "model": case["model"],
            "settings": settings,
            "optimizer": case["optimizer"],
            "layout": case["before"],
        }
        start(source, {"synth": making})
    nbytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    copied: list[float] = []
    called: list[float] = []
    whole: list[float] = []
    peaks: list[float] = []
    job = {"source": str(source), "options": {**case["after"], "threads": options.threads}}
    for turn in range(options.runs):
        clear(target)
        if turn == 0:
            subprocess.run(
                ["cp", "-r", source, target], check=True
            )  # so that both sides find the source in memory
            clear(target)
        began = time.monotonic()
        subprocess.run(["cp", "-r", source, target], check=True)
        if not in_memory:
            subprocess.run(["sync"], check=True)
        copied.append(time.monotonic() - began)
        clear(target)
        began = time.monotonic()
        done = start(target, job)
        whole.append(time.monotonic() - began)
        called.append(done["seconds"])
        peaks.append(done["peak_mb"])
        print(
            f"  {name} {turn + 1}: cp {copied[-1]:.2f} s, call {called[-1]:.2f} s, process {whole[-1]:.2f} s, "
            f"peak {peaks[-1]:.0f} MB, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    cp = statistics.median(copied)
    print(
        f"{name}: {nbytes / 1e9:.2f} GB, {'direct' if done['direct'] else 'buffered'}, {done['threads']} threads, read "
        f"{done['read'] / nbytes:.2f}x: call {statistics.median(called) / cp:.2f}, process "
        f"{statistics.median(whole) / cp:.2f} of cp -r{'' if in_memory else ' + sync'} "
        f"({nbytes / cp / 1e9:.2f} GB/s); peak {max(peaks):.0f} MB"
    )
    if options.cgroup_mb and not in_memory:
        clear(target)
        done = start(target, {**job, "cgroup_mb": options.cgroup_mb})
        print(
            f"{name} in a cgroup of {options.cgroup_mb} MiB: "
            + (done["refused"] or f"{done['seconds']:.2f} s, peak {done['peak_mb']:.0f} MB")
        )
    clear(target)
    if not options.keep:
        clear(source)


def clear(target: Path) -> None:
    """Remove a folder, and leave nothing to be written back during the next measurement."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()


def start(target: Path, job: dict) -> dict:
    """Run one job in a process of its own."""
    command = [sys.executable, __file__, str(target), "--child", json.dumps(job)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def child(target: str, job: dict) -> None:
    """Make a source, or reshard one; prints one JSON object."""
    refused = enter_cgroup(job["cgroup_mb"] << 20) if "cgroup_mb" in job else ""
    from ckptkit import ops
    from ckptkit.engine.shapes import default_threads
    from ckptkit.stores.system import MEMORY_FILE_SYSTEMS, file_system

    began = time.monotonic()
    if "synth" in job:
        done = ops.synth(target, **job["synth"])
    else:
        done = ops.reshard(job["source"], target, **job["options"])
    direct = file_system(target) not in MEMORY_FILE_SYSTEMS
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
                "read": done.bytes_read,
                "direct": direct,
                "threads": job.get("options", {}).get("threads") or default_threads(direct),
                "refused": refused,
            }
        )
    )


def enter_cgroup(limit: int) -> str:
    """Put this process in a memory cgroup; gives the reason where that is impossible."""
    for base, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(base, f"ckptkit-bench-{limit >> 20}")
        if not Path(base).is_dir():
            continue
        try:
            group.mkdir(exist_ok=True)
            (group / name).write_text(str(limit))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return ""
        except OSError as error:
            why = f"not run, since no cgroup can be made ({error})"
    return why


if __name__ == "__main__":
    main()
