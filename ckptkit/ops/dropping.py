"""What a reshard leaves behind: listed always, and refused where its flag is missing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.dtypes import DType
from ckptkit.core.plan import Key
from ckptkit.core.schema import Tensor
from ckptkit.errors import UsageError
from ckptkit.ops.folding import fold_names
from ckptkit.ops.reports import nbytes_text


@dataclass(frozen=True)
class DropRow:
    """Something of the source that does not reach the destination.

    Attributes:
        what: A role over a folded pattern of tensors, or an extra: `exp_avg of layers.{0..39}.attn.q`, `extras: rng`.
        count, nbytes: Tensors and bytes; 0 bytes for extras.
        why: Why.
        flag: The option that allows it, empty where none is needed.
        allowed: Whether it may be left behind: its option was given, or it needs none.
    """

    what: str
    count: int
    nbytes: int
    why: str
    flag: str = ""
    allowed: bool = True


class Dropped:
    """Collects dropped keys and turns them into rows, folded by pattern."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._keys: dict[tuple[str, str, str, bool], list[tuple[str, int]]] = defaultdict(list)

    def add(self, key: Key, dtype: DType, why: str, flag: str = "", allowed: bool = True) -> None:
        tensor, role = key
        size = dtype.itemsize
        for n in self._tensors[tensor].shape:
            size *= n
        self._keys[role, why, flag, allowed].append((tensor, size))

    def rows(self) -> list[DropRow]:
        found = []
        for (role, why, flag, allowed), members in self._keys.items():
            patterns = fold_names(name for name, _ in members)
            named = (
                patterns[0] if len(patterns) == 1 else f"{patterns[0]} and {len(patterns) - 1} more patterns"
            )
            found.append(
                DropRow(f"{role} of {named}", len(members), sum(n for _, n in members), why, flag, allowed)
            )
        return found


def refuse_silent_loss(drops: Sequence[DropRow], source: str, format: str) -> None:
    """Raise UsageError that lists every drop whose flag is missing."""
    missing = [row for row in drops if not row.allowed]
    if not missing:
        return
    lines = [
        f"  {row.what}"
        + (f" ({nbytes_text(row.nbytes)})" if row.nbytes else "")
        + f": {row.why}; allow it with {row.flag}"
        for row in missing
    ]
    flags = " ".join(dict.fromkeys(row.flag for row in missing))
    raise UsageError(
        f"{source} holds what would be lost in this {format} destination:\n"
        + "\n".join(lines)
        + f"\nNothing was written. Give {flags} to leave it behind, or choose a destination that holds it.",
        drops=[row.what for row in missing],
    )
