"""Rules for names: both directions are inverse, clashes are errors, values and state do not change."""

import re
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ckptkit import ops
from ckptkit.errors import UsageError
from ckptkit.ops.renaming import Rule, new_names, read_rules, renamed

RULES = {
    "model.layers.{i}.self_attn.{p}_proj.weight": "layers.{i}.attn.{p}",
    "model.{rest*}": "body.{rest*}",
    "lm_head.weight": "head",
}
_TOML = "[names]\n" + "\n".join(f'"{left}" = "{right}"' for left, right in RULES.items())
NAMES = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.11.self_attn.k_proj.weight",
    "model.embed.weight",
    "lm_head.weight",
    "other",
]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    values = {name: np.full((4, k + 1), k, np.float32) for k, name in enumerate(NAMES)}
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "somebody_s"}')
    return folder


def test_names_become_what_the_rules_say(stored: Path, tmp_path: Path) -> None:
    result = ops.reshard(str(stored), str(tmp_path / "b"), rename=RULES)

    found = load_file(tmp_path / "b" / "model.safetensors")
    assert set(found) == {"layers.0.attn.q", "layers.11.attn.k", "body.embed.weight", "head", "other"}
    assert (found["layers.11.attn.k"] == 1).all() and (found["head"] == 3).all()
    assert any("4 of 5 tensors" in note for note in result.notes)


def test_there_and_back_is_the_same_checkpoint(stored: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(_TOML)

    ops.reshard(str(stored), str(tmp_path / "b"), rename=str(rules), to="native", layout="dp=3,zero=3")
    ops.reshard(str(tmp_path / "b"), str(tmp_path / "c"), rename_back=str(rules), to="hf", layout="tp=1")

    assert ops.diff(str(stored), str(tmp_path / "c")).exit_code == 0


def test_optimizer_groups_follow(trained: str) -> None:
    source = ops.open(trained)
    bare = replace(source, catalog=copy(source.catalog))
    bare.catalog.model = None
    before = source.catalog.extras.common["groups"]

    found = renamed(bare, read_rules({"layers.{rest*}": "blocks.{rest*}"})).catalog

    assert [group["tensors"] for group in found.extras.common["groups"]] == [
        [re.sub(r"^layers\.", "blocks.", name) for name in group["tensors"]] for group in before
    ]
    assert set(found.facts["fingerprints"]) == {
        re.sub(r"^layers\.", "blocks.", key) for key in source.catalog.facts["fingerprints"]
    }


@given(st.lists(st.text("abc.", min_size=1, max_size=9), unique=True, max_size=6))
def test_rules_turned_round_undo_themselves(names: list[str]) -> None:
    """Wherever they do not clash."""
    rules = [Rule("a.{x}", "b.c.{x}"), Rule("c.{x}.{y*}", "q.{y*}.{x}")]
    try:
        there, _ = new_names(names, rules)
    except UsageError:
        return
    for name, made in there.items():
        if made != name:
            rule = next(rule for rule in rules if rule.apply(name) is not None)
            assert rule.turned().apply(made) == name


def test_clashes_name_both_tensors(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both be called same"):
        ops.reshard(
            str(stored), str(tmp_path / "b"), rename={"model.embed.weight": "same", "lm_head.weight": "same"}
        )

    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "rules",
    [
        {"a.{x}": "b"},
        {"a.{x}": "b.{y}"},
        {"a.{x}.{x}": "b.{x}"},
        {"a.{x": "b"},
        {"": "b"},
        {"a.{x}": "b.{x*}"},
    ],
)
def test_rules_that_cannot_be_turned_round_are_refused(rules: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        read_rules(rules)


@pytest.mark.parametrize("text", ["", "[names", "[other]\na = 1", "[names]\na = 1", "names = 3", "\udcff"])
def test_files_that_hold_no_rules_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rules.toml").write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(UsageError):
        read_rules(str(tmp_path / "rules.toml"))
    with pytest.raises(UsageError, match="cannot read"):
        read_rules(str(tmp_path / "nothing.toml"))


def test_models_with_a_schema_have_families_instead(weights: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--names"):
        ops.reshard(weights, str(tmp_path / "b"), rename={"{a*}": "x.{a*}"})
    with pytest.raises(UsageError, match="give one"):
        ops.reshard(weights, str(tmp_path / "b"), rename={"a": "b"}, rename_back={"a": "b"})


def test_a_rule_that_fits_nothing_is_said(stored: Path, tmp_path: Path) -> None:
    notes = ops.reshard(str(stored), str(tmp_path / "b"), rename={"nothing.{x}": "b.{x}"}, dry_run=True).notes

    assert "the rule 'nothing.{x}' fits no tensor" in notes


def test_an_unknown_model_type_is_said_by_plan_and_reshard(stored: Path, tmp_path: Path) -> None:
    plan = ops.plan(str(stored), str(tmp_path / "b"), probe=False)
    result = ops.reshard(str(stored), str(tmp_path / "b"))

    for notes in (plan.notes, result.notes):
        assert any("model_type 'somebody_s'" in note and "dimension 0 only" in note for note in notes)
