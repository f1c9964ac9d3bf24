"""What goes wrong is answered clearly; what changes while it is copied is never saved."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.errors import CkptError, CorruptionError, StoreError, UsageError
from ckptkit.hooks import Checkpointer, Held
from tests.hooks.jobs import steps_in
from tests.hooks.models import Net, batch, make


def started(url: Path, optimizer: str = "adamw", **options: Any) -> tuple[Checkpointer, Any, Any, Any]:
    """A registered Checkpointer that saves every step, its model, optimizer and step."""
    net, opt, step = make("plain", 0, 1, optimizer)
    ckpt = Checkpointer(str(url), cache="off", busy="wait", timeout_s=20, **{"every": 1, **options})
    ckpt.register(model=net, optimizer=opt)
    ckpt.restore()
    return ckpt, net, opt, step


@contextmanager
def copies_held_back(ckpt: Checkpointer) -> Iterator[None]:
    """No copy runs inside."""
    gate = threading.Event()
    ckpt._saver._copier.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


# ── while a copy runs ────────────────────────────────────────────────────────────────────────────────────────


def test_the_optimizer_waits_for_what_is_not_copied(tmp_path: Path) -> None:
    """Its step begins only when the copy has ended, and what is saved are the values before it."""
    ckpt, net, _, step = started(tmp_path)
    step(0)
    saved = net.head.weight.detach().clone()
    with copies_held_back(ckpt):
        ckpt.on_step_end(1)
        other = threading.Thread(target=step, args=(1,))
        other.start()
        other.join(0.3)
        waiting = other.is_alive()
        unchanged = torch.equal(net.head.weight, saved)
    other.join()
    ckpt.close()

    assert waiting and unchanged
    assert not torch.equal(net.head.weight, saved)
    again, opt2, _ = make("plain", 0, 1, seed=9)
    with Checkpointer(str(tmp_path), cache="off") as ckpt:
        ckpt.register(model=again, optimizer=opt2)
        ckpt.restore()
    assert torch.equal(again.head.weight, saved)


def test_a_parameter_that_the_forward_changes_fails_that_save(tmp_path: Path) -> None:
    """A bias changed while the copy runs: the step is not committed and the tensor is named; training goes on."""
    ckpt, net, _, step = started(tmp_path, max_failures=5)
    step(0)
    with copies_held_back(ckpt):
        ckpt.on_step_end(1)
        with torch.no_grad():
            net.blocks[1].up.bias += 1
    step(1)
    with pytest.raises(
        CorruptionError, match=r"blocks\.1\.up\.bias \(param\) was changed while it was copied"
    ):
        ckpt.wait()
    ckpt.on_step_end(2)
    ckpt.wait()
    ckpt.close()

    assert steps_in(str(tmp_path)) == ["step-00000002.e1"]


def test_buffers_are_copied_before_the_call_returns(tmp_path: Path) -> None:
    """What the forward pass changes is taken at the step's end, whenever the rest is copied."""
    ckpt, net, _, step = started(tmp_path)
    step(0)
    with copies_held_back(ckpt):
        ckpt.on_step_end(1)
        net(batch(7))
    ckpt.close()

    again = Net()
    with Checkpointer(str(tmp_path), cache="off") as ckpt:
        ckpt.register(model=again)
        ckpt.restore(strict=False)
    assert float(again.blocks[0].calls[0]) == 1  # type: ignore[index]


def test_memory_that_moves_while_it_is_copied_fails_that_save(tmp_path: Path) -> None:
    """`param.data = ...` during the copy is noticed by its address."""
    ckpt, net, _, step = started(tmp_path)
    step(0)
    with copies_held_back(ckpt):
        ckpt.on_step_end(1)
        net.head.weight.data = net.head.weight.data.clone()
        save = ckpt._saver.last
        assert save is not None
        ckpt._saver._judge(save)
    with pytest.raises(CorruptionError, match=r"head\.weight \(param\) moved"):
        ckpt.wait()
    with pytest.raises(CorruptionError):
        ckpt.close()


# ── registered things that change ────────────────────────────────────────────────────────────────────────────


def test_registering_twice(tmp_path: Path) -> None:
    """One Checkpointer, one set of tensors."""
    ckpt, net, opt, _ = started(tmp_path)

    with pytest.raises(UsageError, match="register was called before"):
        ckpt.register(model=net, optimizer=opt)
    ckpt.close()


def test_a_parameter_replaced_after_registration(tmp_path: Path) -> None:
    """The optimizer would go on updating the old one: an error that names it."""
    ckpt, net, _, step = started(tmp_path)
    step(0)
    net.head.bias = nn.Parameter(torch.zeros(7))

    with pytest.raises(UsageError, match=r"head\.bias \(param\) was replaced"):
        ckpt.on_step_end(1)
    ckpt.close()


def test_a_shape_changed_after_registration(tmp_path: Path) -> None:
    """A vocabulary that grows in place, for example."""
    ckpt, net, _, step = started(tmp_path)
    step(0)
    net.head.weight.data = torch.zeros(9, net.head.weight.shape[1])

    with pytest.raises(
        UsageError, match=r"head\.weight \(param\) has shape \(9, 24\).*was registered with \(7, 24\)"
    ):
        ckpt.on_step_end(1)
    ckpt.close()


def test_optimizer_state_that_is_loaded_anew_is_followed(tmp_path: Path) -> None:
    """`load_state_dict` puts other tensors in place; the next save takes them."""
    ckpt, net, opt, step = started(tmp_path)
    step(0)
    ckpt.on_step_end(1)
    opt.zero_grad()
    state = opt.state_dict()
    opt.load_state_dict(
        {**state, "state": {k: {n: v + 1 for n, v in s.items()} for k, s in state["state"].items()}}
    )
    ckpt.on_step_end(2)
    ckpt.close()

    again, opt2, _ = make("plain", 0, 1)
    with Checkpointer(str(tmp_path), cache="off") as ckpt:
        ckpt.register(model=again, optimizer=opt2)
        ckpt.restore()
    first = next(iter(again.parameters()))
    assert torch.equal(opt2.state[first]["exp_avg"], opt.state[next(iter(net.parameters()))]["exp_avg"])


def test_saving_in_the_middle_of_gradient_accumulation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients that no step has used: a failed save that says what to do, and an error when it happens again.

    Once is no error: a loss scaler leaves out a step, too.
    """
    ckpt, net, opt, step = started(tmp_path, max_failures=2)
    step(0)
    ckpt.on_step_end(1)
    opt.zero_grad()
    net(batch(1)).sum().backward()

    assert not ckpt.on_step_end(2)
    assert "gradient accumulation" in caplog.text
    with pytest.raises(UsageError, match=r"2 saves in a row failed.*gradient accumulation"):
        ckpt.on_step_end(3)
    ckpt.close()
    assert steps_in(str(tmp_path)) == ["step-00000001.e1"]


def test_steps_must_rise(tmp_path: Path) -> None:
    """A number of micro-batches, or a step told twice, is noticed."""
    ckpt, _, _, step = started(tmp_path)
    step(0)
    ckpt.on_step_end(5)

    with pytest.raises(UsageError, match=r"on_step_end\(5\) after 5 completed steps"):
        ckpt.on_step_end(5)
    ckpt.close()


def test_nothing_registered(tmp_path: Path) -> None:
    """Every call says what comes first."""
    ckpt = Checkpointer(str(tmp_path), cache="off", every=1)

    for call in (ckpt.restore, lambda: ckpt.on_step_end(1), ckpt.save):
        with pytest.raises(UsageError, match="call register"):
            call()
    with pytest.raises(UsageError, match="nothing to save"):
        ckpt.register()
    ckpt.close()


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    """Its parameters are not the model's: said at registration."""
    ckpt = Checkpointer(str(tmp_path), cache="off")

    with pytest.raises(UsageError, match="that the registered model does not have"):
        ckpt.register(model=Net(), optimizer=torch.optim.SGD(Net().parameters()))
    with pytest.raises(UsageError, match=r"no torch\.optim\.Optimizer"):
        ckpt.register(model=Net(), optimizer=object())
    ckpt.close()


def test_state_that_is_no_plain_value(tmp_path: Path) -> None:
    """Nothing is pickled: an object in a state is refused at registration, with its place."""

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [{"inside": object()}]}

        def load_state_dict(self, state: Any) -> None: ...

    ckpt = Checkpointer(str(tmp_path), cache="off")

    with pytest.raises(UsageError, match=r"odd\['deep'\]\[0\]\['inside'\] is a object"):
        ckpt.register(model=Net(), extras={"odd": Odd()})
    ckpt.close()


def test_tensors_on_meta_or_of_unknown_roles(tmp_path: Path) -> None:
    """A model that is not materialised has nothing to save; a role must be one."""
    ckpt = Checkpointer(str(tmp_path), cache="off")

    with pytest.raises(UsageError, match="meta device"):
        ckpt.register(model=nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match="'weights' is no role"):
        ckpt.register(tensors=[Held("w", "weights", torch.zeros(2))])
    ckpt.close()


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": 4, "durable_every": 6},
        {"replicas": "maybe"},
        {"busy": "never"},
        {"max_failures": 0},
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], tmp_path: Path) -> None:
    """Each is named."""
    with pytest.raises(UsageError, match=str(next(reversed(options)))):
        Checkpointer(str(tmp_path), cache="off", **options)


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_failed_saves_are_counted_and_raise_when_there_are_many(tmp_path: Path) -> None:
    """Two in a row are warned of; the third is raised by the next call. A good one in between starts the count anew."""
    ckpt, _, _, step = started(tmp_path, max_failures=3)

    def save(number: int, blocked: bool) -> None:
        step(number)
        if blocked:
            (tmp_path / f"step-{number + 1:08d}.e1" / "rank-00000.safetensors").mkdir(parents=True)
        ckpt.on_step_end(number + 1)
        try:
            ckpt.wait()
        except StoreError:
            assert blocked

    for number, blocked in enumerate((True, True, False, True, True)):
        save(number, blocked)
    assert ckpt.metrics["failed_in_a_row"] == 2
    save(5, True)
    step(6)
    with pytest.raises(StoreError, match="3 saves in a row failed"):
        ckpt.on_step_end(7)
    with pytest.raises(StoreError):
        ckpt.close()


def test_a_save_is_skipped_while_every_buffer_is_written(tmp_path: Path) -> None:
    """With `busy=skip` training never waits for a slow store; the skip is counted."""
    ckpt, _, _, step = _skipping(tmp_path)
    gate = threading.Event()
    ckpt._saver._finisher.submit(gate.wait)
    begun = []
    for number in range(4):
        step(number)
        begun.append(ckpt.on_step_end(number + 1))
    gate.set()
    ckpt.close()

    assert begun == [True, True, False, False]
    assert ckpt.metrics["saves_skipped_total"] == 2
    assert steps_in(str(tmp_path)) == ["step-00000001.e1", "step-00000002.e1"]


def _skipping(url: Path) -> tuple[Checkpointer, Any, Any, Any]:
    net, opt, step = make("plain", 0, 1)
    ckpt = Checkpointer(str(url), cache="off", every=1, timeout_s=20)
    ckpt.register(model=net, optimizer=opt)
    ckpt.restore()
    return ckpt, net, opt, step


def test_an_error_in_the_loop_saves_the_last_step(tmp_path: Path) -> None:
    """The state of the last completed step is saved, since nothing has changed it; the error goes on."""
    with pytest.raises(ValueError, match="data"):
        ckpt, _, _, step = started(tmp_path, every=100)
        with ckpt:
            for number in range(3):
                step(number)
                ckpt.on_step_end(number + 1)
            raise ValueError("data")

    assert steps_in(str(tmp_path)) == ["step-00000003.e1"]


def test_disabled_hooks_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CKPTKIT_DISABLE=1`: a training script runs as if the hooks were not there."""
    monkeypatch.setenv("CKPTKIT_DISABLE", "1")
    ckpt = Checkpointer("nonsense://", every=1)
    ckpt.register(model=object())  # type: ignore[arg-type]

    assert (ckpt.restore(), ckpt.on_step_end(1), ckpt.wait(), ckpt.should_stop) == (0, False, None, False)
    ckpt.fence()
    ckpt.close()
    assert not list(tmp_path.iterdir())


def test_a_cache_that_was_asked_for_must_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` goes without one; a socket that is named does not. `CKPTKIT_CACHE=off` overrules both."""
    socket = str(tmp_path / "no.sock")

    with pytest.raises(StoreError, match=r"no\.sock"):
        Checkpointer(str(tmp_path / "run"), cache=socket)
    monkeypatch.setenv("CKPTKIT_CACHE", "off")
    Checkpointer(str(tmp_path / "run"), cache=socket).close()


def test_a_url_without_room_for_a_step_is_refused_at_registration(tmp_path: Path) -> None:
    """Before the first step, and before any memory is taken."""
    ckpt = Checkpointer(str(tmp_path), cache="off")

    with pytest.raises(StoreError, match=r"bytes free, but a step takes 70,368,744,"):
        ckpt.register(tensors=[Held("huge", "param", torch.zeros(1).expand(1 << 44))])
    ckpt.close()


def test_closing_waits_for_the_last_save(tmp_path: Path) -> None:
    """What was started is whole when `close` returns."""
    ckpt, _, _, step = started(tmp_path)
    step(0)
    ckpt.on_step_end(1)
    ckpt.close()

    assert steps_in(str(tmp_path)) == ["step-00000001.e1"]
    with pytest.raises(CkptError):
        ckpt.on_step_end(2)


def test_a_save_of_many_tensors_keeps_the_trainer_for_little(tmp_path: Path) -> None:
    """Not a timing: the calls into torch that the trainer's thread makes do not grow with the tensors."""
    torch.manual_seed(0)
    calls = []
    for count in (10, 400):
        net = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(count)])
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        ckpt = Checkpointer(str(tmp_path / str(count)), cache="off", every=1, busy="wait")
        ckpt.register(model=net, optimizer=opt)
        ckpt.restore()
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            copies_held_back(ckpt),
        ):
            ckpt.on_step_end(1)
        time.sleep(0)
        ckpt.close()
        calls.append(sum(event.count for event in profile.key_averages() if event.key.startswith("aten::")))
    assert calls[1] <= calls[0] + 10
