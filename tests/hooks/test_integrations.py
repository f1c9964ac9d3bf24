"""Frameworks that need no library of their own: DCP, trainers in torchtitan's style. Others: tests/peers."""

from pathlib import Path
from typing import Any

import torch

import ckptkit
from ckptkit.hooks.integrations.torchtitan import TitanCheckpointer
from tests.hooks import jobs
from tests.hooks.models import differing, make, whole
from tests.hooks.ranks import run_ranks


def test_dcp_goes_through_ckptkit(tmp_path: Path) -> None:
    """`dcp.save` by two FSDP ranks makes a native step; `dcp.load` by one process fills another model from it."""
    url = str(tmp_path / "run")
    saved = run_ranks(2, jobs.dcp_round, url, "fsdp", True)

    assert ckptkit.verify(f"{url}/step-00000001.e1").exit_code == 0
    loaded = run_ranks(2, jobs.dcp_round, url, "tp", False)

    assert differing(saved[0][0], loaded[0][0]) == []
    assert all(note == {"epoch": 3} for _, note in loaded)


def test_a_trainer_in_torchtitans_style(tmp_path: Path) -> None:
    """Load, save at every step, the last one waited for; another one goes on from there."""

    class Trainer:
        seen = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": torch.tensor(self.seen)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = int(state["seen"])

    def build() -> tuple[Any, ...]:
        net, opt, step = make("plain", 0, 1)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k))
        trainer = Trainer()
        made = TitanCheckpointer(
            str(tmp_path), model_parts=[net], optimizers=[opt], lr_schedulers=[sched], states={"train_state": trainer}, every=10,
            cache="off",
        )  # fmt: skip
        return made, net, opt, step, sched, trainer

    made, net, opt, step, sched, trainer = build()
    assert not made.load()
    for number in range(3):
        step(number)
        sched.step()
        trainer.seen += 100
        made.save(number + 1, last_step=number == 2)
    made.close()

    again, net2, opt2, _, sched2, trainer2 = build()
    assert again.load() and again.step == 3
    assert trainer2.seen == 300 and sched2.state_dict() == sched.state_dict()
    assert differing(whole(net, opt), whole(net2, opt2)) == []
    again.close()
