"""ckptkit: open, plan, repair, reshard, verify and compare checkpoints of any layout and format.

>>> import ckptkit
>>> source = ckptkit.open("runs/zaya/step-00001200.e3")  # doctest: +SKIP

The functions live in `ckptkit.ops` and are loaded at first use, so that `import ckptkit` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.hooks import Checkpointer
    from ckptkit.ops import copy, diff, gc, inspect, latest, open, plan, repair, reshard, stats, synth, verify

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "__version__",
    "copy",
    "diff",
    "gc",
    "inspect",
    "latest",
    "open",
    "plan",
    "repair",
    "reshard",
    "stats",
    "synth",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("ckptkit.hooks" if name == "Checkpointer" else "ckptkit.ops"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
