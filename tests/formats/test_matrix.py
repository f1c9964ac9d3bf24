"""Any to any: every format into every other and back, with drawn models and layouts, through planner and engine.

A → B → A is the identity on what B holds, and what B does not hold is exactly what the plan lists. One drawn case for each ordered pair;
`-m long` draws many. How many ran is printed at the end.
"""

import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ckptkit import models, ops
from ckptkit.core.adapters import possible, with_adapters
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.dtypes import DType
from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError, UsageError
from ckptkit.formats.base import Format
from ckptkit.formats.reference import (
    ZAYA_CONFIG,
    Truth,
    Values,
    gather,
    json_bytes,
    random_truth,
    same,
    write,
)
from ckptkit.formats.registry import FORMATS, by_name
from ckptkit.ops.planning import DropRow
from ckptkit.stores.local import LocalStore

LAYOUTS = (
    "tp=2,pp=2,ep=2,dp=2,zero=1",
    "dp=3,zero=3",
    "tp=2,dp=3,zero=2:deepspeed",
    "pp=2,dp=2,zero=1:megatron",
    "ep=2,dp=4,zero=1",
    "tp=2",
    "pp=3,dp=2",
    "dp=2,zero=1:whole",
    "tp=1",
)
PAIRS = list(product(FORMATS, FORMATS))
RAN: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def printed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Says how many combinations ran."""
    yield
    pairs = len({name.split(" ")[0] for name in RAN})
    text = f"matrix: {sum(RAN.values())} combinations of models, layouts and {pairs} ordered pairs of formats"
    capture: Any = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{text}")


def configuration(draw: Any, kind: str) -> dict[str, Any]:
    """A small model of a kind, in Transformers' terms: odd sizes, few layers, layers that differ, tied or not."""
    layers = draw(st.integers(1, 3))
    tied = draw(st.booleans())
    if kind == "zaya":
        return {
            **ZAYA_CONFIG, "vocab_size": draw(st.sampled_from([30, 64])), "hidden_size": draw(st.sampled_from([16, 24])),
            "num_hidden_layers": layers, "moe_intermediate_size": draw(st.sampled_from([6, 8])), "router_hidden_size": 4,
            "head_dim": 4, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"][:layers], "tie_word_embeddings": tied,
        }  # fmt: skip
    config: dict[str, Any] = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": draw(st.sampled_from([6, 8, 12])),
        "num_attention_heads": 4, "num_key_value_heads": draw(st.sampled_from([2, 4])), "head_dim": draw(st.sampled_from([2, 3])),
        "vocab_size": draw(st.sampled_from([7, 16])), "intermediate_size": draw(st.sampled_from([4, 6, 10])),
        "tie_word_embeddings": tied, "num_local_experts": 4,
    }  # fmt: skip
    if kind.endswith("_moe"):
        config |= {
            "num_experts": 4, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 6,
            "mlp_only_layers": draw(st.sampled_from([[], [0]])), "decoder_sparse_step": 1,
        }  # fmt: skip
    return config


def with_some_adapters(draw: Any, model: Model, rank: int) -> Model:
    """The model with adapters at some of its matrices."""
    slots = possible(model, "transformers")
    sites = sorted({name.removesuffix(".lora_A.weight") for name in slots if name.endswith(".lora_A.weight")})
    chosen = draw(st.lists(st.sampled_from(sites), min_size=1, max_size=6, unique=True))
    found = {
        tensor: rank
        for site in chosen
        for half in "AB"
        for tensor in slots[f"{site}.lora_{half}.weight"].tensors
    }
    return with_adapters(model, found)


def drawn(draw: Any, format: Format, both: tuple[str, str]) -> Truth:
    """A checkpoint of all that a format holds of a drawn model."""
    kinds = ["zaya"] if "hub" in both else ["zaya", "llama", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe"]
    config = configuration(draw, draw(st.sampled_from(kinds)))
    schema = models.find(config)
    assert schema is not None
    model = schema.bind(config)
    if "peft" in both or draw(st.booleans()):
        model = with_some_adapters(draw, model, rank=2)
    state = "master" in format.roles and draw(st.booleans())
    truth = random_truth(
        model, format.names, state=state, seed=draw(st.integers(0, 99)), parts=format.parts,
        param=draw(st.sampled_from(["bfloat16", "float32", "float16"])),
    )  # fmt: skip
    placed = {s.tensor for item in truth.names.whole.values() for s in item.segments}
    truth.held = {key: dtype for key, dtype in truth.held.items() if key[0] in placed}
    truth.values = {key: truth.values[key] for key in truth.held}
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    truth.extras = Extras(files={"config.json": json_bytes(config), "adapter_config.json": json_bytes(lora)})
    if format.extras:
        trained = sorted({name for name, role in truth.held if role == "exp_avg"})
        truth.extras.common.update(step=40, scheduler={"last_epoch": 40})
        if trained:
            truth.extras.common["groups"] = [{"kind": "adamw", "step": 40, "lr": 0.1, "tensors": trained}]
    return truth


def first_that_fits(draw: Any, format: Format, attempt: Any) -> Any:
    """What `attempt(layout)` gives for the first of the layouts, in drawn order, that format and model can hold."""
    if not format.ranks:
        return attempt(None)
    for layout in draw(st.permutations(LAYOUTS)):
        try:
            return attempt(layout)
        except LayoutError:
            continue
    raise AssertionError(f"{format.name} holds none of the layouts")


def allowing(drops: list[DropRow]) -> dict[str, Any]:
    """The options that a plan's list asks for."""
    options: dict[str, Any] = {"only": [], "drop": []}
    for row in drops:
        if row.allowed:
            continue
        flag, *glob = shlex.split(row.flag)
        name = flag.removeprefix("--").replace("-", "_")
        if glob:
            options[name] += [g for g in glob if g not in options[name]]
        else:
            options[name] = True
    return options


def convert(draw: Any, source: Path, target: Path, format: Format) -> tuple[Catalog, list[DropRow]] | None:
    """One conversion that leaves behind what the plan says it must; None where that is everything."""

    def attempt(layout: str | None) -> list[DropRow] | None:
        try:
            needed = ops.plan(str(source), str(target), to=format.name, layout=layout, probe=False).drops
            options = allowing(needed)
            return ops.reshard(
                str(source), str(target), to=format.name, layout=layout, threads=1, **options
            ).plan.drops
        except UsageError as error:
            if "is left to write" not in str(error):
                raise
            return None

    drops = first_that_fits(draw, format, attempt)
    return None if drops is None else (format.read(LocalStore(target)), drops)


def by_role(keys: Mapping[tuple[str, str], DType], values: Values) -> dict[str, tuple[int, int]]:
    """Tensors and bytes of each role."""
    found: dict[str, tuple[int, int]] = {}
    for key in keys:
        count, nbytes = found.get(key[1], (0, 0))
        found[key[1]] = count + 1, nbytes + values[key].nbytes
    return found


def check(
    before: Truth | Catalog, values: Values, after: Catalog, root: Path, drops: list[DropRow]
) -> Values:
    """What arrived is what there was, to the bit, and what did not is what the plan lists, by number and bytes of each role."""
    found = gather(root, after)
    lost = {key: dtype for key, dtype in before.held.items() if key not in after.held}
    listed: dict[str, tuple[int, int]] = {}
    for row in drops:
        role = row.what.split(" of ")[0]
        if not row.what.startswith("extras: "):
            count, nbytes = listed.get(role, (0, 0))
            listed[role] = count + row.count, nbytes + row.nbytes
    assert listed == by_role(lost, values)
    same(found, {key: array for key, array in values.items() if key in after.held})
    assert {key: dtype for key, dtype in before.held.items() if key in after.held} == after.held
    step = before.extras.common.get("step")
    kept = not any(row.what == "extras: step" for row in drops)
    assert after.extras.common.get("step") == (step if kept else None)
    return found


def there_and_back(draw: Any, first: str, second: str) -> None:
    a, b = by_name(first), by_name(second)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        truth = drawn(draw, a, (first, second))

        def written(layout: str | None) -> str:
            write(a, truth, root / "a", layout or "tp=1")
            return layout or ""

        first_that_fits(draw, a, written)
        there = convert(draw, root / "a", root / "b", b)
        RAN[f"{first}->{second} {'nothing in common' if there is None else ''}"] += 1
        if there is None:
            assert not {truth.tensors[name].part for name, _ in truth.held} & set(b.parts)
            return
        middle, lost = there
        values = check(truth, truth.values, middle, root / "b", lost)

        back = convert(draw, root / "b", root / "c", a)

        assert back is not None
        check(middle, values, back[0], root / "c", back[1])
        assert back[0].held.keys() == middle.held.keys() & truth.held.keys()


def run(first: str, second: str, examples: int) -> None:
    """Draw cases for a pair. The first that hypothesis draws is the simplest there is, alike for all pairs, and left out."""
    count = 0

    @seed(crc32(f"{first} {second}".encode()))
    @settings(
        max_examples=examples + 1, phases=[Phase.generate], database=None, derandomize=False,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.data())
    def each(data: st.DataObject) -> None:
        nonlocal count
        if data.draw(st.integers(0, 1 << 30)):
            there_and_back(data.draw, first, second)
            count += 1

    each()
    assert count


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_there_and_back_is_the_identity_on_what_both_hold(first: str, second: str) -> None:
    """Any model and layout: every bit of what B holds comes back, and the plan lists the rest."""
    run(first, second, 1)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_there_and_back_for_many_models(first: str, second: str) -> None:
    """As above, with ten drawn models and pairs of layouts for each pair of formats."""
    run(first, second, 10)
