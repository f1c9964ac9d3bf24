"""Trainers that place tensors by a schema: ZAYA1 in layouts with experts, stages, ZeRO and other names."""

from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.layouts import Layout
from tests.hooks import jobs
from tests.hooks.ranks import run_ranks


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("tp=2,dp=2,zero=1", "canonical"), ("pp=2,ep=2,dp=2,zero=1:whole", "megatron")),
        (("pp=2", "megatron"), ("ep=2,dp=2", "transformers")),
    ],
)
def test_a_schema_says_where_everything_is(
    before: tuple[str, str], after: tuple[str, str], tmp_path: Path
) -> None:
    """Weights, masters and moments (AdamW's and Muon's) saved in one layout and family of names come back in another, bit for bit."""
    url = str(tmp_path / "run")
    worlds = [Layout.parse(layout).world for layout, _ in (before, after)]

    run_ranks(worlds[0], jobs.by_schema, url, before[0], before[1], True)
    found = run_ranks(worlds[1], jobs.by_schema, url, after[0], after[1], False)

    assert found == [(9, [])] * worlds[1]
    source = ckptkit.open(f"{url}/step-00000009.e1")
    assert source.catalog.model is not None and source.catalog.model.schema.name == "zaya"
    assert source.format is not None and list(source.format.problems(source.store, source.catalog)) == []
