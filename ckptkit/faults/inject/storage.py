"""Faults of storage, as rules for the calls that a program makes below a folder.

A rule meets calls of some kinds on paths that match a pattern: after so many of them, for so many times. `Rules` is a handler of
`ckptkit.faults.interpose` and of the FUSE layer, so that one rule serves both.
"""

import errno
import fnmatch
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.faults.interpose import Call, Proceed

ERRORS = {
    "enospc": errno.ENOSPC,
    "eio": errno.EIO,
    "edquot": errno.EDQUOT,
    "erofs": errno.EROFS,
    "enosys": errno.EOPNOTSUPP,
}
EFFECTS = (*ERRORS, "short", "slow", "kill", "hang")
KINDS = (
    "open", "write", "truncate", "allocate", "copy", "sync", "datasync", "rename", "exchange", "link", "symlink", "unlink", "mkdir", "rmdir",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What goes wrong, where and when.

    Attributes:
        effect: An error of `ERRORS`; `short`: half of a write is done; `slow`: the call takes `seconds` longer; `kill`: the process is
            killed before the call; `hang`: it stops there (SIGSTOP).
        calls: Kinds of `KINDS`, separated by commas; empty for all.
        path: Pattern of the path (`*/manifest.json`).
        after: So many matching calls go well before.
        times: How many are met then; -1 for all that follow.
        seconds: Of `slow`.
    """

    effect: str
    calls: str = ""
    path: str = "*"
    after: int = 0
    times: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.calls.split(",") if kind and kind not in KINDS]
        if self.effect not in EFFECTS or unknown:
            raise UsageError(
                f"a rule of {self.effect!r} on {self.calls!r}; effects are {', '.join(EFFECTS)}, calls {', '.join(KINDS)}"
            )

    def meets(self, call: Call) -> bool:
        if self.calls and call.kind not in self.calls.split(","):
            return False
        if self.effect == "short" and call.kind != "write":
            return False
        return fnmatch.fnmatchcase(call.path, self.path) or bool(
            call.other and fnmatch.fnmatchcase(call.other, self.path)
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Rule":
        """From plain values; raises UsageError for one that a rule does not have."""
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown or "effect" not in values:
            raise UsageError(f"a rule has no {', '.join(sorted(unknown)) or 'effect'}")
        return cls(**values)


class Rules:
    """Rules being applied. The first one that meets a call acts.

    Attributes:
        met: `(effect, kind, path)` of every call that was met.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = list(rules)
        self._seen = [0] * len(self._rules)
        self._lock = threading.Lock()
        self.met: list[tuple[str, str, str]] = []

    def __call__(self, call: Call, proceed: Proceed) -> Any:
        rule = self._choose(call)
        if rule is None:
            return proceed(call)
        if rule.effect in ERRORS:
            code = ERRORS[rule.effect]
            raise OSError(code, os.strerror(code), call.path)
        if rule.effect == "slow":
            time.sleep(rule.seconds)
        elif rule.effect == "short":
            call.data = call.data[: max(1, call.data.nbytes // 2)]
        else:
            os.kill(os.getpid(), signal.SIGKILL if rule.effect == "kill" else signal.SIGSTOP)
        return proceed(call)

    def _choose(self, call: Call) -> Rule | None:
        with self._lock:
            for number, rule in enumerate(self._rules):
                if not rule.meets(call):
                    continue
                self._seen[number] += 1
                over = self._seen[number] - rule.after
                if over > 0 and (rule.times < 0 or over <= rule.times):
                    self.met.append((rule.effect, call.kind, call.path))
                    return rule
        return None
