"""The whole tour on a ZAYA1 made on the spot."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.ops.comparing import diff
from ckptkit.ops.inspecting import inspect
from ckptkit.ops.planning import plan
from ckptkit.ops.reports import nbytes_text
from ckptkit.ops.resharding import reshard
from ckptkit.ops.runs import newest
from ckptkit.ops.synthesis import synth
from ckptkit.ops.verifying import verify

Say = Callable[[str], None]

_SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 32,
    "vocab_size": 4096,
}
"""About 12 million parameters: 100 MB with optimizer state."""
_TRAINED = "tp=2,pp=2,ep=4,dp=4,zero=1"
_WANTED = "pp=3,ep=2,dp=6,zero=1"

_KILLED = """
import glob, os, signal, sys, time
from ckptkit.ops.resharding import reshard
source, target, layout = sys.argv[1:]
journals = os.path.join(os.path.dirname(target), "." + os.path.basename(target) + ".*.unfinished", ".journal")
def progress(done, total):
    while done * 2 > total:  # half-way: wait for something durable, which the journal lists, and die
        if any(open(path).read().count("\\n") > 1 for path in glob.glob(journals)):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
reshard(source, target, layout=layout, progress=progress)
"""


def demo(folder: str, say: Callable[[str], None]) -> int:
    """Make a small ZAYA1 in `folder` and reshard, verify, break and repair it; returns 0 when everything held.

    Args:
        folder: An empty or new folder; what the demo wrote stays there.
        say: Called with each line to show: the command that does the same, then what came of it.

    Raises UsageError where `folder` holds something.
    """
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UsageError(f"{folder} is not empty; give a new folder")
    os.makedirs(folder, exist_ok=True)
    tour = _Tour(Path(folder), say)
    for part in (tour.make, tour.reshard, tour.export, tour.logits, tour.kill, tour.corrupt):
        part()
    return 0 if tour.held else 1


class _Tour:
    def __init__(self, folder: Path, say: Say) -> None:
        self.folder, self.say = folder, say
        self.held = True
        self.run = folder / "run"
        self.first, self.second = str(self.run / "step-00001000"), str(self.run / "step-00002000")

    def must(self, holds: bool, what: str) -> None:
        """Say what was checked, and remember when it does not hold."""
        self.held &= holds
        self.say(f"  {what}" if holds else f"  FAILED: {what}")

    def show(self, command: str) -> None:
        self.say(f"$ ckptkit {command.replace(str(self.folder) + os.sep, '')}")

    def make(self) -> None:
        sets = " ".join(f"--set {name}={value}" for name, value in _SIZES.items())
        for step, path in ((1000, self.first), (2000, self.second)):
            self.show(
                f"synth {path} --model zaya-tiny {sets} --seed {step} --step {step} --layout {_TRAINED}"
            )
            made = synth(path, model="zaya-tiny", settings=_SIZES, seed=step, step=step, layout=_TRAINED)
            self.say(f"  {made.files} rank files, {nbytes_text(made.bytes_written)}, in {made.seconds:.1f} s")
        self.show(f"inspect {self.second}")
        seen = inspect(self.second)
        self.say(
            f"  {seen.model}, {seen.layout}, {seen.world} ranks, step {seen.step}, {seen.parameters:,} parameters"
        )
        for row in seen.roles:
            self.say(
                f"  {row.role}: {row.tensors} tensors, {'/'.join(row.dtypes)}, {nbytes_text(row.nbytes)}"
            )

    def reshard(self) -> None:
        target = str(self.folder / "resharded")
        self.show(f"plan {self.second} {target} --layout {_WANTED}")
        planned = plan(self.second, target, layout=_WANTED)
        about = f", about {planned.seconds:.1f} s" if planned.seconds else ""
        self.say(
            f"  {planned.elements:,} elements in {planned.pairs:,} copies, each proven to be covered once{about}"
        )
        for row in planned.drops:
            self.say(f"  left behind: {row.what}: {row.why}")
        self.show(f"reshard {self.second} {target} --layout {_WANTED}")
        done = reshard(self.second, target, layout=_WANTED)
        self.must(done.checked, f"{done.files} rank files in {done.seconds:.1f} s, opened again and whole")
        self.show(f"verify {target} --against {self.second}")
        report = verify(target, against=self.second)
        self.must(
            report.exit_code == 0,
            f"{report.leaves_checked} leaves match their digests, {report.elements_compared:,} elements are bitwise equal",
        )

    def export(self) -> None:
        resharded, direct = str(self.folder / "resharded"), str(self.folder / "hf")
        hub, again = str(self.folder / "hub"), str(self.folder / "hf-through-hub")
        for source, target, to in ((self.second, direct, "hf"), (resharded, hub, "hub"), (hub, again, "hf")):
            flags = " --drop-optimizer" if source != hub else ""
            self.show(f"reshard {source} {target} --to {to}{flags}")
            done = reshard(source, target, to=to, drop_optimizer=source != hub)
            self.must(done.checked, f"{nbytes_text(done.bytes_written)}, opened again and whole")
        self.show(f"verify {again} --against {direct}")
        report = verify(again, against=direct)
        same = f"{report.elements_compared:,} elements are bitwise equal, through another layout and the original names"
        self.must(report.exit_code == 0, same)

    def logits(self) -> None:
        if find_spec("transformers") is None:
            self.say("  (transformers is not installed: its logits are not compared)")
            return
        with _quiet():
            a, b = (_logits(str(self.folder / name)) for name in ("hf", "hf-through-hub"))
        if a is None or b is None:
            self.say("  (this transformers does not know ZAYA1: its logits are not compared)")
            return
        self.must(a == b, "transformers loads both and gives the same logits, bit for bit")

    def kill(self) -> None:
        whole, target = str(self.folder / "resharded"), str(self.folder / "interrupted")
        self.show(f"reshard {self.second} {target} --layout {_WANTED}    # killed half-way with SIGKILL")
        child = subprocess.run([sys.executable, "-c", _KILLED, self.second, target, _WANTED], check=False)
        killed = child.returncode == -signal.SIGKILL
        if not killed:
            self.say("  (it ended before it could be killed)")
        self.must(
            not killed or not os.path.exists(target), "nothing that a reader could take for a checkpoint"
        )
        self.show(f"reshard {self.second} {target} --layout {_WANTED}    # the same command again")
        if not os.path.exists(target):
            done = reshard(self.second, target, layout=_WANTED)
            self.say(f"  {nbytes_text(done.bytes_reused)} were durable already and are kept")
        left = [name for name in os.listdir(self.folder) if name.endswith(".unfinished")]
        equal = _same_files(whole, target)
        self.must(equal and not left, "the same files as in one go, byte for byte; nothing else stays")

    def corrupt(self) -> None:
        file = Path(self.second) / "rank-00013.safetensors"
        with open(file, "r+b") as data:
            data.seek(-5000, os.SEEK_END)
            byte = data.read(1)[0]
            data.seek(-5000, os.SEEK_END)
            data.write(bytes([byte ^ 0x40]))
        self.say(f"Now one bit of {file.relative_to(self.folder)} is flipped.")
        self.show(f"verify {self.second}")
        report = verify(self.second)
        for fault in report.faults[:1]:
            self.say(f"  {fault.what}")
        self.must(
            report.exit_code == 1 and report.faults[0].file == file.name, "found, with its file and tensors"
        )
        resharded = str(self.folder / "resharded")
        self.show(f"diff {self.second} {resharded}")
        found = diff(self.second, resharded)
        self.must(
            found.tensors_differing == 1 and "rank 13's" in found.where,
            f"{found.tensors[0].tensor}/{found.tensors[0].role} at {list(found.tensors[0].at)}: {found.where}"
            if found.tensors
            else "no difference",
        )
        self.show(f"latest {self.run}")
        newest_whole = newest(str(self.run))
        for line in newest_whole.reasons():
            self.say(f"  {line.splitlines()[0][:160]}")
        self.must(newest_whole.path == self.first, f"{newest_whole.path}")


def _same_files(a: str, b: str) -> bool:
    """Whether two folders hold the same files with the same bytes."""
    ours, theirs = (sorted(p.name for p in Path(folder).iterdir()) for folder in (a, b))
    return ours == theirs and all(
        (Path(a) / name).read_bytes() == (Path(b) / name).read_bytes() for name in ours
    )


def _logits(folder: str) -> bytes | None:
    """The logits of a few tokens, as bytes; None where the library does not know the model."""
    import torch
    import transformers

    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    except (KeyError, ValueError):
        return None
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        return repr(info).encode()
    with torch.no_grad():
        logits = model(torch.arange(1, 33)[None]).logits
    return logits.float().numpy().tobytes()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep a library's progress bars and warnings off the terminal."""
    before = {
        name: os.environ.get(name)
        for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
    }
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
