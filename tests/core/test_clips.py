"""Chunks of family tensors: checked against arrays that hold each element's own canonical index."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.boxes import Box
from ckptkit.core.clips import clip, images, strided
from ckptkit.core.local import LocalTensor, Span
from ckptkit.core.views import View

SIZES = {"a": 3, "b": 2, "c": 4, "d": 2}
VIEWS = [
    "x: a c",
    "x: (a b) c",
    "x: (a b c)",
    "x: c (b a)",
    "x: b=1 (a c)",
    "[x: a b | y: c] d",
    "(d [x: a b | y: c])",
    "c (d [x: a b | y: a])",
]


def local_of(text: str) -> LocalTensor:
    view = View.parse(text)
    axes = {part.tensor: tuple(sorted(view.axes_of(part))) for part in view.parts}
    spans = {axis: Span(0, size, size) for axis, size in SIZES.items()}
    local = view.localise("key", axes, spans, {}, {part.tensor: part.tensor for part in view.parts})
    assert local is not None
    return local


def materialise(local: LocalTensor) -> np.ndarray:
    """Each element of a local tensor as text: which canonical element it is; empty where it is padding."""
    out = np.full(local.shape, "", dtype=object)
    for segment in local.segments:
        for index in itertools.product(
            *(range(a, b) for a, b in zip(segment.box.start, segment.box.stop, strict=True))
        ):
            at = list(segment.origin)
            for value, low, dim, step in zip(
                index, segment.box.start, segment.dim, segment.step, strict=True
            ):
                if dim >= 0:
                    at[dim] += step * (value - low)
            out[tuple(at)] = f"{segment.tensor}{index}"
    return out


@st.composite
def chunks(draw: st.DrawFn) -> tuple[LocalTensor, Box]:
    local = local_of(draw(st.sampled_from(VIEWS)))
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in local.shape]
    return local, Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))


@given(chunks())
@settings(max_examples=200, deadline=None)
def test_a_clip_holds_what_the_array_slice_holds(case: tuple[LocalTensor, Box]) -> None:
    """Clipping the affine maps and slicing the array give the same elements at the same places."""
    local, box = case

    found = materialise(clip(local, box))

    slices = tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))
    assert np.array_equal(found, materialise(local)[slices])


@given(chunks(), st.permutations(range(3)))
@settings(max_examples=100, deadline=None)
def test_strided_storage_holds_the_elements_where_numpy_puts_them(
    case: tuple[LocalTensor, Box], order: list[int]
) -> None:
    """A tensor stored with permuted strides reads back as the transposed array's memory."""
    local = case[0]
    array = materialise(local)
    axes = [axis for axis in order if axis < array.ndim]
    stored = np.ascontiguousarray(array.transpose(axes))
    strides = tuple(stored.strides[axes.index(axis)] // stored.itemsize for axis in range(array.ndim))

    found = materialise(strided(local, strides, array.size))

    assert found.tolist() == stored.ravel().tolist()


@given(chunks(), st.data())
@settings(max_examples=200, deadline=None)
def test_images_are_where_the_elements_of_a_canonical_box_lie(
    case: tuple[LocalTensor, Box], data: st.DataObject
) -> None:
    """The boxes are disjoint and hold exactly the elements of the canonical box."""
    local = case[0]
    segment = data.draw(st.sampled_from(local.segments))
    bounds = [
        sorted(data.draw(st.tuples(st.integers(lo, hi), st.integers(lo, hi))))
        for lo, hi in zip(segment.box.start, segment.box.stop, strict=True)
    ]
    box = Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))
    array = materialise(local)

    hits = np.zeros(array.shape, int)
    for image in images(local, segment.tensor, box):
        hits[tuple(slice(lo, hi) for lo, hi in zip(image.start, image.stop, strict=True))] += 1

    wanted = {f"{segment.tensor}{i}" for i in itertools.product(*(range(a, b) for a, b in bounds))}
    assert np.array_equal(hits, np.isin(array, sorted(wanted)).astype(int))
