"""Steps that nobody is to restore: `banned.json` in a run's folder.

    {"format": 1, "bans": [{"epoch": 3, "step": 1200, "newer": true, "why": "the loss of step 1201 is nan"}]}

A ban names one step of one epoch, or with `newer` that step and everything after it *in that epoch*: a later incarnation that
passes the same steps again is not meant. `newest()` passes banned steps over and says why.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ckptkit import stores
from ckptkit.errors import CkptError, FormatError

__all__ = ["FILE", "Ban", "ban", "ban_of", "read_bans"]

FILE = "banned.json"
_FORMAT = 1


@dataclass(frozen=True)
class Ban:
    """One ban. `newer`: all later steps of the epoch too."""

    epoch: int
    step: int
    newer: bool = False
    why: str = ""

    def covers(self, epoch: int, step: int) -> bool:
        return epoch == self.epoch and (step >= self.step if self.newer else step == self.step)


def read_bans(run: str) -> list[Ban]:
    """The bans of a run; none where the file is missing.

    Raises:
        FormatError: the file is not what it should be. Nothing is restored then: what it was to forbid is unknown.
        StoreError: the store does not answer.
    """
    store = stores.open_store(run)
    if not store.exists(FILE):
        return []
    try:
        value = json.loads(store.read(FILE))
        if value["format"] != _FORMAT:
            raise ValueError(f"its format is {value['format']!r}, not {_FORMAT}")
        return [_parse(row) for row in value["bans"]]
    except CkptError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{run}/{FILE} cannot be understood ({error!r}), so which steps are banned is unknown; mend it, or remove it to "
            "allow every step",
            file=FILE,
        ) from error


def _parse(row: dict) -> Ban:
    found = Ban(row["epoch"], row["step"], row.get("newer", False), row.get("why", ""))
    kinds = {"epoch": int, "step": int, "newer": bool, "why": str}
    for name, kind in kinds.items():
        if type(getattr(found, name)) is not kind:
            raise ValueError(f"{name} is {getattr(found, name)!r}")
    return found


def ban(run: str, new: Ban) -> None:
    """Add a ban. Raises as `read_bans`, and StoreError where it cannot be written."""
    bans = [*read_bans(run), new]
    content = json.dumps({"format": _FORMAT, "bans": [asdict(one) for one in dict.fromkeys(bans)]}, indent=1)
    stores.write_file(run, FILE, content.encode() + b"\n")


def ban_of(bans: Sequence[Ban], epoch: int, step: int) -> Ban | None:
    """The ban that covers a step, if one does."""
    return next((one for one in bans if one.covers(epoch, step)), None)
