"""Where a run can go on: the one `newest()` of the project, and how far to go back when that step is no good."""

from ckptkit import stores
from ckptkit.errors import CkptError, FormatError, StoreError
from ckptkit.ops import runs
from ckptkit.ops.bans import Ban, ban, ban_of, read_bans

__all__ = ["Resume"]


class Resume:
    """The steps of a run, as a supervisor sees them.

    Args:
        run: The run's URL, or empty where only the trainer knows it; then nothing is checked and nothing can be rolled back.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._saved = -1

    def saved(self, step: int) -> None:
        """A trainer told that a step is durable."""
        self._saved = max(self._saved, step)

    def point(self) -> str:
        """Where a start goes on, for the log. A store that does not answer is told, too: the trainer decides what that means."""
        if not self.run:
            return "the trainer knows from which step"
        try:
            found = self._newest()
        except CkptError as error:
            return f"where it goes on is not known: {error}"
        if found is None:
            return f"{self.run} holds no step yet"
        passed = "".join(f"; {reason}" for reason in found.reasons())
        if found.step is None:
            return f"no step of {self.run} is whole{passed}"
        self.saved(found.step.step)
        return f"goes on from {found.step.name}, if no node holds a newer step in memory{passed}"

    def check(self) -> None:
        """Make sure that a restart is no fresh start.

        Raises FormatError where the run had a durable step and now has none that is whole; StoreError where the store does
        not answer is left to the trainer, which waits or ends.
        """
        if not self.run or self._saved < 0:
            return
        try:
            found = self._newest()
        except StoreError:
            return
        if found is None or found.step is None:
            reasons = "; ".join(found.reasons()) if found is not None else "it holds no step"
            raise FormatError(
                f"{self.run} had step {self._saved}, and now no step of it is whole ({reasons}). It is not started anew; "
                "look at the store, or remove bans",
                file=self.run,
            )

    def go_back(self, step: int, why: str) -> str:
        """Ban what may hold the fault that was seen after `step` steps, and tell what was banned.

        A loss is computed from the weights of the step before, so that step and later ones are banned. Seen again
        after a restart at or before that, the newest step that is left is banned too: the cause lies further back.

        Raises FormatError where that would ban the last whole step; StoreError where the store does not answer.
        """
        if not self.run:
            raise FormatError("to roll back, the policy must say where the run's steps are (run = ...)")
        bans = read_bans(self.run)
        whole = [row for row in runs.steps(self.run).steps if row.state == "whole"]
        left = [row for row in whole if ban_of(bans, row.epoch, row.step) is None]
        if not left:
            raise FormatError(f"{self.run} holds no whole step to go back to", file=self.run)
        newest = left[-1]
        new = [row for row in left if row.epoch == newest.epoch and row.step >= step - 1] or [newest]
        if len(new) == len(left):
            raise FormatError(
                f"to go back behind step {new[0].step}, which is the last whole step of {self.run}, is not done by itself; "
                "start it by hand from another checkpoint, or change the run",
                file=self.run,
            )
        ban(self.run, Ban(newest.epoch, new[0].step, newer=True, why=why))
        names = ", ".join(row.name for row in new)
        return f"{names} will not be restored; it goes on from {left[-len(new) - 1].name}"

    def _newest(self) -> runs.Newest | None:
        """The newest whole step by structure; None where the run holds no step at all."""
        if not stores.is_folder(self.run) or not runs.step_folders(self.run):
            return None
        return runs.newest(self.run, quick=True)
