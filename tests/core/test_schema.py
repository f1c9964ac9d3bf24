"""Schemas, rules, templates and names: what they mean, and what they refuse."""

from collections.abc import Mapping
from typing import Any

import pytest

from ckptkit.core.layouts import Layout
from ckptkit.core.local import Span
from ckptkit.core.rules import Rule
from ckptkit.core.schema import Declare, Family, Name, Schema, StoredNames, Tensor
from ckptkit.core.templates import fill, layers_of
from ckptkit.errors import LayoutError

CONFIG = {"layers": 3, "vocab": 10, "hidden": 4, "kv": 2, "group": 3, "expert": 4, "ffn": 6}


def schema(**changes: Any) -> Schema:
    """A small schema, with some parts replaced."""
    parts: dict[str, Any] = {
        "id": "small@1",
        "first": (Declare("embed", "vocab hidden"),),
        "layer": (
            Declare("layers.{i}.q", "kv group hidden"),
            Declare("layers.{i}.up", "expert ffn hidden", when="1:"),
        ),
        "last": (Declare("norm", "hidden"),),
        "rules": {
            "vocab": "tp:pad=4",
            "kv": "tp:replicate",
            "group": "tp:inner=kv",
            "expert": "ep",
            "ffn": "etp",
        },
        "families": (),
        "sizes": lambda config: dict(config),
    }
    return Schema(**{**parts, **changes})


def named(
    *lines: Name, first: tuple[Name, ...] = (), config: Mapping[str, Any] = CONFIG, **changes: Any
) -> Any:
    """The names of a family with these lines in every layer."""
    family = Family("odd", first, lines)
    return schema(families=(family,), **changes).bind(config).names("odd")


def spans(text: str, size: int, degree: int, outer: int = 1, padded: bool = True) -> list[tuple[int, int]]:
    """What each coordinate of a mesh axis holds of axis `a`."""
    rule = Rule.parse("a", text)
    found = [rule.span({"a": size, "o": outer}.__getitem__, degree, c, padded) for c in range(degree)]
    assert all(span.size == size for span in found)
    return [(span.start, span.stop) for span in found]


def test_rules_split_axes_as_their_page_says() -> None:
    """Equal parts; replicas above the size; padding to a multiple; what remains of the degree for the inner axis."""
    assert spans("tp", 6, 3) == [(0, 2), (2, 4), (4, 6)]
    assert spans("tp:replicate", 2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert spans("tp:replicate", 4, 2) == [(0, 2), (2, 4)]
    assert spans("tp:pad=4", 10, 2) == [(0, 8), (8, 16)]
    assert spans("tp:pad=4", 10, 2, padded=False) == [(0, 5), (5, 10)]
    assert spans("tp:inner=o", 6, 2, outer=2) == [(0, 6), (0, 6)]
    assert spans("tp:inner=o", 6, 4, outer=2) == [(0, 3), (3, 6), (0, 3), (3, 6)]
    assert spans("tp:inner=o", 6, 4, outer=0) == [(0, 6)] * 4


def test_a_published_vocabulary_is_padded_to_the_layouts_own_multiple() -> None:
    """50257 words, multiples of 128: 50432 rows at tp=2, 50688 at tp=4 (Megatron-LM, vocab padding)."""
    assert spans("tp:pad=128", 50257, 2)[-1] == (25216, 50432)
    assert spans("tp:pad=128", 50257, 4)[-1] == (38016, 50688)
    assert Span(38016, 50688, 50257).real == (38016, 50257)


@pytest.mark.parametrize(
    ("text", "size", "degree", "message"),
    [
        ("tp", 6, 4, "tp=4 does not divide axis a, which has 6"),
        ("tp:replicate", 3, 4, "tp=4 does not divide axis a, which has 3"),
        ("ep", 6, 4, "ep=4 does not divide axis a"),
        ("tp:inner=o", 8, 3, r"tp=3 is above axis o \(2\) and no multiple of it"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(text: str, size: int, degree: int, message: str) -> None:
    """The message names axis, size and degree."""
    with pytest.raises(LayoutError, match=message):
        spans(text, size, degree, outer=2)


@pytest.mark.parametrize(
    "text", ["", "dp", "tp:", "tp:pad", "tp:pad=0", "tp:pad=x", "tp:inner=", "tp:replicate=2", "tp tp"]
)
def test_rules_that_mean_nothing_are_refused(text: str) -> None:
    """When the schema is bound, not when a layout first asks."""
    with pytest.raises(LayoutError, match="of axis vocab: write tp, ep or etp"):
        schema(rules={"vocab": text}).bind(CONFIG)


def test_templates_do_arithmetic_on_the_layer() -> None:
    """`{i}`, sums and multiples of it, the last layer, an expert."""
    index = {"i": 3, "last": 7, "e": 2}

    assert fill("a.{i}.b.{2i+1}.c.{i-1}.{last}.{e}.{2i}", index) == "a.3.b.7.c.2.7.2.6"
    assert fill("plain", index) == "plain"
    for wrong in ("{j}", "{}", "{i*2}", "{I}", "{i+}", "{2}"):
        with pytest.raises(LayoutError, match="uses none of i, last, e"):
            fill(f"x{wrong}", index)


def test_layers_are_taken_as_slices() -> None:
    """As Python slices, and nothing else."""
    assert [list(layers_of(when, 4)) for when in (":", "1:", ":-1", "-1:", "2:9")] == [
        [0, 1, 2, 3], [1, 2, 3], [0, 1, 2], [3], [2, 3],
    ]  # fmt: skip
    for wrong in ("", "1", "a:", "::2", "1:2:3"):
        with pytest.raises(LayoutError, match="write a slice"):
            layers_of(wrong, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "hidden": -1}, "gives axis hidden the size -1"),
        ({**CONFIG, "hidden": 1.5}, "gives axis hidden the size 1.5"),
        ({**CONFIG, "hidden": True}, "gives axis hidden the size True"),
        ({**CONFIG, "hidden": "4"}, "gives axis hidden the size '4'"),
        ({**CONFIG, "layers": 1 << 40}, "more than 65536 layers or experts"),
        ({**CONFIG, "expert": 1 << 40}, "more than 65536 layers or experts"),
        ({k: v for k, v in CONFIG.items() if k != "kv"}, "gives no size for axis kv"),
        ({**CONFIG, "hidden": 1 << 60}, r"embed cannot have shape \(10, 1152921504606846976\)"),
    ],
)
def test_configurations_that_make_no_model_are_refused(config: dict[str, Any], message: str) -> None:
    """Sizes come from other people's files."""
    with pytest.raises(LayoutError, match=message):
        _ = schema().bind(config).tensors


@pytest.mark.parametrize(
    "fault",
    [
        lambda c: c["nothing"],
        lambda c: c["vocab"] // 0,
        lambda c: c["vocab"] + "x",
        lambda c: "ab"[c["vocab"]],
    ],
)
def test_a_configuration_that_breaks_the_schemas_code_is_no_traceback(fault: Any) -> None:
    """A missing, zero or mistyped field ends in a LayoutError that names the model."""
    with pytest.raises(LayoutError, match="model small@1: the configuration"):
        schema(sizes=fault).bind(CONFIG)


def test_canonical_names_are_a_family_of_their_own() -> None:
    """Every canonical tensor is itself, in the order of declaration."""
    model = schema().bind(CONFIG)

    assert list(model.names().whole) == list(model.tensors) == [
        "embed", "layers.0.q", "layers.1.q", "layers.1.up", "layers.2.q", "layers.2.up", "norm",
    ]  # fmt: skip
    assert model.names("canonical") is model.names()
    assert model.names().whole["embed"].shape == (12, 4)
    assert model.names().unpadded()["embed"].shape == (10, 4)
    with pytest.raises(LayoutError, match="has no names 'hf'; it has canonical"):
        model.names("hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": (Declare("w", "hidden"),)}, "declares w twice"),
        ({"layer": (Declare("w.{j}", "hidden"),)}, r"\{j\} uses none of i, last"),
        ({"layer": (Declare("w.{i}", "hidden", when="x"),)}, "write a slice"),
    ],
)
def test_declarations_that_clash_are_refused(changes: dict[str, Any], message: str) -> None:
    """A second tensor of one name would replace the first without a word."""
    with pytest.raises(LayoutError, match=message):
        _ = schema(**changes).bind(CONFIG).tensors


def test_names_that_do_not_fit_their_tensors_are_refused() -> None:
    """Unknown tensors, one key twice, dense and expert tensors in one, two axes on one mesh axis."""
    with pytest.raises(LayoutError, match=r"l\.1 uses unknown tensor layers\.1\.k"):
        _ = named(Name("l.{i}", "layers.{i}.k: hidden", "1:")).whole
    with pytest.raises(LayoutError, match="q is there twice"):
        _ = named(Name("q", "layers.{i}.q: kv group hidden")).whole
    both = "hidden [layers.{i}.q: kv group | layers.{i}.up: expert ffn]"
    with pytest.raises(LayoutError, match="joins tensors with and without an expert axis"):
        _ = named(Name("l.{i}", both, "1:")).whole
    cut_twice = named(first=(Name("e", "embed: vocab hidden"),), rules={"vocab": "tp:pad=4", "hidden": "tp"})
    assert list(cut_twice.placements(Layout()))
    with pytest.raises(LayoutError, match="e would be cut along hidden and vocab by one mesh axis"):
        list(cut_twice.placements(Layout(tp=2)))


def test_experts_of_one_module_take_turns() -> None:
    """Lines whose keys agree up to the expert are one module's parameters: 0.a, 0.b, 1.a, 1.b."""
    view = "layers.{i}.up: expert={e} ffn hidden"

    names = named(
        Name("l.{i}.{e}.a", view, "2:"), Name("l.{i}.{e}.b", view, "2:"), Name("m.{i}.{e}", view, "2:")
    )

    assert list(names.whole) == [
        *(f"l.2.{e}.{x}" for e in range(4) for x in "ab"), *(f"m.2.{e}" for e in range(4)),
    ]  # fmt: skip


def test_names_without_a_model_allow_only_layouts_that_need_none() -> None:
    """Data parallel and zero=3 work on any tensors; every other cut needs to know what they are."""
    names = StoredNames({"w": Tensor("w", ("0",), (8,))})

    assert [p.ranks.tolist() for p in names.placements(Layout(dp=2, cp=2, zero=3))] == [[0, 1, 2, 3]]
    assert list(names.whole) == list(names.unpadded()) == ["w"]
    for layout in (Layout(tp=2), Layout(pp=2), Layout(dp=2, ep=2), Layout(tp=2, etp=2)):
        with pytest.raises(LayoutError, match="needs to know what the tensors are"):
            list(names.placements(layout))


def test_tensors_have_a_size_for_every_axis() -> None:
    """And no size that leaves 64 bits."""
    with pytest.raises(LayoutError, match=r"w has axes \('a', 'b'\), but shape \(3,\)"):
        Tensor("w", ("a", "b"), (3,))
    with pytest.raises(LayoutError, match="w cannot have shape"):
        Tensor("w", ("a", "b"), (1 << 40, 1 << 40))
