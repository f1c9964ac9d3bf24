"""megatron-core without a GPU, for the example alone: it asks for one wherever it makes tensors, and is given the CPU."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and say of their type what Megatron looks for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


def pretend(device: torch.device) -> None:
    """Answer for the GPU that is not there; does nothing where there is one. There is no dropout, so its generators are left out."""
    if device.type != "cpu":
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    tracker: Any = CudaRNGStatesTracker
    tracker.add = lambda *_: None
    tracker.fork = lambda *_: nullcontext()
    _OnCpu().__enter__()
