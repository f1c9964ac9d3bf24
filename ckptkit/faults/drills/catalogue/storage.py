"""Disks and object stores that fill, fail, go away or lose what was not synced; and clocks that jump."""

import json
import shutil
import time
from collections.abc import Sequence

from ckptkit import ops
from ckptkit.faults.drills.base import drill
from ckptkit.faults.drills.light import LARGE, NODES, Light
from ckptkit.faults.drills.verdict import NotHereError
from ckptkit.faults.inject import fuse
from ckptkit.faults.inject.plan import Choice
from ckptkit.faults.inject.program import environment
from ckptkit.faults.inject.storage import Rule
from ckptkit.formats.native import step_dir


def with_rules(stage: Light, rules: Sequence[Rule], *, clock_s: float = 0.0) -> None:
    """Start all daemons again, with faults in what they do to the durable run."""
    durable = stage.cluster.durable.parent
    durable.mkdir(parents=True, exist_ok=True)
    for node in stage.nodes:
        node.stop()
        node.environment = environment(str(durable) if rules else None, rules, clock_s=clock_s, base={})
        node.start(wait=False)
    for node in stage.nodes:
        node.wait_serving()


def drained(stage: Light, step: int) -> None:
    """Drain a step, verify it as any tool would, then lose all memory and restore it."""
    stage.drain(step)
    folder = stage.cluster.durable / step_dir(step, stage.cluster.epoch)
    stage.expect(ops.verify(str(folder)).exit_code == 0, f"{folder.name} does not verify")
    stage.lose(*stage.nodes)
    stage.recover(redone=0)


@drill(
    "A disk that is full during a drain costs time: the drain is tried again, and the step becomes whole when there is room.",
    27, "storage", menu=[Choice("enospc", ["durable"], values={"after": (0, 6), "times": (1, 5)})], drain=True,
)  # fmt: skip
def disk_full(stage: Light) -> None:
    _rule(stage, "enospc", "open,write,allocate")


@drill(
    "A sync that fails once is not trusted: the file is written anew, and the manifest comes after a clean sync only.",
    28, "storage", menu=[Choice("eio", ["durable"], values={"after": (0, 6), "times": (1, 3)})], drain=True, smoke=True,
)  # fmt: skip
def sync_fails(stage: Light) -> None:
    _rule(stage, "eio", "sync,datasync")


@drill(
    "Writes that are short are completed: every byte of a drained step verifies.",
    "storage", menu=[Choice("short", ["durable"], values={"after": (0, 8), "times": (1, 9)})], drain=True,
)  # fmt: skip
def short_writes(stage: Light) -> None:
    _rule(stage, "short", "write")


@drill(
    "A slow disk delays durability and nothing else: saves go on in memory meanwhile.",
    "storage", menu=[Choice("slow", ["durable"], values={"after": (0, 4), "times": (2, 6)})], drain=True,
)  # fmt: skip
def slow_disk(stage: Light) -> None:
    _rule(stage, "slow", "write,sync,datasync")


def _rule(stage: Light, effect: str, calls: str) -> None:
    fault = stage.plan.faults[0]
    rule = Rule(effect, calls, "*step-*", int(fault.values["after"]), int(fault.values["times"]), seconds=0.3)
    with_rules(stage, [rule])
    stage.begin()
    step = stage.save(level=2)
    stage.fault()
    with stage.nodes[0].client() as client:
        client.request("drain")
    following = stage.save(level=2)
    stage.expect(following == step + 1, "saves in memory did not go on")
    for node in stage.nodes:
        node.environment = {}
    drained(stage, following)


@drill(
    "While the durable store is away saves and copies go on, drains are tried again, and one version waits.",
    27, "storage", menu=[Choice("store away", ["durable"], values={"saves": (1, 3)})], drain=True,
)  # fmt: skip
def store_away(stage: Light) -> None:
    stage.begin()
    fault = stage.fault()
    away = stage.cluster.durable.parent
    shutil.rmtree(away, ignore_errors=True)
    away.write_bytes(b"in the way")
    stage.save(level=2)
    with stage.nodes[0].client() as client:
        client.request("drain")
    stage.until(lambda: stage.metric("drain_retries_total") >= 2, "drains to be tried again")
    for _ in range(int(fault.values["saves"])):
        newest = stage.save(level=2)
    away.unlink()
    drained(stage, newest)


@drill(
    "A daemon killed while it drains goes on when it is back; what is in storage is whole or has no manifest.",
    4, "daemon", "storage", menu=[Choice("kill daemon", NODES)], shapes=LARGE, drain=True, draining={"max_bps": 12_000_000},
)  # fmt: skip
def daemon_killed_while_draining(stage: Light) -> None:
    stage.begin()
    step = stage.save()
    with stage.nodes[0].client() as client:
        client.request("drain")
    folder = stage.cluster.durable / step_dir(step, 1)
    stage.until(lambda: list(folder.glob("rank-*.digests")), "a rank to be durable")
    node = stage.node(stage.fault().target)
    node.kill()
    stage.expect(
        not (folder / "manifest.json").exists() or ops.verify(str(folder)).exit_code == 0,
        "a torn step has a manifest",
    )
    node.start()
    drained(stage, step)


@drill(
    "A durable file that is deleted, cut short or damaged after its commit is noticed, and the step before is restored.",
    31, "storage", menu=[Choice(kind, [f"rank {n}" for n in range(8)]) for kind in ("deleted", "truncated", "flipped")], drain=True,
)  # fmt: skip
def durable_damaged(stage: Light) -> None:
    stage.begin()
    first = stage.save()
    stage.drain(first)
    bad = stage.save()
    stage.drain(bad)
    fault = stage.fault()
    path = stage.cluster.durable / step_dir(bad, 1) / f"rank-{int(fault.target[5:]):05d}.safetensors"
    content = bytearray(path.read_bytes())
    if fault.kind == "deleted":
        path.unlink()
    else:
        if fault.kind == "truncated":
            del content[len(content) // 2 :]
        else:
            content[int(fault.when * (len(content) - 1))] ^= 1
        path.write_bytes(content)
    stage.ledger.unusable.add(bad)
    stage.lose(*stage.nodes)
    stage.expect(stage.recover() == first, "a damaged step was restored")


@drill(
    "Power lost in the middle of a drain leaves a step that is whole, or one without a manifest; the one before stands.",
    29, "storage", menu=[Choice("power loss", ["storage"], values={"delay_s": (0.0, 0.6), "seed": (0, 1 << 30)})], drain=True,
    shapes=LARGE, draining={"max_bps": 20_000_000},
)  # fmt: skip
def power_loss_in_drain(stage: Light) -> None:
    why = fuse.missing()
    if why:
        raise NotHereError(why)
    fault = stage.plan.faults[0]
    backing, at = stage.folder / "disk", stage.cluster.durable.parent
    backing.mkdir()
    for node in stage.nodes:
        node.stop()
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir()
    with fuse.Mount(str(backing), str(at)) as mount:
        for node in stage.nodes:
            node.start()
        stage.begin()
        first = stage.save()
        stage.drain(first)
        second = stage.save()
        with stage.nodes[0].client() as client:
            client.request("drain")
        time.sleep(float(fault.values["delay_s"]))
        stage.fault()
        for node in stage.nodes:
            node.lose()
        stage.ledger.lost("memory")
        mount.power_loss(int(fault.values["seed"]))
    at.rmdir()
    backing.rename(at)
    for node in stage.nodes:
        node.start(wait=False)
    for node in stage.nodes:
        node.wait_serving()
    folder = stage.cluster.durable / step_dir(second, 1)
    whole = (folder / "manifest.json").exists()
    if whole:
        stage.expect(
            ops.verify(str(folder)).exit_code == 0, "a step with a manifest is not whole after a power loss"
        )
    stage.expect(stage.recover() == (second if whole else first), "not the newest whole step was restored")


@drill(
    "A wall clock that jumps an hour, ahead or back, changes nothing: saves, copies, drains and restores go on.",
    34, "time", menu=[Choice("clock jump", NODES, values={"seconds": [-3600.0, 3600.0]})], drain=True,
)  # fmt: skip
def clock_jump(stage: Light) -> None:
    stage.begin()
    stage.save(level=2)
    fault = stage.fault()
    node = stage.node(fault.target)
    node.kill()
    node.environment = environment(clock_s=float(fault.values["seconds"]), base={})
    node.start()
    first = (
        json.loads(node.log_path.read_text().splitlines()[-1])["time"],
        json.loads(stage.nodes[(node.number + 1) % 4].log_path.read_text().splitlines()[-1])["time"],
    )
    stage.expect(first[0][:13] != first[1][:13], f"the clock did not jump: {first}")
    stage.cluster.environment = environment(clock_s=-float(fault.values["seconds"]), base={})
    stage.save_again()
    stage.recover(redone=0)
    drained(stage, stage.save(level=2))


def _objects(stage: Light) -> None:
    """Skip where there is no S3 to run."""
    import importlib.util

    missing = [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"{' and '.join(missing)} not installed (pip install 'moto[server]' s3fs)")


@drill(
    "An object store that answers with errors, cuts bodies short or keeps silent delays a drain; nothing unfinished is taken for a step.",
    30, "objects", menu=[
        Choice("503", ["store"], values={"seconds": (0.3, 1.0)}), Choice("truncated", ["store"], values={"seconds": (0.3, 1.0)}),
        Choice("silent", ["store"], values={"seconds": (0.3, 1.0)}), Choice("reset", ["store"], values={"seconds": (0.3, 1.0)}),
    ], nodes=2, ranks=2, scale=1.0,
)  # fmt: skip
def store_fails(stage: Light) -> None:
    from ckptkit.faults.cluster.objects import s3_server
    from ckptkit.faults.inject.network import Behaviour, Proxy

    _objects(stage)
    fault = stage.plan.faults[0]
    with s3_server() as (url, variables):
        host, _, port = variables["AWS_ENDPOINT_URL"].removeprefix("http://").partition(":")
        with Proxy((host, int(port))) as proxy:
            for node in stage.nodes:
                node.stop()
            stage.cluster.url = url
            stage.cluster.environment = variables
            faulty = {**variables, "AWS_ENDPOINT_URL": "http://{}:{}".format(*proxy.address)}
            for node in stage.nodes:
                node.environment = faulty
                node.start()
            stage.begin()
            step = stage.save(level=2)
            behaviours = {
                "503": Behaviour(status=503), "truncated": Behaviour(truncate=60), "silent": Behaviour(partition=True), "reset": Behaviour(refuse=True),
            }  # fmt: skip
            proxy.behave(behaviours[fault.kind])
            stage.fault()
            with stage.nodes[0].client() as client:
                client.request("drain")
            time.sleep(float(fault.values["seconds"]))
            newest = stage.save(level=2)
            stage.expect(newest == step + 1, "saves in memory did not go on")
            proxy.behave()
            stage.drain(newest)
            stage.lose(*stage.nodes)
            stage.recover(redone=0)
            stage.save()
