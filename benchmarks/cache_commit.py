"""How long the commit of a save takes in a large job: one real daemon that coordinates, 127 simulated ones, 8 ranks on each.

The real daemon is a process with its own eight ranks, which join, save and seal through its socket. The others run the real `Node` in one further
process, with a real HTTP server and client each; what a daemon does besides (digests, copies, writes to tmpfs) takes them no time. So a save
makes the coordinator handle the traffic of 128 nodes: votes, records, holdings.

    python -m benchmarks.cache commit            # as a part of benchmarks/cache.py
"""

import asyncio
import contextlib
import multiprocessing
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from ckptkit.cache import codec
from ckptkit.cache.client import CacheClient, Skipped
from ckptkit.cache.client import Member as ClientMember
from ckptkit.cache.events import (
    Begin,
    Begun,
    Broadcast,
    Called,
    Effect,
    Hashed,
    HashSlot,
    Join,
    Loaded,
    Pulled,
    PullShard,
    Received,
    Refuse,
    Seal,
    Send,
    SlotReady,
    Tick,
)
from ckptkit.cache.messages import TO_NODE, Bans, Epoch, Owner
from ckptkit.cache.node import Node
from ckptkit.cache.outbox import Outbox
from ckptkit.cache.settings import Settings
from ckptkit.cache.slots import SlotTable

RANKS = 8
BYTES = 1 << 20


class SimNode:
    """The protocol of one node over HTTP; everything else is done at once."""

    def __init__(self, name: str, job: str) -> None:
        self.name, self.job = name, job
        table = SlotTable.layout(dict.fromkeys(range(RANKS), 3), 0, BYTES)
        self.node, _ = Node.start(name, table, None, Bans(), Settings(), time.monotonic())
        self.outbox = Outbox(None, self.headers, 5.0, lambda address, why: None)
        self.addresses: dict[str, str] = {}
        self.begun: dict[int, int] = {}
        self.seen: dict[int, float] = {}

    def headers(self) -> dict[str, str]:
        epoch = self.node.epoch
        return {
            "X-Ckpt-Job": self.job,
            "X-Ckpt-Epoch": str(epoch.epoch if epoch else 0),
            "X-Ckpt-Inc": epoch.inc if epoch else "0" * 32,
        }

    async def serve(self) -> str:
        """Listen; gives the address."""
        app = web.Application()
        app.add_routes([web.get("/v1/inventory", self._inventory), web.post("/v1/messages", self._message)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        sock = socket.create_server(("127.0.0.1", 0), backlog=256)
        await web.SockSite(runner, sock).start()
        return f"127.0.0.1:{sock.getsockname()[1]}"

    async def _inventory(self, request: web.Request) -> web.Response:
        return web.Response(body=codec.encode(self.node.inventory()))

    async def _message(self, request: web.Request) -> web.Response:
        effects = self.apply(Received(codec.decode(await request.read(), *TO_NODE)))
        refused = next((effect for effect in effects if isinstance(effect, Refuse)), None)
        return web.Response(status=refused.code if refused else 200, body=b"{}")

    def apply(self, event: Any) -> list[Effect]:
        """Hand over an event, and do what it leads to."""
        effects = self.node.handle(event, time.monotonic())
        record = self.node.record
        if record is not None and record.newest is not None and self.node.trains:
            self.seen.setdefault(record.newest.step, time.monotonic())
        loop = asyncio.get_running_loop()
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._send(to, message)
                case Broadcast(message):
                    for to in self.addresses:
                        self._send(to, message)
                case HashSlot(slot, seq):
                    loop.call_soon(self.apply, Hashed(slot, seq, f"{slot:032x}"))
                case PullShard():
                    loop.call_soon(self.apply, Pulled(effect.slot, effect.seq, "", effect.shard.used))
                case Begun(session, slot):
                    self.begun[session] = slot
        return effects

    def _send(self, to: str, message: Any) -> None:
        if to == self.name:
            asyncio.get_running_loop().call_soon(self.apply, Received(message))
        else:
            self.outbox.send((self.addresses[to],), message)

    def join(self, epoch: Epoch) -> None:
        self.addresses = dict(epoch.addresses)
        for slot in range(len(self.node.table)):
            self.apply(SlotReady(slot))
        for local, rank in enumerate(epoch.ranks[self.name]):
            self.apply(Called(local, Owner(local + 1, 1), Join(epoch, rank, local, BYTES)))

    async def restored(self) -> None:
        """Take part in the restore: there is nothing to load."""
        while self.node.restore is None:
            await asyncio.sleep(0.05)
        for local in range(RANKS):
            self.apply(Called(local, Owner(local + 1, 1), Loaded(self.node.restore.attempt)))

    def save(self, step: int, index_hash: str) -> None:
        for local in range(RANKS):
            self.begun.pop(local, None)
            self.apply(Called(local, Owner(local + 1, 1), Begin(step, BYTES)))
            if local in self.begun:
                self.apply(Called(local, Owner(local + 1, 1), Seal(self.begun[local], BYTES, index_hash)))


async def simulate(pipe: Connection, count: int, job: str) -> None:
    """The other process: obeys `("join", epoch)`, `("save", step, index, slice)`, `("seen", step)`, `("ping", address)`."""
    nodes = [SimNode(f"s{number:04d}", job) for number in range(count)]
    pipe.send([await node.serve() for node in nodes])
    ticks = asyncio.create_task(_tick(nodes))
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    while True:
        what, *facts = await asyncio.to_thread(pipe.recv)
        if what == "end":
            break
        if what == "join":
            for node in nodes:
                node.join(facts[0])
            await asyncio.gather(*(node.restored() for node in nodes))
            pipe.send(None)
        elif what == "save":  # on some nodes
            began = time.monotonic()
            for node in nodes[facts[2]]:
                node.save(facts[0], facts[1])
            await asyncio.sleep(0)
            pipe.send(began)
        elif what == "seen":
            while not all(facts[0] in node.seen for node in nodes):
                await asyncio.sleep(0.002)
            pipe.send([node.seen[facts[0]] for node in nodes])
        elif what == "ping":
            times = []
            for _ in range(200):
                began = time.perf_counter()
                async with session.get(f"http://{facts[0]}/v1/healthz") as response:
                    await response.read()
                times.append(time.perf_counter() - began)
            pipe.send(times)
    ticks.cancel()
    await session.close()
    for node in nodes:
        await node.outbox.close()


async def _tick(nodes: Sequence[SimNode]) -> None:
    while True:
        for node in nodes:
            node.apply(Tick())
            await asyncio.sleep(1.0 / len(nodes))


def _other(pipe: Connection, count: int, job: str) -> None:
    asyncio.run(simulate(pipe, count, job))


def commit(shm: Path, saves: int, nodes: int = 128) -> dict[str, Any]:
    """Medians over `saves` saves of each kind: from the last vote of all to the record on a node (`last`), from seals on all nodes at once (`burst`).

    Of every save the median of the nodes, and the last of them (`…_max`). `trips` is in round trips of HTTP to the coordinator. Without copies: a save
    commits before it is copied.
    """
    from benchmarks.cache import JOB, daemon, processor, tell

    root = shm / "commit"
    (root / JOB).mkdir(parents=True, mode=0o700)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=_other, args=(theirs, nodes - 1, JOB), daemon=True
    )
    other.start()
    addresses = ours.recv()
    with (
        daemon(root, "[replicas]\ncount = 0") as (process, host),
        _ranks(root / JOB / "daemon.sock", JOB) as clients,
    ):
        # Rank 0's node coordinates: the real one comes first.
        places = [("n0", host), *((f"s{number:04d}", address) for number, address in enumerate(addresses))]
        members = [
            ClientMember(number * RANKS + local, name, address) for number, (name, address) in enumerate(places) for local in range(RANKS)
        ]  # fmt: skip
        inc = secrets.token_hex(16)
        for local, client in enumerate(clients):
            client.join(1, inc, rank=local, local_rank=local, members=members, bytes_max=BYTES)
        index_hash = clients[0].put_index(b"index")
        ours.send(
            (
                "join",
                codec.build(
                    Epoch,
                    {
                        "epoch": 1,
                        "inc": inc,
                        "members": [m.as_dict() for m in members],
                        "copies": 0,
                        "fresh": False,
                    },
                ),
            )
        )
        with ThreadPoolExecutor(RANKS) as pool:  # each waits for all others
            assert all(pool.map(lambda client: client.locate() is None and client.report(True), clients))
        ours.recv()
        ours.send(("ping", host))
        trip = ours.recv()
        found: dict[str, list[float]] = {"last": [], "last_max": [], "burst": [], "burst_max": []}
        used: list[float] = []
        for step in range(1, 2 * saves + 3):
            spent = processor([process.pid]) - time.process_time()
            for client in clients:
                slot = client.begin(step, BYTES)
                assert not isinstance(slot, Skipped), slot
                slot.buffer[:4096] = (4088).to_bytes(8, "little") + b"{}".ljust(4088)
                assert client.seal(slot, BYTES, index_hash, None, b"{}", step=step) is None
            way = "burst" if step % 2 else "last"
            if way == "last":
                ours.send(("save", step, index_hash, slice(1, None)))
                ours.recv()
                time.sleep(1.5)  # until every vote but one has been counted
            ours.send(("save", step, index_hash, slice(0, 1) if way == "last" else slice(None)))
            began = ours.recv()
            ours.send(("seen", step))
            seen = [at - began for at in ours.recv()]
            assert clients[0].wait(step, 1, 30.0)
            if step > 2:
                found[way].append(statistics.median(seen))
                found[f"{way}_max"].append(max(seen))
                used.append(processor([process.pid]) - time.process_time() - spent)
        ours.send(("end",))
    other.join(20)
    trips = statistics.median(trip)
    facts: dict[str, Any] = {"nodes": nodes, "ranks": nodes * RANKS, "round_trip_ms": trips * 1e3}
    for name, times in found.items():
        facts[f"{name}_ms"] = statistics.median(times) * 1e3
        facts[f"{name}_trips"] = statistics.median(times) / trips
    facts["coordinator_cpu_ms"] = statistics.median(used) * 1e3
    tell("commit", **facts)
    return facts


@contextlib.contextmanager
def _ranks(sock: Path, job: str) -> Iterator[list[CacheClient]]:
    clients = [CacheClient.connect(str(sock), job, timeout_s=60.0, begin_s=5.0) for _ in range(RANKS)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()
