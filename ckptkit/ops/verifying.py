"""Verification: is a checkpoint whole, and do its bytes say what they said when it was written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.layouts import Layout
from ckptkit.ops.reports import Progress, Report


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `kind` is structure, digest, coverage, replica, master or against."""

    kind: str
    what: str
    file: str = ""
    tensor: str = ""
    box: str = ""


@dataclass
class VerifyReport(Report):
    """What was checked, what was found, and what was not checked.

    Attributes:
        faults: Everything that is wrong, at most `limit` of each kind; `fault_count` counts all.
        checked, not_checked: Sentences for people.
        leaves, leaves_checked, bytes_checked: Digests there are, and were compared.
        against: The other checkpoint, empty without one; `elements_compared` elements were bitwise equal to it.
        exit_code: 0, or 1 with faults.
    """

    url: str
    format: str = ""
    layout: str = ""
    against: str = ""
    faults: list[Fault] = field(default_factory=list)
    fault_count: int = 0
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    leaves: int = 0
    leaves_checked: int = 0
    bytes_checked: int = 0
    elements_compared: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.fault_count else 0


def verify(
    url: str,
    *,
    quick: bool = False,
    sample: float | None = None,
    against: str | None = None,
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    limit: int = 20,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a checkpoint: structure, coverage, every leaf's digest, replicas, and masters against parameters.

    Args:
        quick: Structure and coverage only: headers, sizes, manifest.
        sample: Share of leaves to read, in (0, 1]; which ones is random and differs from call to call.
        against: Another checkpoint, of any layout and format: canonical tensors that both hold must be bitwise equal,
            and both must hold the same ones.
        limit: Faults listed of each kind.

    Raises:
        UsageError: `quick` and `sample` together, or a sample outside (0, 1].
        StoreError: there is nothing at `url`. A broken checkpoint is a report with faults, not an exception.
    """
    raise NotImplementedError
