"""Device of the tests of Triton kernels: a GPU, or the CPU under Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS_TRITON = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"
    ),
]
