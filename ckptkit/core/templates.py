"""Templates: names with a layer or an expert in them, and the layers a line applies to."""

import re
from collections.abc import Mapping

from ckptkit.errors import LayoutError

_VARIABLE = re.compile(r"\{([^{}]*)\}")
_SUM = re.compile(r"([0-9]{0,9})([a-z]+)([+-][0-9]{1,9})?")
_SLICE = re.compile(r"(-?[0-9]{1,9})?:(-?[0-9]{1,9})?")


def fill(template: str, index: Mapping[str, int]) -> str:
    """Replace `{i}`, `{i-1}`, `{2i+1}`, `{last}`, `{e}`, ... by their values. Raises LayoutError for another variable."""

    def value(match: re.Match[str]) -> str:
        sum_ = _SUM.fullmatch(match.group(1))
        if sum_ is None or sum_.group(2) not in index:
            raise LayoutError(f"template {template!r}: {match.group(0)} uses none of {', '.join(index)}")
        return str(int(sum_.group(1) or 1) * index[sum_.group(2)] + int(sum_.group(3) or 0))

    return _VARIABLE.sub(value, template) if "{" in template else template


def layers_of(when: str, layers: int) -> range:
    """The layers that a slice such as `1:` or `:-1` takes of `layers`. Raises LayoutError when it is no slice."""
    found = _SLICE.fullmatch(when)
    if found is None:
        raise LayoutError(f"layers {when!r}: write a slice, such as 1: or :-1")
    start, stop = (None if text is None else int(text) for text in found.groups())
    return range(*slice(start, stop).indices(layers))
