"""Where two plain values (extras, configurations) differ."""

from collections.abc import Mapping
from typing import Any


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two plain values differ, as `path: A, B`."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                found.append(
                    f"{inner}: {_short(a[key]) if key in a else 'absent'}, {_short(b[key]) if key in b else 'absent'}"
                )
            else:
                found += differences(a[key], b[key], inner)
        return found
    if (
        isinstance(a, list)
        and isinstance(b, list)
        and len(a) == len(b)
        and any(isinstance(x, dict) for x in a)
    ):
        return [
            line
            for k, (x, y) in enumerate(zip(a, b, strict=True))
            for line in differences(x, y, f"{path}[{k}]")
        ]
    return [] if a == b else [f"{path}: {_short(a)}, {_short(b)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
