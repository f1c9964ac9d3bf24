"""Which form of an operation runs on a device.

Order of choice: the caller's `backend`, the variable `CKPTKIT_KERNELS` (`torch`, `triton` or `hip`), then Triton on
a GPU (CUDA and ROCm are both `cuda` to torch) where it is installed, else torch. Under `TRITON_INTERPRET=1`
Triton also serves CPU tensors, slowly: that is for tests. HIP forms run only when asked for by name.

>>> backends("rmsnorm_residual_forward")
('torch', 'triton', 'hip')
>>> resolve("leaf_digests", "cpu", backend="torch")
'torch'
"""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckptkit.errors import UsageError

INSTALLED: bool = find_spec("triton") is not None  # found, not loaded: that takes longer than most commands

_HERE = "ckptkit.kernels."
_FORMS: dict[str, dict[str, str]] = {
    "rmsnorm_residual_forward": {
        "torch": "rmsnorm:forward_torch",
        "triton": "rmsnorm_triton:forward",
        "hip": "native:rmsnorm_residual_forward",
    },
    "rmsnorm_residual_backward": {
        "torch": "rmsnorm:backward_torch",
        "triton": "rmsnorm_triton:backward",
        "hip": "native:rmsnorm_residual_backward",
    },
    "route": {"torch": "router:route_torch", "triton": "router_triton:route"},
    "newton_schulz": {
        "torch": "newton_schulz:newton_schulz_torch",
        "triton": "newton_schulz_triton:newton_schulz",
    },
    "adamw_step": {"torch": "adamw:adamw_step_torch", "triton": "adamw_triton:adamw_step"},
    "leaf_digests": {
        "torch": "digest:leaf_digests_torch",
        "triton": "digest_triton:leaf_digests",
        "hip": "native:leaf_digests",
    },
    "pack": {"torch": "pack:pack_torch", "triton": "digest_triton:pack"},
    "digest_in_place": {"torch": "pack:digest_in_place_torch", "triton": "digest_triton:digest_in_place"},
    "unpack": {"torch": "pack:unpack_torch", "triton": "digest_triton:unpack"},
}


def operations() -> tuple[str, ...]:
    """The names that `choose` knows."""
    return tuple(_FORMS)


def backends(operation: str) -> tuple[str, ...]:
    """The backends that have a form of `operation`, whether or not they run here."""
    if operation not in _FORMS:
        raise UsageError(f"no kernel is called {operation!r}; there are {', '.join(_FORMS)}")
    return tuple(_FORMS[operation])


def interpreted() -> bool:
    """Whether Triton runs in its interpreter (decided by the environment before Triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on")


def resolve(operation: str, device: Any, backend: str | None = None) -> str:
    """The backend that serves `operation` on `device`.

    Args:
        operation: One of `operations()`.
        device: A `torch.device`, or its name (`"cuda:0"`).
        backend: `torch`, `triton` or `hip` to insist; None to choose.

    Raises:
        UsageError: The operation is unknown, or the backend asked for has no form of it or cannot run here.
    """
    have = backends(operation)
    on_gpu = str(device).startswith("cuda")
    wanted = backend or os.environ.get("CKPTKIT_KERNELS") or None
    if wanted is None:
        return "triton" if "triton" in have and INSTALLED and on_gpu else "torch"
    if wanted not in have:
        if backend is None:  # the variable speaks of all operations; those without that form fall back
            return "torch"
        raise UsageError(f"{operation} has no {wanted!r} form; it has {', '.join(have)}")
    if wanted == "triton" and not INSTALLED:
        raise UsageError(f"the triton form of {operation} was asked for, but triton is not installed here")
    if wanted == "triton" and not (on_gpu or interpreted()):
        raise UsageError(
            f"the triton form of {operation} needs a GPU, not {device}: or set TRITON_INTERPRET=1"
        )
    if wanted == "hip" and not on_gpu:
        raise UsageError(f"the HIP form of {operation} needs a GPU, not {device}")
    return wanted


def choose(operation: str, device: Any, backend: str | None = None) -> Callable[..., Any]:
    """The function that serves `operation` on `device`; all forms of one operation share a signature."""
    chosen = resolve(operation, device, backend)
    module, _, name = _FORMS[operation][chosen].partition(":")
    form: Callable[..., Any] = getattr(import_module(_HERE + module), name)
    return form
