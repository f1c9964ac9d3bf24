"""Policies of a supervisor, in TOML.

run = "s3://runs/zaya1"         # where the run's steps are

[restarts]
max = 20                        # in the window; then it gives up
window_s = 86400
backoff_s = [1, 60]             # the first wait, doubled up to the second; a restart that made progress begins anew

[hang]
startup_s = 1800                # until the first beat
after_s = 300                   # without a beat, or `factor` times the usual step, whichever is longer
factor = 10
slow_factor = 3                 # a rank that needs so many times the median is reported

[loss]
nan = "rollback"                # restart | rollback | stop | ignore
spike = "ignore"
spike_sigma = 8                 # robust standard deviations above the median of `window` steps...
spike_steps = 3                 # ...for so many steps in a row
window = 64

[corruption]                    # replicas whose digests differ, as the hook API reports
action = "restart"              # restart | stop | ignore

[node]
bad_after = 3                   # incidents blamed on this node in the window: it leaves the run; 0: never

[layouts]                       # by number of ranks; CKPTKIT_LAYOUT and {layout} in the command
8 = "tp=2,pp=2,ep=2,dp=2"
4 = "tp=2,ep=2,dp=2"
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptkit.core.layouts import Layout
from ckptkit.errors import CkptError, UsageError

__all__ = ["Corruption", "Hang", "Loss", "Node", "Policy", "Restarts", "load_policy", "parse_policy"]

T = TypeVar("T")

RESTART, ROLLBACK, STOP, IGNORE = "restart", "rollback", "stop", "ignore"


def _one_of(*values: str) -> dict[str, tuple[str, ...]]:
    return {"choices": values}


@dataclass(frozen=True)
class Restarts:
    """How often, and how long to wait before each."""

    max: int = 20
    window_s: float = 86400.0
    backoff_s: tuple[float, float] = (1.0, 60.0)


@dataclass(frozen=True)
class Hang:
    """How long silence may last."""

    startup_s: float = 1800.0
    after_s: float = 300.0
    factor: float = 10.0
    slow_factor: float = 3.0


@dataclass(frozen=True)
class Loss:
    """What a loss that is no number, or far above the usual, leads to."""

    nan: str = field(default=ROLLBACK, metadata=_one_of(RESTART, ROLLBACK, STOP, IGNORE))
    spike: str = field(default=IGNORE, metadata=_one_of(RESTART, ROLLBACK, STOP, IGNORE))
    spike_sigma: float = 8.0
    spike_steps: int = 3
    window: int = 64


@dataclass(frozen=True)
class Corruption:
    """What differing replicas lead to."""

    action: str = field(default=RESTART, metadata=_one_of(RESTART, STOP, IGNORE))


@dataclass(frozen=True)
class Node:
    """When this node leaves the run."""

    bad_after: int = 3


@dataclass(frozen=True)
class Policy:
    """All of it; see the module."""

    run: str = ""
    restarts: Restarts = Restarts()
    hang: Hang = Hang()
    loss: Loss = Loss()
    corruption: Corruption = Corruption()
    node: Node = Node()
    layouts: Mapping[int, str] = field(default_factory=dict)

    def layout(self, ranks: int) -> str:
        """The layout for a number of ranks; empty where the policy names none at all.

        Raises UsageError where it names others only.
        """
        if not self.layouts:
            return ""
        if ranks not in self.layouts:
            raise UsageError(
                f"the policy has no layout for {ranks} ranks (it has {', '.join(map(str, sorted(self.layouts)))}); add one "
                "to [layouts]"
            )
        return self.layouts[ranks]


def load_policy(path: str) -> Policy:
    """Read a policy. Raises UsageError where the file cannot be read or says what is not known."""
    try:
        with open(path, "rb") as file:
            return parse_policy(tomllib.load(file), path)
    except OSError as error:
        raise UsageError(f"cannot read the policy {path}: {error.strerror}", file=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", file=path) from error


def parse_policy(table: Mapping[str, Any], where: str = "the policy") -> Policy:
    """A policy from a table. Raises UsageError for unknown names and values that make no sense; names them."""
    table = dict(table)
    layouts = table.pop("layouts", {})
    if not isinstance(layouts, Mapping):
        raise UsageError(f"{where}: [layouts] must be a table of layouts by number of ranks")
    policy = _fill(Policy, table, where, "")
    return dataclasses.replace(policy, layouts=_layouts(layouts, where))


def _layouts(table: Mapping[str, Any], where: str) -> dict[int, str]:
    found = {}
    for ranks, text in table.items():
        try:
            layout = Layout.parse(text)
            if layout.world != int(ranks):
                raise UsageError(f"it has {layout.world} ranks")
        except (CkptError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{where}: [layouts] {ranks} = {text!r}: {error}") from error
        found[int(ranks)] = str(text)
    return found


def _fill(kind: type[T], table: Mapping[str, Any], where: str, section: str) -> T:
    fields = {one.name: one for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types_ = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in fields:
            known = ", ".join(fields)
            raise UsageError(f"{where}: {section}{name} is not known; {section or 'a policy '}has {known}")
        at = f"{where}: {section}{name}"
        if dataclasses.is_dataclass(types_[name]):
            if not isinstance(value, Mapping):
                raise UsageError(f"{at} must be a table")
            values[name] = _fill(types_[name], value, where, f"{name}.")
        else:
            values[name] = _value(types_[name], value, at)
            choices = fields[name].metadata.get("choices")
            if choices and value not in choices:
                raise UsageError(f"{at} = {value!r}: choose {', '.join(choices)}")
    return kind(**values)


def _value(kind: Any, value: Any, at: str) -> Any:
    if isinstance(kind, types.GenericAlias):  # a pair of numbers
        if not isinstance(value, list) or len(value) != len(kind.__args__):
            raise UsageError(f"{at} must be a list of {len(kind.__args__)} numbers, not {value!r}")
        return tuple(_value(one, part, at) for one, part in zip(kind.__args__, value, strict=True))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = (
        number and value >= 0
        if kind is float
        else number and kind is int and value >= 0 and value == int(value)
    )
    if kind is str:
        good = isinstance(value, str)
    if not good:
        what = {str: "text", int: "a whole number, 0 or more", float: "a number, 0 or more"}[kind]
        raise UsageError(f"{at} must be {what}, not {value!r}")
    return kind(value)
