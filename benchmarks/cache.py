"""What the node cache costs beside the least that the same work could cost, in one run that takes turns.

    python -m benchmarks.cache [--mib 256] [--ranks 4] [--rounds 5] [--disk PATH] [--shm PATH] [--only NAME...] [--out results.json]

    verify    slots compared with their digests        beside `xxhash` of the same memory, with as many threads
    drain     slots to a native step on a disk         beside direct writes of the same bytes, one stream and one a rank, the faster
    peer      a daemon's slot fetched into a slot      beside `sendfile` into the same memory, as many connections (verified: digests too)
    save      host tensors to a daemon's slot          beside memcpy between the same tensors and slot
    idle      a daemon with full slots                 share of a CPU, memory beside the slots
    restart   killed and started again                 until it serves its inventory, while all slots are to be scrubbed
    commit    128 nodes, 1,024 ranks                   beside one round trip of HTTP (`benchmarks/cache_commit.py`)

`share` is the ratio of medians, `best` that of the fastest of each, `processor` how much processor time ours took beside the other: on a busy
machine only that says something. Slots take `mib * ranks` on tmpfs, and one slot more.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckptkit.cache import codec
from ckptkit.cache.copies import PeerCopy
from ckptkit.cache.drain import Drainer
from ckptkit.cache.durable import DurableRun
from ckptkit.cache.events import Drained, PullShard
from ckptkit.cache.fetch import Caller, Peers
from ckptkit.cache.hashing import Hashing
from ckptkit.cache.logs import Log
from ckptkit.cache.messages import Shard, SlotRecord, Version
from ckptkit.cache.pull import Puller
from ckptkit.cache.sealing import Sealing
from ckptkit.cache.throttle import Gate, Throttle
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.formats.native_digests import RankDigests

MIB = 1 << 20
INC = "ab" * 16
JOB = "bench"
VERSION = Version(1, 100, INC)
REQUEST, CONNS = 64 * MIB, 4
RESULTS: dict[str, dict[str, Any]] = {}


def tell(name: str, **values: Any) -> None:
    RESULTS[name] = values | {"load": os.getloadavg()[0]}
    print(
        f"{name:10}",
        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()),
        flush=True,
    )


CPU: dict[str, float] = {}
"""Processor seconds of the ways of the last `in_turn`, all rounds."""


def processor(pids: Sequence[int]) -> float:
    """Processor seconds of this process and others so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def in_turn(
    ways: dict[str, Callable[[], Any]],
    rounds: int,
    *,
    before: Callable[[], None] = lambda: None,
    pids: Sequence[int] = (),
) -> dict[str, list[float]]:
    """Seconds of every way; each round runs all of them, one after the other. A first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    CPU.clear()
    for number in range(rounds + 1):
        for name, way in ways.items():
            before()
            used, began = processor(pids), time.perf_counter()
            way()
            if number:
                found[name].append(time.perf_counter() - began)
                CPU[name] = CPU.get(name, 0.0) + processor(pids) - used
    return found


def shares(name: str, nbytes: int, ours: str, found: dict[str, list[float]], **facts: Any) -> None:
    """Our rate as a share of the fastest other way's."""
    middle = {way: statistics.median(times) for way, times in found.items()}
    least = {way: min(times) for way, times in found.items()}
    base = min((way for way in found if not way.startswith(ours)), key=lambda way: middle[way])
    if CPU.keys() >= found.keys():
        facts["processor"] = CPU[ours] / max(CPU[base], 1e-3)
    CPU.clear()
    tell(
        name, share=middle[base] / middle[ours], best=least[base] / least[ours], base=base,
        **{f"{way}_GBps": nbytes / seconds / 1e9 for way, seconds in middle.items()}, **facts,
    )  # fmt: skip


class Slots:
    """Full slots of a daemon that is not there: `ranks` shards of one sealed step."""

    def __init__(self, root: Path, ranks: int, nbytes: int) -> None:
        self.root, self.ranks, self.nbytes = root, ranks, nbytes
        folder = str(root / JOB)
        self.tmpfs = Tmpfs(folder, "n0")
        hashing = Hashing(2)
        sealing = Sealing(self.tmpfs, hashing, verify=True)
        index = b"no index of a layout, but as good to carry"
        self.index_hash = xxhash.xxh3_128_hexdigest(index)
        self.tmpfs.put_index(self.index_hash, index)
        header = b"{}".ljust(4088)
        self.records = []
        block = np.random.default_rng(0).bytes(16 * MIB)
        for rank in range(ranks):
            self.tmpfs.populate(rank, 0, self.tmpfs.allocate(rank, nbytes) or nbytes)
            with self.tmpfs.mapped(rank, nbytes, writable=True) as view:
                view[:8], view[8:4096] = len(header).to_bytes(8, "little"), header
                for at in range(4096, nbytes, len(block)):
                    part = view[at : at + len(block)]
                    part[:] = block[: part.nbytes]
                    part[:8] = (rank << 32 | at >> 20).to_bytes(8, "little")
                    part.release()
            self.tmpfs.write_side(rank, "extras", b"{}")
            record = SlotRecord(
                rank, f"own/{rank}", "WRITING", 1, VERSION, rank, ranks, self.index_hash, nbytes, writer_done=True,
            )  # fmt: skip
            digest, why = sealing.seal(record)
            assert digest, why
            record = SlotRecord(
                rank, f"own/{rank}", "SEALED", 1, VERSION, rank, ranks, self.index_hash, nbytes, digest
            )
            self.tmpfs.write_slot(rank, codec.plain(record))
            self.records.append(record)
        hashing.close()
        lanes = {str(rank): f"own/{rank}" for rank in range(ranks)}
        self.tmpfs.write_json("layout.json", {"slot_bytes": nbytes, "lanes": lanes})

    def digests(self, rank: int) -> RankDigests:
        return RankDigests.parse("slot", self.tmpfs.read_side(rank, "digests"))


def verify(slots: Slots, rounds: int) -> None:
    with slots.tmpfs.mapped(0, slots.nbytes) as view:
        digests = slots.digests(0)
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            hashing = Hashing(threads)
            pool = ThreadPoolExecutor(threads)
            step = slots.nbytes // threads

            def alone(pool: ThreadPoolExecutor = pool, threads: int = threads, step: int = step) -> None:
                list(
                    pool.map(
                        lambda k: xxhash.xxh3_128_digest(view[k * step : (k + 1) * step]), range(threads)
                    )
                )

            def ours(hashing: Hashing = hashing) -> None:
                assert not hashing.bad_leaves(view, digests)

            shares(
                f"verify-{threads}",
                slots.nbytes,
                "ours",
                in_turn({"xxhash": alone, "ours": ours}, rounds),
                threads=threads,
            )
            hashing.close()
            pool.shutdown()


def drain(slots: Slots, disk: Path, rounds: int) -> None:
    for ranks in sorted({1, slots.ranks}):
        records = slots.records[:ranks]
        files = [disk / f"plain-{rank}" for rank in range(ranks)]

        def plain(streams: int, files: list[Path] = files) -> None:
            with ThreadPoolExecutor(streams) as pool:
                list(pool.map(lambda item: _direct(slots, *item), enumerate(files)))

        def ours(records: list[SlotRecord] = records) -> None:
            ended = threading.Event()
            told: list[Any] = []
            run = DurableRun(str(disk / "run"))
            drainer = Drainer(
                slots.tmpfs, run, Throttle(0), Log(job=JOB, node="n0"), done=told.append, over=lambda records, seconds: ended.set(),
                moved=lambda nbytes: None, mismatch=lambda: None,
            )  # fmt: skip
            drainer.drain(VERSION, records)
            ended.wait()
            drainer.close()
            run.close()
            assert told == [Drained(VERSION)], told

        ways: dict[str, Callable[[], Any]] = {"direct-1": lambda: plain(1)}
        if ranks > 1:
            ways[f"direct-{ranks}"] = lambda ranks=ranks: plain(ranks)

        def empty(files: list[Path] = files) -> None:
            for file in files:
                file.unlink(missing_ok=True)
            shutil.rmtree(disk / "run", ignore_errors=True)

        shares(
            f"drain-{ranks}",
            ranks * slots.nbytes,
            "ours",
            in_turn({**ways, "ours": ours}, rounds, before=empty),
            ranks=ranks,
        )
        empty()


def _direct(slots: Slots, rank: int, path: Path) -> None:
    """What the disk can do: large aligned writes past the page cache into allocated room, one fdatasync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, slots.nbytes)
        with slots.tmpfs.mapped(rank, slots.nbytes) as view:
            for at in range(0, slots.nbytes, 8 * MIB):
                os.pwrite(fd, view[at : at + 8 * MIB], at)
        os.fdatasync(fd)
    finally:
        os.close(fd)


@contextmanager
def daemon(root: Path, extra: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A daemon over the slots in `root`; gives its process and address."""
    process = start_daemon(root, extra)
    try:
        yield process, address(root, process)
    finally:
        process.kill()
        process.wait()


def start_daemon(root: Path, extra: str = "") -> "subprocess.Popen[bytes]":
    config = root / "cache.toml"
    config.write_text(
        f'job = "{JOB}"\nroot = "{root}"\nnode = "n0"\nlisten = "127.0.0.1:0"\n{extra}\n[tls]\nmode = "off"\n[slots]\nreserve = "64MiB"\nround = "1MiB"\n'
    )
    (root / JOB / "address.json").unlink(missing_ok=True)
    with open(root / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ckptkit", "cache", "serve", "--config", str(config)],
            stdout=log,
            stderr=log,
        )


def address(root: Path, process: "subprocess.Popen[bytes]", timeout_s: float = 60.0) -> str:
    until = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < until:
        try:
            return str(json.loads((root / JOB / "address.json").read_text())["address"])
        except (OSError, ValueError):
            time.sleep(0.005)
    raise RuntimeError(f"no daemon: {(root / 'log').read_text()[-2000:]}")


def scrubbed(host: str, nbytes: int) -> None:
    """Wait until a daemon has read again what it found at its start."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        lines = _ask(host, "/metrics").decode().splitlines()
        if nbytes <= sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("ckptkit_cache_scrub_bytes_total")
        ):
            return
        time.sleep(0.2)


def peer(slots: Slots, shm: Path, rounds: int) -> None:
    record = slots.records[0]
    path = f"{slots.tmpfs.folder}/slots/0000.dat"
    there = Tmpfs(str(shm / "other" / JOB), "n1")
    there.populate(0, there.allocate(0, slots.nbytes), slots.nbytes)
    server = subprocess.Popen([sys.executable, __file__, "--serve", path], stdout=subprocess.PIPE)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    slots.tmpfs.close()  # the daemon's now
    with daemon(slots.root) as (process, host):
        scrubbed(host, slots.ranks * slots.nbytes)
        peers = Peers(Caller(JOB, 0, "0" * 32), None)
        ended: list[Any] = []
        over = threading.Event()

        def done(event: Any) -> None:
            ended.append(event)
            over.set()

        puller = Puller(
            there, conns=CONNS, request=REQUEST, throttle=Throttle(0), gate=Gate(), patience_s=1.0, index=lambda *_: None, done=done,
            mismatch=lambda: None, moved=lambda nbytes: None,
        )  # fmt: skip
        puller.slot_bytes = slots.nbytes
        shard = Shard(VERSION, 0, slots.ranks, slots.index_hash, slots.nbytes, record.digest)

        def ours() -> None:
            over.clear()
            puller.pull(PullShard(0, 1, shard, ("n0",)), [PeerCopy(peers, host, VERSION, 0)])
            over.wait()
            assert not ended.pop().reason

        ranges = range(0, slots.nbytes, REQUEST)
        with there.mapped(0, slots.nbytes, writable=True) as view, ThreadPoolExecutor(CONNS) as pool:
            links = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNS)]

            def fetch(at: int) -> None:
                link, size = links.pop(), min(REQUEST, slots.nbytes - at)
                link.sendall(struct.pack("<QQ", at, size))
                done = 0
                while done < size:
                    done += link.recv_into(view[at + done : at + size])
                links.append(link)

            def plain() -> None:
                list(pool.map(fetch, ranges))

            found = in_turn({"sendfile": plain, "ours": ours}, rounds, pids=(server.pid, process.pid))
            for link in links:
                link.close()
        puller.close()
        peers.close()
    server.kill()
    server.wait()
    there.close()
    shutil.rmtree(shm / "other")
    shares("peer", slots.nbytes, "ours", found, conns=CONNS)


def serve(path: str) -> None:
    """The other end of the plain copy: ranges of a file by `sendfile`."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)

    def answer(link: socket.socket) -> None:
        with open(path, "rb") as file:
            while len(ask := link.recv(16, socket.MSG_WAITALL)) == 16:
                at, left = struct.unpack("<QQ", ask)
                while left:
                    sent = os.sendfile(link.fileno(), file.fileno(), at, left)
                    at, left = at + sent, left - sent

    while True:
        threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()


def save(shm: Path, nbytes: int, rounds: int) -> None:
    """Through the hooks, as a trainer without a device does it: tensors of 2 MiB into the slot, and memcpy of the same."""
    import torch

    from ckptkit.hooks import Checkpointer, Held

    root = shm / "saving"
    (root / JOB).mkdir(parents=True, mode=0o700)
    tensors = [torch.randn(MIB).bfloat16() for _ in range(nbytes // (2 * MIB))]
    with daemon(root, f'restore_wait_s = 1.0\n[drain]\nurl = "{shm}/durable"'):
        ckpt = Checkpointer(str(shm / "durable" / JOB), cache=str(root / JOB / "daemon.sock"), busy="wait")
        ckpt.register(tensors=[Held(f"w{k:05d}", "param", tensor) for k, tensor in enumerate(tensors)])
        ckpt.restore(fresh=True)
        saver = ckpt._saver
        views = [
            room.view(torch.bfloat16)
            for room in torch.empty(nbytes, dtype=torch.uint8).fill_(1).split(2 * MIB)
        ]
        times: dict[str, list[float]] = {"memcpy": [], "ours": [], "ours-call": []}
        for step in range(1, rounds + 4):  # every slot once before
            began = time.perf_counter()
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor)
            plain = time.perf_counter() - began
            began = time.perf_counter()
            ckpt.on_step_end(step)
            ckpt.save()
            call = time.perf_counter() - began
            ckpt.wait()
            assert saver.last is not None and saver.last.error is None, saver.last and saver.last.error
            if step > 3:
                times["memcpy"].append(plain)
                times["ours"].append(saver.last.copy_s)
                times["ours-call"].append(call)
        shares("save", nbytes, "ours", times, threads=torch.get_num_threads())
        ckpt.close()
    shutil.rmtree(root)


def idle(slots: Slots, seconds: float, rounds: int) -> None:
    """CPU and memory of a daemon that has nothing to do; and how soon one that was killed serves again."""
    import psutil

    starts, whole = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        process = start_daemon(slots.root)
        host = address(slots.root, process)
        inventory = _ask(host, "/v1/inventory")
        whole.append(time.perf_counter() - began)
        assert len(json.loads(inventory)["shards"]) == slots.ranks
        serving = [
            json.loads(line) for line in (slots.root / "log").read_text().splitlines() if '"serving"' in line
        ]
        starts.append(time.perf_counter() - began)
        assert serving
        process.send_signal(signal.SIGKILL)
        process.wait()
    tell(
        "restart",
        median_s=statistics.median(whole),
        worst_s=max(whole),
        slots_GiB=slots.ranks * slots.nbytes / 2**30,
    )
    with daemon(slots.root) as (process, host):
        look = psutil.Process(process.pid)
        scrubbed(host, slots.ranks * slots.nbytes)
        before, began = look.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, passed = look.cpu_times(), time.monotonic() - began
        cpu = (after.user + after.system - before.user - before.system) / passed
        info = look.memory_info()
        tell(
            "idle",
            cpu_percent=100 * cpu,
            rss_beside_slots_MiB=(info.rss - info.shared) / MIB,
            rss_MiB=info.rss / MIB,
            seconds=passed,
        )


def _ask(host: str, path: str) -> bytes:
    import http.client

    link = http.client.HTTPConnection(host, timeout=20)
    try:
        link.request("GET", path, headers=Caller(JOB, 0, "0" * 32).headers)
        return link.getresponse().read()
    finally:
        link.close()


NAMES = ("verify", "drain", "peer", "save", "restart", "commit")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of a slot")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default="build/bench", help="folder for drains")
    parser.add_argument("--shm", default="/dev/shm/ckptkit-bench")
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--out")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    shm, disk = Path(given.shm), Path(given.disk) / "cache"
    shutil.rmtree(shm, ignore_errors=True)
    disk.mkdir(parents=True, exist_ok=True)
    shm.mkdir(parents=True)
    try:
        if {"verify", "drain", "peer", "restart"} & set(given.only):
            slots = Slots(shm / "slots", given.ranks, given.mib * MIB)
            if "verify" in given.only:
                verify(slots, given.rounds)
            if "drain" in given.only:
                drain(slots, disk, given.rounds)
            if "peer" in given.only:
                peer(slots, shm, given.rounds)
            slots.tmpfs.close()
            if "restart" in given.only:
                idle(slots, given.idle_s, given.rounds)
            shutil.rmtree(shm / "slots")
        if "save" in given.only:
            save(shm, given.mib * MIB, given.rounds)
        if "commit" in given.only:
            from benchmarks.cache_commit import commit

            RESULTS["commit"] = commit(shm, given.rounds)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    if given.out:
        Path(given.out).write_text(json.dumps(RESULTS, indent=1) + "\n")


if __name__ == "__main__":
    main()
