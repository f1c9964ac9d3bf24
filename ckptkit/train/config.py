"""Configuration of a run: plain fields, read from a TOML file, each with a default.

`[model]` holds the fields of a Transformers `config.json` (any may be left out after `base`, a preset of `ckptkit synth`);
the other tables are the classes below. A name that no table knows is an error, so that a typing mistake is not a default.

>>> Config.from_table({"model": {"base": "zaya-tiny"}, "train": {"steps": 10}}).train.steps
10
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.ops.presets import PRESETS

SHIPPED = "ckptkit.train.configs"


@dataclass
class TrainTable:
    """How long, how much at a time, and in what precision.

    Attributes:
        steps: Optimizer steps of the whole run.
        batch: Sequences of one step, over all ranks.
        micro_batch: Sequences that one rank takes through the model at once.
        seq_len: Tokens of a sequence.
        seed: Of the initial weights.
        dtype: Of weights and activations: `float32` or `bfloat16` (with float32 masters); `auto` is bfloat16 on a GPU.
        skip: What a token that chose the skip expert gets: `zero` (as Transformers has it) or `identity`, its normed
            input times its probability (as the original code has it).
        dispatch: `torch`, `triton` or `hip`: which form of the kernels; empty to choose by device.
    """

    steps: int = 100
    batch: int = 8
    micro_batch: int = 1
    seq_len: int = 128
    seed: int = 0
    dtype: str = "auto"
    skip: str = "zero"
    dispatch: str = ""


@dataclass
class OptimizerTable:
    """Muon for matrices, AdamW for the rest; warm-up, then a cosine down to `min_ratio` of each rate.

    Attributes:
        muon_lr, muon_momentum, muon_weight_decay: Of Muon; its momentum is of the lerp form.
        muon_adjust: How a matrix's shape scales the rate: `original` (sqrt(max(1, rows / columns))) or `match_rms_adamw`
            (0.2 sqrt(max(rows, columns))).
        muon_dtype: Of the operands of Newton-Schulz: `bfloat16`, `float32`, or `auto` for the first on a GPU, else the
            second (which CPUs multiply faster, and which lets layouts agree closely).
        adamw_lr, beta1, beta2, eps, weight_decay: Of AdamW; vectors (norms, biases, scales) do not decay.
        clip: Greatest norm of the whole gradient; 0 for no limit.
        warmup: Steps until the full rate.
        decay: `cosine` or `constant`.
        min_ratio: Part of the rate that is left at the last step.
    """

    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.1
    muon_adjust: str = "original"
    muon_dtype: str = "auto"
    adamw_lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: int = 10
    decay: str = "cosine"
    min_ratio: float = 0.1


@dataclass
class BalanceTable:
    """The update of the routers' balancing biases, outside the gradient (`ckptkit.train.balance`).

    Attributes:
        mode: `sign` (a fixed step towards an even load), `pid`, or `none`.
        rate: The step of `sign`.
        kp, ki, kd: Gains of `pid`.
    """

    mode: str = "sign"
    rate: float = 1e-3
    kp: float = 1e-2
    ki: float = 1e-4
    kd: float = 0.0


@dataclass
class DataTable:
    """What is learned: files, read as bytes, or a seeded synthetic text.

    Attributes:
        files: Paths or patterns; relative ones count from the configuration's folder. Empty for the synthetic text.
        seed: Of the order of sequences, and of the synthetic text.
        synthetic_bytes: Size of the synthetic text.
    """

    files: list[str] = field(default_factory=list)
    seed: int = 0
    synthetic_bytes: int = 1 << 20


@dataclass
class CheckpointTable:
    """Where and how often a run saves (`ckptkit.Checkpointer`).

    Attributes:
        root: URL of the run's folder; empty for none.
        every: Steps between saves.
        durable_every: Steps between saves that reach the URL, where a node cache holds the others; 0 for all.
        cache: `auto`, `off`, or a daemon's socket.
        init: Checkpoint of weights to start from, when the run has no step yet.
    """

    root: str = ""
    every: int = 50
    durable_every: int = 0
    cache: str = "auto"
    init: str = ""


@dataclass
class LogTable:
    """What is told while a run goes on.

    Attributes:
        every: Steps between lines on the console.
        jsonl: File that gets one JSON object a step; empty for none.
        tensorboard: Folder of TensorBoard's log; empty for none. Needs the `train` extra.
        peak_tflops: Peak of one device, for MFU; 0 to look it up by the device's name.
    """

    every: int = 1
    jsonl: str = ""
    tensorboard: str = ""
    peak_tflops: float = 0.0


_TABLES = {
    "train": TrainTable,
    "optimizer": OptimizerTable,
    "balance": BalanceTable,
    "data": DataTable,
    "checkpoint": CheckpointTable,
    "log": LogTable,
}
_CHOICES = {
    ("train", "dtype"): ("auto", "float32", "bfloat16"),
    ("train", "skip"): ("zero", "identity"),
    ("train", "dispatch"): ("", "torch", "triton", "hip"),
    ("optimizer", "muon_adjust"): ("original", "match_rms_adamw"),
    ("optimizer", "muon_dtype"): ("auto", "float32", "bfloat16"),
    ("optimizer", "decay"): ("cosine", "constant"),
    ("balance", "mode"): ("sign", "pid", "none"),
}
_AT_LEAST_ONE = (("train", "batch"), ("train", "micro_batch"), ("train", "seq_len"), ("checkpoint", "every"))


@dataclass
class Config:
    """A whole configuration. `model` is a complete Transformers configuration of a schema's family."""

    model: dict[str, Any]
    train: TrainTable = field(default_factory=TrainTable)
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    balance: BalanceTable = field(default_factory=BalanceTable)
    data: DataTable = field(default_factory=DataTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)
    log: LogTable = field(default_factory=LogTable)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "the configuration") -> "Config":
        """Check and complete a table as TOML gives it.

        Raises:
            UsageError: an unknown name, a value of another type, or no model.
        """
        _known(table, ("model", *_TABLES), where)
        given = dict(table.get("model", {}))
        base = given.pop("base", "")
        if base not in PRESETS and (base or "model_type" not in given):
            raise UsageError(
                f"{where}: [model] needs base, one of {', '.join(PRESETS)}, or a whole config.json's fields"
                + (f"; it has base = {base!r}" if base else "")
            )
        model = {**PRESETS[base][1], **given} if base else given
        tables = {name: _read(kind, table.get(name, {}), name, where) for name, kind in _TABLES.items()}
        return cls(model=model, **tables)

    @classmethod
    def load(cls, path: str) -> "Config":
        """Read a TOML file; a bare name that is no file is one of those shipped (`ckptkit train --help` lists them).

        Raises:
            UsageError: there is no such file, or it is no such TOML.
        """
        file = Path(path)
        if file.is_file():
            text, folder = file.read_text(), file.parent
        elif path in shipped():
            text, folder = (resources.files(SHIPPED) / path).read_text(), Path()
        else:
            raise UsageError(
                f"there is no configuration {path!r}; give a TOML file, or one of those shipped: {', '.join(shipped())}"
            )
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is no TOML: {error}") from error
        config = cls.from_table(table, path)
        config.data.files = [str(folder / name) for name in config.data.files]
        return config


def shipped() -> list[str]:
    """Names of the configurations in the package."""
    return sorted(item.name for item in resources.files(SHIPPED).iterdir() if item.name.endswith(".toml"))


def override(config: Config, settings: Mapping[str, Any]) -> None:
    """Set `table.field` to a value for each of `settings`, as `--set` gives them. Raises UsageError."""
    for name, value in settings.items():
        table, _, entry = name.partition(".")
        if table == "model" and entry:
            config.model[entry] = value
            continue
        if table not in _TABLES or not entry:
            raise UsageError(f"--set {name}: write TABLE.FIELD with one of model, {', '.join(_TABLES)}")
        now = {f.name: getattr(getattr(config, table), f.name) for f in fields(_TABLES[table])}
        setattr(config, table, _read(_TABLES[table], {**now, entry: value}, table, f"--set {name}"))


def _read(kind: type, given: Mapping[str, Any], table: str, where: str) -> Any:
    defaults = kind()
    _known(given, [f.name for f in fields(defaults)], f"{where}: [{table}]")
    values = {}
    for name, value in given.items():
        wanted = type(getattr(defaults, name))
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not wanted:
            raise UsageError(f"{where}: [{table}] {name} = {value!r} must be of type {wanted.__name__}")
        choices = _CHOICES.get((table, name))
        if choices and value not in choices:
            raise UsageError(
                f"{where}: [{table}] {name} = {value!r} must be one of {', '.join(filter(None, choices))}"
            )
        if isinstance(value, int | float) and (value < 0 or value < ((table, name) in _AT_LEAST_ONE)):
            raise UsageError(f"{where}: [{table}] {name} = {value!r} is too small")
        values[name] = value
    return kind(**values)


def _known(given: Mapping[str, Any], names: Any, where: str) -> None:
    for name in given:
        if name not in names:
            near = get_close_matches(name, list(names), 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise UsageError(f"{where} has no {name!r}; {hint}")
