"""Draw of tokens from the scores of a vocabulary by native kernels. Each row is computed by itself, on one thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from windlass.base.errors import ModelError
from windlass.kernels.inference_path import InferencePath, get_inference_path, tensor_address


def find_sampling_path() -> InferencePath | None:
    """Return the active path if it has native kernels for sampling; None if there are none, or if they were built
    before these kernels existed.
    """
    found = get_inference_path()
    return found if hasattr(found.module, "draw_tokens") else None


def draw_tokens(scores: torch.Tensor, settings: npt.NDArray[np.float64], path: InferencePath) -> list[int]:
    """Return a token for each row: the inverse of its cumulative distribution at its uniform number.

    Args:
        scores: float32 `[rows, vocabulary]` on the CPU, contiguous; the highest of each row is finite.
        settings: `[rows, 6]`, contiguous: temperature, top-k (0: no limit), top-p, min-p, 1 if min-p applies after
            top-p and 0 if before it, and the uniform number in [0, 1).

    Raises:
        ModelError: the scores have another dtype.
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
