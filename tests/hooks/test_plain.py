"""One process: what is saved comes back bit for bit, for every optimizer, before and after its first step."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.errors import CoverageError, FormatError, LayoutError, StoreError, UsageError
from ckptkit.hooks import Checkpointer, Held
from tests.hooks.models import WIDTH, Net, batch, differing, make, whole

OPTIMIZERS = (
    "adamw", "amsgrad", "sgd", "nadam", "adagrad", "rmsprop", "adadelta", "adamax", "asgd", "rprop", "radam", "adafactor",
)  # fmt: skip


def run(url: Path, **options: Any) -> Checkpointer:
    return Checkpointer(str(url), cache="off", busy="wait", timeout_s=20, **options)


def trained(url: Path, steps: int, optimizer: str = "adamw", **options: Any) -> tuple[Any, list[float]]:
    """Restore, train up to a number of steps, saving each."""
    net, opt, step = make("plain", 0, 1, optimizer)
    ckpt = run(url, every=1, **options)
    ckpt.register(model=net, optimizer=opt)
    losses = []
    for number in range(ckpt.restore(), steps):
        losses.append(step(number))
        ckpt.on_step_end(number + 1)
    ckpt.close()
    return (net, opt, step), losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_as_if_it_had_not_stopped(optimizer: str, tmp_path: Path) -> None:
    """Stopped after two steps and continued: losses and the whole state equal those of the run in one go."""
    (net, opt, _), losses = trained(tmp_path / "one", 4, optimizer)

    _, before = trained(tmp_path / "two", 2, optimizer)
    (net2, opt2, _), after = trained(tmp_path / "two", 4, optimizer)

    assert before + after == losses
    assert differing(whole(net, opt), whole(net2, opt2)) == []
    assert opt2.state_dict()["param_groups"] == opt.state_dict()["param_groups"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_planned_before_it_exists(optimizer: str, tmp_path: Path) -> None:
    """The buffer that is made before the first step holds the state of the steps after it: no second plan is needed."""
    net, opt, step = make("plain", 0, 1, optimizer)
    ckpt = run(tmp_path, every=1)
    ckpt.register(model=net, optimizer=opt)
    size = ckpt._plan.size

    step(0)
    ckpt.on_step_end(1)

    assert ckpt._plan.size == size
    ckpt.close()


def test_state_that_no_step_made_is_not_made_by_a_restore(tmp_path: Path) -> None:
    """A parameter that never had a gradient has no optimizer state; neither has it after a restore."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    net, opt = build()
    ckpt = run(tmp_path, every=1)
    ckpt.register(model=net, optimizer=opt)
    net["used"](torch.ones(2, 4)).sum().backward()  # type: ignore[index]
    opt.step()
    ckpt.on_step_end(1)
    ckpt.close()

    again, opt2 = build()
    with run(tmp_path) as ckpt:
        ckpt.register(model=again, optimizer=opt2)
        assert ckpt.restore() == 1

    assert set(opt2.state) == {again["used"].weight, again["used"].bias}  # type: ignore[index]
    assert differing(whole(net, opt), whole(again, opt2)) == []


def test_what_is_no_tensor_comes_back(tmp_path: Path) -> None:
    """Schedulers, loaders, extras, groups and every random generator go on where they were."""

    class Counter:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"at": 0}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.state)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = dict(state)

    def build() -> tuple[Any, ...]:
        net = Net()
        groups: list[dict[str, Any]] = [
            {"params": net.blocks.parameters(), "lr": 0.3},
            {"params": net.head.parameters()},
        ]
        opt = torch.optim.AdamW(groups)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
        return net, opt, sched, Counter(), Counter()

    net, opt, sched, loader, extra = build()
    ckpt = run(tmp_path)
    ckpt.register(model=net, optimizer=opt, scheduler=sched, loader=loader, extras={"extra": extra})
    ckpt.restore()
    net(batch(0)).sum().backward()
    opt.step()
    sched.step()
    loader.state = {"at": 7, 3: (1, 2.5, float("inf")), "shuffle": torch.arange(5), "rows": np.arange(3)}
    extra.state = {"note": "ä", "nothing": None, "raw": b"\0\1"}
    ckpt.on_step_end(1)
    ckpt.save()
    ckpt.close()
    drawn = (random.random(), float(torch.rand(1)), float(np.random.rand()))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]

    net2, opt2, sched2, loader2, extra2 = build()
    with run(tmp_path) as ckpt:
        ckpt.register(model=net2, optimizer=opt2, scheduler=sched2, loader=loader2, extras={"extra": extra2})
        before = [id(group) for group in opt2.param_groups], [id(p) for p in net2.parameters()]
        assert ckpt.restore() == 1

    assert (random.random(), float(torch.rand(1)), float(np.random.rand())) == drawn
    assert [{k: v for k, v in g.items() if k != "params"} for g in opt2.param_groups] == groups
    assert ([id(group) for group in opt2.param_groups], [id(p) for p in net2.parameters()]) == before
    assert sched2.state_dict() == sched.state_dict()
    assert torch.equal(loader2.state.pop("shuffle"), torch.arange(5))
    assert np.array_equal(loader2.state.pop("rows"), np.arange(3))
    assert loader2.state == {"at": 7, 3: (1, 2.5, float("inf"))}
    assert extra2.state == {"note": "ä", "nothing": None, "raw": b"\0\1"}


class Loader:
    """Counts batches."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("forward", [False, True])
def test_an_error_in_a_step_loses_neither_the_step_before_nor_a_batch(forward: bool, tmp_path: Path) -> None:
    """By then the batch is taken and generators have drawn: what is saved is of the end of the step before, or nothing
    where the forward pass has changed a buffer."""
    net, opt, step = make("plain", 0, 1)
    loader = Loader()
    with pytest.raises(ZeroDivisionError), run(tmp_path, every=10) as ckpt:
        ckpt.register(model=net, optimizer=opt, loader=loader)
        ckpt.restore()
        loader.at = 1
        step(0)
        ckpt.on_step_end(1)
        after = torch.get_rng_state()
        loader.at = 2
        torch.rand(5)
        if forward:
            net(batch(1))
        raise ZeroDivisionError

    net2, opt2, _ = make("plain", 0, 1)
    loader2 = Loader()
    with run(tmp_path) as ckpt:
        ckpt.register(model=net2, optimizer=opt2, loader=loader2)
        assert ckpt.restore() == (0 if forward else 1)

    if not forward:
        assert differing(whole(net, opt), whole(net2, opt2)) == []
        assert loader2.at == 1 and torch.equal(torch.get_rng_state(), after)


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    """Element types, no axes, no elements, other strides: all come back, in the memory they were in."""
    tensors = {
        "half": torch.randn(3, 5).bfloat16(), "long": torch.arange(7), "flag": torch.tensor([True, False]),
        "one": torch.tensor(2.5), "none": torch.empty(0, 4), "turned": torch.randn(4, 6).t(),
        "odd": torch.randn(3, 7)[:, 1:6], "eight": torch.randn(9).to(torch.float8_e4m3fn),
    }  # fmt: skip
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    held = [Held(name, "param", tensor) for name, tensor in tensors.items()]
    ckpt = run(tmp_path)
    ckpt.register(tensors=held)
    ckpt.restore()
    ckpt.on_step_end(3)
    ckpt.save()
    ckpt.close()
    for tensor in tensors.values():
        tensor.copy_(torch.zeros(tensor.shape))

    with run(tmp_path) as ckpt:
        ckpt.register(tensors=held)
        assert ckpt.restore() == 3

    assert all(torch.equal(tensors[n].float(), kept[n].float()) for n in tensors)


def test_what_is_written_is_a_native_checkpoint(tmp_path: Path) -> None:
    """ckptkit's own tools find it whole, and other formats can be made of it."""
    (net, _, _), _ = trained(tmp_path / "run", 2)
    step = tmp_path / "run" / "step-00000002.e1"

    assert ckptkit.verify(str(step)).exit_code == 0
    ckptkit.reshard(str(step), str(tmp_path / "pt"), to="torch", drop_extras=True)
    loaded = torch.load(next((tmp_path / "pt").glob("*.pt")), weights_only=False)
    model = loaded.get("model", loaded)
    assert torch.equal(model["head.weight"], net.head.weight)


def test_events_come_in_order(tmp_path: Path) -> None:
    """A step is requested, staged, committed; only then is it called saved."""
    seen: list[tuple[str, int]] = []

    trained(tmp_path, 1, on_event=lambda event: seen.append((event["event"], event["step"])))

    assert seen == [("requested", 1), ("staged", 1), ("committed", 1)]


# ── never silently a fresh start ─────────────────────────────────────────────────────────────────────────────


def test_an_empty_run_starts_at_zero_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one case in which nothing is restored without being asked."""
    with run(tmp_path / "new") as ckpt:
        ckpt.register(model=Net())
        assert ckpt.restore() == 0

    assert "holds no step: starting at step 0" in caplog.text


def test_a_broken_step_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A leaf of the newest step is damaged: the one before is restored, and the log says why."""
    trained(tmp_path, 2)
    flip(tmp_path / "step-00000002.e1" / "rank-00000.safetensors")

    net, opt, _ = make("plain", 0, 1)
    with run(tmp_path) as ckpt:
        ckpt.register(model=net, optimizer=opt)
        assert ckpt.restore() == 1

    assert "step-00000002.e1: rank 0: CorruptionError: leaf 0" in caplog.text


def test_steps_but_none_whole_is_an_error_that_names_each(tmp_path: Path) -> None:
    """Only `fresh=True` starts at 0 then."""
    trained(tmp_path, 2)
    flip(tmp_path / "step-00000002.e1" / "rank-00000.safetensors")
    (tmp_path / "step-00000001.e1" / "manifest.json").unlink()

    with run(tmp_path) as ckpt:
        ckpt.register(model=Net())
        with pytest.raises(
            FormatError, match=r"(?s)step-00000002.e1.*CorruptionError.*step-00000001.e1.*manifest.json"
        ) as caught:
            ckpt.restore(strict=False)
        assert "fresh=True" in str(caught.value)
        assert ckpt.restore(fresh=True) == 0


def flip(path: Path) -> None:
    """Change one byte of a file's last tensor."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_url_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    """It is probed when the Checkpointer is made."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(StoreError, match="file"):
        run(tmp_path / "file" / "run")
    with pytest.raises(UsageError, match="no store for nonsense"):
        Checkpointer("nonsense://somewhere/run", cache="off")


# ── other checkpoints ────────────────────────────────────────────────────────────────────────────────────────


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    """Other names, and other shapes, are errors that name a tensor; an older step would be no better."""
    trained(tmp_path, 2)

    with run(tmp_path) as ckpt:
        ckpt.register(model=nn.Linear(3, 3))
        with pytest.raises(CoverageError, match="weight"):
            ckpt.restore()
    with run(tmp_path) as ckpt:
        ckpt.register(model=Net(WIDTH + 8))
        with pytest.raises(LayoutError, match="shape"):
            ckpt.restore()


def test_what_is_missing_is_listed_where_that_is_allowed(tmp_path: Path) -> None:
    """`strict=False` restores what is there; the rest keeps its values."""
    (net, _, _), _ = trained(tmp_path, 1)
    torch.manual_seed(5)
    other: Any = nn.ModuleDict({"blocks": Net().blocks, "more": nn.Linear(2, 2)})
    kept = other["more"].weight.clone()

    with run(tmp_path) as ckpt:
        ckpt.register(model=other)
        with pytest.raises(CoverageError, match="more"):
            ckpt.restore()
        assert ckpt.restore(strict=False) == 1
        assert ckpt.missing == ("more.weight (param)", "more.bias (param)")

    assert torch.equal(other["blocks"][0].up.weight, net.blocks[0].up.weight)
    assert torch.equal(other["more"].weight, kept)


def test_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    """A warm start from another run: its weights, but step 0 and no optimizer state."""
    (net, _, _), _ = trained(tmp_path / "old", 2)
    fresh, opt, _ = make("plain", 0, 1, seed=3)

    with run(tmp_path / "new") as ckpt:
        ckpt.register(model=fresh, optimizer=opt)
        assert ckpt.restore(str(tmp_path / "old"), weights_only=True) == 0

    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))
    assert not opt.state


def test_later_incarnations_outrank_earlier_ones(tmp_path: Path) -> None:
    """After a restart from an older step, its steps are the newest, whatever their number."""
    trained(tmp_path, 3)
    (tmp_path / "step-00000003.e1" / "manifest.json").unlink()
    net, opt, step = make("plain", 0, 1)
    with run(tmp_path, every=1) as ckpt:
        ckpt.register(model=net, optimizer=opt)
        assert ckpt.restore() == 2
        step(2)
        ckpt.on_step_end(3)

    assert json.loads((tmp_path / "step-00000003.e2" / "manifest.json").read_text())["epoch"] == 2
    with run(tmp_path) as ckpt:
        ckpt.register(model=Net())
        assert ckpt.restore(strict=False) == 3
