"""The embedded training loop: ZAYA1, in any layout, saved and restored by ckptkit.

    config = Config.load("zaya1-tiny.toml")
    summary = train(config, "tp=2,pp=2,dp=2,zero=1")

One idea a module, in the order in which a step uses them:

| module | what it does |
|---|---|
| `config`, `dims` | the TOML file; sizes of the model |
| `held`, `initial` | what a rank holds, by the model's schema; its initial values |
| `parallel`, `collectives` | process groups of a layout; collectives that carry gradients |
| `data` | bytes to tokens, in an order that depends on the seed alone |
| `vocab`, `context`, `cca`, `moe`, `model` | embedding and loss; attention and its context parallelism; experts; a stage |
| `baseline`, `stages` | a Mixtral-style model, to compare with; which models there are |
| `pipeline` | micro-batches through the stages |
| `flat`, `muon`, `optim`, `balance` | buffers of parameters and gradients; Muon; the optimizer; the routers' biases |
| `trainer`, `loop`, `launch`, `telemetry` | a step; a run; its processes; what it tells |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.train.config import Config
    from ckptkit.train.loop import Options, Summary
    from ckptkit.train.runs import train
    from ckptkit.train.trainer import Trainer

_WHERE = {
    "Config": "config",
    "Options": "loop",
    "Summary": "loop",
    "Trainer": "trainer",
    "train": "runs",
}

__all__ = ["Config", "Options", "Summary", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ckptkit.train.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
