"""Views: patterns read, refused, and localised to hand-written segments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.boxes import Box
from ckptkit.core.views import LocalTensor, Part, Segment, Span, View
from ckptkit.errors import LayoutError

NAMES = st.from_regex(r"[a-z_][a-z0-9_.]{0,5}", fullmatch=True)


def write(view: View) -> str:
    """A pattern with that structure."""
    words = [f"{axis}={index}" for axis, index in view.fixed]
    alternatives = " | ".join(f"{part.tensor}: {' '.join(part.axes)}" for part in view.parts)
    bracket = len(view.parts) > 1 or bool(view.parts[0].axes)
    for dim, axes in enumerate(view.dims):
        inner = f" [{alternatives}]" if bracket and dim == view.split else ""
        words.append(f"({' '.join(axes)}{inner})")
    return " ".join(words) if bracket else f"{view.parts[0].tensor}: {' '.join(words)}"


@st.composite
def structures(draw: st.DrawFn) -> View:
    axes = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    fixed = [(axis, draw(st.sampled_from(["0", "17", "{e}"]))) for axis in axes[:2] if draw(st.booleans())]
    rest = [axis for axis in axes if axis not in dict(fixed)]
    dims = [tuple(rest[k : k + 2]) for k in range(0, len(rest), 2)] or [()]
    split = draw(st.integers(0, len(dims) - 1))
    own = [
        tuple(draw(st.lists(NAMES.filter(lambda n: n not in axes), max_size=2, unique=True)))
        for _ in range(2)
    ]
    parts = [Part("a.b", own[0]), Part("c{i-1}", own[1])][: draw(st.integers(1, 2))]
    if len(parts) == 1 and not parts[0].axes:
        split = 0
    return View(tuple(dims), split, tuple(parts), tuple(fixed), "")


@given(structures())
def test_a_pattern_reads_as_the_structure_it_was_written_from(view: View) -> None:
    """Writing a view and reading it gives the view, and reading it again from its text, too."""
    text = write(view)

    read = View.parse(text)

    assert (read.dims, read.split, read.parts, read.fixed) == (view.dims, view.split, view.parts, view.fixed)
    assert View.parse(read.text) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no tensor"),
        ("hidden", "names no tensor"),
        ("(", r"expected \), found 'the end'"),
        ("w: (a", r"expected \), found 'the end'"),
        ("w: (a (b))", r"expected \), found '\('"),
        ("w: a)", r"'\)' does not belong there"),
        ("w: ]", "']' does not belong there"),
        ("w: |", r"'\|' does not belong there"),
        ("[", "each alternative in \\[\\] starts with `tensor:`, found 'the end'"),
        ("[a b]", "starts with `tensor:`, found 'a'"),
        ("[q: a", r"expected \], found 'the end'"),
        ("[q: a |", "starts with `tensor:`, found 'the end'"),
        ("[q: a | ]", r"starts with `tensor:`, found '\]'"),
        ("[q: (a)]", r"expected \], found '\('"),
        ("(a [q: b] c)", r"expected \), found 'c'"),
        ("[q: a] [k: b]", r"only one tensor or one \[ \]"),
        ("q: a k: b", r"only one tensor or one \[ \]"),
        ("q: [k: b]", r"only one tensor or one \[ \]"),
        ("w: a a", "names axis a twice"),
        ("(a [q: a])", "names axis a twice"),
        ("w: a=0 a", "names axis a twice"),
        ("w: a=", "cannot read '='"),
        ("w: a=b", "cannot read '=b'"),
        ("w: a=1b", "cannot read '=1b'"),
        ("w: a=-1", "cannot read '=-1'"),
        ("w: %", "cannot read '%'"),
        ("w: 1", "cannot read '1'"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(text: str, message: str) -> None:
    """Each message shows where the pattern stops making sense."""
    with pytest.raises(LayoutError, match=message):
        View.parse(text)


@given(st.text("ab:()[]|= {}1.%", max_size=12))
def test_no_text_is_a_traceback(text: str) -> None:
    """Whatever is written, the answer is a view or a LayoutError."""
    try:
        View.parse(text)
    except LayoutError as error:
        assert repr(text) in str(error) or repr(text.rstrip()) in str(error)


def localise(text: str, axes: dict[str, tuple[str, ...]], **spans: Span) -> LocalTensor | None:
    return View.parse(text).localise("key", axes, spans, {"e": 1}, {name: name.upper() for name in axes})


def whole(size: int) -> Span:
    return Span(0, size, size)


def test_interleaved_parts_step_over_each_other() -> None:
    """Two KV heads of (2 query heads, 1 key head) times 3: head 1 of k begins at row 15, its queries at row 9."""
    local = localise(
        "(kv [q: group dim | k: dim]) hidden",
        {"q": ("kv", "group", "dim", "hidden"), "k": ("hidden", "kv", "dim")},
        kv=whole(2), group=whole(2), dim=whole(3), hidden=whole(5),
    )  # fmt: skip

    assert local is not None and local.shape == (18, 5)
    assert local.segments == (
        Segment("Q", Box((0, 0, 0, 0), (2, 2, 3, 5)), (0, 0, 0, 1), (9, 3, 1, 1), (0, 0)),
        Segment("K", Box((0, 0, 0), (5, 2, 3)), (1, 0, 0), (1, 9, 1), (6, 0)),
    )


def test_a_single_alternative_counts_in_the_shape() -> None:
    """Brackets around one tensor are as good as none."""
    bracket = localise(
        "(kv [q: dim]) tap", {"q": ("kv", "dim", "tap")}, kv=whole(2), dim=whole(3), tap=whole(4)
    )
    plain = localise("q: (kv dim) tap", {"q": ("kv", "dim", "tap")}, kv=whole(2), dim=whole(3), tap=whole(4))

    assert bracket == plain and plain is not None and plain.shape == (6, 4)


def test_a_rank_of_padding_only_has_a_shape_and_no_elements() -> None:
    """Rows 8 to 12 of a vocabulary of 7: the local tensor is there, its box is empty."""
    local = localise("w: vocab hidden", {"w": ("vocab", "hidden")}, vocab=Span(8, 12, 7), hidden=whole(2))

    assert local is not None
    assert (local.shape, local.size, local.real_size) == ((4, 2), 8, 0)
    assert local.segments[0].box == Box((7, 0), (7, 2))


def test_a_fixed_index_is_on_the_rank_that_holds_it() -> None:
    """Expert 1 of 4 lies in the span 0:2, not in 2:4."""
    here = localise(
        "w: expert={e} hidden", {"w": ("expert", "hidden")}, expert=Span(0, 2, 4), hidden=whole(3)
    )
    there = localise(
        "w: expert={e} hidden", {"w": ("expert", "hidden")}, expert=Span(2, 4, 4), hidden=whole(3)
    )

    assert here is not None and here.shape == (3,) and here.segments[0].box == Box((1, 0), (2, 3))
    assert there is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w: expert=4 hidden", "takes expert=4, but expert has 4"),
        ("w: expert={j} hidden", r"expert=\{j\} uses no known variable \(e\)"),
        ("w: hidden", r"w has axes \('expert', 'hidden'\), the pattern does not"),
        ("w: expert hidden tap", "the pattern does not"),
    ],
)
def test_patterns_must_fit_their_tensors(text: str, message: str) -> None:
    """An index past its axis would leave a tensor out without a word."""
    with pytest.raises(LayoutError, match=message):
        localise(text, {"w": ("expert", "hidden")}, expert=whole(4), hidden=whole(3), tap=whole(1))
