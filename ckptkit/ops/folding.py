"""Names folded by pattern: `layers.{0..39}.attn.q` for forty tensors."""

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import product
from typing import TypeVar

_NUMBER = re.compile(r"(\d+)")
T = TypeVar("T", bound=Hashable)


def fold(rows: Iterable[tuple[str, T]]) -> list[tuple[str, T, list[str]]]:
    """Group names that differ in numbers only and carry an equal value.

    Args:
        rows: Names and a value that all names of one pattern share (a shape, say).

    Returns:
        `(pattern, value, names)`, in the order of each pattern's first name. Every number of a pattern that varies
        shows its values in braces; a pattern with several stands for all combinations of them.
    """
    groups: dict[tuple[tuple[str, ...], T], dict[tuple[int | str, ...], str]] = {}
    for name, value in rows:
        parts = _NUMBER.split(name)
        # A number with leading zeros is a text: 007 and 7 are different names.
        numbers = tuple(int(n) if str(int(n)) == n else n for n in parts[1::2])
        groups.setdefault((tuple(parts[0::2]), value), {})[numbers] = name
    found = []
    for (texts, value), members in groups.items():
        for sets in _merge(list(members)):
            found.append((_write(texts, sets), value, [members[n] for n in product(*map(_ordered, sets))]))
    return found


def fold_names(names: Iterable[str]) -> list[str]:
    """Patterns alone."""
    return [pattern for pattern, _, _ in fold((name, 0) for name in names)]


Sets = tuple[frozenset[int | str], ...]


def _merge(rows: Sequence[tuple[int | str, ...]]) -> list[Sets]:
    """Tuples of numbers as products of sets: disjoint, and together exactly the rows."""
    found: list[Sets] = [tuple(frozenset([n]) for n in row) for row in rows]
    for position in reversed(range(len(rows[0]))):
        together: dict[Sets, set[int | str]] = {}
        for sets in found:
            rest = (*sets[:position], frozenset(), *sets[position + 1 :])
            together.setdefault(rest, set()).update(sets[position])
        found = [(*s[:position], frozenset(values), *s[position + 1 :]) for s, values in together.items()]
    return found


def _write(texts: tuple[str, ...], sets: Sets) -> str:
    parts = [texts[0]]
    for values, text in zip(sets, texts[1:], strict=True):
        parts += [_braces(values), text]
    return "".join(parts)


def _ordered(values: frozenset[int | str]) -> list[int | str]:
    """Numbers by size, then texts."""
    return sorted(values, key=lambda v: (isinstance(v, str), v))


def _braces(values: frozenset[int | str]) -> str:
    if len(values) == 1:
        return str(next(iter(values)))
    numbers = sorted(v for v in values if isinstance(v, int))
    pieces = []
    start = 0
    for k in range(1, len(numbers) + 1):
        if k == len(numbers) or numbers[k] != numbers[k - 1] + 1:
            stretch = numbers[start:k]
            pieces.append(f"{stretch[0]}..{stretch[-1]}" if len(stretch) > 1 else str(stretch[0]))
            start = k
    pieces += sorted(v for v in values if isinstance(v, str))
    return "{" + ",".join(pieces) + "}"
