"""`triton` and `tl` where Triton is installed; stand-ins elsewhere, so that kernels' modules still import.

A stand-in answers any attribute, call or index with itself: enough to define a kernel, never to run one.
`ckptkit.kernels.dispatch.INSTALLED` says which of the two it is.
"""

from importlib import import_module
from typing import Any

from ckptkit.kernels.dispatch import INSTALLED


class _Absent:
    """Stands where Triton is not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # doctest, inspect and copy ask for these and want an honest no
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator (`@triton.jit`) it leaves the function as it is.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getitem__(self, key: Any) -> Any:
        return self


triton: Any = import_module("triton") if INSTALLED else _Absent()
tl: Any = import_module("triton.language") if INSTALLED else triton
