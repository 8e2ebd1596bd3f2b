"""Draw of tokens from the scores of a vocabulary by native kernels. Each row is computed by itself, on one thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from windlass.base.errors import ModelError
from windlass.kernels.inference_path import InferencePath, get_inference_path, tensor_address

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "min_p_is_last", "uniform")
"""Columns of the settings of `draw_tokens`."""


def find_sampling_path(path: str | None = None) -> InferencePath | None:
    """Return the path with native kernels for sampling; None if there are none, or if they were built before these
    kernels existed.

    Args:
        path: one of `list_inference_paths()` in place of the active one.
    """
    found = get_inference_path(path)
    return found if hasattr(found.module, "draw_tokens") else None


def draw_tokens(scores: torch.Tensor, settings: npt.NDArray[np.float64], path: InferencePath) -> list[int]:
    """Return a token for each row: the inverse of its cumulative distribution at its uniform number.

    Args:
        scores: float32 `[rows, vocabulary]` on the CPU, contiguous; the highest of each row is finite.
        settings: `[rows, 6]`, contiguous, with the columns `SETTINGS`. `top_k` is 0 without a limit; `min_p_is_last` is
            1 if min-p applies after top-p, else 0.
    """
    if scores.dtype != torch.float32:
        raise ModelError(f"scores of {scores.dtype} cannot be drawn from by native kernels; convert them to float32")
    rows, vocabulary = scores.shape
    if not rows:
        return []
    tokens = np.empty(rows, dtype=np.int64)
    address = tensor_address("tensor of scores", scores)
    assert path.module is not None
    path.module.draw_tokens(
        path.number, address, rows, vocabulary, settings.ctypes.data, tokens.ctypes.data, torch.get_num_threads()
    )
    found: list[int] = tokens.tolist()
    return found
