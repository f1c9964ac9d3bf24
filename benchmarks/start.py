"""How long it takes until something is on the screen.

    python benchmarks/start.py [URL]

1. `ckptkit --help` against `python -c "import numpy, click"`, interleaved: at most 2x, and no torch in it.
2. `ckptkit inspect URL` as a whole process: at most 1 s for a checkpoint of 8 GB with optimizer state. Without URL this part
   is left out.
3. Opening and describing a native checkpoint of 4,096 ranks, and a safetensors folder of 4,096 shards, on a store that takes
   5 ms for every open: at most 5 s each.

Exits 1 where a limit is passed.
"""

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptkit import ops
from ckptkit.formats import registry
from ckptkit.ops.inspecting import inspection
from ckptkit.ops.sources import Source
from ckptkit.stores.base import Reader, Store
from ckptkit.stores.local import LocalStore

RANKS = 4096
OPEN_S = 0.005
HELP = "from ckptkit.cli.main import cli; cli(['--help'])"


class SlowStore(Store):
    """Another store, each open of which takes 5 ms, as on a busy shared file system."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url
        self.parallel = store.parallel

    def files(self) -> Sequence[str]:
        return self.store.files()

    def exists(self, path: str) -> bool:
        return self.store.exists(path)

    def size(self, path: str) -> int:
        return self.store.size(path)

    def identity(self, path: str) -> str:
        return self.store.identity(path)

    def open(self, path: str) -> Reader:
        time.sleep(OPEN_S)
        return self.store.open(path)


def seconds(command: Sequence[str]) -> float:
    """Wall-clock time of a process that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def help_ratio(rounds: int) -> tuple[float, float, float]:
    """Medians of both processes, and the median of the ratios of neighbours."""
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(seconds([sys.executable, "-c", "import numpy, click"]))
        ours.append(seconds([sys.executable, "-c", HELP]))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios)


def inspect_slow(folder: Path) -> float:
    """Time to open and describe a checkpoint on the slow store."""
    start = time.perf_counter()
    store = SlowStore(LocalStore(folder))
    found = registry.detect(store)
    report = inspection(Source(str(folder), store, found, found.read(store)))
    took = time.perf_counter() - start
    assert report.files >= RANKS, report.files
    return took


def make_native(folder: Path) -> None:
    """4,096 ranks, each with a part of a tiny model and its optimizer state."""
    ops.synth(
        str(folder),
        model="llama",
        settings={"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 4096},
        optimizer="adamw",
        layout=f"tp=2,dp={RANKS // 2},zero=1",
    )


def make_shards(folder: Path) -> None:
    """4,096 safetensors shards with an index, as a published model has; written here, to need no other tool."""
    folder.mkdir()
    weight_map = {}
    for shard in range(RANKS):
        file = f"model-{shard + 1:05d}-of-{RANKS:05d}.safetensors"
        names = [f"layers.{shard}.{part}" for part in range(8)]
        entries = {
            n: {"dtype": "BF16", "shape": [4, 4], "data_offsets": [k * 32, k * 32 + 32]}
            for k, n in enumerate(names)
        }
        header = json.dumps(entries).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(header)) + header + bytes(32 * len(names)))
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 32 * len(weight_map)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="a checkpoint to inspect, for part 2")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    passed = True

    def row(what: str, value: str, good: bool) -> None:
        nonlocal passed
        passed &= good
        print(f"{what:<44} {value:>24}  {'ok' if good else 'TOO SLOW'}", flush=True)

    ours, theirs, ratio = help_ratio(arguments.rounds)
    row(
        "--help / import numpy, click", f"{ours * 1e3:.0f} / {theirs * 1e3:.0f} ms = {ratio:.2f}x", ratio <= 2
    )
    if arguments.url:
        command = [
            sys.executable,
            "-c",
            f"from ckptkit.cli.main import cli; cli(['inspect', {arguments.url!r}])",
        ]
        took = statistics.median(seconds(command) for _ in range(5))
        row(f"inspect {arguments.url}", f"{took:.2f} s", took <= 1)
    makers: list[tuple[str, Callable[[Path], None]]] = [
        ("native ranks", make_native),
        ("safetensors shards", make_shards),
    ]
    for what, make in makers:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "made")
            took = inspect_slow(Path(folder) / "made")
        row(f"inspect {RANKS:,} {what}, 5 ms an open", f"{took:.2f} s", took <= 5)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
