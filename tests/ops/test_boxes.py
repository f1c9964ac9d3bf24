"""Boxes as users write them, against what numpy does with the same text."""

from pathlib import Path

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import UsageError
from ckptkit.ops.boxes import parse_box
from tests.ops.making import values


@pytest.mark.parametrize(
    "text", ["", "[...]", "[1]", "[0:2, 5]", "[1:, -3:, :4]", "[-1, :, 2]", "[:, 3:3]", "[..., 7]"]
)
def test_a_box_means_what_numpy_means(trained: str, text: str) -> None:
    """The values of a box are the slice of the whole tensor, read from 16 ranks."""
    name = "layers.1.attn.q"
    whole = values(trained)[name, "param"]
    expected = eval(f"whole{text or '[...]'}", {"whole": whole})

    found = ops.inspect(trained).values(f"{name}{text}")

    assert found.shape == expected.shape
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_a_role_is_named_after_a_slash(trained: str) -> None:
    """Without one the parameter is meant, with one the optimizer's state."""
    whole = values(trained)
    shown = ops.inspect(trained)

    assert shown.values("norm/exp_avg_sq").tobytes() == whole["norm", "exp_avg_sq"].tobytes()
    assert shown.values("norm").tobytes() == whole["norm", "param"].tobytes()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers.1.attn.Q", "did you mean layers.1.attn.q"),
        ("norm/momentum", "held as param, master"),
        ("norm[1, 2]", "has 1 .hidden=32"),
        ("norm[32]", "outside axis 0"),
        ("norm[a]", "neither an index nor a range"),
        ("norm[0:4:2]", "neither an index nor a range"),
        ("norm[0", "is no box"),
    ],
)
def test_what_does_not_fit_is_named(trained: str, text: str, says: str) -> None:
    """The message says what there is instead."""
    catalog = ops.open(trained).catalog

    with pytest.raises(UsageError, match=says):
        parse_box(text, catalog)


def test_pieces_say_where_each_byte_is(trained: str) -> None:
    """Reading each piece of a box by its file, offset and strides gives the box."""
    name, role = "layers.2.experts.gate_up", "momentum"
    whole = values(trained)[name, role]
    box = whole[1:3, :, 5:9]
    got = np.zeros_like(box)

    for piece in ops.inspect(trained).where(f"{name}/{role}[1:3, :, 5:9]"):
        assert piece.dtype == "float32" and not piece.replica
        spans = [slice(*map(int, part.split(":"))) if ":" in part else slice(int(part), int(part) + 1)
                 for part in piece.box.strip("[]").split(", ")]  # fmt: skip
        data = (Path(trained) / piece.file).read_bytes()
        shape = tuple(s.stop - s.start for s in spans)
        inside = tuple(slice(s.start - low, s.stop - low) for s, low in zip(spans, (1, 0, 5, 0), strict=True))
        got[inside] = np.ndarray(shape, np.uint32, data, piece.offset, piece.strides)

    assert got.tobytes() == box.tobytes()
