"""What a run tells: lines on the console, one JSON object a step, TensorBoard, and a trace of a few steps.

Every figure is of the whole run. `stall` is the part of the time that saving took from training; `load` the busiest expert's
share of an even load (1.0 is even), the worst of all layers; `skip` the share of tokens that chose no expert.
"""

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import IO, Any, Protocol, Self

import torch

from ckptkit.core.schema import Model
from ckptkit.train.config import Config, LogTable
from ckptkit.train.trainer import Result

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "MI300X": 1307.0,
    "MI325X": 1307.0,
    "MI250X": 383.0,
}
"""Published dense bfloat16 peaks by a part of the device's name."""


class Sink(Protocol):
    """Takes one record a step."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def flops_per_token(model: Model, seq_len: int) -> float:
    """Operations that training on one token needs: 6 a parameter that it meets, and attention over half the sequence.

    A matrix of which a token meets one in E counts 1/E; the embedding counts as the head, its look-up as nothing.
    """
    met = 0.0
    for tensor in model.tensors.values():
        if tensor.kind == "param" and not (tensor.name == "embed" and not model.flags["tied"]):
            met += prod(tensor.shape) / (model.sizes["expert"] if tensor.is_expert else 1)
    attention = 2 * 2 * model.sizes["head"] * model.sizes["head_dim"] * seq_len / 2
    return 6 * met + 3 * model.layers * attention


def peak_flops(table: LogTable, device: torch.device) -> float:
    """Peak operations a second of one device, 0 where it is not known."""
    if table.peak_tflops:
        return table.peak_tflops * 1e12
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return 1e12 * next((peak for part, peak in PEAK_TFLOPS.items() if part in name), 0.0)


class Meter:
    """Turns results of steps into records."""

    def __init__(self, config: Config, model: Model, world: int, device: torch.device) -> None:
        t = config.train
        self.tokens = t.batch * t.seq_len
        self.per_token = flops_per_token(model, t.seq_len)
        self.peak = world * peak_flops(config.log, device)
        self.steps = t.steps
        self.lr = config.optimizer.adamw_lr, config.optimizer.muon_lr

    def record(self, result: Result, seconds: float, stall_s: float) -> dict[str, Any]:
        """The record of a step that took `seconds` in all, `stall_s` of them for saving."""
        load = result.load.double().cpu()
        share = load / load.sum(1, keepdim=True).clamp_min(1)
        routed = share[:, :-1]
        even = routed.sum(1).clamp_min(1e-12) / routed.shape[1]
        rate = self.tokens / seconds
        record = {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": result.norm,
            "lr_adamw": self.lr[0] * result.ratio,
            "lr_muon": self.lr[1] * result.ratio,
            "seconds": seconds,
            "stall_s": stall_s,
            "tokens_per_s": rate,
            "mfu": rate * self.per_token / self.peak if self.peak else None,
            "load_max": float((routed.amax(1) / even).max()),
            "skip": float(share[:, -1].mean()),
            "load": share.tolist(),
        }
        return record


class Console:
    """A line every few steps, to standard error."""

    def __init__(self, every: int, steps: int) -> None:
        from rich.console import Console as Rich

        self.out, self.every, self.steps = Rich(stderr=True, highlight=False), max(1, every), steps
        self.since: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.since.append(record)
        step = record["step"]
        if step % self.every and step != self.steps and step != 1:
            return
        seconds = sum(r["seconds"] for r in self.since)
        tokens = sum(r["tokens_per_s"] * r["seconds"] for r in self.since)
        stall = sum(r["stall_s"] for r in self.since)
        mfu = "" if record["mfu"] is None else f"  mfu {100 * record['mfu']:.1f}%"
        self.out.print(
            f"step [bold]{step:>{len(str(self.steps))}}[/]/{self.steps}  loss [bold]{record['loss']:.4f}[/]  "
            f"grad {record['grad_norm']:.3g}  lr {record['lr_adamw']:.2e}  {tokens / seconds:,.0f} tokens/s{mfu}  "
            f"stall {100 * stall / seconds:.1f}%  load {record['load_max']:.2f}  skip {100 * record['skip']:.1f}%",
            soft_wrap=True,
        )
        self.since.clear()

    def say(self, text: str) -> None:
        self.out.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        pass


class Jsonl:
    """One JSON object a step, appended to a file; a run that goes on goes on in it."""

    def __init__(self, path: str) -> None:
        self.out: IO[str] = sys.stdout if path == "-" else open(path, "a")  # noqa: SIM115  (as long as the run)

    def write(self, record: dict[str, Any]) -> None:
        self.out.write(json.dumps({"time": time.time(), **record}) + "\n")
        self.out.flush()

    def close(self) -> None:
        if self.out is not sys.stdout:
            self.out.close()


class TensorBoard:
    """Scalars of every step."""

    def __init__(self, folder: str) -> None:
        from ckptkit.errors import UsageError

        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("[log] tensorboard needs TensorBoard: pip install 'ckptkit[train]'") from error
        self.out: Any = SummaryWriter(folder)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float):
                self.out.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.out.close()


def sinks(table: LogTable, steps: int, quiet: bool) -> list[Sink]:
    """Where records go, by the configuration."""
    found: list[Sink] = []
    if not quiet:
        found.append(Console(table.every, steps))
    if table.jsonl:
        found.append(Jsonl(table.jsonl))
    if table.tensorboard:
        found.append(TensorBoard(table.tensorboard))
    return found


class Profile:
    """A trace of three steps after two, for chrome://tracing or Perfetto. `step` is called after each step."""

    def __init__(self, path: str, device: torch.device) -> None:
        self.path = path
        self.profiler: Any = None
        if path:
            from torch import profiler

            kinds = [profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                kinds.append(profiler.ProfilerActivity.CUDA)
            self.profiler = profiler.profile(
                activities=kinds,
                schedule=profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
                on_trace_ready=lambda p: p.export_chrome_trace(path),
            )

    def __enter__(self) -> Self:
        if self.profiler is not None:
            self.profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.profiler is not None:
            self.profiler.__exit__(*error)

    def step(self) -> None:
        if self.profiler is not None:
            self.profiler.step()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Names a part of a step in the trace."""
        if self.profiler is None:
            return nullcontext()
        from torch import profiler

        return profiler.record_function(name)
