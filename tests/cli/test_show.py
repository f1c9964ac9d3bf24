"""How values and tables look."""

import click
import pytest

from ckptkit.cli import show


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996, "10.0 kB"), (99_960, "100 kB"),
        (999_499, "999 kB"), (999_600, "1.00 MB"), (8_412_345_678, "8.41 GB"), (3 * 10**15, "3.00 PB"),
        (5 * 10**18, "5000 PB"),
    ],
)  # fmt: skip
def test_bytes_have_three_digits_and_never_four_before_the_unit_changes(count: int, text: str) -> None:
    assert show.nbytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"), (0.041, "0.04 s"), (0.4, "0.4 s"), (9.949, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"),
        (59.6, "1 min"), (61, "1 min 1 s"), (3599.6, "1 h"), (7500, "2 h 5 min"), (86400 * 400, "400 d"),
        (86400 * 4 + 3600 * 3, "4 d 3 h"),
    ],
)  # fmt: skip
def test_times_have_two_units_at_most(seconds: float, text: str) -> None:
    assert show.duration(seconds) == text


def test_memory_is_binary() -> None:
    assert [show.memory(n) for n in (512, 256 << 20, 3 << 29)] == ["512 B", "256 MiB", "1.50 GiB"]


def test_shares_show_that_a_rare_thing_is_there_and_that_a_common_one_is_not_all() -> None:
    assert [show.share(a, 1_000_000) for a in (0, 1, 125_000, 999_999, 1_000_000)] == [
        "0", "0.0001%", "12.5%", "99.9%", "100%",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 8, 30])
def test_a_shortened_text_has_the_width_and_keeps_both_ends(width: int) -> None:
    text = "model.layers.{0..39}.self_attn.q_proj.weight"

    short = show.shorten(text, width)

    assert len(short) == min(width, len(text))
    assert width < 8 or (short[0] == text[0] and short[-1] == text[-1])


def table() -> show.Table:
    made = show.Table(
        (
            show.Column("tensor", cut=20),
            show.Column("dtype", spare=1),
            show.Column("empty"),
            show.Column("size", right=True),
        )
    )
    made.add("layers.{0..39}.experts.gate_up", "bfloat16", "", "8.41 GB")
    made.add("norm", "float32", "", "12 B")
    return made


def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    assert [click.unstyle(line) for line in table().lines()] == [
        "tensor                          dtype        size",
        "layers.{0..39}.experts.gate_up  bfloat16  8.41 GB",
        "norm                            float32      12 B",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 48, 80])
def test_a_table_fits_the_terminal(width: int) -> None:
    assert max(len(click.unstyle(line)) for line in table().lines(width)) <= width


def test_a_spare_column_goes_before_a_name_becomes_unreadable() -> None:
    lines = [click.unstyle(line) for line in table().lines(32)]

    assert "dtype" not in lines[0]
    assert lines[1] == "layers.{0.…xperts.gate_up  8.41 GB" or len(lines[1]) <= 32


def test_numbers_stay_whole_on_a_narrow_terminal() -> None:
    """A cut number would be another number."""
    assert all("8.41 GB" in click.unstyle(line) for line in list(table().lines(22))[1:2])


def test_further_lines_hang_below_the_first() -> None:
    assert show.hang("  a bb ccc dd", 8) == ["  a bb", "    ccc", "    dd"]
    assert show.hang("a bb", None) == ["a bb"]


def test_styles_take_no_room_when_text_wraps() -> None:
    red = click.style("aaaa", fg="red")

    assert show.wrap(f"{red} bbbb", 9) == [f"{red} bbbb"]


def test_text_wraps_at_spaces() -> None:
    assert show.wrap("a bb ccc\ndd", 5) == ["a bb", "ccc", "dd"]
    assert show.wrap("averylongword x", 5) == ["averylongword", "x"]
