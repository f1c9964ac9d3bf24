"""Option values: what is accepted, and what a refusal says."""

import click
import pytest

from ckptkit.cli.values import DESTINATION, DTYPE, LAYOUT, PLACE, SETTING, SHARE, SIZE
from ckptkit.core.layouts import Layout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("1k", 1000),
        ("5GB", 5 * 10**9),
        ("5G", 5 * 10**9),
        ("256MiB", 256 * 2**20),
        ("256 mib", 256 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2TB", 2 * 10**12),
        ("1Ki", 1024),
    ],
)
def test_sizes_are_decimal_unless_the_unit_has_an_i(text: str, expected: int) -> None:
    assert SIZE.convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 XB", "1e9", "0", "0.1", "5GB2", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"256MiB|less than one byte"):
        SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "expected"), [("5%", 0.05), ("0.05", 0.05), (".5", 0.5), ("100%", 1.0), ("1", 1.0)]
)
def test_shares_are_percent_or_fraction(text: str, expected: float) -> None:
    assert SHARE.convert(text, None, None) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["0", "0%", "101%", "5", "-1%", "x", ""])
def test_a_share_lies_above_0_and_at_most_at_1(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write it like 5%"):
        SHARE.convert(text, None, None)


def test_a_layout_is_parsed_and_its_error_is_passed_on() -> None:
    assert LAYOUT.convert("pp=2,tp=4", None, None) == Layout(tp=4, pp=2)
    with pytest.raises(click.BadParameter, match="a degree is at least 1"):
        LAYOUT.convert("tp=0", None, None)


@pytest.mark.parametrize(
    ("text", "expected"), [("bf16", "bfloat16"), ("float32", "float32"), ("torch.float16", "float16")]
)
def test_dtypes_have_short_forms(text: str, expected: str) -> None:
    assert DTYPE.convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["int8", "float8_e4m3fn", "float31", ""])
def test_weights_are_cast_to_floats_of_two_bytes_or_more_only(text: str) -> None:
    with pytest.raises(click.BadParameter, match="bfloat16"):
        DTYPE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_hidden_layers=8", ("num_hidden_layers", 8)),
        ("tie=true", ("tie", True)),
        ("name=a=b", ("name", "a=b")),
        ("x=[1, 2]", ("x", [1, 2])),
    ],
)
def test_settings_hold_json_or_text(text: str, expected: tuple[str, object]) -> None:
    assert SETTING.convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["layers", "=8"])
def test_a_setting_without_a_name_or_sign_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="NAME=VALUE"):
        SETTING.convert(text, None, None)


@pytest.mark.parametrize("text", ["run@latest", "run@1200", "run@1200.e3", "run@1200/", "file:///run@7"])
def test_a_destination_is_no_step_of_a_run(text: str) -> None:
    """It would become a folder called run@1200, which hides the step from then on."""
    assert PLACE.convert(text, None, None) == text
    with pytest.raises(click.BadParameter, match="new folder"):
        DESTINATION.convert(text, None, None)


def test_an_empty_path_is_refused_before_it_means_the_working_folder() -> None:
    with pytest.raises(click.BadParameter, match="empty path"):
        PLACE.convert("", None, None)
