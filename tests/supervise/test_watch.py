"""What pulses mean, with a clock in hand: silence, slowness, losses, torn lines."""

from pathlib import Path

import pytest

from ckptkit.hooks.pulse import Pulse, beats_file
from ckptkit.supervise.policy import parse_policy
from ckptkit.supervise.watch import Watch

POLICY = parse_policy(
    {"hang": {"startup_s": 100.0, "after_s": 10.0, "factor": 4.0}, "loss": {"window": 8, "spike": "stop"}}
)


class Ranks:
    """Writes pulses at times of its choosing."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.watch = Watch(str(folder), list(range(ranks)), POLICY, 0.0)

    def tell(self, rank: int, line: str) -> None:
        with open(beats_file(str(self.folder), rank), "a") as file:
            file.write(line)

    def beat(self, at: float, step: int, *, ranks: tuple[int, ...], loss: float | None = None) -> None:
        value = "null" if loss is None else loss
        for rank in ranks:
            self.tell(rank, f'{{"at": {at}, "what": "beat", "step": {step}, "loss": {value}}}\n')

    def kinds(self, now: float) -> list[str]:
        return [found.kind for found in self.watch.look(now)]


def test_the_first_step_has_its_own_limit(tmp_path: Path) -> None:
    """Loading takes long; a rank that never says a word is found after startup_s."""
    ranks = Ranks(tmp_path, 2)

    assert ranks.kinds(99.0) == []
    ranks.beat(99.5, 1, ranks=(0,))
    (found,) = ranks.watch.look(101.0)

    assert (found.kind, found.rank, found.step) == ("hang", 1, 0)
    assert "before the first step" in found.detail


def test_silence_is_measured_in_usual_steps(tmp_path: Path) -> None:
    """Steps of 5 s allow 20 s of silence, not 10; when all stand at one step, no rank is blamed."""
    ranks = Ranks(tmp_path, 2)
    for step in range(1, 5):
        ranks.beat(5.0 * step, step, ranks=(0, 1))

    assert ranks.kinds(39.0) == []
    (found,) = ranks.watch.look(40.5)

    assert found.rank is None
    assert "ranks 0, 1 stand still after step 4" in found.detail


def test_the_rank_that_is_behind_is_blamed(tmp_path: Path) -> None:
    """The others wait for it in a collective."""
    ranks = Ranks(tmp_path, 3)
    ranks.beat(1.0, 1, ranks=(0, 1, 2))
    ranks.beat(2.0, 2, ranks=(0, 2))

    (found,) = ranks.watch.look(13.0)

    assert (found.kind, found.rank, found.step) == ("hang", 1, 1)


def test_saving_at_the_end_may_take_as_long_as_the_start(tmp_path: Path) -> None:
    """A trainer that closes says so."""
    ranks = Ranks(tmp_path, 1)
    ranks.beat(1.0, 1, ranks=(0,))
    ranks.tell(0, '{"at": 2.0, "what": "closing"}\n')

    assert ranks.kinds(90.0) == []
    assert ranks.kinds(103.0) == ["hang"]


def test_a_slow_rank_is_told_once_and_nothing_is_done(tmp_path: Path) -> None:
    """Ranks that do not meet in each step differ in their pace."""
    ranks = Ranks(tmp_path, 3)
    for step in range(1, 56):
        ranks.beat(1.0 * step, step, ranks=(0, 1))
    for step in range(1, 12):
        ranks.beat(5.0 * step, step, ranks=(2,))

    (found,) = ranks.watch.look(55.0)

    assert (found.kind, found.action, found.rank) == ("slow", "ignore", 2)
    assert ranks.kinds(55.0) == []


@pytest.mark.parametrize("value", ['"nan"', '"inf"', '"-inf"'])
def test_a_loss_that_is_no_number_is_found_at_once(tmp_path: Path, value: str) -> None:
    """JSON has no NaN, so it comes as text."""
    ranks = Ranks(tmp_path, 1)
    ranks.tell(0, f'{{"at": 1.0, "what": "beat", "step": 3, "loss": {value}}}\n')

    (found,) = ranks.watch.look(1.0)

    assert (found.kind, found.action, found.step) == ("nan", "rollback", 3)


def test_a_falling_loss_with_noise_is_no_spike_and_high_values_do_not_become_usual(tmp_path: Path) -> None:
    """Three steps in a row out of line count, once; the median stays where it was."""
    ranks = Ranks(tmp_path, 1)
    for step in range(1, 21):
        ranks.beat(step, step, ranks=(0,), loss=3.0 - 0.05 * step + 0.02 * (step % 3))
    assert ranks.kinds(20.0) == []

    for step in range(21, 24):
        ranks.beat(step, step, ranks=(0,), loss=9.0)
    assert ranks.kinds(23.0) == ["spike"]

    ranks.beat(24, 24, ranks=(0,), loss=9.0)
    assert ranks.kinds(24.0) == []


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    """A rank may be killed while it writes, and the rest of a line may come later."""
    ranks = Ranks(tmp_path, 1)
    ranks.tell(0, 'garbage\n{"what": "beat"}\n[1]\n{"at": 1.0, "what": "be')
    assert ranks.kinds(1.0) == []
    ranks.tell(0, 'at", "step": 7}\n')

    ranks.kinds(1.0)

    assert ranks.watch.step == 7


def test_a_pulse_is_a_line_and_without_a_supervisor_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real pulses are read back; without the variable no file appears."""
    monkeypatch.delenv("CKPTKIT_PULSE", raising=False)
    Pulse(0).beat(1)
    assert not list(tmp_path.iterdir())

    pulse = Pulse(1, str(tmp_path))
    pulse.beat(5, 2.5)
    pulse.tell("saved", step=4, level=3)
    watch = Watch(str(tmp_path), [1], POLICY, 0.0)
    assert watch.look(0.0) == []
    pulse.close()
    pulse.beat(6)  # after its end: nothing

    assert (watch.step, watch.saved) == (5, 4)
    watch.close()
