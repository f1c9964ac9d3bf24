"""megatron-core as the judge: what it saves is read, and what ckptkit writes it loads over NaN, bit for bit.

A real `GPTModel` with the real distributed optimizer runs on gloo ranks (`megatron_jobs`). Not a judge: the fully reshardable state
that megatron-core 0.16.1 itself writes from several buckets, which is shifted.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit import ops
from ckptkit.errors import FormatError, UsageError
from ckptkit.formats import registry
from ckptkit.formats.reference import gather
from ckptkit.stores.local import LocalStore

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

JOBS = Path(__file__).with_name("megatron_jobs.py")

SAVED: dict[str, dict[str, Any]] = {
    "full": {"do": "save", "model": "dense", "form": "fully_reshardable", "tp": 2},
    "buckets": {"do": "save", "model": "dense", "form": "dp_reshardable", "bucket": 300},
    "gathered": {"do": "save", "model": "dense", "form": "dp_zero_gather_scatter", "tp": 2, "tied": True},
    "whole": {"do": "save", "model": "dense", "form": "fully_reshardable", "whole": True, "tp": 2},
    "experts": {"do": "save", "model": "moe", "form": "dp_reshardable", "ep": 2},
    "legacy": {"do": "save_legacy", "model": "dense", "tp": 2},
    "legacy-buckets": {"do": "save_legacy", "model": "dense", "bucket": 300},
    "legacy-experts": {"do": "save_legacy", "model": "moe", "ep": 2},
    "legacy-whole": {"do": "save_legacy", "model": "dense", "whole": True},
    "legacy-stages": {"do": "save_legacy", "model": "dense", "pp": 2, "layers": 4, "tied": True},
}
"""Saved by two ranks."""

FULL = "fully_reshardable"
LOADED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # name: source, format, layout, how it is loaded
    "full to stages": ("full", "megatron", "pp=2,zero=1", {"form": FULL, "pp": 2}),
    "full to legacy": ("full", "megatron-legacy", "dp=2,zero=1", {}),
    "buckets to tensor parallel": ("buckets", "megatron", "tp=2,zero=1", {"form": FULL, "tp": 2}),
    "gathered to data parallel": ("gathered", "megatron", "dp=2,zero=1", {"form": FULL, "tied": True}),
    "whole to stages": ("whole", "megatron", "pp=2,zero=1", {"form": FULL, "pp": 2}),
    "experts to stages": ("experts", "megatron", "pp=2,zero=1", {"form": FULL, "pp": 2, "engine": True}),
    "experts to legacy": ("experts", "megatron-legacy", "ep=2,dp=2,zero=1", {"ep": 2}),
    "legacy to stages": ("legacy", "megatron", "pp=2,zero=1", {"form": FULL, "pp": 2}),
    "legacy buckets to legacy": ("legacy-buckets", "megatron-legacy", "tp=2,zero=1", {"tp": 2}),
    "legacy experts to one rank": ("legacy-experts", "megatron", "dp=2,zero=1", {"form": FULL, "engine": True}),
    "legacy whole to distributed": ("legacy-whole", "megatron-legacy", "dp=2,zero=1", {}),
    "distributed to legacy whole": ("legacy", "megatron-legacy", "dp=2", {"whole": True}),
    "stages to tensor parallel": (
        "legacy-stages", "megatron", "tp=2,zero=1", {"form": FULL, "tp": 2, "layers": 4, "tied": True},
    ),
    "stages to stages": ("legacy-stages", "megatron-legacy", "pp=2,zero=1", {"pp": 2, "layers": 4, "tied": True}),
}  # fmt: skip


def megatron_config() -> dict[str, Any]:
    """The configuration of `megatron_jobs`' dense model, as Transformers has it."""
    return {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip


def run(job: dict[str, Any], root: Path) -> None:
    """Do a job on two ranks. Fails with what the first rank that failed printed."""
    meeting = root / f"meeting-{len(list(root.iterdir()))}"
    command = [sys.executable, "-W", "ignore", str(JOBS)]
    logs = [root / f"{meeting.name}-{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as out:  # no pipe: Megatron's helpers would keep it open
            ranks.append(
                subprocess.Popen(
                    [*command, str(rank), "2", str(meeting), json.dumps(job)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            )
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):  # what a rank leaves behind goes with its session
                os.killpg(process.pid, signal.SIGKILL)
    for code, log in zip(codes, logs, strict=True):
        assert code == 0, log.read_text()[-3000:]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by name, each made when it is first asked for."""
    root = tmp_path_factory.mktemp("megatron")

    class Samples(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            run({**SAVED[name], "folder": str(root / name)}, root)
            self[name] = root / name
            return self[name]

    return Samples()


OFTEN = (
    "full to stages", "buckets to tensor parallel", "experts to legacy", "legacy to stages", "legacy whole to distributed",
    "stages to stages",
)  # fmt: skip
"""Every form, format and kind of model once; the rest are long."""


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.long) for n in LOADED]
)
def test_megatron_loads_what_it_saved_after_any_reshard(
    name: str, samples: dict[str, Path], tmp_path: Path
) -> None:
    """Weights, fp32 weights, moments, steps and groups in every form of the optimizer, resharded, equal those saved."""
    source, format, layout, how = LOADED[name]
    model = SAVED[source]["model"]

    ops.reshard(str(samples[source]), str(tmp_path / "out"), to=format, layout=layout)

    job = {"do": "load" if format == "megatron" else "load_legacy", "model": model, "rng": False, **how}
    run({**job, "folder": str(tmp_path / "out" / "iter_0000007")}, tmp_path)


def test_megatron_takes_back_its_random_states(samples: dict[str, Path], tmp_path: Path) -> None:
    """In a layout of the same sizes RNG states go back to their coordinates."""
    ops.reshard(str(samples["full"]), str(tmp_path / "out"), to="megatron", layout="tp=2,zero=1")

    run(
        {
            "do": "load",
            "model": "dense",
            "form": FULL,
            "tp": 2,
            "folder": str(tmp_path / "out" / "iter_0000007"),
        },
        tmp_path,
    )


def test_state_that_megatron_itself_shifted_is_refused(samples: dict[str, Path], tmp_path: Path) -> None:
    """megatron-core 0.16.1 writes wrong values from several buckets; they are found, not carried on."""
    job = {"do": "save", "model": "dense", "form": FULL, "bucket": 300, "folder": str(tmp_path / "shifted")}
    run(job, tmp_path)

    with pytest.raises(FormatError, match="fp32 weights are not those of"):
        ops.inspect(str(tmp_path / "shifted"))


@pytest.mark.parametrize("kind", [pytest.param("split", marks=pytest.mark.long), "fused"])
def test_adapters_beside_the_weights_become_pefts_and_go_back(kind: str, tmp_path: Path) -> None:
    """LoRA adapters that megatron-core stored in Megatron-Bridge's form, sharded by tensor parallelism, become peft's, one for each
    projection; of those that are apart in Megatron too, megatron-core loads every bit again in another layout."""
    job = {"model": "dense", "adapters": kind}
    run({**job, "do": "save_adapters", "tp": 2, "folder": str(tmp_path / "iter_0000007")}, tmp_path)
    config = tmp_path / "config"
    config.mkdir()
    (config / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    (config / "config.json").write_text(json.dumps(megatron_config()))
    source, adapter = str(tmp_path / "iter_0000007"), str(tmp_path / "adapter")
    with pytest.raises(UsageError, match="peft holds no weights"):
        ops.reshard(source, adapter, to="peft", config=str(config), drop_extras=True)

    ops.reshard(source, adapter, to="peft", config=str(config), only=["*.lora_*"], drop_extras=True)

    held = registry.detect(LocalStore(Path(adapter))).read(LocalStore(Path(adapter)))
    assert len(held.held) == 2 * 2 * 7
    values = gather(Path(adapter), held)
    expected = gather(
        tmp_path / "iter_0000007", registry.by_name("megatron").read(LocalStore(tmp_path / "iter_0000007"))
    )
    for part in "qkv":
        of = "q+k+v" if kind == "fused" else part
        apart = f"{of}.{part}" if kind == "fused" else part
        left, right = (
            values[f"layers.1.attn.{part}.lora_A", "param"],
            expected[f"layers.1.attn.{of}.lora_A", "param"],
        )
        assert left.tobytes() == right.tobytes()
        left, right = (
            values[f"layers.1.attn.{part}.lora_B", "param"],
            expected[f"layers.1.attn.{apart}.lora_B", "param"],
        )
        assert left.tobytes() == right.tobytes()

    ops.reshard(source, str(tmp_path / "again"), to="megatron", layout="pp=2")
    run({**job, "do": "load_adapters", "pp": 2, "folder": str(tmp_path / "again" / "iter_0000007")}, tmp_path)
