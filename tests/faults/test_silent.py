"""Silent corruption: every bit that flips between a tensor, a slot, a disk and the tensor again is found before a wrong byte reaches a model.

Flips are found by what readers run: the daemon that compares a device's digests, the one function that reads copies of shards (slots, peers,
storage), and `Checkpointer.restore` from storage. Each must name the place.
"""

import logging
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.cache.copies import MappedCopy, digests_of, extras_of, fill
from ckptkit.errors import CkptError, CorruptionError
from ckptkit.faults.cluster.nodes import Cluster
from ckptkit.faults.cluster.rank import Model
from ckptkit.faults.inject.memory import flip_file

SHAPES = {"w": ((768, 1024), "float32"), "e": ((3, 32, 32), "bfloat16")}
"""3 MB: two leaves for each of two ranks."""


def through_slots(cluster: Cluster, rng: random.Random, flips: int, clean: int) -> None:
    """Readers of slots: clean ones read without a word, one with a flipped bit is refused, leaf and slot named."""
    node = cluster.nodes[0]
    slots = {r["rank"]: number for number, r in node.records().items() if r["state"] == "SEALED"}
    folder = node.folder / "slots"

    def read(rank: int) -> None:
        number, record = slots[rank], node.records()[slots[rank]]
        content = bytearray((folder / f"{number:04d}.dat").read_bytes())
        copy = MappedCopy(
            memoryview(content), lambda what: (folder / f"{number:04d}.{what}").read_bytes(), f"slot {number}"
        )
        _, digests = digests_of([copy], record["digest"])
        fill([copy], digests, 0, memoryview(bytearray(digests.data_start + digests.data_size)))
        extras_of([copy], digests)

    for trial in range(max(flips, clean)):
        rank = rng.choice(sorted(slots))
        if trial < clean:
            read(rank)
        if trial < flips:
            number = slots[rank]
            what = rng.choices(["dat", "extras", "digests"], [18, 1, 1])[0]
            path = folder / f"{number:04d}.{what}"
            size = node.records()[number]["used"] if what == "dat" else path.stat().st_size
            flip = flip_file(str(path), rng.randrange(size), rng.randrange(8))
            with pytest.raises(CkptError, match=f"slot {number}"):
                read(rank)
            flip_file(str(path), flip.offset, flip.bit)


def through_copies(cluster: Cluster, rng: random.Random, flips: int, clean: int) -> None:
    """Saves: a bit that flips between the device's digest and the slot aborts the step; the others commit."""
    node, model = cluster.nodes[0], Model(2, 0, SHAPES)
    step = 1
    for trial in range(max(flips, clean)):
        if trial < clean:
            step += 1
            cluster.save(step)
        if trial < flips:
            step += 1
            cluster.all("begin", step=step, wait=True)
            victim = trial % 2
            cluster.ranks[1 - victim].do("write", step=step)
            cluster.ranks[victim].do("write", step=step, flip=rng.randrange(model.nbytes))
            cluster.all("seal", step=step)
            assert not cluster.ranks[0].do("wait", step=step, timeout=10)["reached"]
    refused = node.events("shard refused")
    assert len(refused) == flips and all(
        "leaf" in line["reason"] or "header" in line["reason"] for line in refused
    )


def through_storage(run: str, rng: random.Random, flips: int, clean: int) -> None:
    """Restores from storage into a model: a flipped bit of any file of the step is refused by name; where a restore does not look at it, every
    value is right, and `verify` finds it."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def restore() -> None:
        ckpt = ckptkit.Checkpointer(run, cache="off")
        ckpt.register(model=model, optimizer=optimizer)
        try:
            assert ckpt.restore() == 1
        finally:
            ckpt.close()

    with ckptkit.Checkpointer(run, cache="off") as ckpt:
        ckpt.register(model=model, optimizer=optimizer)
        ckpt.restore(fresh=True)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.on_step_end(1)
        ckpt.save()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    (folder,) = Path(run).glob("step-*")
    weights = folder / "rank-00000.safetensors"
    others = [path for path in folder.iterdir() if path != weights]
    for trial in range(max(flips, clean)):
        if trial < clean:
            with torch.no_grad():
                for value in model.parameters():
                    value.zero_()
            restore()
            assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        if trial < flips:
            path = weights if trial % 4 else rng.choice(others)
            flip = flip_file(str(path), rng.randrange(path.stat().st_size), rng.randrange(8))
            try:
                restore()
            except CkptError as error:
                assert path.name.partition(".")[0] in str(error), (flip.text(), str(error))
            else:  # padding of a header, an index that this layout does not need: no value of the model
                assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items()), (
                    flip.text()
                )
                with pytest.raises(CkptError, match=path.name.partition(".")[0]):
                    _verified(folder)
            flip_file(str(path), flip.offset, flip.bit)


def _verified(folder: Path) -> None:
    """Raises what `ckptkit verify` would say."""
    report = ckptkit.verify(str(folder))
    if report.exit_code:
        raise CorruptionError(str(report))


def everything(folder: Path, share: int) -> Counter[str]:
    """1000 flips and 1000 clean passes, or one `share`th of each."""
    rng = random.Random(4)
    options = {"shapes": SHAPES, "digests": True}
    with Cluster(folder, ranks=2, options=options, replicas={"count": 0}) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        through_slots(cluster, rng, 500 // share, 500 // share)
        through_copies(cluster, rng, 100 // share, 100 // share)
    through_storage(str(folder / "run"), rng, 400 // share, 400 // share)
    return Counter(slots=500 // share, copies=100 // share, storage=400 // share)


def test_flips_are_found_and_clean_passes_are_clean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fiftieth of the long run below."""
    caplog.set_level(logging.ERROR)
    assert everything(tmp_path, 50).total() == 20


@pytest.mark.long
def test_a_thousand_flips_and_a_thousand_clean_passes(tmp_path: Path, capsys, caplog) -> None:
    """All found, none reported where there is none."""
    caplog.set_level(logging.ERROR)
    found = everything(tmp_path, 1)
    with capsys.disabled():
        print(f"\nflips found, and as many clean passes without a word: {dict(found)}")
    assert found.total() == 1000
