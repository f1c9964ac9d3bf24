"""Iteration time: ZAYA1 beside a Mixtral-style model of the same width, layers and tokens, active parameters within 2%.

    python benchmarks/train.py                           on a GPU: 8 layers of ZAYA1-8B's width, 4 x 4096 tokens a step
    python benchmarks/train.py --layers 2 --hidden 128 --seq-len 128 --vocab 512 --steps 3       a CPU's size

Active parameters are all but the embedding and the experts that a token does not meet; the baseline's experts get the width
that makes them equal. Both models take turns, step by step, in one process; medians over the steps. Each is run twice: as it is
(fused kernels for norms and routers, grouped matrix products for experts), and with `torch.compile` on attention and
the pieces between kernels. Parts are timed alone, forward and backward, on the same shapes.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.train.config import Config
from ckptkit.train.moe import experts
from ckptkit.train.parallel import Parallel
from ckptkit.train.trainer import Trainer, bind


def active(model: Model, chosen: int) -> int:
    """Parameters that one token meets, without the embedding and the output layer."""
    total = 0
    for tensor in model.tensors.values():
        if tensor.kind == "param" and "vocab" not in tensor.axes:
            size = math.prod(tensor.shape)
            total += size * chosen // model.sizes["expert"] if tensor.is_expert else size
    return total


def configs(options: argparse.Namespace) -> tuple[Config, Config]:
    """The two models."""
    heads = max(options.hidden // 256, 2)
    shared = {"vocab_size": options.vocab, "hidden_size": options.hidden, "num_hidden_layers": options.layers}
    train = {
        "seq_len": options.seq_len,
        "batch": options.batch,
        "micro_batch": options.micro_batch,
        "steps": 1000,
    }
    zaya = {
        "base": "zaya-8b", **shared, "num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1),
        "moe_intermediate_size": options.hidden, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    muon = {"muon_dtype": "bfloat16" if torch.cuda.is_available() else "float32"}
    first = Config.from_table({"model": zaya, "train": train, "optimizer": muon})
    wanted = active(bind(first), 1)
    best: tuple[int, dict[str, Any]] | None = None
    for width in range(32, 2 * options.hidden, 32):
        fields = {
            "base": "mixtral", **shared, "num_attention_heads": 2 * heads, "num_key_value_heads": max(heads // 2, 1),
            "head_dim": 128, "intermediate_size": width, "router_aux_loss_coef": 0.02, "tie_word_embeddings": True,
        }  # fmt: skip
        off = abs(active(bind(Config.from_table({"model": fields})), 2) - wanted)
        if best is None or off < best[0]:
            best = off, fields
    assert best is not None
    return first, Config.from_table({"model": best[1], "train": train})


class Timer:
    """Times of a device's work between two points, by its own events where it has them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds."""
        return first.elapsed_time(last) if self.cuda else (last - first) * 1e3

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def one_step(trainer: Trainer, timer: Timer) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of the optimizer."""
    t = trainer.config.train
    tokens, targets = trainer.loader.next(0, 1, trainer.stage.context.positions)
    timer.sync()
    a = timer.mark()
    trainer.optimizer.zero()
    trainer.pipeline.run(tokens, targets)
    b = timer.mark()
    trainer.optimizer.reduce()
    trainer.done += 1
    trainer.optimizer.step(trainer.done, trainer.optimizer.norm_sq().sqrt(), 1.0)
    trainer.balancer.step()
    c = timer.mark()
    timer.sync()
    assert t.batch == len(tokens)
    return timer.between(a, b), timer.between(b, c)


def alone(work: Callable[[], torch.Tensor], timer: Timer, steps: int) -> float:
    """Milliseconds of a piece, forward and backward."""
    times = []
    for number in range(steps + 3):
        timer.sync()
        a = timer.mark()
        work().float().sum().backward()
        b = timer.mark()
        timer.sync()
        if number >= 3:
            times.append(timer.between(a, b))
    return statistics.median(times)


def parts(trainer: Trainer, timer: Timer, steps: int) -> dict[str, float]:
    """Attention, mixture, and the experts alone of one layer, for one micro-batch."""
    stage: Any = trainer.stage
    last = stage.layers[-1]
    layer, dims = stage.model.layers[last], stage.dims
    shape = trainer.config.train.micro_batch, trainer.config.train.seq_len, dims.hidden
    x = torch.randn(shape, device=stage.parallel.device, dtype=stage.dtype, requires_grad=True)
    rows = math.prod(shape[:2]) * getattr(stage, "chosen", 1)
    counts = [rows // dims.experts] * dims.experts
    flat = torch.randn(sum(counts), dims.hidden, device=x.device, dtype=stage.dtype, requires_grad=True)
    if hasattr(stage, "mixture"):
        state = torch.randn(*shape[:2], stage.state_width, device=x.device, dtype=stage.dtype)
        pieces = {
            "attention": lambda: stage.attention(x, layer.self_attn, last),
            "mixture": lambda: stage.mixture(x, state, layer.mlp, None)[0],
        }
    else:
        pieces = {
            "attention": lambda: stage._attention(x, layer.self_attn),
            "mixture": lambda: stage._mixture(x, layer.mlp, last),
        }
    pieces["experts, evenly loaded"] = lambda: experts(flat, counts, layer.mlp.experts)
    found = {name: alone(work, timer, steps) for name, work in pieces.items()}
    found["router and dispatch"] = found["mixture"] - found["experts, evenly loaded"]
    return found


def compile_pieces(trainer: Trainer) -> None:
    """`torch.compile` on what lies between the kernels."""
    stage: Any = trainer.stage
    if hasattr(stage, "mixture"):
        attention = stage.attention
        # Every layer is alike: one index, or it would be compiled once for each.
        compiled = torch.compile(lambda x, w: attention(x, w, 0), dynamic=False)
        stage.attention = lambda x, w, _: compiled(x, w)
    else:
        stage._attention = torch.compile(stage._attention, dynamic=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"layers": 8, "hidden": 2048, "vocab": 32768, "seq-len": 4096, "batch": 4, "micro-batch": 4, "steps": 10}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", default="", help="a file for the figures")
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    parallel = Parallel(Layout(), 0, device)
    timer = Timer(parallel.device)
    zaya, mixtral = configs(options)
    sizes = {"zaya": active(bind(zaya), 1), "mixtral": active(bind(mixtral), 2)}
    print(
        f"{name}, torch {torch.__version__}: {options.layers} layers of width {options.hidden}, vocabulary {options.vocab}, "
        f"{options.batch} x {options.seq_len} tokens a step"
    )
    print(
        f"active parameters {sizes['zaya'] / 1e6:.1f} M and {sizes['mixtral'] / 1e6:.1f} M "
        f"({sizes['mixtral'] / sizes['zaya'] - 1:+.2%}); experts of width {zaya.model['moe_intermediate_size']} (1 of 16) and "
        f"{mixtral.model['intermediate_size']} (2 of 8)"
    )
    figures: dict[str, Any] = {"device": name, "active": sizes, "options": vars(options)}
    trainers = {"zaya": Trainer(zaya, parallel), "mixtral": Trainer(mixtral, parallel)}
    for trainer in trainers.values():
        trainer.stage.train()
    torch._dynamo.config.recompile_limit = 64
    for kind in ("as it is", "compiled"):
        if kind == "compiled":
            for trainer in trainers.values():
                compile_pieces(trainer)
        times: dict[str, list[tuple[float, float]]] = {who: [] for who in trainers}
        for number in range(options.steps + 3):
            for who, trainer in trainers.items():
                found = one_step(trainer, timer)
                if number >= 3:
                    times[who].append(found)
        figures[kind] = {}
        for who, rows in times.items():
            run, update = (statistics.median(column) for column in zip(*rows, strict=True))
            tokens = options.batch * options.seq_len / (run / 1e3)
            detail = parts(trainers[who], timer, options.steps)
            figures[kind][who] = {
                "forward+backward ms": run,
                "optimizer ms": update,
                "parts of a layer ms": detail,
            }
            print(
                f"{kind}, {who}: forward and backward {run:.1f} ms ({tokens:,.0f} tokens/s), optimizer {update:.1f} ms"
            )
            print(
                "    a layer, one micro-batch: "
                + ", ".join(f"{part} {ms:.2f} ms" for part, ms in detail.items())
            )
        z, m = (figures[kind][who]["forward+backward ms"] for who in ("zaya", "mixtral"))
        print(f"{kind}: ZAYA1 takes {z / m:.2f} of the baseline's time (forward and backward)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)
    if device != "cpu":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
