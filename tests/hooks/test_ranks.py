"""Several ranks over gloo: any mesh to any other, replicas once, agreement with deadlines."""

from pathlib import Path

import pytest
import torch

import ckptkit
from tests.hooks import jobs
from tests.hooks.models import differing, make
from tests.hooks.ranks import run_ranks


def reference(steps: int) -> list[float]:
    """The losses of one process that is never stopped."""
    _, _, step = make("plain", 0, 1)
    return [step(number) for number in range(steps)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ddp", 2), ("ddp", 2)),
        (("fsdp", 2), ("plain", 1)),
        (("plain", 1), ("fsdp", 3)),
        (("tp", 2), ("fsdp", 2)),
        (("zero", 2), ("tp", 2)),
        (("tp", 4), ("zero", 2)),
        (("hsdp", 4), ("ddp", 2)),
        (("fsdp", 3), ("hsdp", 4)),
    ],
    ids=lambda end: f"{end[0]}{end[1]}",
)
def test_a_run_goes_on_in_any_mesh(before: tuple[str, int], after: tuple[str, int], tmp_path: Path) -> None:
    """What was saved in one mesh is restored in another bit for bit, and the losses go on as in one process."""
    url = str(tmp_path / "run")

    one = run_ranks(before[1], jobs.train, before[0], url, 3, 3, group=before[1] > 1)
    two = run_ranks(after[1], jobs.train, after[0], url, 5, 5, group=after[1] > 1)

    assert [result["first"] for result in two] == [3] * after[1]
    assert differing(weights(one[0]["state"]), weights(two[0]["restored"])) == []
    torch.testing.assert_close(one[0]["losses"] + two[0]["losses"], reference(5), rtol=1e-6, atol=0)
    assert ckptkit.verify(f"{url}/step-00000003.e1").exit_code == 0


def weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but the buffers that count calls, which wrappers may call more often."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(".calls")}


def test_the_same_mesh_gives_the_same_bits(tmp_path: Path) -> None:
    """Losses after a restore in the same layout equal those of an uninterrupted run of that layout."""
    whole = run_ranks(2, jobs.train, "fsdp", str(tmp_path / "one"), 4, None)

    first = run_ranks(2, jobs.train, "fsdp", str(tmp_path / "two"), 2, 2)
    second = run_ranks(2, jobs.train, "fsdp", str(tmp_path / "two"), 4, None)

    assert first[0]["losses"] + second[0]["losses"] == whole[0]["losses"]


def test_replicas_are_written_once_and_dealt_out_evenly(tmp_path: Path) -> None:
    """Three ranks that hold the same write a third each, together no more than one would."""
    alone = run_ranks(1, jobs.world_of, str(tmp_path / "one"), group=False)[0][1]

    sizes = [size for size, _ in run_ranks(3, jobs.world_of, str(tmp_path / "three"))]

    headers = [
        header(tmp_path / "three" / "step-00000001.e1" / f"rank-0000{rank}.safetensors") for rank in range(3)
    ]
    data = [size - head for size, head in zip(sizes, headers, strict=True)]
    one = alone - header(tmp_path / "one" / "step-00000001.e1" / "rank-00000.safetensors")
    assert sum(data) == one
    assert max(data) < 1.1 * one / 3


def header(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


# ── agreement ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_that_never_registers_is_named_in_bounded_time(tmp_path: Path) -> None:
    """The others wait for their timeout, not for ever, and say who is missing."""
    found = run_ranks(3, jobs.late, str(tmp_path))

    for kind, message, seconds in found[:2]:
        assert kind == "StoreError"
        assert "rank 2 of 3 did not arrive" in message
        assert seconds < 8


def test_a_rank_that_makes_no_checkpointer_is_named(tmp_path: Path) -> None:
    """Likewise before anything is registered."""
    found = run_ranks(3, jobs.absent, str(tmp_path))

    assert all(
        kind == "StoreError" and "rank 2 of 3 did not arrive" in message for kind, message, _ in found[:2]
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shape", r"blocks\.0\..* has shape .* on rank 0 and .* on rank 1"),
        ("dtype", "is float32 on rank 0 and bfloat16 on rank 1"),
        ("groups", "different numbers of optimizer groups"),
        ("every", "different every: 5 on rank 0, 3 on rank 1"),
    ],
)
def test_differing_registrations_are_found_when_they_are_made(what: str, says: str, tmp_path: Path) -> None:
    """All ranks raise the same, at once; nobody hangs at the first save."""
    found = run_ranks(2, jobs.other_model, str(tmp_path), what)

    for kind, message, seconds in found:
        assert kind == "UsageError"
        assert seconds < 15
        assert message == found[0][1]
    import re

    assert re.search(says, found[0][1]), found[0][1]


def test_one_rank_that_cannot_write_fails_the_step_for_all(tmp_path: Path) -> None:
    """Nobody takes the step for whole; every rank hears which rank failed; the next step is saved."""
    found = run_ranks(2, jobs.blocked, str(tmp_path))

    for (first, second), metrics in found:
        assert first[0] == "StoreError" and "rank-00001" in first[1]
        assert second[0] == ""
        assert metrics["saves_failed_total"] == 1 and metrics["failed_in_a_row"] == 0
    assert jobs.steps_in(str(tmp_path)) == ["step-00000002.e1"]


def test_sigterm_on_one_rank_saves_the_same_step_on_all(tmp_path: Path) -> None:
    """Within the grace every rank saves that step, and ends with the code of SIGTERM."""
    found = run_ranks(2, jobs.terminated, str(tmp_path))

    (code, step), other = found
    assert code == 143 and other == (143, step)
    assert jobs.steps_in(str(tmp_path)) == [f"step-{step:08d}.e1"]


# ── silent corruption ────────────────────────────────────────────────────────────────────────────────────────


def test_a_flipped_bit_is_named_and_the_save_goes_on(tmp_path: Path) -> None:
    """Policy `warn`: with two holders nobody can say who is right, so both are named; the step is saved."""
    found = run_ranks(2, jobs.drift, str(tmp_path), "warn", 1)

    for events, raised, _ in found:
        assert [kind for kind, _, _ in raised] == [""] * 4
        lines = [event["lines"] for event in events if event["event"] == "differing"]
        assert lines[0][0].startswith("one of ranks 0, 1: head.weight (param)")
        assert "in leaf " in lines[0][0]
    assert len(jobs.steps_in(str(tmp_path))) == 2


def test_a_flipped_bit_raises_where_that_is_the_policy(tmp_path: Path) -> None:
    """Policy `raise`: no step is committed, and the next call raises on every rank."""
    found = run_ranks(2, jobs.drift, str(tmp_path), "raise", 1)

    for _, raised, _ in found:
        assert [kind for kind, _, _ in raised[1:3]] == ["CorruptionError", "CorruptionError"]
    assert jobs.steps_in(str(tmp_path)) == []


def test_the_majority_outvotes_a_flipped_bit(tmp_path: Path) -> None:
    """Policy `outvote`: the odd rank is named, that step is not committed, and the next is taken from the others."""
    found = run_ranks(3, jobs.drift, str(tmp_path), "outvote", 0)

    for events, _, _ in found:
        odd = [event["odd"] for event in events if event["event"] == "differing"]
        assert odd[0] == (0,)
    assert jobs.steps_in(str(tmp_path)) == ["step-00000002.e1"]
    restored = run_ranks(1, restored_head, str(tmp_path), group=False)[0]
    assert torch.equal(restored, found[1][2]) and not torch.equal(restored, found[0][2])


def restored_head(rank: int, world: int, url: str) -> torch.Tensor:
    from ckptkit.hooks import Checkpointer

    net, opt, _ = make("plain", 0, 1)
    with Checkpointer(url, cache="off") as ckpt:
        ckpt.register(model=net, optimizer=opt)
        ckpt.restore()
    head: torch.Tensor = net.head.weight
    return head.detach().clone()


# ── loaders and generators ───────────────────────────────────────────────────────────────────────────────────


def test_state_of_each_rank_comes_back_to_it(tmp_path: Path) -> None:
    """Loaders and random generators that differ between ranks, in the same layout."""
    url = str(tmp_path)
    saved = run_ranks(2, jobs.loaders, url, 1)

    again = run_ranks(2, jobs.loaders, url, 0)

    assert [at for _, at, _ in again] == [at for at, _ in saved] == [0, 7]
    assert [drawn for _, _, drawn in again] == [drawn for _, drawn in saved]


def test_loaders_of_another_number_of_ranks_are_refused_unless_asked(tmp_path: Path) -> None:
    """The error names both degrees; `new_data=True` starts data anew."""
    url = str(tmp_path)
    run_ranks(2, jobs.loaders, url, 1)

    (kind, message, _), at, _ = run_ranks(1, jobs.loaders, url, 0, group=False)[0]
    assert (
        kind == "FormatError" and "each of 2 data-parallel ranks" in message and "there are 1 now" in message
    )

    (kind, _, _), at, _ = run_ranks(1, jobs.loaders, url, 0, True, group=False)[0]
    assert (kind, at) == ("", -1)


def test_a_rank_that_sat_out_an_earlier_group_meets_the_others(tmp_path: Path) -> None:
    """Processes outlive groups of them: each group counts its own Checkpointers."""
    folder = tmp_path / "groups"
    folder.mkdir()

    assert run_ranks(3, jobs.in_groups, str(folder), [2, 3, 1, 3], group=False) == [
        [2, 3, 1, 3],
        [2, 3, 3],
        [3, 3],
    ]
