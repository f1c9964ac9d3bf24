"""DeepSpeed as the judge: what it saves is read, and what ckptkit writes it loads, bit for bit, and trains on from."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.formats import registry
from ckptkit.formats.reference import gather
from ckptkit.stores.local import LocalStore

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

JOBS = Path(__file__).with_name("deepspeed_jobs.py")

SAVED: dict[str, dict[str, Any]] = {
    "one": {"stage": 1, "bf16": True},
    "two": {"stage": 2, "bf16": True, "zero": {"round_robin_gradients": True}},
    "three": {"stage": 3, "bf16": True},
    "experts": {"stage": 1, "bf16": True, "ep": 2},
    "subgroups": {"stage": 3, "bf16": False, "zero": {"sub_group_size": 30}, "frozen": True},
}
"""Saved by two ranks."""

LOADED: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    # name: source, format, layout, ranks, how the engine is set up
    "one-to-one-rank": ("one", "deepspeed", "dp=1,zero=1:deepspeed", 1, {"stage": 1, "bf16": True}),
    "one-to-stage-3": ("one", "deepspeed", "dp=2,zero=3", 2, {"stage": 3, "bf16": True}),
    "three-to-stage-2": ("three", "deepspeed", "dp=2,zero=2:deepspeed", 2, {"stage": 2, "bf16": True}),
    "three-to-one-rank": ("three", "deepspeed", "dp=1,zero=3", 1, {"stage": 3, "bf16": True}),
    "subgroups-to-one-rank": (
        "subgroups", "deepspeed", "dp=1,zero=3", 1,
        {"stage": 3, "bf16": False, "zero": {"sub_group_size": 30}, "frozen": True},
    ),
    "experts-to-one-rank-each": ("experts", "deepspeed", "dp=2,zero=1:deepspeed", 2, {"stage": 1, "bf16": True, "ep": 1}),
    "one-to-universal": (
        "one", "deepspeed-universal", "", 2, {"stage": 1, "bf16": True, "universal": True}
    ),
    "three-to-universal": (
        "three", "deepspeed-universal", "", 1, {"stage": 1, "bf16": True, "universal": True}
    ),
    "one-to-universal-3": (
        "one", "deepspeed-universal", "", 2, {"stage": 3, "bf16": True, "universal": True}
    ),
}  # fmt: skip


def run_jobs(folder: Path, ranks: int, jobs: list[dict[str, Any]]) -> None:
    """Run jobs in processes of their own, and fail with their output."""
    listed = folder / f"jobs-{ranks}-{len(list(folder.glob('jobs-*')))}.json"
    listed.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(ranks):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        log = open(folder / f"{listed.stem}.{rank}.log", "wb")  # noqa: SIM115
        command = [sys.executable, str(JOBS), str(listed)]
        running.append((subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder), log))
    failed = False
    for process, log in running:
        try:
            failed |= process.wait(timeout=600) != 0
        except subprocess.TimeoutExpired:
            failed = True
            process.kill()
        log.close()
        if failed:
            for other, _ in running:
                other.kill()
    if failed:
        text = [Path(log.name).read_bytes().decode("utf-8", "replace")[-3000:] for _, log in running]
        raise AssertionError("DeepSpeed failed:\n" + "\n----\n".join(text))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that DeepSpeed saved, those that ckptkit made of them, and what DeepSpeed found in these."""
    folder = tmp_path_factory.mktemp("deepspeed")
    run_jobs(
        folder,
        2,
        [{"do": "save", "root": str(folder / n), "out": str(folder / n), **job} for n, job in SAVED.items()],
    )
    jobs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for name, (source, to, layout, ranks, job) in LOADED.items():
        ops.reshard(str(folder / source), str(folder / name), to=to, layout=layout or None)
        jobs[ranks].append({"do": "load", "root": str(folder / name), "out": str(folder / name), **job})
    ops.reshard(str(folder / "two"), str(folder / "again"), to="deepspeed", layout="dp=2,zero=2:deepspeed")
    jobs[2].append(
        {"do": "load", "root": str(folder / "again"), "out": str(folder / "again"), **SAVED["two"]}
    )
    for name in ("one-to-one-rank", "one-to-stage-3", "three-to-one-rank", "subgroups", "two"):
        jobs[1].append({"do": "fp32", "root": str(folder / name), "out": str(folder / name)})
    for name, inject in (("one", True), ("one-to-one-rank", False), ("three", False)):
        out = folder / f"{name}-converted"
        out.mkdir()
        jobs[1].append(
            {
                "do": "universal", "root": str(folder / name / "global_step2"), "out": str(out / "global_step2"), "inject": inject,
            }
        )  # fmt: skip
    for ranks, wanted in jobs.items():
        run_jobs(folder, ranks, wanted)
    return folder


def dumped(path: Path) -> dict[tuple[str, str], bytes]:
    import torch

    found = torch.load(path, weights_only=True)
    assert not any(torch.isnan(value).any() for value in found.values()), "something was not loaded"
    return {key: value.numpy().tobytes() for key, value in found.items()}


def values(root: Path, name: str = "") -> dict[tuple[str, str], np.ndarray]:
    store = LocalStore(root)
    format = registry.by_name(name) if name else registry.detect(store)
    return gather(root, format.read(store))


@pytest.mark.parametrize("name", SAVED)
def test_what_deepspeed_saved_is_read(name: str, made: Path) -> None:
    """Masters and moments are those that DeepSpeed has in memory; low-precision weights are the masters, rounded."""
    import torch

    found = values(made / name)
    expected = dumped(made / f"{name}.loaded.pt")

    for key, data in expected.items():
        if key[1]:
            assert found[key].tobytes() == data, key
    for (tensor, role), array in found.items():
        if role == "master" and (tensor, "param") in found:
            rounded = torch.from_numpy(array.view(np.float32)).bfloat16().view(torch.int16).numpy()
            assert rounded.tobytes() == found[tensor, "param"].tobytes(), tensor


@pytest.mark.parametrize("name", LOADED)
def test_what_ckptkit_wrote_is_loaded(name: str, made: Path) -> None:
    """DeepSpeed loads masters, moments, buffers and step bit for bit, at another stage or number of ranks."""
    assert dumped(made / f"{name}.loaded.pt") == dumped(made / f"{LOADED[name][0]}.loaded.pt")


@pytest.mark.parametrize(
    "name", [name for name in LOADED if "experts" not in name]
)  # gradients add up in another order
def test_training_goes_on_as_if_nothing_had_happened(name: str, made: Path) -> None:
    """The step after loading gives the bits of the step without saving."""
    assert dumped(made / f"{name}.stepped.pt") == dumped(made / f"{LOADED[name][0]}.stepped.pt")


def test_round_robin_is_written_for_engines_with_it(made: Path) -> None:
    """A run that balances gradients gets the order that its engine expects."""
    assert dumped(made / "again.stepped.pt") == dumped(made / "two.stepped.pt")


@pytest.mark.parametrize(
    "name", ["one-to-one-rank", "one-to-stage-3", "three-to-one-rank", "subgroups", "two"]
)
def test_zero_to_fp32_agrees(name: str, made: Path) -> None:
    """DeepSpeed's script finds the same fp32 weights as ckptkit, in what either of them wrote."""
    import torch

    found = values(made / name)
    for key, tensor in torch.load(made / f"{name}.fp32.pt", weights_only=True).items():
        role = next(role for role in ("master", "param", "buffer") if (key, role) in found)
        assert found[key, role].tobytes() == tensor.detach().contiguous().numpy().tobytes(), key


@pytest.mark.parametrize("name", ["one", "one-to-one-rank", "three"])
def test_converted_to_universal(name: str, made: Path) -> None:
    """ds_to_universal takes what either wrote, and ckptkit reads from its result what was in it."""
    expected, found = values(made / name), values(made / f"{name}-converted")

    assert {key for key in expected if key[1] != "param"} <= found.keys()
    for key, array in expected.items():
        if key in found:
            assert found[key].tobytes() == array.tobytes(), key
