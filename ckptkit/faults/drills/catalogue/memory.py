"""Bits that flip in memory and on the wire, links that are slow or cut, memory that is short."""

import mmap
import urllib.error
import urllib.request
from functools import partial
from unittest.mock import patch

from ckptkit.faults.cluster.nodes import Node
from ckptkit.faults.drills.base import drill
from ckptkit.faults.drills.light import LARGE, NODES, RANKS, Light
from ckptkit.faults.inject.memory import flip_file
from ckptkit.faults.inject.plan import Choice, Fault

FLIPS = {"at": (0.0, 1.0), "bit": (0, 7)}


def flip(stage: Light, fault: Fault, step: int, rank: int) -> tuple[str, int]:
    """Flip a drawn bit of a rank's file in its node's slot; gives the file and the slot."""
    node = stage.ranks[rank].node
    (slot,) = (n for n in node.holding(step, rank) if node.records()[n]["lane"] != "replica")
    path = str(node.folder / "slots" / f"{slot:04d}.dat")
    used = node.records()[slot]["used"]
    place = flip_file(path, int(float(fault.values["at"]) * (used - 1)), int(fault.values["bit"]))
    stage.harm(f"{place.offset} of {used} in slot {slot} of {node.name}, bit {place.bit}")
    return path, slot


@drill(
    "A bit that flipped in a slot is found by the reader, taken from the copy, and the step is not given up.",
    17, "memory", menu=[Choice("bit flip", RANKS, values=FLIPS)], smoke=True,
)  # fmt: skip
def flip_with_copy(stage: Light) -> None:
    stage.begin(saves=1)
    step = stage.save(level=2)
    fault = stage.plan.faults[0]
    flip(stage, fault, step, stage.rank(fault.target).rank)
    stage.expect(stage.recover(redone=0) == step, "a step with a whole copy was given up")
    found = sum(a["attempts"] for a in stage.cluster.answers)
    stage.expect(found == len(stage.ranks), "the step was tried more than once")


@drill(
    "A bit that flipped in the only copy is found, the step is rejected by all ranks together, and the one before is restored.",
    17, "memory", menu=[Choice("bit flip", RANKS, values=FLIPS)], replicas={"count": 0}, smoke=True,
)  # fmt: skip
def flip_without_copy(stage: Light) -> None:
    stage.begin(saves=2)
    fault = stage.plan.faults[0]
    flip(stage, fault, stage.step, stage.rank(fault.target).rank)
    stage.ledger.unusable.add(stage.step)
    stage.expect(stage.recover() == 1, "a step with a wrong byte was restored")


@drill(
    "The scrubber finds a flipped bit before anyone reads it, and mends the slot from the copy.",
    17, "memory", menu=[Choice("bit flip", RANKS, values=FLIPS)],
)  # fmt: skip
def flip_scrubbed(stage: Light) -> None:
    stage.begin()
    step = stage.save(level=2)
    fault = stage.plan.faults[0]
    rank = stage.rank(fault.target)
    node = rank.node
    (slot,) = (n for n in node.holding(step, rank.rank) if node.records()[n]["lane"] != "replica")
    data = node.folder / "slots" / f"{slot:04d}.dat"
    before = data.read_bytes()
    flip(stage, fault, step, rank.rank)
    with node.client() as client:
        client.request("scrub")
    stage.until(lambda: data.read_bytes() == before, "the leaf to be mended")
    stage.expect(node.metric("hash_mismatch_total", where="scrub") >= 1, "the scrubber did not count it")
    stage.until(lambda: not node.records()[slot]["damaged"], "the slot to be sound")
    stage.recover(redone=0)


@drill(
    "Memory that is bad a second time is taken out of use, and what it held is copied again.",
    20, "memory", menu=[Choice("stuck cell", RANKS, values=FLIPS)],
)  # fmt: skip
def stuck_cell(stage: Light) -> None:
    stage.begin()
    step = stage.save(level=2)
    fault = stage.plan.faults[0]
    rank = stage.rank(fault.target)
    node = rank.node
    (slot,) = (n for n in node.holding(step, rank.rank) if node.records()[n]["lane"] != "replica")
    path = str(node.folder / "slots" / f"{slot:04d}.dat")
    at = int(float(fault.values["at"]) * (node.records()[slot]["used"] - 1))
    for bad in (1, 2):
        stage.harm(f"bit of byte {at} in slot {slot} of {node.name}, for the {bad}. time")
        flip_file(path, at, int(fault.values["bit"]))
        with node.client() as client:
            client.request("scrub")
        stage.until(partial(_struck, node, slot, bad), "the scrub")
    stage.until(lambda: node.records()[slot]["state"] == "RETIRED", "the slot to be out of use")
    stage.recover(redone=0)
    stage.save(level=2)


def _struck(node: Node, slot: int, times: int) -> bool:
    """Whether a slot was found bad so many times."""
    record = node.records()[slot]
    return bool(record["strikes"] >= times or record["state"] == "RETIRED")


@drill(
    "Bits that flip on the wire between nodes are found, the leaves fetched again; no bad copy is ever sealed.",
    18, "network", menu=[Choice("flips on the wire", ["all nodes"], values={"chunks": (1, 4)})], shapes=LARGE,
)  # fmt: skip
def flips_on_the_wire(stage: Light) -> None:
    stage.begin()
    fault = stage.fault()
    stage.cluster.proxy.flip = {node.name: int(fault.values["chunks"]) for node in stage.nodes}
    stage.save(level=2)
    stage.expect(stage.metric("hash_mismatch_total", where="fetch") >= 1, "no flipped bit was met")
    stage.cluster.proxy.heal()
    stage.lose(stage.nodes[stage.random.randrange(4)])
    stage.recover(redone=0)


@drill(
    "Answers cut short in the middle of a shard are asked for again; the copy is right all the same.",
    18, "network", menu=[Choice("cut short", NODES, values={"after": (100_000, 1_500_000)})], shapes=LARGE,
)  # fmt: skip
def answers_cut_short(stage: Light) -> None:
    stage.begin()
    fault = stage.fault()
    stage.cluster.proxy.cut_after = {node.name: int(fault.values["after"]) for node in stage.nodes}
    stage.save(level=2)
    stage.cluster.proxy.heal()
    stage.lose(stage.node(fault.target))
    stage.recover(redone=0)


@drill(
    "Bytes that change between a device's digest and the slot abort that save, and training goes on.",
    19, "memory", menu=[Choice("flip in a host buffer", RANKS, values={"at": (4096, 70_000)})], digests=True, smoke=True,
)  # fmt: skip
def flip_in_copy(stage: Light) -> None:
    stage.begin(saves=1)
    fault = stage.fault()
    victim = stage.rank(fault.target)
    step = stage.start_save(write=False)
    stage.all("write", [rank for rank in stage.ranks if rank is not victim], step=step)
    victim.do("write", step=step, flip=int(fault.values["at"]))
    stage.all("seal", step=step)
    stage.expect(
        not stage.reached(step, timeout_s=3.0),
        "a step whose bytes differ from the device's digests committed",
    )
    stage.expect(victim.node.events("shard refused"), "the shard was not refused")
    stage.save()
    stage.recover(redone=0)


@drill(
    "A slot whose record is torn, garbage or missing is free after a restart; every other slot stays.",
    21, "memory", menu=[Choice("torn record", RANKS, values={"content": ["", "{", '{"slot": 0}', "gone"]})], replicas={"count": 0},
)  # fmt: skip
def torn_record(stage: Light) -> None:
    stage.begin(saves=2)
    fault = stage.plan.faults[0]
    rank = stage.rank(fault.target)
    (slot,) = rank.node.holding(stage.step, rank.rank)
    record = rank.node.folder / "slots" / f"{slot:04d}.json"
    stage.fault()
    rank.node.kill()
    record.unlink()
    if fault.values["content"] != "gone":
        record.write_text(str(fault.values["content"]))
    rank.node.start()
    stage.ledger.unusable.add(stage.step)
    stage.expect(stage.recover() == 1, "a step with a lost slot was restored")


@drill(
    "Where memory is short at the start, the third slot goes first and saves still work; where it is out, ranks are told, and live.",
    22, "storage", "memory", menu=[Choice("short", ["all nodes"]), Choice("out", ["all nodes"])],
)  # fmt: skip
def memory_out_at_start(stage: Light) -> None:
    fault = stage.fault()
    for node in stage.nodes:
        node.stop()
    budget = {"short": "9MiB", "out": "2MiB"}[fault.kind]
    stage.cluster.config["slots"] = {"budget": budget}
    for node in stage.nodes:
        node.start()
    if fault.kind == "short":
        stage.begin(saves=3)
        stage.expect(
            any("slots.budget allows" in line["detail"] for line in stage.nodes[0].events("memory")),
            "it was not said",
        )
        stage.recover(redone=0)
        return
    stage.cluster.launch()
    members = [{k: v for k, v in rank.member.items() if k != "max_epoch"} for rank in stage.ranks]
    answers = stage.all("join", members=members, epoch=1, inc="0" * 31 + "1")
    stage.expect({a.get("code") for a in answers} == {507}, f"ranks without memory got {answers}")
    stage.expect(all(rank.alive for rank in stage.ranks), "a rank died of it")
    for node in stage.nodes:
        node.stop()
    del stage.cluster.config["slots"]
    for node in stage.nodes:
        node.start()
    stage.recover()


@drill(
    "Under memory pressure copies are given back and own slots never; no rank dies of it, and saves go on.",
    23, "memory", menu=[Choice("pressure", NODES)],
)  # fmt: skip
def memory_pressure(stage: Light) -> None:
    stage.begin()
    step = stage.save(level=2)
    node = stage.node(stage.fault().target)
    own = [n for n, r in node.records().items() if r["state"] == "SEALED" and r["lane"] != "replica"]
    with node.client() as client:
        released = client.request("evict", slots=10)["released"]
    stage.expect(released > 0, "nothing was given back")
    records = node.records()
    stage.expect(all(records[n]["state"] == "SEALED" for n in own), "a slot of a rank was given back")
    stage.expect(all(rank.alive for rank in stage.ranks), "a rank died of it")
    stage.expect(
        step == 1 and node.metric("pressure_actions_total", action="release") >= released,
        "it was not counted",
    )
    stage.save()
    stage.recover(redone=0)


@drill(
    "A peer that is slow costs copies, not saves: the level falls, is said, and comes back when it is fast again.",
    25, "network", menu=[Choice("slow peer", NODES, values={"rate": (50_000, 200_000)})], shapes=LARGE,
    replicas={"timeout_s": 8.0, "stall_s": 3.0},
)  # fmt: skip
def peer_slow(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    fault = stage.fault()
    stage.cluster.proxy.rate = {stage.node(fault.target).name: float(fault.values["rate"])}
    for _ in range(3):
        stage.save()
    stage.until(lambda: stage.nodes[0].metric("replica_degraded"), "the copies to be given up")
    stage.cluster.proxy.heal()
    stage.until(lambda: not stage.nodes[0].metric("replica_degraded"), "the copies to be made")
    stage.save(level=2)
    stage.recover(redone=0)


@drill(
    "While the network is partitioned nothing commits on either side; healed, the sealed step commits.",
    26, "network", menu=[Choice("partition", NODES)], smoke=True,
)  # fmt: skip
def partition(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    alone = stage.node(stage.fault().target).name
    stage.cluster.proxy.partition({alone}, {node.name for node in stage.nodes})
    step = stage.start_save()
    stage.all("seal", step=step)
    stage.expect(not stage.reached(step, timeout_s=1.0), "a step committed across a partition")
    stage.cluster.proxy.heal()
    stage.expect(stage.reached(step), f"step {step} did not commit after the partition")
    stage.recover(redone=0)


@drill(
    "Requests of strangers get an error and touch no file: paths in names, bodies too large, other jobs, nonsense.",
    36, "network", menu=[Choice("hostile requests", NODES, values={"shift": (0, 5)})],
)  # fmt: skip
def hostile_requests(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    node = stage.node(stage.fault().target)
    before = {path: path.stat().st_mtime_ns for path in (node.folder / "slots").iterdir()}
    head = {"X-Ckpt-Job": "job", "X-Ckpt-Epoch": str(stage.cluster.epoch), "X-Ckpt-Inc": stage.cluster.inc}
    asked = [
        ("GET", "/v1/shards/1/1/../../../etc/passwd/data", head, None), ("GET", "/v1/shards/1/1/%2e%2e/digests", head, None),
        ("GET", "/v1/index/..%2f..%2fetc%2fpasswd", head, None), ("PUT", "/v1/index/" + "0" * 32, head, b"not that index"),
        ("POST", "/v1/messages", head, b"[" * 100_000), ("POST", "/v1/messages", head, b"\xff" * 1000),
        ("POST", "/v1/messages", {**head, "X-Ckpt-Job": "another"}, b"{}"), ("POST", "/v1/bans", head, b'{"bans": []}'),
        ("GET", "/v1/shards/99999999999999999999/1/0/data", head, None), ("DELETE", "/v1/inventory", head, None),
    ]  # fmt: skip
    for method, path, headers, body in asked:
        url = f"http://{node.host}:{node.port_behind}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers, method=method), timeout=20
            ) as answer:
                stage.expect(False, f"{method} {path} was answered with {answer.status}")
        except urllib.error.HTTPError as error:
            stage.expect(400 <= error.code < 500, f"{method} {path} was answered with {error.code}")
        except OSError:
            pass  # the socket was closed
    after = {path: path.stat().st_mtime_ns for path in (node.folder / "slots").iterdir()}
    stage.expect(before == after, "a stranger's request touched a file")
    stage.save(level=2)
    stage.recover(redone=0)


@drill(
    "Where a driver registers a part of the memory only, that part is undone, copies bounce, and every byte arrives.",
    24, "memory", menu=[Choice("registration fails", ["driver"], values={"after": (0, 3)})],
)  # fmt: skip
def registration_fails(stage: Light) -> None:
    """There is no driver without a device, so its refusal is played; what answers to it is the hook API's own."""
    import torch

    from ckptkit.hooks import buffers

    stage.begin()
    fault = stage.fault()
    segment = 1 << 16
    done: list[int] = []
    undone: list[int] = []
    good = int(fault.values["after"])

    def register(address: int, nbytes: int) -> int:
        if len(done) == good:
            return 1
        done.append(address)
        return 0

    def unregister(address: int) -> int:
        undone.append(address)
        return 0

    runtime = buffers._Runtime(register, unregister, None)
    memory = mmap.mmap(-1, 4 * segment)
    with (
        patch.object(buffers, "SEGMENT", segment),
        patch.object(buffers._Runtime, "find", lambda: runtime),
        patch.object(buffers._Runtime, "_forget", lambda self: None),
    ):
        buffer = buffers.HostBuffer(memoryview(memory))
        mode = buffer.register(torch.device("cuda"))
    stage.expect(
        mode == "bounce" and len(done) == good,
        f"{len(done)} segments were registered, and copies go by {mode}",
    )
    stage.expect(undone == done[::-1], f"registered were {done}, undone {undone}")
    data = stage.random.randbytes(len(memory))
    buffer.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    stage.expect(bytes(memory) == data, "bytes that were copied are not in the memory")
    stage.verdict.bytes_verified += len(data)
    stage.save()
    stage.recover(redone=0)
