"""What ranks do in the tests of distributed saves."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ckptkit.hooks import Checkpointer
from ckptkit.hooks.targets import Skip
from tests.hooks.models import WIDTH, Net, make, whole


def train(
    rank: int,
    world: int,
    kind: str,
    url: str,
    upto: int,
    every: int | None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Restore, train up to a number of steps, save; gives the losses, the first step, and the whole state."""
    net, opt, step = make(kind, rank, world)
    ckpt = Checkpointer(url, cache="off", every=every, busy="wait", timeout_s=30, **(options or {}))
    ckpt.register(model=net, optimizer=opt)
    first = ckpt.restore()
    restored = whole(net, opt) if first else {}
    losses = []
    for number in range(first, upto):
        losses.append(step(number))
        ckpt.on_step_end(number + 1)
    ckpt.close()
    state = whole(net, opt)
    return {
        "first": first,
        "losses": losses,
        "restored": restored if rank == 0 else {},
        "state": state if rank == 0 else {},
    }


def steps_in(url: str) -> list[str]:
    return sorted(path.name for path in Path(url).glob("step-*") if (path / "manifest.json").exists())


def caught(action: Any) -> tuple[str, str, float]:
    """What an action raises: kind, message, and after how many seconds."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001  (given to the test)
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def late(rank: int, world: int, url: str) -> Any:
    """The last rank never registers."""
    net, opt, _ = make("plain", 0, 1)
    ckpt = Checkpointer(url, cache="off", timeout_s=3)
    if rank == world - 1:
        time.sleep(8)
        return "", "", 0.0
    return caught(lambda: ckpt.register(model=net, optimizer=opt))


def absent(rank: int, world: int, url: str) -> Any:
    """The last rank makes no Checkpointer at all."""
    if rank == world - 1:
        time.sleep(8)
        return "", "", 0.0
    return caught(lambda: Checkpointer(url, cache="off", timeout_s=3))


def other_model(rank: int, world: int, url: str, what: str) -> Any:
    """Rank 1 registers something else than the others."""
    net = Net(WIDTH + 8 if what == "shape" and rank == 1 else WIDTH)
    if what == "dtype" and rank == 1:
        net = net.bfloat16()
    groups: Any = (
        [{"params": [p]} for p in net.parameters()] if what == "groups" and rank == 1 else net.parameters()
    )
    opt = torch.optim.AdamW(groups)
    return caught(
        lambda: Checkpointer(
            url, cache="off", timeout_s=20, every=3 if what == "every" and rank == 1 else 5
        ).register(model=net, optimizer=opt)
    )  # fmt: skip


def drift(rank: int, world: int, url: str, replicas: str, odd: int) -> Any:
    """One rank's parameter changes by one bit, as broken memory does; then two saves."""
    net, opt, step = make("plain", 0, 1)
    events: list[Any] = []
    ckpt = Checkpointer(
        url, cache="off", timeout_s=20, every=1, busy="wait", replicas=replicas, on_event=events.append
    )
    ckpt.register(model=net, optimizer=opt)
    ckpt.restore()
    step(0)
    if rank == odd:
        net.head.weight.data.view(torch.int32)[3, 5] ^= 1 << 22
    raised = []
    for number in (1, 2):
        raised.append(caught(lambda n=number: ckpt.on_step_end(n)))
        raised.append(caught(ckpt.wait))
        opt.zero_grad()
    caught(ckpt.close)
    return events, raised, net.head.weight.detach().clone()


def blocked(rank: int, world: int, url: str) -> Any:
    """Rank 1 cannot write its file of step 1; step 2 goes well."""
    net, opt, step = make("plain", 0, 1)
    ckpt = Checkpointer(url, cache="off", timeout_s=20, every=1, busy="wait")
    ckpt.register(model=net, optimizer=opt)
    ckpt.restore()
    if rank == 0:
        (Path(url) / "step-00000001.e1" / "rank-00001.safetensors").mkdir(parents=True)
    torch.distributed.barrier()
    found = []
    for number in (0, 1):
        step(number)
        ckpt.on_step_end(number + 1)
        found.append(caught(ckpt.wait))
    metrics = dict(ckpt.metrics)
    ckpt.close()
    return found, metrics


def loaders(rank: int, world: int, url: str, first: int, new_data: bool = False) -> Any:
    """Each rank has a loader at a place of its own."""

    class Loader:
        at = rank * 7

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = Loader()
    net = Net()
    ckpt = Checkpointer(url, cache="off", timeout_s=20)
    ckpt.register(model=net, loader=loader)
    if first:
        ckpt.restore()
        ckpt.on_step_end(1)
        ckpt.save()
        ckpt.close()
        return loader.at, float(torch.rand(1))
    loader.at = -1
    error = caught(lambda: ckpt.restore(new_data=new_data))
    ckpt.close()
    return error, loader.at, float(torch.rand(1))


def terminated(rank: int, world: int, url: str) -> Any:
    """Rank 1 gets SIGTERM in the middle; steps take unlike times on the ranks."""
    net, opt, step = make("ddp", rank, world)
    ckpt = Checkpointer(url, cache="off", timeout_s=20, grace_s=20)
    ckpt.register(model=net, optimizer=opt)
    first = ckpt.restore()
    number = first
    try:
        for number in range(first, 10_000):
            if number == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step(number)
            time.sleep(0.02 * rank)
            ckpt.on_step_end(number + 1)
    except SystemExit as end:
        ckpt.close()
        return end.code, number + 1
    return None, number + 1


def world_of(rank: int, world: int, url: str) -> Any:
    """Files of a save by several ranks that hold the same."""
    net, opt, step = make("plain", 0, 1)
    ckpt = Checkpointer(url, cache="off", timeout_s=20)
    ckpt.register(model=net, optimizer=opt)
    ckpt.restore()
    step(0)
    ckpt.on_step_end(1)
    ckpt.save()
    ckpt.close()
    return ckpt._plan.size, ckpt._plan.total


def cached(rank: int, world: int, kind: str, url: str, socket: str, upto: int, level: int) -> Any:
    """Train with the node's cache, and end as a killed process does: nothing is closed."""
    net, opt, step = make(kind, rank, world)
    ckpt = Checkpointer(url, cache=socket, every=1, busy="wait", timeout_s=60)
    ckpt.register(model=net, optimizer=opt)
    first = ckpt.restore()
    restored = whole(net, opt) if first else {}
    losses = []
    for number in range(first, upto):
        losses.append(step(number))
        ckpt.on_step_end(number + 1)
        ckpt.wait(1)
    if upto > first:
        ckpt.wait(level)
    state = whole(net, opt)
    return {"first": first, "losses": losses, "restored": restored, "state": state}


def given_up(rank: int, world: int, url: str, socket: str, folder: str) -> Any:
    """Five saves that rank 1 gives up after rank 0 has begun them, and before it seals them; rank 0's counts, and what its wait says."""
    net, opt, step = make("ddp", rank, world)
    ckpt = Checkpointer(url, cache=socket, every=1, timeout_s=30, max_failures=3)
    ckpt.register(model=net, optimizer=opt)
    ckpt.restore()
    target: Any = ckpt._opened.target
    take, finish = target.take, target.finish

    def heard(name: str) -> None:
        until = time.monotonic() + 30
        while not (Path(folder) / name).exists() and time.monotonic() < until:
            time.sleep(0.005)

    def given(number: int, nbytes: int, timeout_s: float) -> Any:
        heard(f"begun-{number}")
        target.give(take(number, nbytes, 5.0), number, "a test")
        (Path(folder) / f"given-{number}").touch()
        raise Skip("a test")

    def begun(number: int, nbytes: int, timeout_s: float) -> Any:
        buffer = take(number, nbytes, 5.0)
        (Path(folder) / f"begun-{number}").touch()
        return buffer

    def late(filled: Any) -> None:
        heard(f"given-{filled.step}")
        finish(filled)

    target.take = given if rank else begun
    target.finish = late
    for number in range(5):
        step(number)
        ckpt.on_step_end(number + 1)
    said = caught(lambda: ckpt.wait(1))[:2]
    return dict(ckpt.metrics), said


def dcp_round(rank: int, world: int, url: str, kind: str, write: bool) -> Any:
    """`dcp.save` or `dcp.load` of a model and an object by way of ckptkit."""
    import torch.distributed.checkpoint as dcp

    from ckptkit.hooks.integrations.dcp import CkptKitReader, CkptKitWriter

    net, opt, step = make(kind, rank, world, seed=0 if write else 5)
    if write:
        step(0)
    state: dict[str, Any] = {"model": net.state_dict(), "note": {"epoch": 3 if write else 0}}
    if write:
        dcp.save(state, storage_writer=CkptKitWriter(url, step=1, timeout_s=30))
    else:
        dcp.load(state, storage_reader=CkptKitReader(url))
        net.load_state_dict(state["model"])
    found = {name: tensor for name, tensor in whole(net, opt).items() if name in dict(net.named_parameters())}
    return found, state["note"]


def by_schema(rank: int, world: int, url: str, layout: str, names: str, write: bool) -> Any:
    """A trainer that places its tensors by ZAYA1's schema: values of names and places saved, or restored and judged."""
    import numpy as np

    from ckptkit.core.dtypes import dtype_named
    from ckptkit.core.layouts import Layout
    from ckptkit.core.schema import OPTIMIZER_ROLES
    from ckptkit.core.shards import shards
    from ckptkit.formats.reference import random_values, regions, tiny_zaya
    from ckptkit.hooks import Held, SchemaPlacement
    from ckptkit.hooks.holdings import Places, catalog_of, explicit

    model = tiny_zaya()
    mesh = Layout.parse(layout)
    held_roles = {}
    for tensor in model.tensors.values():
        held_roles[tensor.name, tensor.kind] = dtype_named("float32" if tensor.keep_fp32 else "bfloat16")
        for role in OPTIMIZER_ROLES[tensor.optimizer]:
            held_roles[tensor.name, role] = dtype_named("float32")
    placement = SchemaPlacement(model.config, mesh, rank, names)
    cut = shards(model.names(names), mesh, held_roles, model.tensors)
    found: list[Held] = []
    seen = set()
    for name, local in placement.locals.items():  # weights lie on every rank that a placement has
        (kind,) = {model.tensors[s.tensor].kind for s in local.segments}
        dtype = getattr(torch, held_roles[local.segments[0].tensor, kind].name)
        found.append(Held(name, kind, torch.empty(local.shape, dtype=dtype)))
        seen.add(name)
    entries = cut.entries
    for k in np.flatnonzero(entries.file == rank).tolist():  # state is cut by the ZeRO rule
        role = ("param", "buffer", "master", "exp_avg", "exp_avg_sq", "momentum", "ema", "state")[
            entries.role[k]
        ]
        if role in ("param", "buffer"):
            continue
        first, last = int(entries.first[k]), int(entries.last[k])
        found.append(
            Held(cut.locals[int(entries.local[k])].key, role, torch.empty(last - first), first, last)
        )
    places = Places(placement)
    catalog = catalog_of(explicit(found, places), places, rank, "here")
    image = bytearray(catalog.files[0].size)
    values = random_values(model.tensors, held_roles, 5)

    def tensors_to(image: bytearray) -> None:
        for one, offset in zip(found, catalog.entries.offset.tolist(), strict=True):
            raw = one.tensor.reshape(-1).view(torch.uint8)
            if write:
                raw.copy_(torch.frombuffer(image, dtype=torch.uint8)[offset : offset + raw.numel()])
            else:
                image[offset : offset + raw.numel()] = raw.numpy().tobytes()

    if write:
        for key, region, box in regions(catalog, [image]):
            region[...] = values[key][box]
        tensors_to(image)
    ckpt = Checkpointer(url, cache="off", timeout_s=30)
    ckpt.register(placement=placement, tensors=found)
    step = ckpt.restore()
    if write:
        ckpt.on_step_end(9)
        ckpt.save()
        ckpt.close()
        return 0
    ckpt.close()
    tensors_to(image)
    wrong = [
        key for key, region, box in regions(catalog, [image]) if not np.array_equal(region, values[key][box])
    ]
    return step, wrong


def in_groups(rank: int, world: int, folder: str, sizes: list[int]) -> list[int]:
    """Ranks below each size make a group, and a Checkpointer in it; gives the sizes that each rank met."""
    met = []
    for number, size in enumerate(sizes):
        if rank >= size:
            continue
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet-{number}", rank=rank, world_size=size
        )
        Checkpointer(f"{folder}/run-{number}", cache="off", timeout_s=20).close()
        met.append(torch.distributed.get_world_size())
        torch.distributed.destroy_process_group()
    return met
