"""ZAYA1 of Transformers through the formats of torch: what torch loads from them gives the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import ops
from tests.formats.dcp_jobs import spoil
from tests.formats.test_chain import logits, tiny_zaya


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model, and what `save_pretrained` writes of it."""
    model = tiny_zaya().to(torch.bfloat16)
    root = tmp_path_factory.mktemp("zaya") / "hf"
    model.save_pretrained(root)
    return model, root


def fresh() -> Any:
    """The same architecture with other values everywhere."""
    model = tiny_zaya().to(torch.bfloat16)
    spoil(dict(model.state_dict()))
    return model


@pytest.mark.parametrize("layout", ["dp=4,zero=3", "tp=2,pp=3,ep=2,dp=2,zero=1"])
def test_torch_loads_a_model_from_dcp(hub_folder: tuple[Any, Path], tmp_path: Path, layout: str) -> None:
    """hf → dcp → `dcp.load` into NaN: every key of the model is there, tied head included, and logits are equal bit for bit."""
    model, source = hub_folder
    ops.reshard(str(source), str(tmp_path / "dcp"), to="dcp", layout=layout)
    target = fresh()

    dcp.load({"model": target.state_dict()}, checkpoint_id=tmp_path / "dcp")

    assert torch.equal(logits(target), logits(model))
    assert ops.verify(str(tmp_path / "dcp"), against=str(source)).fault_count == 0


def test_torch_loads_a_model_from_a_file(hub_folder: tuple[Any, Path], tmp_path: Path) -> None:
    """hf → dcp → torch → hf: `load_state_dict` is strict, tied weights share a storage, and the way back is bitwise."""
    model, source = hub_folder
    ops.reshard(str(source), str(tmp_path / "dcp"), to="dcp", layout="dp=3,zero=3")
    ops.reshard(str(tmp_path / "dcp"), str(tmp_path / "pt"), to="torch")
    ops.reshard(str(tmp_path / "pt"), str(tmp_path / "hf"), to="hf")
    target = fresh()

    state = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    target.load_state_dict(state, strict=True)

    assert torch.equal(logits(target), logits(model))
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert ops.verify(str(tmp_path / "hf"), against=str(source)).fault_count == 0
