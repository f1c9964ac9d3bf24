"""ckptkit: open, plan, reshard, verify and compare checkpoints of any layout and format.

>>> import ckptkit
>>> source = ckptkit.open("runs/zaya/step-00001200.e3")  # doctest: +SKIP

The functions live in `ckptkit.ops` and are loaded at first use, so that `import ckptkit` stays fast.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.ops import diff, inspect, latest, open, plan, reshard, stats, synth, verify

__all__ = [
    "__version__",
    "diff",
    "inspect",
    "latest",
    "open",
    "plan",
    "reshard",
    "stats",
    "synth",
    "verify",
]

try:
    __version__ = version("ckptkit")
except PackageNotFoundError:  # a checkout on the path, never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("ckptkit.ops"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
