"""The journal: only what is durable, only of this plan and source, and a torn end is no trouble."""

import dataclasses
from pathlib import Path

import pytest

from ckptkit.core.copies import copies_into
from ckptkit.core.destination import Literal
from ckptkit.core.plan import make_plan
from ckptkit.engine.journal import Durable, Journal, plan_hash
from ckptkit.stores.durable import UnfinishedFolder
from ckptkit.stores.folder import LOG
from tests.engine.toy import Toy, destination

ROWS = [
    Durable(0, 0, b"", ()),
    Durable(0, 1, bytes(range(32)), ((3, 5, 9, 77), (4, 0, 1, 2))),
    Durable(7, 2, b"", ()),
]


def opened(parent: Path, plan: str = "plan", source: str = "source") -> tuple[UnfinishedFolder, Journal]:
    folder = UnfinishedFolder(str(parent / "out"), "ab")
    return folder, Journal(folder, plan, source)


def started(parent: Path) -> Path:
    """The log of a folder with a journal of all rows."""
    folder, journal = opened(parent)
    with folder:
        journal.start(ROWS[:1])
        journal.append(ROWS[1:2])
        journal.append(ROWS[2:])
    return Path(folder.path) / LOG


def read(parent: Path, plan: str = "plan", source: str = "source") -> list[Durable] | None:
    folder, journal = opened(parent, plan, source)
    with folder:
        return journal.read()


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    started(tmp_path)
    assert read(tmp_path) == ROWS


@pytest.mark.parametrize(("plan", "source"), [("other", "source"), ("plan", "other")])
def test_a_journal_of_another_plan_or_source_is_not_used(tmp_path: Path, plan: str, source: str) -> None:
    started(tmp_path)
    assert read(tmp_path, plan, source) is None


def test_no_journal_or_an_empty_one_is_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    log = started(tmp_path)
    for content in (b"", b"\0" * 100):
        log.write_bytes(content)
        assert read(tmp_path) is None


def test_every_torn_end_leaves_the_lines_before_it(tmp_path: Path) -> None:
    """Cut at every byte, and with zeros where the file system had not written yet."""
    log = started(tmp_path)
    data = log.read_bytes()
    for cut in range(len(data) + 1):
        for tail in (b"", b"\0" * 9, b"\0" * 9 + b"\n"):
            log.write_bytes(data[:cut] + tail)
            lines = data[:cut].count(b"\n")

            found = read(tmp_path)

            assert found == (ROWS[: lines - 1] if lines else None), (cut, tail)


def test_starting_again_drops_the_torn_end(tmp_path: Path) -> None:
    log = started(tmp_path)
    with log.open("ab") as file:
        file.write(b'{"file": 1, "seg')
    folder, journal = opened(tmp_path)

    with folder:
        journal.start(journal.read() or [])
        journal.append([Durable(9, 9, b"", ())])

        assert journal.read() == [*ROWS, Durable(9, 9, b"", ())]


def test_the_plan_hash_changes_with_everything_that_is_written() -> None:
    toy = Toy()
    source, target = toy.catalog("tp=1"), toy.catalog("dp=2,zero=3", start=8)
    copies, want = copies_into(make_plan(source, target)), destination(target)
    base = plan_hash(copies, want)
    assert plan_hash(copies, destination(target)) == base

    others = [
        plan_hash(copies.take(slice(1, None)), want),
        plan_hash(dataclasses.replace(copies, src=copies.src + 1), want),
        plan_hash(copies, destination(target, digests=True)),
        plan_hash(copies, dataclasses.replace(want, literals={0: [Literal(0, b"\xab" * 8)]})),
        plan_hash(copies, dataclasses.replace(want, literals={1: want.literals[0]})),
    ]
    assert len({base, *others}) == len(others) + 1
