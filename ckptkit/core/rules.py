"""Rules: how an axis splits over a mesh axis.

tp                 equal parts; the degree must divide the axis
tp:replicate       as above, and where the degree exceeds the axis, several ranks hold the same index
tp:pad=128         the axis is padded to a multiple of 128 * degree first (vocabularies)
tp:inner=kv_head   the axis takes what remains of the degree when it exceeds the axis `kv_head`
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ckptkit.core.local import Span
from ckptkit.errors import LayoutError

_RULE = re.compile(r"(tp|ep|etp)(?::(?:(replicate)|pad=([1-9][0-9]{0,8})|inner=(\w+)))?")


@dataclass(frozen=True, slots=True)
class Rule:
    """How one axis splits. `mesh_axis` is tp, ep or etp; at most one of the options is set."""

    axis: str
    mesh_axis: str
    replicate: bool = False
    pad: int = 0
    inner: str = ""

    @classmethod
    def parse(cls, axis: str, text: str) -> "Rule":
        """Read a rule (module docstring). Raises LayoutError."""
        found = _RULE.fullmatch(text)
        if found is None:
            raise LayoutError(
                f"rule {text!r} of axis {axis}: write tp, ep or etp, alone or with :replicate, :pad=N or :inner=AXIS"
            )
        mesh_axis, replicate, pad, inner = found.groups()
        return cls(axis, mesh_axis, replicate is not None, int(pad or 0), inner or "")

    def span(self, size_of: Callable[[str], int], degree: int, coordinate: int, padded: bool = True) -> Span:
        """The part of the axis at one of `degree` coordinates.

        Args:
            size_of: Size of an axis by name (this rule's own, and that of `inner`).
            padded: Whether `pad` applies.

        Raises:
            LayoutError: the degree does not divide the axis.
        """
        size, total = size_of(self.axis), degree
        if self.inner:
            outer = size_of(self.inner)
            if degree <= outer or not outer:
                return Span(0, size, size)
            if degree % outer:
                raise LayoutError(
                    f"{self.mesh_axis}={degree} is above axis {self.inner} ({outer}) and no multiple of it, so that "
                    f"axis {self.axis} cannot be cut; choose a multiple of {outer}, or at most {outer}"
                )
            degree //= outer
            coordinate %= degree
        full = size
        if self.pad and padded:
            unit = self.pad * degree
            full = -(-size // unit) * unit
        elif self.replicate and degree > size > 0 and degree % size == 0:
            index = coordinate * size // degree
            return Span(index, index + 1, size)
        if full % degree:
            left = f" leaves {degree} ranks, which do not divide" if self.inner else " does not divide"
            raise LayoutError(
                f"{self.mesh_axis}={total}{left} axis {self.axis}, which has {size}; "
                f"choose a degree that divides {size * (total // degree)}"
            )
        share = full // degree
        return Span(coordinate * share, (coordinate + 1) * share, size)
