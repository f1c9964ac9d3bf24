"""Progress: plain lines when piped, a bar on a terminal, never on standard output."""

import io
import re

from ckptkit.cli.progress import LINE_EVERY_S, Meter, Progress, status


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_piped_progress_is_a_line_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("resharding", stream=stream, clock=clock) as progress:
        for second in range(36):
            clock.now = float(second)
            progress(second * 100_000_000, 10_000_000_000)

    lines = stream.getvalue().splitlines()

    assert len(lines) == int(35 / LINE_EVERY_S)
    assert lines[0] == "resharding 10%: 1.00 GB of 10.0 GB, 100 MB/s, 1 min 30 s left"


def test_a_quick_command_prints_no_progress() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("verifying", stream=stream, clock=clock) as progress:
        clock.now = 9.9
        progress(5, 5)

    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_rate_and_time_left_that_goes_away() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("resharding", stream=stream, clock=clock) as progress:
        for second in range(5):
            clock.now = float(second)
            progress(second * 100_000_000, 1_000_000_000)
        progress._bar.refresh()

    drawn = stream.getvalue()

    assert "resharding" in drawn and "100 MB/s" in drawn and "6.0 s left" in drawn
    assert drawn.rstrip().endswith("\x1b[2K") or "\x1b[2K" in drawn.splitlines()[-1]


def test_a_reader_that_goes_away_does_not_stop_the_work() -> None:
    clock = Clock()
    with Progress("resharding", stream=Closed(), clock=clock) as progress:
        clock.now = 60.0
        progress(1, 2)
        clock.now = 120.0
        progress(2, 2)


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    """100 s at 1 byte/s, then 60 s at 10 bytes/s: the first part no longer counts."""
    meter, done = Meter(), 0
    for second in range(161):
        meter.add(float(second), done)
        done += 1 if second < 100 else 10

    assert abs(meter.rate - 10) < 0.01


def test_a_new_phase_has_a_rate_of_its_own() -> None:
    meter = Meter()
    meter.add(0.0, 0)
    meter.add(10.0, 1000)
    meter.add(20.0, 0)

    assert meter.rate == 0.0


def test_what_is_unknown_is_left_out() -> None:
    assert status(0, 0, 0.0) == "0 B"
    assert re.fullmatch(r"5 of 10, 2 files/s, 2\.5 s left", status(5, 10, 2.0, "files"))
