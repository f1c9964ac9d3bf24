"""Any to any: every format into every other and back, in several layouts, through planner and engine."""

from functools import cache
from itertools import product
from pathlib import Path

import pytest

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import make_plan
from ckptkit.core.shards import shards
from ckptkit.engine.run import run
from ckptkit.errors import LayoutError
from ckptkit.formats.base import Format, ReadOptions
from ckptkit.formats.reference import (
    TOY,
    TOY_CONFIG,
    Values,
    gather,
    json_bytes,
    random_truth,
    same,
    toy,
    write,
)
from ckptkit.formats.registry import FORMATS, by_name
from ckptkit.stores.local import LocalStore

LAYOUTS = (
    "tp=2,pp=2,ep=2,dp=2,zero=1",
    "dp=3,zero=3",
    "tp=2,dp=3,zero=2:deepspeed",
    "tp=4,pp=3,ep=4",
    "dp=2,zero=1",
)


def read(format: Format, root: Path) -> Catalog:
    return format.read(LocalStore(root), ReadOptions(model=TOY))


@cache
def layouts_of(name: str) -> tuple[str, ...]:
    """Layouts that a format can hold: all of them, but for those that it refuses (DeepSpeed has no pipeline stages here)."""
    format = by_name(name)
    if not format.ranks:
        return ("tp=1",)
    truth = random_truth(toy(), format.names, state="master" in format.roles)
    held = []
    for layout in LAYOUTS:
        try:
            format.lay_out(shards(truth.names, Layout.parse(layout), truth.held, truth.tensors))
        except LayoutError:
            continue
        held.append(layout)
    assert len(held) >= 3, f"{name} holds {held} only"
    return tuple(held)


def convert(source: Catalog, root: Path, format: Format, layout: str, target: Path) -> Catalog:
    """One conversion of all that the destination holds."""
    held = {key: dtype for key, dtype in source.held.items() if key[1] in format.roles}
    wanted = shards(toy().names(format.names), Layout.parse(layout), held, source.tensors, pad=format.ranks)
    wanted.extras = source.extras if format.extras else Extras(files=source.extras.files)
    destination = format.lay_out(wanted)
    run(make_plan(source, destination.catalog), destination, LocalStore(root), str(target), threads=1)
    return read(format, target)


def kept(values: Values, format: Format) -> Values:
    return {key: array for key, array in values.items() if key[1] in format.roles}


@pytest.mark.parametrize(("first", "second"), list(product(FORMATS, FORMATS)))
def test_there_and_back_is_the_identity_on_what_both_hold(first: str, second: str, tmp_path: Path) -> None:
    """A → B → A keeps every bit of every role that B holds, whatever the layouts, names and files of the two."""
    a, b = by_name(first), by_name(second)
    state = "master" in a.roles
    seed = sum(map(ord, first + second))
    truth = random_truth(toy(), a.names, state=state, seed=seed)
    truth.extras = Extras(files={"config.json": json_bytes(TOY_CONFIG)})
    there, back = layouts_of(first), layouts_of(second)
    write(a, truth, tmp_path / "a", there[seed % len(there)])
    source = read(a, tmp_path / "a")

    middle = convert(source, tmp_path / "a", b, back[seed % len(back)], tmp_path / "b")
    end = convert(middle, tmp_path / "b", a, there[(seed + 1) % len(there)], tmp_path / "c")

    expected = kept(truth.values, b)
    same(gather(tmp_path / "b", middle), expected)
    same(gather(tmp_path / "c", end), kept(expected, a))
