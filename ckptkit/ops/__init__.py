"""What users do with checkpoints: the Python API behind `ckptkit` and the command line.

Every function returns a report: plain fields, `summary()` for people, `to_json()` for programs, and `exit_code` where it is a
check. Nothing here prints. Functions load at first use, so that a command imports only what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.ops.collecting import gc
    from ckptkit.ops.comparing import diff
    from ckptkit.ops.copying import copy
    from ckptkit.ops.inspecting import inspect
    from ckptkit.ops.planning import plan
    from ckptkit.ops.repairing import repair
    from ckptkit.ops.resharding import reshard
    from ckptkit.ops.runs import latest, newest, steps
    from ckptkit.ops.sources import open
    from ckptkit.ops.statistics import stats
    from ckptkit.ops.synthesis import synth
    from ckptkit.ops.verifying import verify

_HOME = {
    "copy": "copying",
    "diff": "comparing",
    "gc": "collecting",
    "inspect": "inspecting",
    "latest": "runs",
    "newest": "runs",
    "open": "sources",
    "plan": "planning",
    "repair": "repairing",
    "reshard": "resharding",
    "stats": "statistics",
    "steps": "runs",
    "synth": "synthesis",
    "verify": "verifying",
}

__all__ = [
    "copy",
    "diff",
    "gc",
    "inspect",
    "latest",
    "newest",
    "open",
    "plan",
    "repair",
    "reshard",
    "stats",
    "steps",
    "synth",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ckptkit.ops.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
