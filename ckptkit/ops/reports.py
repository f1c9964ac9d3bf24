"""Reports: what every operation returns, as fields, as text and as JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

Progress = Callable[[int, int], None]
"""Called now and then with `(bytes done, bytes in all)`, from one thread at a time."""


class Report:
    """A dataclass of plain values that can say itself in text and in JSON.

    Attributes:
        exit_code: What a command that made this report exits with.
    """

    schema: ClassVar[int] = 1

    @property
    def exit_code(self) -> int:
        return 0

    def summary(self) -> str:
        """The report for people, in lines."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Plain values: `schema`, `report` (its kind), and every public field."""
        assert is_dataclass(self)
        found: dict[str, Any] = {"schema": self.schema, "report": type(self).__name__}
        for field in fields(self):
            if not field.name.startswith("_"):
                found[field.name] = plain(getattr(self, field.name))
        return found

    def to_json(self) -> str:
        """One JSON object, on one line."""
        return json.dumps(self.as_dict(), allow_nan=False)


def plain(value: Any) -> Any:
    """`value` in JSON's types. Not-a-number and infinities become strings, since JSON has none."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)


def nbytes_text(count: float) -> str:
    """Bytes for people: `17.7 GB`, in powers of 1000 as disks count."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.95 or unit == "TB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def duration_text(seconds: float) -> str:
    """A duration for people: `0.4 s`, `3 min 20 s`, `2 h 05 min`, `6 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count_text(count: int, noun: str) -> str:
    """`1 file`, `3 files`, `1,234 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
