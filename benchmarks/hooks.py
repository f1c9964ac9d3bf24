"""What saving costs a trainer, beside torch's own ways, in one run.

    python benchmarks/hooks.py [--out results.json] [--gib 8] [--dir /dev/shm/ckptkit-bench] [--only copy steps restore many]

On a GPU: the state lies in 2 MiB tensors, and a step is a chain of matmuls of about 300 ms; blocks of ten steps with and without one save
take turns. On a CPU the same with smaller sizes. Ratios are what counts: of the copy engine's rate, of a plain memcpy, of the time of steps
without saving. `--dir` should be in memory, so that the disk plays no part; it is removed at the end.
"""

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptkit.core.catalog import Catalog
from ckptkit.core.copies import copies_into
from ckptkit.core.plan import make_plan
from ckptkit.formats.native import NativeFormat
from ckptkit.hooks import Checkpointer, Held
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.device import DeviceStreams
from ckptkit.hooks.holdings import Places, catalog_of, explicit
from ckptkit.hooks.loading import Direct, batches, direct_rows, load
from ckptkit.hooks.moving import Snapshot, Streams
from ckptkit.hooks.saving import Save
from ckptkit.kernels.pack import digest_in_place
from ckptkit.stores.local import LocalStore

MIB, GIB, GB = 1 << 20, 1 << 30, 1e9
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
RESULTS: dict[str, Any] = {}


def tell(name: str, **values: Any) -> None:
    RESULTS[name] = values
    print(
        name,
        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()),
        flush=True,
    )


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds, the best of a few: what else runs on the machine only adds."""
    found = []
    for _ in range(repeats):
        sync()
        began = time.perf_counter()
        call()
        sync()
        found.append(time.perf_counter() - began)
    return min(found)


def made_state(nbytes: int, each: int) -> dict[str, torch.Tensor]:
    return {f"w{k:05d}": torch.randn(each // 2, device=DEVICE).bfloat16() for k in range(nbytes // each)}


def registered(folder: Path, state: dict[str, torch.Tensor], **options: Any) -> Checkpointer:
    ckpt = Checkpointer(str(folder), cache="off", busy="wait", **options)
    ckpt.register(tensors=[Held(name, "param", tensor) for name, tensor in state.items()])
    return ckpt


def last(ckpt: Checkpointer) -> Save:
    found = ckpt._saver.last
    assert found is not None
    return found


def rss() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def copy(folder: Path, nbytes: int) -> None:
    """The save itself against the copy engine (or memcpy), with digests; its extra memory."""
    each = 2 * MIB
    state = made_state(nbytes, each)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        whole = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
        limit = GIB / timed(lambda: pinned.copy_(whole, non_blocking=True))
        back = GIB / timed(lambda: whole.copy_(pinned, non_blocking=True))
        del pinned, whole
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        flat, room = torch.empty(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        flat.fill_(3)
        limit, back, before = nbytes / timed(lambda: room.copy_(flat)), 0.0, 0
        del flat, room
    ckpt = registered(folder / "copy", state)
    ckpt.restore(fresh=True)
    base = rss()
    seconds, calls = [], []
    for step in range(1, 8):
        sync()
        began = time.perf_counter()
        ckpt.on_step_end(step)
        ckpt.save()
        calls.append(time.perf_counter() - began)
        ckpt.wait()
        save = last(ckpt)
        seconds.append(save.device_copy_s or save.copy_s)
        shutil.rmtree(folder / "copy" / f"step-{step:08d}.e1", ignore_errors=True)
    rate = nbytes / min(seconds[1:])
    slots = sum(buffer.nbytes for buffer in ckpt._saver.buffers)
    extra = torch.cuda.max_memory_allocated() - before if GPU else 0
    tell(
        "copy", bytes=nbytes, plain_GBps=limit / GB, save_GBps=rate / GB, share=rate / limit, time_ratio=limit / rate,
        call_ms=statistics.median(calls[1:]) * 1e3, mode=ckpt._saver.mode, device_extra_MiB=extra / MIB,
        host_extra_MiB=max(rss() - base, 0) / MIB, slots_MiB=slots / MIB, host_to_device_GBps=back / GB,
    )  # fmt: skip
    if GPU:
        small(folder, 20_000, 32 << 10, limit)
    ckpt.close()


def small(folder: Path, count: int, each: int, limit: float) -> None:
    """Many small tensors, packed on the device."""
    state = made_state(count * each, each)
    ckpt = registered(folder / "small", state)
    ckpt.restore(fresh=True)
    seconds = []
    for step in range(1, 6):
        ckpt.on_step_end(step)
        ckpt.save()
        ckpt.wait()
        seconds.append(last(ckpt).device_copy_s or last(ckpt).copy_s)
    rate = count * each / min(seconds)
    tell(
        "small",
        tensors=count,
        save_GBps=rate / GB,
        share=rate / limit,
        device_extra_MiB=ckpt._saver.snapshot.extra_device_bytes / MIB,
    )
    ckpt.close()
    shutil.rmtree(folder / "small")


def steps(folder: Path, nbytes: int, step_s: float, peers: bool) -> None:
    """Blocks of ten steps, with and without a save, taking turns; and torch's async_save in its place."""
    state = made_state(nbytes, 2 * MIB)
    size = 8192 if GPU else 512
    x = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16 if GPU else torch.float32)

    def chain(count: int) -> None:
        y = x
        for _ in range(count):
            y = (x @ y) * 1e-4

    chain(3)
    each = timed(lambda: chain(4)) / 4
    count = max(1, round(step_s / each))
    tensors = list(state.values())
    ckpt = registered(folder / "steps", state)
    ckpt.restore(fresh=True)
    number = 0

    def block(save: Callable[[int], None] | None) -> float:
        nonlocal number
        sync()
        began = time.perf_counter()
        for k in range(10):
            chain(count)
            ckpt.fence()
            torch._foreach_mul_(tensors, 1.0)
            number += 1
            if save is not None and k == 4:
                save(number)
            sync()  # a loop that reads its loss
        return time.perf_counter() - began

    def ours(step: int) -> None:
        ckpt.on_step_end(step)
        ckpt.save()

    def default(step: int) -> None:
        waiting.append(dcp.async_save(dict(state), checkpoint_id=str(folder / f"dcp-{step}")))

    def staged(step: int) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        stager = DefaultStager(StagingOptions(True, True, True, True))
        waiting.append(
            dcp.async_save(
                dict(state), checkpoint_id=str(folder / f"dcp-{step}"), async_checkpointer_type=AsyncCheckpointerType.THREAD,
                async_stager=stager,
            )
        )  # fmt: skip

    waiting: list[Any] = []
    ways: dict[str, Callable[[int], None] | None] = {"none": None, "ckptkit": ours}
    if peers:
        ways |= {"dcp_async_default": default, "dcp_async_pinned_shared": staged}
    times: dict[str, list[float]] = {name: [] for name in ways}
    faults: dict[str, str] = {}
    block(None)
    for _ in range(6):
        for name, save in ways.items():
            if name in faults:
                continue
            waiting.clear()
            try:
                times[name].append(block(save))
                for one in waiting:
                    getattr(one, "upload_completion", one).result()
            except Exception as error:  # noqa: BLE001  (a peer that does not run here is no fault of ours)
                faults[name] = f"{type(error).__name__}: {error}"[:200]
            ckpt.wait()
            for path in [*folder.glob("dcp-*"), *(folder / "steps").glob("step-*")]:
                shutil.rmtree(path)
    base = statistics.median(times["none"])
    found = {
        name: statistics.median(values) / base - 1
        for name, values in times.items()
        if values and name != "none"
    }
    stall = ckpt.metrics["stall_seconds_total"]
    tell(
        "steps",
        bytes=nbytes,
        step_ms=base / 10 * 1e3,
        **{f"{k}_extra": v for k, v in found.items()},
        stall_s=stall,
        **faults,
    )
    ckpt.close()


def restore(folder: Path, nbytes: int, peers: bool) -> None:
    """From node memory in the same layout, digests checked on the device; through the engine; dcp.load beside it."""
    state = made_state(nbytes, 2 * MIB)
    ckpt = registered(folder / "restore", state)
    ckpt.restore(fresh=True)
    ckpt.on_step_end(1)
    ckpt.save()
    ckpt.wait()
    buffer = ckpt._saver.buffers[0]
    step = folder / "restore" / "step-00000001.e1"
    source = NativeFormat().read(LocalStore(step))
    places = Places(None)
    holdings = explicit([Held(name, "param", tensor) for name, tensor in state.items()], places)
    target = catalog_of(holdings, places, 0, "here")
    planned = timed(lambda: copies_into(make_plan(source, target)), 1)
    copies = copies_into(make_plan(source, target))
    values: dict[str, Any] = {"bytes": nbytes, "plan_s": planned}
    if GPU:
        pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        whole = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
        limit = GIB / timed(lambda: whole.copy_(pinned, non_blocking=True))
        del pinned, whole
    else:
        flat, room = torch.empty(nbytes, dtype=torch.uint8).fill_(1), torch.zeros(nbytes, dtype=torch.uint8)
        limit = nbytes / timed(lambda: room.copy_(flat))
        del flat, room
    began = time.perf_counter()
    direct = direct_rows(copies, source, 0, target.entries.offset.tolist(), holdings, DEVICE)
    values["rows_s"] = time.perf_counter() - began
    values |= restore_parts(direct, buffer, source, nbytes)
    for tensor in state.values():
        tensor.zero_()
    rate = nbytes / timed(lambda: load(direct, buffer, source, 0, DEVICE, packs=True))
    values |= {
        "plain_GBps": limit / GB,
        "direct_GBps": rate / GB,
        "share": rate / limit,
        "rows": len(direct.rows),
    }
    again = registered(folder / "restore", state)
    values["engine_GBps"] = nbytes / timed(again.restore, 2) / GB
    again.close()
    ckpt.close()
    if peers:
        dcp.save(dict(state), checkpoint_id=str(folder / "dcp"))
        values["dcp_load_GBps"] = (
            nbytes / timed(lambda: dcp.load(dict(state), checkpoint_id=str(folder / "dcp")), 2) / GB
        )
    tell("restore", **values)
    shutil.rmtree(folder / "restore")


def restore_parts(direct: Direct, buffer: HostBuffer, source: Catalog, nbytes: int) -> dict[str, float]:
    """What a restore from memory does, one after the other: tables in Python, copies, digests. `load` does them beside each other."""
    start = source.files[0].data_start
    size = source.files[0].size - start
    streams: Streams = DeviceStreams(DEVICE, False) if GPU else Streams()
    snapshots: list[Snapshot] = []

    def tables() -> None:
        snapshots.clear()
        for low, high in batches(size):
            one = Snapshot(direct.parts(start + low, start + high), DEVICE, start, size, packs=True)
            one.direct.views(buffer)
            assert one.direct_plan is None or one.direct_plan.leaf_count
            snapshots.append(one)

    def copies() -> None:
        for one in snapshots:
            streams.fill(one.direct, buffer)
        streams.end()

    def digests() -> None:
        for one in snapshots:
            if one.direct_plan is not None and one.digests is not None:
                digest_in_place(one.direct_plan, one.digests[: one.direct_count])

    tables_s, copies_s, digests_s = timed(tables), timed(copies), timed(digests, 2)
    return {
        "tables_s": tables_s, "tables_ms_per_1000": tables_s / len(direct.rows) * 1e6, "copies_GBps": nbytes / copies_s / GB,
        "digests_GBps": nbytes / digests_s / GB,
    }  # fmt: skip


def many(folder: Path) -> None:
    """5,000 tensors: planning, and what a save costs in Python, beside one forward of the model.

    As in training: `on_step_end` comes after an optimizer's step, the fence after a forward and backward. `fence_at_once_ms` is the fence
    of a loop that does nothing in between, which finds copies under way.
    """
    torch.manual_seed(0)
    width = 256
    layers = [torch.nn.Linear(width, width) for _ in range(2500 // 3)]
    net = torch.nn.Sequential(*layers).to(DEVICE)
    opt = torch.optim.AdamW(net.parameters(), foreach=True)
    x = torch.randn(64, width, device=DEVICE)

    def gradients() -> None:
        opt.zero_grad()
        net(x).sum().backward()

    gradients()
    opt.step()
    ckpt = Checkpointer(str(folder / "many"), cache="off", busy="wait", every=1)
    began = time.perf_counter()
    ckpt.register(model=net, optimizer=opt)
    planning = time.perf_counter() - began
    ckpt.restore(fresh=True)
    forward = timed(lambda: net(x))
    ends: list[float] = []
    fences: list[float] = []
    at_once: list[float] = []
    for step in range(1, 23):
        gradients()
        opt.step()
        began = time.perf_counter()
        ckpt.on_step_end(step)
        ends.append(time.perf_counter() - began)
        if step % 2:
            gradients()
            sync()
        else:
            last(ckpt).copied.wait()
        began = time.perf_counter()
        ckpt.fence()
        (fences if step % 2 else at_once).append(time.perf_counter() - began)
        ckpt.wait()
    tell(
        "many", tensors=len(ckpt._saver.table.holdings), planning_s=planning, on_step_end_ms=statistics.median(ends[2:]) * 1e3,
        fence_ms=statistics.median(fences[1:]) * 1e3, fence_at_once_ms=statistics.median(at_once[1:]) * 1e3, forward_ms=forward * 1e3,
    )  # fmt: skip
    ckpt.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--gib", type=float, default=8.0 if GPU else 0.5)
    parser.add_argument("--dir", default="/dev/shm/ckptkit-bench")
    parser.add_argument("--step-ms", type=float, default=300.0 if GPU else 100.0)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", nargs="+", default=["copy", "steps", "restore", "many"])
    given = parser.parse_args()
    folder = Path(given.dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    nbytes = int(given.gib * GIB) // (2 * MIB) * (2 * MIB)
    name = (
        torch.cuda.get_device_name()
        if GPU
        else f"cpu, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )
    tell("machine", device=name, torch=torch.__version__, numpy=np.__version__)
    if not given.no_peers and "steps" in given.only and not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if GPU else "gloo", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1
        )
    try:
        for name in given.only:
            if name == "copy":
                copy(folder, nbytes)
            elif name == "steps":
                steps(folder, nbytes, given.step_ms / 1e3, not given.no_peers)
            elif name == "restore":
                restore(folder, nbytes, not given.no_peers)
            else:
                many(folder)
            gc.collect()
            if GPU:
                torch.cuda.empty_cache()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if given.out:
            Path(given.out).write_text(json.dumps(RESULTS, indent=1))
    tell("end", peak_rss_MiB=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
