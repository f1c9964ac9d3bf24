"""Random toys, layouts and boxes for property tests (hypothesis strategies)."""

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from ckptkit.core.layouts import DEFAULT_ORDER, ZERO_RULES, Layout
from ckptkit.errors import LayoutError
from tests.core.oracle import Bundle, Form, Rule, Toy, ToyFamily

RULES = {
    "kv": Rule("tp", replicate=True),
    "group": Rule("tp", inner="kv"),
    "head": Rule("tp"),
    "expert": Rule("ep"),
    "ffn": Rule("etp"),
}


@st.composite
def toys(draw: st.DrawFn) -> Toy:
    """A model of a few tensors with axes of every kind of rule, and two families of names."""
    sizes = {
        "vocab": draw(st.integers(0, 9)),
        "kv": draw(st.sampled_from([2, 4, 1, 3])),
        "group": draw(st.sampled_from([2, 4, 1, 6])),
        "head": draw(st.sampled_from([4, 12, 2, 6, 0])),
        "expert": draw(st.sampled_from([2, 4, 6, 1])),
        "ffn": draw(st.sampled_from([4, 2, 6])),
        "hidden": draw(st.sampled_from([3, 5, 2, 1, 0])),
        "tap": draw(st.sampled_from([2, 1, 3, 7])),
    }
    rules = {**RULES, "vocab": Rule("tp", pad=draw(st.integers(1, 3)))}
    layers = draw(st.integers(0, 4))
    count = draw(st.integers(1, 4))
    bundles = tuple(draw(_bundle(number, sizes)) for number in range(count))
    families = tuple(draw(_family(name, bundles, sizes, layers)) for name in ("one", "two"))
    return Toy(sizes, rules, layers, bundles, families)


@st.composite
def _bundle(draw: st.DrawFn, number: int, sizes: dict[str, int]) -> Bundle:
    # Two axes that one mesh axis cuts do not fit in a tensor, but for kv and group.
    by_tp = draw(st.sampled_from([{"vocab"}, {"head"}, {"kv", "group"}]))
    axes = draw(
        st.permutations([a for a in sorted(sizes) if a in by_tp or a not in ("vocab", "head", "kv", "group")])
    )
    common = axes[: draw(st.integers(0, 3))]
    rest = [axis for axis in axes[3:] if axis != "expert"]
    parts = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        own = draw(st.permutations(rest))[: draw(st.integers(0, 2 if len(common) < 2 else 1))]
        while own and prod(sizes[axis] or 1 for axis in (*common, *own)) > 300:
            own = own[1:]
        parts.append((tuple(own), tuple(draw(st.permutations([*common, *own])))))
    kind = draw(st.sampled_from(["param", "param", "param", "buffer"]))
    return Bundle(
        number,
        draw(st.sampled_from(["layer", "layer", "first", "last"])),
        tuple(parts),
        kind,
        draw(st.sampled_from(["adamw", "muon", "none"])) if kind == "param" else "none",
        tuple(draw(st.lists(st.sampled_from(["int32", "uint16", "int64"]), min_size=4, max_size=4))),
    )


@st.composite
def _family(
    draw: st.DrawFn, name: str, bundles: Sequence[Bundle], sizes: dict[str, int], layers: int
) -> ToyFamily:
    forms = {}
    for bundle in bundles:
        own, order = bundle.parts[0]
        common = [axis for axis in order if axis not in own]
        fixable = ["", *(axis for axis in common if sizes[axis])]
        fixed = draw(st.sampled_from(fixable)) if draw(st.booleans()) else ""
        together = len(bundle.parts) > 1 and draw(st.booleans())
        joins = [tuple(range(len(bundle.parts)))] if together else [(p,) for p in range(len(bundle.parts))]
        forms[bundle.number] = tuple(draw(_form(bundle, parts, common, fixed)) for parts in joins)
    movable = [b.number for b in bundles if b.home == "layer" and layers]
    first = [b.number for b in bundles if b.home == "first"]
    return ToyFamily(
        name,
        forms,
        frozenset(n for n in movable if draw(st.integers(0, 3)) == 0),
        frozenset(n for n in first if draw(st.integers(0, 3)) == 0),
    )


@st.composite
def _form(draw: st.DrawFn, bundle: Bundle, parts: tuple[int, ...], common: Sequence[str], fixed: str) -> Form:
    dims: list[tuple[str, ...]] = []
    for axis in draw(st.permutations([axis for axis in common if axis != fixed])):
        merged = draw(st.booleans())
        if dims and merged:
            dims[-1] = (*dims[-1], axis)
        else:
            dims.append((axis,))
    if draw(st.integers(0, 5)) == 0:
        dims.insert(draw(st.integers(0, len(dims))), ())  # a dimension of one index
    bracket = len(parts) > 1 or draw(st.booleans())
    own = any(bundle.parts[p][0] for p in parts)
    if (own or bracket) and (not dims or draw(st.booleans())):
        split = draw(st.integers(0, len(dims)))
        dims.insert(split, ())  # the parts have a dimension of their own
    else:
        split = draw(st.integers(0, max(0, len(dims) - 1)))
    return Form(tuple(dims), split, parts, fixed, bracket and bool(dims))


@st.composite
def layouts(draw: st.DrawFn, layers: int, most: int = 32) -> Layout:
    """A layout of at most `most` ranks; it need not fit a model."""
    tp, cp, dp = (draw(st.sampled_from(n)) for n in ([1, 2, 4, 3], [1, 1, 2], [1, 2, 3, 4]))
    pp = draw(st.sampled_from([1, 2, 3]))
    while tp * cp * dp * pp > most:
        dp, pp = max(1, dp // 2), max(1, pp - 1)
        cp = 1
    inside = tp * cp * dp
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if inside % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2) if inside // ep % n == 0]))
    stages: tuple[int, ...] | None = None
    vpp = 1
    how = draw(st.sampled_from(["even", "stages", "vpp"]))
    if how == "stages" and pp > 1:
        edges = sorted(draw(st.lists(st.integers(0, layers), min_size=pp - 1, max_size=pp - 1)))
        stages = tuple(b - a for a, b in zip([0, *edges], [*edges, layers], strict=True))
    elif how == "vpp" and pp > 1:
        vpp = draw(st.sampled_from([n for n in (1, 2) if layers % (pp * n) == 0] or [1]))
    degrees = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "cp": cp, "dp": dp}
    zero, rule = draw(st.sampled_from([0, 1, 2, 3])), draw(st.sampled_from(ZERO_RULES))
    order = "-".join(draw(st.permutations(DEFAULT_ORDER.split("-"))))
    for axes in (order, DEFAULT_ORDER):
        try:
            return Layout(**degrees, zero=zero, rule=rule, stages=stages, order=axes)
        except LayoutError:
            assert axes != DEFAULT_ORDER  # only the order of ranks may be impossible here
    raise AssertionError


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box of at least one element inside `shape`, whose sizes are at least 1."""
    lo = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return lo, tuple(draw(st.integers(a + 1, size)) for a, size in zip(lo, shape, strict=True))
