"""ckptkit's own operations as scenarios."""

from collections.abc import Mapping
from typing import Any

from ckptkit.faults.crash.explore import Scenario
from ckptkit.faults.crash.scenarios.draining import Drain
from ckptkit.faults.crash.scenarios.hooking import HookSave
from ckptkit.faults.crash.scenarios.removing import RemoveSteps, Repair, collect, retain
from ckptkit.faults.crash.scenarios.writing import Copy, WriteStep


def _every() -> list[Scenario]:
    hf: dict[str, Any] = {"to": "hf", "drop_extras": True}
    return [
        WriteStep("save", "a step is written beside an older one, in the native format"),
        WriteStep("save-new-run", "the same where the run folder does not exist yet", parents=True),
        WriteStep("overwrite", "a step is replaced by another", overwrite=True),
        WriteStep("resume", "a run that was stopped half-way is continued", stopped=True),
        WriteStep(
            "resume-after-loss", "the same, where a crash took a file and left the journal",
            stopped=True, lost="rank-00001.s*",
        ),
        WriteStep("restart", "a run that was stopped half-way is started over", stopped=True, restart=True),
        WriteStep("reshard-hf", "a step in safetensors files", **hf),
        WriteStep("reshard-dcp", "a step in PyTorch's distributed format", to="dcp", layout="ep=2,dp=2"),
        Copy("copy", "a step is copied from elsewhere"),
        Drain("drain", "the node cache writes a step, and its coordinator the manifest"),
        HookSave("hook-save", "a trainer that was started again saves through the hooks, without a daemon"),
        RemoveSteps("gc", "two of three steps are removed by `ckptkit gc`", collect),
        RemoveSteps("gc-hf", "the same in a format without a marker", collect, to="hf"),
        RemoveSteps("retention", "two of three steps are removed by the node cache", retain),
        Repair("repair", "a damaged step is repaired from another copy"),
    ]  # fmt: skip


SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _every()}
"""Every scenario by name; each makes its files when it is explored."""
