"""Synthetic checkpoints."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import LayoutError, UsageError
from ckptkit.formats import reference
from ckptkit.ops.presets import PRESETS
from tests.ops.making import TRAINED, ZAYA, contents, make, values


def test_values_do_not_depend_on_layout_or_format(trained: str, weights: str, tmp_path: Path) -> None:
    """One seed, three layouts and three formats: the same tensors, bit for bit."""
    truth = values(trained)
    reference.same(truth, values(make(tmp_path / "a", layout="pp=3,dp=2,ep=2,zero=1:megatron")))
    reference.same(truth, values(make(tmp_path / "b", layout="dp=5,zero=3")))

    part = {key: array for key, array in truth.items() if key[1] in ("param", "buffer")}
    reference.same(part, values(weights))
    reference.same(part, values(make(tmp_path / "hub", to="hub", optimizer="none")))


def test_a_parameter_is_its_master_rounded_and_state_is_plausible(trained: str) -> None:
    """As after a step of mixed-precision training."""
    truth = values(trained)

    for (name, role), array in truth.items():
        numbers = array.view(ml_dtypes.bfloat16 if array.itemsize == 2 else np.float32).astype(np.float64)
        assert np.isfinite(numbers).all()
        if role == "param":
            rounded = truth[name, "master"].view(np.float32).astype(ml_dtypes.bfloat16)
            assert array.tobytes() == rounded.tobytes()
        if role == "exp_avg_sq":
            assert (numbers >= 0).all()


def test_each_tensor_has_the_state_of_its_optimizer(trained: str, tmp_path: Path) -> None:
    """Muon for matrices inside the model, AdamW for the rest; groups list every trained tensor once."""
    catalog = ops.open(trained).catalog
    adamw = ops.open(make(tmp_path / "a", optimizer="adamw")).catalog

    assert {role for name, role in catalog.held if name == "layers.0.attn.q"} == {
        "param",
        "master",
        "momentum",
    }
    assert {role for name, role in catalog.held if name == "embed"} == {
        "param",
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert not [key for key in adamw.held if key[1] == "momentum"]
    for found in (catalog, adamw):
        groups = found.extras.common["groups"]
        listed = [name for group in groups for name in group["tensors"]]
        trained_tensors = [name for name, tensor in found.tensors.items() if tensor.kind == "param"]
        assert sorted(listed) == sorted(trained_tensors)
        assert all(group["step"] == found.step == 1000 for group in groups)
    assert {group["weight_decay"] for group in adamw.extras.common["groups"]} == {0.0, 0.1}


def test_every_rank_has_a_random_state_of_its_own(trained: str) -> None:
    """Sixteen coordinates, no two streams alike."""
    states = ops.open(trained).catalog.extras.by_coordinate

    assert len(states) == 16 == len({str(state) for state in states.values()})


def test_the_same_call_gives_the_same_bytes(trained: str, tmp_path: Path) -> None:
    """No time, host or path gets into a checkpoint."""
    assert contents(make(tmp_path / "again", layout=TRAINED)) == contents(trained)
    assert contents(make(tmp_path / "other", layout=TRAINED, seed=1)) != contents(trained)


@pytest.mark.parametrize("name", [name for name in PRESETS if "tiny" in name])
def test_every_kind_of_model_can_be_made(name: str, tmp_path: Path) -> None:
    """Each small preset in training layout is whole, and its weights convert to `hf` and verify."""
    made = ops.synth(str(tmp_path / "n"), model=name, layout="tp=2,dp=2,zero=1").url
    weights = ops.reshard(made, str(tmp_path / "hf"), to="hf", drop_optimizer=True).url

    assert ops.verify(made).exit_code == 0
    assert ops.verify(made, against=weights, quick=True).exit_code == 0
    assert ops.open(weights).catalog.model is not None


def test_published_sizes_are_right() -> None:
    """Parameters of the presets, against what their publishers say."""
    from ckptkit import models

    def count(name: str) -> int:
        schema, config = PRESETS[name]
        tensors = models.named(schema).bind(config).tensors.values()
        return sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in tensors if tensor.kind == "param")

    assert count("zaya-8b") == 8_840_488_784
    assert count("llama-8b") == 8_030_261_248
    assert count("mixtral-8x7b") == 46_702_792_704
    assert count("qwen-30b-a3b") == 30_532_122_624


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_have_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    """But balancing biases, which stay float32 whatever the rest is."""
    held = ops.open(make(tmp_path / "x", dtype=dtype, optimizer="none")).catalog.held

    assert {kind.name for (_, role), kind in held.items() if role == "param"} == {dtype}
    assert {kind.name for (_, role), kind in held.items() if role == "buffer"} == {"float32"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "gpt"}, "known: zaya"),
        ({"settings": {"num_layers": 3}}, "no setting num_layers"),
        ({"settings": {"num_key_value_heads": 3}}, "with these settings"),
        ({"optimizer": "sgd"}, r"known: muon\+adamw"),
        ({"to": "hf"}, "holds no optimizer state"),
        ({"to": "hf", "optimizer": "none", "layout": "tp=2"}, "holds no ranks"),
        ({"dtype": "int8"}, "random values are floats"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, options, says: str
) -> None:
    """Each message says what is possible."""
    with pytest.raises(UsageError, match=says):
        make(tmp_path / "x", **{"settings": ZAYA, **options})
    assert not list(tmp_path.iterdir())


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Four experts do not go to eight ranks."""
    with pytest.raises(LayoutError, match="ep=8"):
        make(tmp_path / "x", layout="ep=8,dp=8")
    assert not list(tmp_path.iterdir())
