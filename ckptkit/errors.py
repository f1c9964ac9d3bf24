"""The errors of ckptkit, one tree:

    CkptError
    ├── UsageError          exit 2   a call or a command line that makes no sense (also a ValueError)
    ├── LayoutError         exit 2   a layout, box or shape that cannot be (also a ValueError)
    ├── FormatError         exit 3   the source is not what its format says
    │   └── ShardMissingError        a file that the checkpoint names is absent (also a FileNotFoundError)
    ├── CoverageError       exit 3   pieces leave a gap, or overlap where they must not
    ├── CorruptionError     exit 3   bytes differ from their digest, checksum or replica
    ├── UnsafeError         exit 3   reading on would run foreign code, or leave the checkpoint's folder
    ├── StoreError          exit 4   the destination or a store failed
    ├── InterruptedRunError exit 5   stopped before the end; the same command goes on from there
    └── TrainingError       exit 6   training cannot go on: the loss is no number

Exit code 1 belongs to no error: it is a completed check (`verify`, `diff`) that found differences.

A message says what failed, where, and what to do next. The facts in it are attributes too:

>>> error = CorruptionError("leaf 3 of a.safetensors changed", file="a.safetensors", leaf=3)
>>> str(error), error.file, error.facts["leaf"], error.exit_code
('leaf 3 of a.safetensors changed', 'a.safetensors', 3, 3)
"""

from typing import TYPE_CHECKING, Any, ClassVar


class CkptError(Exception):
    """What every error of ckptkit is. Raise one of the kinds below it.

    Args:
        message: What failed, where, and what to do next; printed as it is.
        facts: What the message speaks of (`file`, `tensor`, `box`, `expected`, …). Each becomes an
            attribute, and all are in `facts`; they survive pickling where their values do.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        self.__dict__.update(facts)

    if TYPE_CHECKING:  # facts are attributes; which ones depends on the raiser

        def __getattr__(self, name: str) -> Any: ...


class UsageError(CkptError, ValueError):
    """A call or a command line that makes no sense, whatever the files hold."""

    exit_code = 2


class LayoutError(CkptError, ValueError):
    """A layout, box or shape that cannot be, or that does not fit the tensors."""

    exit_code = 2


class FormatError(CkptError):
    """The source is not what its format says: a header, a size or an index is wrong."""


class ShardMissingError(FormatError, FileNotFoundError):
    """A file that the checkpoint names is absent."""


class CoverageError(CkptError):
    """The pieces of a tensor or file leave a gap, or overlap where they must not."""


class CorruptionError(CkptError):
    """Bytes differ from their digest or checksum, or two replicas differ."""


class UnsafeError(CkptError):
    """Reading on would run foreign code, or follow a path out of the checkpoint."""


class StoreError(CkptError):
    """The destination or a store failed: no space, no permission, no answer, a fault of the disk."""

    exit_code = 4


class InterruptedRunError(CkptError):
    """A run stopped before its end and left nothing half visible; the same command goes on from there."""

    exit_code = 5


class TrainingError(CkptError):
    """Training cannot go on by itself: the loss or the gradient is no number."""

    exit_code = 6
