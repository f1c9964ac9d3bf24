"""Our conversions beside those of the libraries that own the formats: times as ratios to `cp -r` of the same output.

    python benchmarks/peers.py PATH                    7 GB, every job, two runs each
    python benchmarks/peers.py /dev/shm/x --gb 1.4

Each job makes its source once, then `cp -r` of the output, the peer and ckptkit take turns, each a process of its own with its
imports, and `sync` after it where PATH is on a disk. Peaks are the memory of all processes of a side together (PSS), sampled while it runs. Jobs:

    dcp         PyTorch DCP, dp=4,zero=3 to one rank: `dcp.load` into a whole state and `dcp.save`, against `reshard --to dcp`
    dcp-torch   PyTorch DCP to one file: `dcp_to_torch_save`, against `reshard --to torch`
    megatron    torch_dist, dp=4,zero=1 to one rank: every tensor loaded and saved by megatron-core, against `reshard --to megatron`
    deepspeed   ZeRO-2 of 4 ranks to fp32 weights in safetensors: `zero_to_fp32`, against `reshard --to hf --dtype float32`
    universal   ZeRO-2 of 4 ranks: `ds_to_universal` with a worker a CPU, against `reshard --to deepspeed-universal`

The last three need the libraries themselves: `make test-peers` installs them into .venv-peers. A job whose library is missing is
left out, and named.

Targets: at most 1.0 of `cp -r` on a disk and 1.5 in memory, and a fifteenth of the peer's memory.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PER_LAYER, BASE = 0.8138, 0.9396
"""GB of a Llama of the settings below, with master weights and moments: BASE + layers * PER_LAYER."""

SETTINGS = {
    "vocab_size": 16384, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip


def dcp_again(source: str, target: str) -> None:
    """What a user of torch does to write a checkpoint of many ranks anew: load all of it, save all of it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(source).read_metadata()
    state: dict = {}
    for key, what in metadata.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            state[key] = torch.empty(what.size, dtype=what.properties.dtype)
        else:
            state[key] = None
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=target)


def dcp_file(source: str, target: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    os.makedirs(target)
    dcp_to_torch_save(source, os.path.join(target, "checkpoint.pt"))


def megatron_again(source: str, target: str) -> None:
    import torch
    from megatron.core import dist_checkpointing as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    # Asked for even where there is no GPU.
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    tensors = dist.load_plain_tensors(step_folder(source))
    os.makedirs(target)
    state = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items() if torch.is_tensor(t)}
    dist.save(state, target)
    torch.distributed.destroy_process_group()


def deepspeed_weights(source: str, target: str) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(source, target, safe_serialization=True)


def deepspeed_universal(source: str, target: str) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.checkpoint import ds_to_universal

    workers = len(os.sched_getaffinity(0))
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=step_folder(source), output_folder=target, num_extract_workers=workers, num_merge_workers=workers,
            keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip


def step_folder(run: str) -> str:
    """The folder of the only step of a run, or the run itself where it is a step."""
    folders = [entry.path for entry in os.scandir(run) if entry.is_dir()]
    return folders[0] if len(folders) == 1 else run


@dataclass(frozen=True)
class Job:
    """One conversion: how its source is written, the peer's function, ours as options of `ckptkit.reshard`, and the library."""

    source: dict[str, str]
    peer: Callable[[str, str], None]
    ours: dict[str, Any]
    library: str = "torch"


_DCP = {"to": "dcp", "layout": "dp=4,zero=3"}
_ZERO = {"to": "deepspeed", "layout": "dp=4,zero=2"}
_WEIGHTS = {"to": "hf", "dtype": "float32", "drop_optimizer": True, "drop_extras": True}
JOBS = {
    "dcp": Job(_DCP, dcp_again, {"to": "dcp", "layout": "tp=1"}),
    "dcp-torch": Job(_DCP, dcp_file, {"to": "torch"}),
    "megatron": Job(
        {"to": "megatron", "layout": "dp=4,zero=1"},
        megatron_again,
        {"to": "megatron", "layout": "tp=1"},
        "megatron.core",
    ),
    "deepspeed": Job(_ZERO, deepspeed_weights, _WEIGHTS, "deepspeed"),
    "universal": Job(_ZERO, deepspeed_universal, {"to": "deepspeed-universal"}, "deepspeed"),
}


def installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder on the file system to measure; made if it is missing")
    parser.add_argument("--gb", type=float, default=7.0)
    parser.add_argument("--job", choices=[*JOBS, "all"], default="all")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--side", choices=["peer", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return side(JOBS[options.job], options.side, *options.folders)
    from ckptkit.engine.executor import usable_cpus
    from ckptkit.stores.system import MEMORY_FILE_SYSTEMS, file_system

    root = Path(options.path).absolute() / "ckptkit-peers"
    root.mkdir(parents=True, exist_ok=True)
    kind = file_system(str(root))
    print(f"{root}: {kind}; {usable_cpus()} CPUs, load {os.getloadavg()[0]:.1f}")
    try:
        for name in JOBS if options.job == "all" else [options.job]:
            if not installed(JOBS[name].library):
                print(f"{name}: left out, {JOBS[name].library} is not installed")
                continue
            measure(name, root, kind in MEMORY_FILE_SYSTEMS, options.gb, options.runs)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(name: str, root: Path, in_memory: bool, gb: float, runs: int) -> None:
    """Let cp, the peer and ckptkit take turns on one job."""
    job = JOBS[name]
    source = root / "-".join(job.source.values()).replace(",", "-")
    if not source.exists():
        make(source, job.source, max(1, round((gb - BASE) / PER_LAYER)))
        os.sync()  # whoever is first shall not write the source as well
    times: dict[str, list[float]] = {"cp": [], "peer": [], "ours": []}
    peaks: dict[str, float] = {}
    for _ in range(runs):
        for who in ("ours", "peer", "cp"):
            target = root / f"out-{who}"
            shutil.rmtree(target, ignore_errors=True)
            # `cp` copies what we wrote just before, so that all three write as many bytes.
            command = ["cp", "-r", str(root / "out-ours"), str(target)]
            if who != "cp":
                command = [
                    sys.executable,
                    __file__,
                    str(root),
                    "--job",
                    name,
                    "--side",
                    who,
                    "--folders",
                    str(source),
                    str(target),
                ]
            began = time.monotonic()
            peak = run(command)
            if not in_memory:
                subprocess.run(["sync"], check=True)
            times[who].append(time.monotonic() - began)
            peaks[who] = max(peak, peaks.get(who, 0.0))
        for who in times:
            shutil.rmtree(root / f"out-{who}", ignore_errors=True)
        print(
            f"  {name}: " + ", ".join(f"{who} {spent[-1]:.1f} s" for who, spent in times.items()), flush=True
        )
    nbytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    cp = statistics.median(times["cp"])
    ratio = {who: statistics.median(times[who]) / cp for who in ("ours", "peer")}
    print(
        f"{name}: {nbytes / 1e9:.2f} GB, cp {nbytes / cp / 1e9:.2f} GB/s; ours {ratio['ours']:.2f}, peer {ratio['peer']:.2f} of cp -r; "
        f"peak {peaks['ours']:.0f} MB against {peaks['peer']:.0f} MB ({peaks['peer'] / peaks['ours']:.0f}x)"
    )


def run(command: list[str]) -> float:
    """Run a command; the most memory in MB that it and its children had at once."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        sampler = _Sampler(process.pid)
        sampler.start()
        _, said = process.communicate()
        sampler.over.set()
        sampler.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}: {said[-2000:]}")
    return sampler.peak / 1e6


class _Sampler(threading.Thread):
    """Sums the proportional set sizes of a process and its children, ten times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.over, self.peak, self._root = threading.Event(), 0, psutil.Process(pid)

    def run(self) -> None:
        while not self.over.wait(0.1):
            total = 0
            with contextlib.suppress(psutil.Error):
                for one in (self._root, *self._root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += one.memory_full_info().pss
            self.peak = max(self.peak, total)


def make(source: Path, options: dict[str, str], layers: int) -> None:
    """A Llama with random values, as the job's source."""
    import ckptkit

    native = source.with_name("native")
    layout = options.get("layout", "tp=1")
    ckptkit.synth(
        str(native),
        model="llama",
        settings={**SETTINGS, "num_hidden_layers": layers},
        optimizer="adamw",
        layout=layout,
    )
    ckptkit.reshard(str(native), str(source), **options)
    shutil.rmtree(native)


def side(job: Job, who: str, source: str, target: str) -> None:
    """Run one side in this process."""
    if who == "peer":
        job.peer(source, target)
    else:
        import ckptkit

        ckptkit.reshard(source, target, **job.ours)


if __name__ == "__main__":
    main()
