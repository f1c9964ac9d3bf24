"""Small checkpoints for the tests of operations, and their values by the plainest means."""

import hashlib
from pathlib import Path
from typing import Any

from ckptkit import ops
from ckptkit.formats import reference

ZAYA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "router_hidden_size": 16,
    "vocab_size": 70,
}
"""40,000 parameters."""
TRAINED = "tp=2,pp=2,ep=4,dp=4,zero=1"


def make(path: Path, **options: Any) -> str:
    """A random ZAYA1 of the smallest kind."""
    given = {"model": "zaya-tiny", "settings": ZAYA, "fingerprint": True, **options}
    return ops.synth(str(path), **given).url


def values(path: str | Path) -> reference.Values:
    """Every canonical tensor and role, put together without planner or engine."""
    return reference.gather(Path(path), ops.open(str(path)).catalog)


def contents(folder: str | Path) -> dict[str, str]:
    """Files below a folder, with digests of their bytes."""
    root = Path(folder)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def flip(file: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file. Offsets below zero count from its end."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)
