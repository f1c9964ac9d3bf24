"""Four real daemons, two ranks each, faults from a seed: nothing announced as safe is lost, nothing torn or mixed is restored.

    CKPTKIT_SEED=7 CKPTKIT_SAVES=1000 python -m pytest -m long tests/cache/test_cluster.py -s

The short run ends after 12 seconds (CKPTKIT_SECONDS), wherever it is; the long one does its saves. A failure says its seed and what had happened.
"""

import os
from pathlib import Path

import pytest

from tests.cache.chaos import Chaos


def said(run: Chaos) -> None:
    faults = ", ".join(f"{count} {name}" for name, count in sorted(run.faults.items()))
    print(
        f"seed {run.seed}: {run.saves} saves, {run.restores} restores, {run.bytes:,} bytes compared; faults: {faults}"
    )


def test_a_cluster_under_faults_loses_nothing(tmp_path: Path) -> None:
    run = Chaos(tmp_path, int(os.environ.get("CKPTKIT_SEED", "1")))

    run.run(60, seconds=float(os.environ.get("CKPTKIT_SECONDS", "12")))

    said(run)
    assert run.saves and run.faults


@pytest.mark.long
def test_a_thousand_saves_under_faults_lose_nothing(tmp_path: Path) -> None:
    run = Chaos(tmp_path, int(os.environ.get("CKPTKIT_SEED", "2")))

    run.run(int(os.environ.get("CKPTKIT_SAVES", "1000")))

    said(run)
    assert run.restores and len(run.faults) >= 10
