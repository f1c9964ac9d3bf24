"""Faults inside Python programs that ckptkit did not start itself: switched on by the environment of the process.

`environment(...)` gives variables for a child. Its Python, and that of its children, then imports `site/sitecustomize.py` of this folder
before anything else, which calls `install`. Nothing of ckptkit's own code looks at these variables, so a run without them
holds no test code.
"""

import datetime
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.faults.inject.storage import Rule, Rules
from ckptkit.faults.interpose import Interposer

VARIABLE = "CKPTKIT_FAULTS"
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

_installed = ExitStack()


def environment(
    root: str | None = None,
    rules: Sequence[Rule] = (),
    *,
    clock_s: float = 0.0,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """An environment in which programs meet faults.

    Args:
        root: Folder below which `rules` hold.
        clock_s: How far the clock of the program is off (`jump_clock`).
        base: Variables to start from; this process's unless given.
    """
    if rules and root is None:
        raise UsageError("rules need the folder that they hold for")
    found = dict(os.environ if base is None else base)
    plan = {"root": root, "rules": [rule.as_dict() for rule in rules], "clock_s": clock_s}
    found[VARIABLE] = json.dumps(plan)
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(SITE))))
    paths = [SITE, *filter(None, [found.get("PYTHONPATH")]), package]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


def install(text: str) -> None:
    """Switch on what an environment says, for the rest of this process."""
    plan: Any = json.loads(text)
    if plan["rules"]:
        rules = Rules([Rule.of(values) for values in plan["rules"]])
        _installed.enter_context(Interposer(plan["root"], rules))
    if plan["clock_s"]:
        jump_clock(plan["clock_s"])


def jump_clock(seconds: float) -> None:
    """Put the wall clock of this process ahead (or back): `time.time`, `time.time_ns` and `datetime.now`, not monotonic clocks.

    What C code reads, and times of files, do not change.
    """
    wall, wall_ns = time.time, time.time_ns
    time.time = lambda: wall() + seconds
    time.time_ns = lambda: wall_ns() + round(seconds * 1e9)

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Datetime":
            return cls.fromtimestamp(time.time(), tz)

    datetime.datetime = Datetime  # type: ignore[misc]
