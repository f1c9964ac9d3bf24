"""Configurations: defaults, overrides, and what a wrong one is told."""

from pathlib import Path

import pytest

from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, LayoutError, UsageError
from ckptkit.train import data
from ckptkit.train.config import Config, override, shipped
from ckptkit.train.dims import Dims
from ckptkit.train.parallel import Parallel
from ckptkit.train.trainer import bind, check
from tests.train.zayas import config_of


@pytest.mark.parametrize("name", ["zaya1-tiny.toml", "zaya1-100m.toml", "zaya1-8b.toml"])
def test_shipped_configurations_are_whole(name: str) -> None:
    config = Config.load(name)

    model = bind(config)
    check(config, model, Layout())
    assert Dims.of(model).layers == config.model["num_hidden_layers"]
    assert name in shipped()


def test_the_8b_configuration_is_the_published_model() -> None:
    """Counts of the published checkpoint: 8.84 billion parameters, the tied embedding once."""
    from math import prod

    tensors = bind(Config.load("zaya1-8b.toml")).tensors.values()

    assert sum(prod(t.shape) for t in tensors if t.kind == "param") == 8_840_488_784


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            {"train": {"stesp": 3}, "model": {"base": "zaya-tiny"}},
            r"\[train\] has no 'stesp'; did you mean steps",
        ),
        ({"trian": {}, "model": {"base": "zaya-tiny"}}, "has no 'trian'; did you mean train"),
        ({"train": {"steps": "3"}, "model": {"base": "zaya-tiny"}}, "steps = '3' must be of type int"),
        ({"train": {"batch": 0}, "model": {"base": "zaya-tiny"}}, "batch = 0 is too small"),
        ({"train": {"dtype": "fp8"}, "model": {"base": "zaya-tiny"}}, "dtype = 'fp8' must be one of"),
        ({"model": {"base": "zaya-small"}}, r"\[model\] needs base, one of"),
        ({}, r"\[model\] needs base"),
    ],
)
def test_a_wrong_table_is_told_what_and_where(table: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Config.from_table(table)


def test_files_are_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nbase = "zaya-tiny"\n[data]\nfiles = ["a.txt"]\n')

    config = Config.load(str(tmp_path / "run.toml"))

    assert config.data.files == [str(tmp_path / "a.txt")]
    with pytest.raises(UsageError, match=r"there is no file .*a\.txt"):
        data.check(config.data, 16)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UsageError, match="hold no sequence of 16 tokens"):
        data.check(config.data, 16)


def test_a_file_that_is_no_toml_or_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[model\n")

    with pytest.raises(UsageError, match="is no TOML"):
        Config.load(str(tmp_path / "bad.toml"))
    with pytest.raises(UsageError, match=r"those shipped: .*zaya1-tiny\.toml"):
        Config.load("nowhere.toml")


def test_overrides_are_checked_like_the_file() -> None:
    config = config_of()

    override(config, {"optimizer.clip": 2, "model.num_experts": 2})

    assert (config.optimizer.clip, config.model["num_experts"]) == (2.0, 2)
    for wrong, told in (
        ("optimizer.clpi", "did you mean clip"),
        ("clip", "write TABLE.FIELD"),
        ("x.y", "write TABLE"),
    ):
        with pytest.raises(UsageError, match=told):
            override(config, {wrong: 1})


@pytest.mark.parametrize(
    ("layout", "settings", "told"),
    [
        ("dp=3", {}, "does not divide into dp=3 shares"),
        ("pp=4", {}, "pp=4 stages need as many layers, the model has 3"),
        ("tp=3", {}, "tp=3 does not divide"),
        ("ep=3,dp=3", {"train__batch": 6}, "ep=3 does not divide"),
        ("cp=4", {"train__seq_len": 12}, "seq_len a multiple of 8, and at least 16"),
        ("tp=2,etp=2", {}, "training takes etp=1"),
        ("dp=2,zero=3", {}, "training takes zero=0, zero=1"),
        ("dp=2,zero=1:megatron", {}, "training takes zero=0, zero=1"),
        ("tp=1", {"checkpoint__init": "somewhere"}, "give a root"),
        ("tp=1", {"model__vocab_size": 100}, "vocabulary has 100; it needs 256"),
        ("tp=1", {"model__model_type": "llama"}, "training knows zaya and .* models"),
        ("tp=1", {"model__sliding_window": 0}, "no sliding_window"),
        ("tp=1", {"model__attention_dropout": 0.5}, "attention_dropout"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_starts(
    layout: str, settings: dict, told: str
) -> None:
    """All of these are found by one process, without a process group."""
    config = config_of(**settings)

    with pytest.raises(CkptError, match=told) as caught:
        parsed = Layout.parse(layout)
        model = bind(config)
        check(config, model, parsed)

    assert isinstance(caught.value, LayoutError | UsageError)
    assert caught.value.exit_code == 2


def test_one_rank_needs_no_process_group() -> None:
    groups = Parallel(Layout())

    assert {groups.tp.size, groups.pp.size, groups.ep.size, groups.world.size} == {1}
    assert groups.is_first
    assert groups.is_last
