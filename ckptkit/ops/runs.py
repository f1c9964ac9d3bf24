"""Run folders: their steps, and which one is the newest whole one."""

from dataclasses import dataclass, field

from ckptkit.ops.reports import Progress, Report


@dataclass(frozen=True)
class StepInfo:
    """One step folder of a run.

    Attributes:
        name: Folder name, for example `step-00001200.e3`.
        path: Its path or URL.
        step, epoch: From its commit record; from the name where it has none. Epoch 0 where neither tells.
        state: `whole`, `unfinished` or `corrupt`.
        why: What is missing or wrong (which rank), empty for `whole`.
        temporary: Whether it is a folder that a writer has not renamed yet.
        age_s: Seconds since it was last changed, by the store's clock.
        nbytes, files: Size of all files, and how many.
        format, layout: Detected, empty where unknown. `layout` is what `--layout` takes.
    """

    name: str
    path: str
    step: int
    epoch: int
    state: str
    why: str = ""
    temporary: bool = False
    age_s: float = 0.0
    nbytes: int = 0
    files: int = 0
    format: str = ""
    layout: str = ""


@dataclass
class Steps(Report):
    """`steps` sorted from the oldest to the newest (epoch, step); temporaries after their step."""

    run: str
    steps: list[StepInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class Newest(Report):
    """The newest whole step of a run.

    Attributes:
        path: Its path, or None where no step is whole.
        step: Its row, or None.
        passed_over: Newer steps that are not whole, newest first, each with its `why`.
        exit_code: 0, or 1 where no step is whole.
    """

    run: str
    path: str | None
    step: StepInfo | None
    passed_over: list[StepInfo] = field(default_factory=list)


def steps(run: str) -> Steps:
    """Every step folder of a run, by structure: names, markers, sizes and headers; no tensor bytes.

    Raises StoreError where `run` is no folder.
    """
    raise NotImplementedError


def newest(run: str, *, quick: bool = False, progress: Progress | None = None) -> Newest:
    """The step with the highest (epoch, step) that is whole, and why newer ones were passed over.

    Args:
        quick: Trust structure (marker, sizes, headers); else every leaf of the candidate is read and compared with its digest,
            where the format has digests.

    Raises:
        FormatError: the folder holds no step at all.
        StoreError: `run` is no folder.
    """
    raise NotImplementedError


def latest(run: str, *, quick: bool = False) -> str:
    """The path of the newest whole step. Raises FormatError where there is none; says what was passed over."""
    raise NotImplementedError
