"""Triton's interpreter where there is no GPU. Triton looks when it is imported, and this file comes before that."""

import os
from importlib.util import find_spec

import torch

if find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
