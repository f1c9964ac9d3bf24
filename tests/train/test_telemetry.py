"""What a run tells: figures from first principles, and each place they go to."""

import json
from pathlib import Path

import pytest
import torch

from ckptkit.train import telemetry
from ckptkit.train.balance import Balancer
from ckptkit.train.config import BalanceTable, Config, LogTable
from ckptkit.train.trainer import Result, bind
from tests.train.zayas import config_of, stage_of


def test_operations_of_the_published_model() -> None:
    """1.29 billion parameters are met by a token, head included; attention at 4,096 tokens comes on top."""
    model = bind(Config.load("zaya1-8b.toml"))

    flops = telemetry.flops_per_token(model, 4096)

    attention = 40 * 3 * 4 * 1024 * 4096 / 2
    assert flops == pytest.approx(6 * 1_290_741_584 + attention)


def test_a_record_is_made_of_a_step() -> None:
    config = config_of(log__peak_tflops=0.001)
    model = bind(config)
    meter = telemetry.Meter(config, model, 2, torch.device("cpu"))
    load = torch.tensor([[10, 0, 0, 30, 0], [10, 10, 10, 10, 0], [0, 0, 0, 20, 20]])

    record = meter.record(Result(7, 2.5, 0.5, 0.5, load, False, 1.0), seconds=2.0, stall_s=0.5)

    assert (record["step"], record["loss"], record["stall_s"]) == (7, 2.5, 0.5)
    assert record["tokens_per_s"] == 4 * 16 / 2.0
    assert record["load_max"] == pytest.approx(4.0), (
        "in the last layer one of four experts has all that is routed"
    )
    assert record["skip"] == pytest.approx(0.5 / 3)
    assert record["lr_muon"] == config.optimizer.muon_lr / 2
    assert record["mfu"] == pytest.approx(32 * telemetry.flops_per_token(model, 16) / 2e9)


def test_without_a_known_peak_there_is_no_mfu() -> None:
    config = config_of()
    meter = telemetry.Meter(config, bind(config), 1, torch.device("cpu"))

    record = meter.record(Result(1, 2.5, 0.5, 1.0, torch.ones(3, 5), False, 1.0), 1.0, 0.0)

    assert record["mfu"] is None


def test_records_go_to_the_console_to_json_lines_and_to_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console sums up what came since its last line; a second run appends."""
    pytest.importorskip("tensorboard")
    config = config_of()
    meter = telemetry.Meter(config, bind(config), 1, torch.device("cpu"))
    table = LogTable(every=2, jsonl=str(tmp_path / "a.jsonl"), tensorboard=str(tmp_path / "board"))

    for first in (1, 5):
        told = telemetry.sinks(table, 8, quiet=False)
        for step in range(first, first + 4):
            result = Result(step, 3.0 - step / 10, 0.5, 1.0, torch.ones(3, 5), False, 1.0)
            for sink in told:
                sink.write(meter.record(result, 0.5, 0.1))
        for sink in told:
            sink.close()

    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    shown = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in shown] == ["1/8", "2/8", "4/8", "6/8", "8/8"]
    assert "128 tokens/s  stall 20.0%" in shown[2]
    assert list((tmp_path / "board").glob("events.*"))


def test_a_trace_of_three_steps_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    with telemetry.Profile(str(path), torch.device("cpu")) as trace:
        for _ in range(6):
            with trace.part("a step"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            trace.step()

    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("a step") == 3


@pytest.mark.parametrize("mode", ["sign", "pid", "none"])
def test_balancing_follows_its_formula(mode: str) -> None:
    """Against loops over layers and experts; the skip expert's bias stays."""
    stage = stage_of(config_of())
    table = BalanceTable(mode=mode, rate=0.01, kp=0.1, ki=0.02, kd=0.03)
    balancer = Balancer(stage, table)
    loads = torch.tensor(
        [
            [[6, 2, 0, 4, 4], [1, 1, 1, 1, 0], [0, 9, 0, 0, 7]],
            [[0, 2, 8, 4, 2], [1, 3, 0, 0, 0], [4, 4, 4, 4, 0]],
        ]
    )
    beta = [[0.0] * 4 for _ in range(3)]
    total = [[0.0] * 4 for _ in range(3)]
    before = [[0.0] * 4 for _ in range(3)]

    for load in loads:
        stage.load.copy_(load)
        assert torch.equal(balancer.step(), load)
        for layer in range(3):
            counts = load[layer].tolist()
            for e in range(4):
                error = (1 - counts[4] / sum(counts)) / 4 - counts[e] / sum(counts)
                change = 0.1 * error + 0.02 * total[layer][e] + 0.03 * (error - before[layer][e])
                sign = 0.01 * ((error > 1e-9) - (error < -1e-9))
                beta[layer][e] += {"sign": sign, "pid": change, "none": 0.0}[mode]
                total[layer][e] += error
                before[layer][e] = error
            if mode != "none":
                beta[layer] = [b - sum(beta[layer]) / 4 for b in beta[layer]]

    for layer, bias in balancer.biases.items():
        assert bias[-1] == -1.0
        torch.testing.assert_close(bias[:-1], torch.tensor(beta[layer]), rtol=1e-5, atol=1e-7)
    assert not stage.load.any(), "counting starts anew"


@pytest.mark.parametrize("table", [BalanceTable(rate=0.01), BalanceTable(mode="pid", kp=0.05, ki=0.002)])
def test_balancing_evens_the_load(table: BalanceTable) -> None:
    """Fixed routers that like one expert best: after 200 steps each has nearly its share."""
    stage = stage_of(config_of())
    balancer = Balancer(stage, table)
    likes = torch.tensor([1.0, 0.5, 0.0, -0.5, -9.0])
    logits = torch.randn(3, 512, 5, generator=torch.Generator().manual_seed(0)) + likes
    busiest = []

    for _ in range(200):
        for layer, bias in balancer.biases.items():
            choice = (logits[layer].softmax(-1) + bias).argmax(-1)
            stage.load[layer] = torch.bincount(choice, minlength=5)
        busiest.append(float(balancer.step().max()) / 128)

    assert busiest[0] > 1.8
    assert max(busiest[-10:]) < 1.15
