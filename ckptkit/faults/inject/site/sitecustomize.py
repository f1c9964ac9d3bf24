"""Imported by Python at its start where `ckptkit.faults.inject.program.environment` put this folder first in the path."""

import os
import sys


def _next() -> None:
    """The module of this name that this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec(
        "sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_next()
if "CKPTKIT_FAULTS" in os.environ:
    from ckptkit.faults.inject.program import install

    install(os.environ["CKPTKIT_FAULTS"])
