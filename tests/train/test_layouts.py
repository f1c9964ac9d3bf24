"""Layout independence: every layout's loss and gradient norm are those of one process."""

from pathlib import Path

import pytest

from tests.train.layouts import Curve, curves

QUICK = ["tp=2,dp=2,zero=1", "pp=2,ep=2,dp=2,zero=1:whole", "cp=2,tp=2,ep=2", "tp=4,zero=1"]
LONG = [
    "tp=1",
    "dp=2",
    "dp=4,zero=1",
    "tp=2",
    "tp=4,zero=1:whole",
    "pp=3",
    "cp=4,ep=4",
    "ep=4,dp=4,zero=1",
    "tp=2,pp=2,ep=2,dp=2,zero=1",
    "tp=2,cp=2,dp=2,ep=4,zero=1:whole",
    "pp=2,cp=2,tp=2,zero=1",
    "pp=2:1/2,dp=4,ep=2,zero=1",
    "tp=8,ep=4",
    "tp=2,dp=4,ep=4,zero=1,order=dp-tp-cp-ep-pp",
]


def _agree(one: Curve, other: Curve) -> None:
    assert len(one) == len(other)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(other, one, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)


def test_layouts_of_four_ranks_train_like_one_process(tmp_path: Path) -> None:
    """TP with and without more ranks than key-value heads, EP, PP, CP, both rules of ZeRO; loads are equal to the token."""
    found = curves(tmp_path, ["tp=1", *QUICK], steps=4)

    for text in QUICK:
        _agree(found["tp=1"][0], found[text][0])
        assert found[text][1] == found["tp=1"][1], text


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, len(LONG), 5))
def test_layouts_of_one_to_eight_ranks_train_like_one_process(tmp_path: Path, first: int) -> None:
    """Twenty steps each."""
    layouts = LONG[first : first + 5]

    found = curves(
        tmp_path,
        ["dp=1", *layouts],
        steps=20,
        train__batch=8,
        model__num_attention_heads=8,
        train__seq_len=32,
    )

    for text in layouts:
        _agree(found["dp=1"][0], found[text][0])


@pytest.mark.parametrize(
    "setting", [{"train__skip": "identity"}, {"balance__mode": "pid"}, {"model__vocab_size": 300}]
)
def test_what_the_configuration_changes_is_the_same_in_every_layout(tmp_path: Path, setting: dict) -> None:
    """Identity skips (with biases that make tokens skip), the pid controller, a vocabulary that needs padding."""
    found = curves(tmp_path, ["tp=1", "tp=2"], steps=3, **setting)

    _agree(found["tp=1"][0], found["tp=2"][0])


@pytest.mark.long
def test_a_matrix_may_lie_on_more_than_two_ranks(tmp_path: Path) -> None:
    """One layer over eight ranks: ranges of the flat buffers are shorter than half a matrix."""
    setting = {
        "model__num_hidden_layers": 1,
        "model__layer_types": ["hybrid"],
        "model__num_experts": 1,
        "train__batch": 8,
    }

    found = curves(tmp_path, ["tp=1", "dp=8,zero=1", "tp=2,dp=4,zero=1"], steps=6, **setting)

    for text in ("dp=8,zero=1", "tp=2,dp=4,zero=1"):
        _agree(found["tp=1"][0], found[text][0])
