"""The guide on models: what it shows works."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.core.schema import Schema
from ckptkit.core.views import View
from ckptkit.models import schemas
from tests.models.arrays import numbered, to_family

GUIDE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_model_in_one_file_works() -> None:
    """The example binds; its Megatron rows are head by head, query then key."""
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        if "SCHEMA" in block
    )
    found: dict[str, Any] = {}
    exec(code, found)  # noqa: S102  (our own guide)
    schema: Schema = found["SCHEMA"]
    model = schema.bind(
        {"num_hidden_layers": 2, "vocab_size": 10, "hidden_size": 6, "num_attention_heads": 2}
    )
    canonical = numbered(model)

    rows = to_family(model, "megatron", canonical)["decoder.layers.1.qk.weight"]

    q, k = canonical["layers.1.q"], canonical["layers.1.k"]
    assert np.array_equal(rows, np.concatenate([q[0], k[0], q[1], k[1]]))


def test_patterns_of_the_guide_can_be_read() -> None:
    """Each pattern in the list of views parses."""
    block = GUIDE.read_text().partition("## Views")[2].split("```")[1]
    patterns = [re.split(r"  +", line)[0] for line in block.strip().splitlines()]

    assert len(patterns) == 7
    assert all(View.parse(pattern).parts for pattern in patterns)


def test_every_schema_and_family_is_in_the_guide() -> None:
    """The table of schemas is complete."""
    rows = GUIDE.read_text().partition("| schema |")[2].partition("\n\n")[0].splitlines()

    listed = {cells[1]: cells for cells in (row.replace("`", "").split("|") for row in rows)}
    for schema in schemas().values():
        cells = next(cells for key, cells in listed.items() if key.strip() == schema.id)
        assert [text.strip() for text in cells[2].split(",")] == list(schema.model_types)
        assert [text.strip() for text in cells[3].split(",")] == [family.name for family in schema.families]
