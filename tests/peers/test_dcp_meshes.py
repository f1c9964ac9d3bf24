"""torch as the judge: Llama on real meshes (FSDP2, HSDP, FSDP2 x TP), saved by torch, resharded here, loaded by torch over NaN.

Small cases are in `tests/formats/test_dcp.py`; these start up to four ranks each.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit import ops
from ckptkit.formats.registry import detect
from ckptkit.stores.local import LocalStore
from tests.formats import dcp_jobs

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.peers import mesh_jobs

pytestmark = pytest.mark.peers

MESHES = {"fsdp": 3, "hsdp": 4, "tp": 4}
"""Kinds, and the ranks that save."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of mesh (`mesh_jobs.save`), and one of the model's configuration."""
    root = tmp_path_factory.mktemp("meshes")
    folders = {kind: root / kind for kind in (*MESHES, "config")}
    for folder in folders.values():
        folder.mkdir()
    (root / "config" / "config.json").write_text(json.dumps({"model_type": "llama", **mesh_jobs.CONFIG}))
    for ranks in set(MESHES.values()):
        jobs = [("save", (folders[kind], kind)) for kind, n in MESHES.items() if n == ranks]
        dcp_jobs.run(ranks, root / f"meeting-{ranks}", mesh_jobs.each, jobs)
    return folders


@pytest.fixture(scope="module")
def outputs(samples: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What became of each of `CASES`, and of two folders of safetensors: resharded, and loaded by torch."""
    root = tmp_path_factory.mktemp("outputs")
    config = str(samples["config"])
    jobs: dict[int, list[tuple[str, tuple[Any, ...]]]] = {ranks: [] for ranks in MESHES.values()}
    made = []
    for number, (saved, form, layout, loaded, ranks) in enumerate(CASES):
        native, out = root / f"{number}-native", root / str(number)
        ops.reshard(str(samples[saved] / form), str(native), to="native", layout=layout, config=config)
        ops.reshard(str(native), str(out), to="dcp", layout="dp=2,zero=3")
        jobs[ranks].append(("load", (out, loaded, form, saved == loaded)))
        made.append(out)
    for size in (1 << 30, 1 << 16):
        out = root / f"hf-{size}"
        ops.reshard(
            str(samples["tp"] / "nested"),
            str(out),
            to="hf",
            config=config,
            drop_optimizer=True,
            max_shard_size=size,
        )
        jobs[4].append(("load_hf", (out, "tp")))
        made.append(out)
    for ranks, listed in jobs.items():
        dcp_jobs.run(ranks, root / f"meeting-{ranks}", mesh_jobs.each, listed)
    return made


def same(left: Any, right: Any, where: str = "") -> None:
    """Nested states hold the same bits."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), where
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for a, b in zip(left, right, strict=True):
            same(a, b, where)
    else:
        assert left == right, where


CASES = [
    # saved on, in keys, resharded through, loaded on, ranks
    ("tp", "nested", "tp=2,pp=2,zero=1", "tp", 4),
    ("tp", "titan", "dp=3,zero=3", "tp", 4),
    ("hsdp", "titan", "tp=2,dp=2,zero=2:deepspeed", "hsdp", 4),
    ("fsdp", "nested", "dp=4,zero=3", "hsdp", 4),
    ("hsdp", "nested", "pp=2:1/1,dp=2,zero=1:megatron", "fsdp", 3),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_torch_goes_on_from_a_resharded_state(
    number: int, samples: dict[str, Path], outputs: list[Path]
) -> None:
    """Weights, moments, momenta, groups and counts are those saved; on the same mesh the next step is the original's too."""
    saved, _, _, loaded, _ = CASES[number]

    same(torch.load(outputs[number] / "loaded.pt"), torch.load(samples[saved] / "whole.pt"))
    if saved == loaded:
        same(torch.load(outputs[number] / "next.pt"), torch.load(samples[saved] / "next.pt"))


@pytest.mark.parametrize("kind", MESHES)
def test_safetensors_that_torch_saved_from_ranks_are_read(
    kind: str, samples: dict[str, Path], tmp_path: Path
) -> None:
    """Shards by rank, shards below `sharded/`, and the files that torch joined of them are each the whole model."""
    whole = torch.load(samples[kind] / "whole.pt")["model"]
    folders = {
        "shards": (samples[kind] / "hf-shards", "dcp"),
        "below": (samples[kind] / "hf-joined" / "sharded", "dcp"),
        "joined": (samples[kind] / "hf-joined", "hf"),
    }
    for name, (folder, format) in folders.items():
        assert detect(LocalStore(folder)).name == format
        ops.reshard(str(folder), str(tmp_path / name), to="torch", config=str(samples["config"]))

        found = torch.load(tmp_path / name / "model.pt")

        same(found, whole)


def test_torchs_reader_of_safetensors_loads_what_we_write(
    samples: dict[str, Path], outputs: list[Path]
) -> None:
    """A folder of Hugging Face files, in one and in several, fills a model on a mesh of four ranks."""
    one, several = outputs[len(CASES) :]
    assert (one / "model.safetensors").exists() and (several / "model.safetensors.index.json").exists()

    for folder in (one, several):
        same(torch.load(folder / "loaded.pt"), torch.load(samples["tp"] / "whole.pt")["model"])
