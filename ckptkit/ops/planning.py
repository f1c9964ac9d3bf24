"""Plans as reports: what a reshard would do, before it does it."""

from dataclasses import dataclass, field
from typing import Any

from ckptkit.ops.reports import Report


@dataclass(frozen=True)
class DropRow:
    """Something of the source that does not reach the destination.

    Attributes:
        what: A role over a folded pattern of tensors, or an extra: `exp_avg of layers.{0..39}.attn.q`, `extras: rng`.
        count, nbytes: Tensors and bytes.
        why: Why.
        flag: The option that allows it, empty where none is needed.
        allowed: Whether that option was given.
    """

    what: str
    count: int
    nbytes: int
    why: str
    flag: str = ""
    allowed: bool = True


@dataclass(frozen=True)
class CastRow:
    """Tensors whose values change dtype or role on the way; `lossy` where bits may be lost."""

    what: str
    count: int
    source: str
    destination: str
    lossy: bool


@dataclass
class PlanReport(Report):
    """What `reshard` with the same arguments would do.

    Attributes:
        source, destination: URL, `format`, `layout`, `world`, `files`, `nbytes` of each.
        bytes_in, bytes_out: Bytes to read (with over-read and headers left out) and to write.
        over_read: Bytes read per byte needed, at least 1.
        pieces_in, pieces_out, pairs, elements: The proof: `elements` of `pieces_out` are covered once by `pairs`.
        replicas: Source pieces that are compared with another one (`replicas_checked`) or not.
        casts, drops: What changes, and what is left behind.
        ties: Tied tensors, stored once.
        padding_in, padding_out: Bytes of padding.
        unverified: What cannot be verified on the way (a source without digests).
        memory: Bytes that the run holds at most.
        free: Free bytes at the destination, None where unknown; `fits` whether that is enough.
        seconds: Estimated time, None without a probe; `read_rate`, `write_rate` in bytes/s from the probe.
        largest_rank, mean_rank: Bytes of the fullest destination rank, and of the mean.
        notes: Which step was taken, and the like.
    """

    source: dict[str, Any]
    destination: dict[str, Any]
    bytes_in: int = 0
    bytes_out: int = 0
    over_read: float = 1.0
    pieces_in: int = 0
    pieces_out: int = 0
    pairs: int = 0
    elements: int = 0
    replicas: int = 0
    replicas_checked: bool = True
    casts: list[CastRow] = field(default_factory=list)
    drops: list[DropRow] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    padding_in: int = 0
    padding_out: int = 0
    unverified: list[str] = field(default_factory=list)
    memory: int = 0
    free: int | None = None
    fits: bool = True
    seconds: float | None = None
    read_rate: float | None = None
    write_rate: float | None = None
    largest_rank: int = 0
    mean_rank: float = 0.0
    notes: list[str] = field(default_factory=list)


def plan(src: str, dst: str, *, probe: bool = True, **options: Any) -> PlanReport:
    """Plan a reshard and prove it; nothing is written (but a probe file, removed at once, with `probe`).

    Takes every option of `ckptkit.ops.reshard`. Drops that lack their flag are listed with `allowed=False`; they raise only
    in `reshard`.
    """
    raise NotImplementedError
