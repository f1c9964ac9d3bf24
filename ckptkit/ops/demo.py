"""The whole tour on a ZAYA1 made on the spot."""

from collections.abc import Callable


def demo(folder: str, say: Callable[[str], None]) -> int:
    """Make a small ZAYA1 in `folder` and reshard, verify, break and repair it; returns 0 when everything held.

    Args:
        folder: An empty or new folder; what the demo wrote stays there.
        say: Called with each line to show: the command that does the same, then what came of it.
    """
    raise NotImplementedError
