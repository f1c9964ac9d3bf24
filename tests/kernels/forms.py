"""Where kernels are tested: on the GPU where there is one, else on the CPU, Triton forms in Triton's interpreter."""

import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch, native
from ckptkit.kernels.dispatch import INSTALLED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed; `make kernels` installs it")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")


def _compiler_here() -> bool:
    if not ON_GPU:
        return False
    try:
        native.compiler(DEVICE)
    except UsageError:
        return False
    return True


COMPILER_HERE = _compiler_here()


def forms(operation: str) -> list:
    """Parameters for `backend`: every form of `operation`; those that cannot run here are skipped, with the reason."""
    marks = {
        "triton": needs_triton,
        "hip": pytest.mark.skipif(not COMPILER_HERE, reason="HIP forms need a GPU and hipcc or nvcc"),
    }
    return [pytest.param(backend, marks=marks.get(backend, ())) for backend in dispatch.backends(operation)]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype).to(DEVICE)


def drawn_bytes(nbytes: int, seed: int) -> torch.Tensor:
    """Uniform bytes, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(DEVICE)


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """|value - expected| / |expected|, Frobenius norms in fp64. NaN where either has one, which passes no test."""
    value, expected = value.double().cpu(), expected.double().cpu()
    return float((value - expected).norm() / expected.norm())
