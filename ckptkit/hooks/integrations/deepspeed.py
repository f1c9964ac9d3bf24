"""DeepSpeed: engines with ZeRO-1 or 2, whose optimizer state lies in flat partitions.

    engine, *_ = deepspeed.initialize(...)
    ckpt = ckptkit.Checkpointer(url, every=50)
    register(ckpt, engine)
    step = ckpt.restore()
    ...
    engine.step()
    ckpt.on_step_end(engine.global_steps)

Each rank's partition is a range of a group's parameters, one after the other; what of it belongs to which parameter is saved under that
parameter's name, so that a step is restored on any number of ranks, with or without ZeRO. Weights are the masters, rounded.

Not here: ZeRO-3, offloading to disk, expert parallelism, and the optimizer wrappers that come without ZeRO (bf16, fp16). Their checkpoints are
read and written as files: `ckptkit reshard` of what `engine.save_checkpoint` wrote.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptkit.errors import UsageError
from ckptkit.hooks.checkpointer import Checkpointer
from ckptkit.hooks.optimizers import make_state
from ckptkit.hooks.placement import Held


def register(
    ckpt: Checkpointer, engine: Any, *, loader: Any = None, extras: Mapping[str, Any] | None = None
) -> None:
    """Register an engine: its module, its optimizer's partitions, schedule, loss scale and counters.

    Raises UsageError for an engine that is none of those above.
    """
    zero = engine.optimizer
    if not hasattr(zero, "single_partition_of_fp32_groups"):
        raise UsageError(
            f"a DeepSpeed engine with {type(zero).__name__} (ZeRO stage {engine.zero_optimization_stage()}) is not supported: ZeRO-1 and 2 "
            "are. Use engine.save_checkpoint, and `ckptkit reshard` for its files"
        )
    make_state(zero.optimizer)
    held = list(_partitions(zero))
    things = {**(extras or {}), "deepspeed": _Engine(engine)}
    ckpt.register(model=engine.module, tensors=held, loader=loader, extras=things)
    zero.optimizer.register_step_pre_hook(lambda *_: ckpt.fence())


def _partitions(zero: Any) -> Iterator[Held]:
    """Masters and moments of this rank's ranges."""
    for number, params in enumerate(zero.round_robin_bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number].detach()
        state = zero.optimizer.state[zero.optimizer.param_groups[number]["params"][0]]
        rank = torch.distributed.get_rank(group=zero.real_dp_process_group[number])
        begin, end = rank * flat.numel(), (rank + 1) * flat.numel()
        at = 0
        for param in params:
            low, high = max(begin, at), min(end, at + param.numel())
            if low < high:
                for role, tensor in (
                    ("master", flat),
                    ("exp_avg", state.get("exp_avg")),
                    ("exp_avg_sq", state.get("exp_avg_sq")),
                ):
                    if tensor is not None:
                        yield Held(
                            zero.param_names[param], role, tensor.detach()[low - begin : high - begin], first=low - at, last=high - at,
                            shape=tuple(param.shape),
                        )  # fmt: skip
            at += param.numel()


class _Engine:
    """What of an engine is no tensor."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        inner = engine.optimizer.optimizer
        scheduler = engine.lr_scheduler
        steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
        return {
            "counters": {
                name: int(getattr(engine, name))
                for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps")
            },
            "groups": [
                {k: v for k, v in group.items() if k != "params" and _is_plain(v)}
                for group in inner.param_groups
            ],
            "step": max(steps, default=None),
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "loss_scale": float(engine.optimizer.cur_scale)
            if hasattr(engine.optimizer, "cur_scale")
            else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine = self._engine
        inner = engine.optimizer.optimizer
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        for group, plain in zip(inner.param_groups, state["groups"], strict=False):
            group.update(plain)
        for values in inner.state.values():
            if state["step"] is None or "step" not in values:
                continue
            if isinstance(values["step"], torch.Tensor):
                values["step"].fill_(state["step"])
            else:
                values["step"] = type(values["step"])(state["step"])
        if state["scheduler"] is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
            engine.lr_scheduler.load_state_dict(state["scheduler"])


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
    )
