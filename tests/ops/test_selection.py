"""Globs: by canonical name, by role, by a family's name."""

import pytest

from ckptkit import models
from ckptkit.errors import UsageError
from ckptkit.ops.selection import select

KEYS = [
    ("layers.0.attn.q", "param"),
    ("layers.0.attn.q", "master"),
    ("layers.1.attn.q", "param"),
    ("norm", "param"),
]


def test_a_glob_matches_names_and_roles() -> None:
    """A bare name takes every role, `name/role` one of them."""
    assert select(KEYS, ["layers.0.*"]) == set(KEYS[:2])
    assert select(KEYS, ["*/master", "norm"]) == {KEYS[1], KEYS[3]}


def test_a_familys_name_means_the_tensors_that_it_is_made_of() -> None:
    """Users know their framework's names better than ours."""
    from ckptkit.formats.reference import ZAYA_CONFIG

    named = models.named("zaya").bind(ZAYA_CONFIG).names("transformers").whole

    assert select(KEYS, ["model.layers.1.self_attn.*q_proj*"], named) == {KEYS[2]}


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    """It is a typing mistake far more often than a wish for nothing."""
    with pytest.raises(UsageError, match=r"layer\.0"):
        select(KEYS, ["norm", "layer.0.*"])
