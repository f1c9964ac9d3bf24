"""Planning at the scale of a 671B mixture of experts: seconds, memory, and how time grows with pieces.

    python benchmarks/plan_scale.py            three cases, each at 1x, 2x and 4x of a quarter of the layers (4x: the model)
    python benchmarks/plan_scale.py --small    a model of a few layers on few ranks, in a second

The model has the shapes of DeepSeek-V3 (arXiv:2412.19437): 61 layers, the first three dense, 256 routed experts and one
shared, latent attention. It holds bfloat16 parameters and the fp32 master copy and moments of AdamW. Nothing is read or
written; a plan is made in a process of its own, which reports its peak memory. Coverage is proven by the
plan itself, and counted again here: elements copied are roles times parameters. The last column is processor time divided by
pieces and pairs, which stays level where time is linear.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ckptkit.core.catalog import Catalog
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import make_plan
from ckptkit.core.schema import OPTIMIZER_ROLES, Declare, Family, Model, Name, Schema
from ckptkit.core.shards import shards

SECONDS, PEAK_MB = 30, 2048
"""What a plan of the whole model may take."""

DENSE, SPARSE = ":3", "3:"

DECLARES = (
    Declare("layers.{i}.attn_norm", "hidden"),
    Declare("layers.{i}.attn.q_down", "q_rank hidden"),
    Declare("layers.{i}.attn.q_norm", "q_rank"),
    Declare("layers.{i}.attn.q_up", "head qk_dim q_rank"),
    Declare("layers.{i}.attn.kv_down", "kv_rope hidden"),
    Declare("layers.{i}.attn.kv_norm", "kv_rank"),
    Declare("layers.{i}.attn.kv_up", "head kv_dim kv_rank"),
    Declare("layers.{i}.attn.out", "hidden head v_dim"),
    Declare("layers.{i}.mlp_norm", "hidden"),
    Declare("layers.{i}.mlp.gate_up", "gate_up ffn hidden", when=DENSE),
    Declare("layers.{i}.mlp.down", "hidden ffn", when=DENSE),
    Declare("layers.{i}.router", "router hidden", when=SPARSE),
    Declare("layers.{i}.router_bias", "router", kind="buffer", when=SPARSE),
    Declare("layers.{i}.shared.gate_up", "gate_up shared_ffn hidden", when=SPARSE),
    Declare("layers.{i}.shared.down", "hidden shared_ffn", when=SPARSE),
    Declare("layers.{i}.experts.gate_up", "expert gate_up expert_ffn hidden", when=SPARSE),
    Declare("layers.{i}.experts.down", "expert hidden expert_ffn", when=SPARSE),
)

VIEWS = {
    "layers.{i}.attn.q_up": "(head qk_dim) q_rank",
    "layers.{i}.attn.kv_up": "(head kv_dim) kv_rank",
    "layers.{i}.attn.out": "hidden (head v_dim)",
    "layers.{i}.mlp.gate_up": "(gate_up ffn) hidden",
    "layers.{i}.shared.gate_up": "(gate_up shared_ffn) hidden",
    "layers.{i}.experts.gate_up": "expert (gate_up expert_ffn) hidden",
}
"""How stored tensors merge axes; the rest are as declared."""


def family(name: str, per_expert: bool) -> Family:
    """Stored names: experts stacked in one tensor a layer, or a tensor for each (as Megatron's grouped MLP)."""

    def line(declare: Declare) -> Name:
        key, view = declare.name, VIEWS.get(declare.name, declare.axes)
        if per_expert and ".experts." in key:
            key = key.replace("experts", "experts.{e}")
            view = view.replace("expert ", "expert={e} ", 1)
        return Name(key, f"{declare.name}: {view}", declare.when)

    layer = tuple(line(declare) for declare in DECLARES)
    return Family(
        name,
        (Name("embed", "embed: vocab hidden"),),
        layer,
        (Name("norm", "norm: hidden"), Name("head", "head: vocab hidden")),
    )


SCHEMA = Schema(
    id="moe@1",
    first=(Declare("embed", "vocab hidden"),),
    layer=DECLARES,
    last=(Declare("norm", "hidden"), Declare("head", "vocab hidden")),
    rules={
        "vocab": "tp:pad=128",
        "head": "tp",
        "ffn": "tp",
        "shared_ffn": "tp",
        "expert": "ep",
        "expert_ffn": "etp",
    },
    families=(family("stacked", False), family("grouped", True)),
    sizes=lambda config: dict(config),
)

MODEL = {
    "layers": 61, "vocab": 129280, "hidden": 7168, "q_rank": 1536, "kv_rank": 512, "kv_rope": 576, "head": 128,
    "qk_dim": 192, "kv_dim": 256, "v_dim": 128, "gate_up": 2, "ffn": 18432, "router": 256, "expert": 256,
    "expert_ffn": 2048, "shared_ffn": 2048,
}  # fmt: skip

SMALL = {
    "layers": 9, "vocab": 1000, "hidden": 64, "q_rank": 48, "kv_rank": 32, "kv_rope": 40, "head": 8,
    "qk_dim": 12, "kv_dim": 16, "v_dim": 8, "gate_up": 2, "ffn": 96, "router": 16, "expert": 16,
    "expert_ffn": 24, "shared_ffn": 24,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A reshard to plan: `(names, layout)` on both sides."""

    title: str
    source: tuple[str, str]
    destination: tuple[str, str]


CASES = {
    "zero1": Case(
        "2,048 to 1,536 ranks, zero=1",
        ("grouped", "tp=8,pp=16,ep=64,dp=16,zero=1"),
        ("grouped", "tp=8,pp=12,ep=64,dp=16,zero=1"),
    ),
    "zero3": Case(
        "2,048 ranks, zero=1 to zero=3",
        ("grouped", "tp=8,pp=16,ep=64,dp=16,zero=1"),
        ("stacked", "dp=2048,zero=3"),
    ),
    "inner": Case(
        "2,048 to 1,536 ranks, etp=8 to etp=2",
        ("grouped", "tp=8,pp=16,ep=8,etp=8,dp=16,zero=1"),
        ("grouped", "tp=2,pp=12,ep=32,etp=2,dp=64,zero=1"),
    ),
}

SMALL_CASES = {
    "zero1": Case(
        "32 to 24 ranks, zero=1",
        ("grouped", "tp=2,pp=4,ep=4,dp=4,zero=1"),
        ("grouped", "tp=2,pp=3,ep=4,dp=4,zero=1"),
    ),
    "zero3": Case(
        "32 ranks, zero=1 to zero=3", ("grouped", "tp=2,pp=4,ep=4,dp=4,zero=1"), ("stacked", "dp=32,zero=3")
    ),
    "inner": Case(
        "32 to 24 ranks, etp=4 to etp=2",
        ("grouped", "tp=4,pp=4,ep=2,etp=4,dp=2,zero=1"),
        ("grouped", "tp=2,pp=3,ep=4,etp=2,dp=4,zero=1"),
    ),
}


@dataclass(frozen=True)
class Measured:
    """One plan. Times in seconds, `cpu_s` of the processor; `peak_mb` of the process, Python and numpy included."""

    layers: int
    source_pieces: int
    destination_pieces: int
    pairs: int
    source_s: float
    destination_s: float
    pieces_s: float
    plan_s: float
    cpu_s: float
    peak_mb: float

    @property
    def total_s(self) -> float:
        return self.source_s + self.destination_s + self.pieces_s + self.plan_s

    @property
    def rows(self) -> int:
        """Pieces on both sides and the pairs between them: what planning works on."""
        return self.source_pieces + self.destination_pieces + self.pairs


def held(model: Model) -> dict[tuple[str, str], DType]:
    """What the checkpoint holds: bfloat16 parameters, fp32 buffers and AdamW's state."""
    f32, bf16 = dtype_named("float32"), dtype_named("bfloat16")
    found = {}
    for tensor in model.tensors.values():
        if tensor.kind == "buffer":
            found[tensor.name, "buffer"] = f32
            continue
        found[tensor.name, "param"] = bf16
        for role in OPTIMIZER_ROLES[tensor.optimizer]:
            found[tensor.name, role] = f32
    return found


def measure(case: Case, config: Mapping[str, Any]) -> Measured:
    """Plan `case` for a model of `config`, and check what the plan covers."""
    model = SCHEMA.bind(config)
    content = held(model)

    def catalog(side: tuple[str, str]) -> Catalog:
        names, layout = side
        return shards(model.names(names), Layout.parse(layout), content, model.tensors)

    cpu = time.process_time()
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    source = catalog(case.source)
    mark()
    destination = catalog(case.destination)
    mark()
    _ = source.pieces, destination.pieces  # computed here, so that their time is told apart from the plan's
    mark()
    plan = make_plan(source, destination)
    mark()
    wanted = sum(prod(model.tensors[name].shape) for name, _ in content)
    if plan.elements != wanted or plan.drops:
        raise SystemExit(f"{case.title}: covered {plan.elements} of {wanted} elements, dropped {plan.drops}")
    times = [b - a for a, b in pairwise(marks)]
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(
        layers=int(config["layers"]),
        source_pieces=len(source.pieces),
        destination_pieces=len(destination.pieces),
        pairs=len(plan.src),
        source_s=times[0],
        destination_s=times[1],
        pieces_s=times[2],
        plan_s=times[3],
        cpu_s=cpu,
        peak_mb=peak,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on few ranks, in this process")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--layers", type=int, help="one size instead of three")
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(CASES[options.one], {**MODEL, "layers": options.layers}))))
        return
    chosen = options.case or list(CASES)
    print(
        f"{'case':<38} layers   src pieces  dst pieces       pairs   src s  dst s pieces s plan s total s  cpu s  peak MB  us/row"
    )
    failed = False
    for name in chosen:
        case = (SMALL_CASES if options.small else CASES)[name]
        whole = (SMALL if options.small else MODEL)["layers"]
        sizes = [options.layers] if options.layers else [whole] if options.small else [16, 31, whole]
        for layers in sizes:
            if options.small:
                found = measure(case, {**SMALL, "layers": layers})
            else:
                command = [sys.executable, __file__, "--one", name, "--layers", str(layers)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.returncode)
                found = Measured(**json.loads(done.stdout))
            print(
                f"{case.title:<38} {found.layers:6} {found.source_pieces:12,} {found.destination_pieces:11,} "
                f"{found.pairs:11,} {found.source_s:7.1f}{found.destination_s:7.1f}{found.pieces_s:9.1f}"
                f"{found.plan_s:7.1f}{found.total_s:8.1f}{found.cpu_s:7.1f}{found.peak_mb:9.0f}{found.cpu_s / found.rows * 1e6:8.2f}",
                flush=True,
            )
            if not options.small and layers == whole:
                failed |= found.total_s > SECONDS or found.peak_mb > PEAK_MB
    if failed:
        raise SystemExit(f"a plan of the whole model took more than {SECONDS} s or {PEAK_MB} MB")


if __name__ == "__main__":
    main()
