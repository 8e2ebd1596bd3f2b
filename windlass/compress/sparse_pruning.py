"""Removal of single weights: magnitude, Wanda and SparseGPT, unstructured and n:m.

[Note: sparse patterns] A share is the part of each row that is removed; `n:m` keeps at most n of each m neighbours of a
row, as hardware for sparse products requires. The weights stay in dense tensors, with zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.base.errors import ConfigError
from windlass.compress.gptq import inverse_factor

SPARSITY_METHODS = ("magnitude", "wanda", "sparsegpt")
_COLUMNS = 128  # columns that SparseGPT prunes before it compensates their errors in the later columns by one product


@dataclass(frozen=True)
class SparsePattern:
    """Pattern of the weights that stay.

    Attributes:
        share: part of each row that is removed.
        keep, of: at most `keep` of each `of` neighbours stay; 0: the share applies to full rows.
    """

    share: float
    keep: int = 0
    of: int = 0


def parse_pattern(text: str) -> SparsePattern:
    """Read a share, e.g. 0.5, or n:m, e.g. 2:4.

    Raises:
        ConfigError: the text is neither a share nor n:m.
    """
    groups = re.fullmatch(r"(\d+):(\d+)", text)
    if groups is not None and 0 < int(groups[1]) < int(groups[2]):
        keep, of = int(groups[1]), int(groups[2])
        return SparsePattern(1 - keep / of, keep, of)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError(f"sparsity is {text!r}; write a share like 0.5, or n:m like 2:4")
    return SparsePattern(share)


def check_pattern(pattern: SparsePattern, features: Mapping[str, int]) -> None:
    """Check that the neighbours of an n:m pattern divide the input features of all layers.

    Args:
        features: number of input features by layer.

    Raises:
        ConfigError: they do not; the message names the first such layer.
    """
    wrong = [name for name, count in features.items() if pattern.of and count % pattern.of]
    if wrong:
        raise ConfigError(
            f"sparsity {pattern.keep}:{pattern.of} does not divide the {features[wrong[0]]} input features of layer "
            f"{wrong[0]!r}; use a share, or leave a multiple of {pattern.of} features"
        )


def sparsify(
    weight: Tensor, pattern: SparsePattern, method: str, hessian: Tensor | None = None, name: str = ""
) -> Tensor:
    """Return a matrix in which the least important weights are 0.

    Scores are `|w|` (magnitude), `|w| sqrt(sum x^2)` (Wanda, Sun et al. 2023, https://arxiv.org/abs/2306.11695) or
    `w^2 / U_jj^2` with the errors compensated by later columns (SparseGPT, Frantar and Alistarh 2023,
    https://arxiv.org/abs/2301.00774), where `U` is the upper Cholesky factor of the inverse of `hessian`.

    Args:
        weight: float32 `[rows, columns]`.
        hessian: sum of `x x^T` over the layer's inputs; None only for magnitude.
        name: name of the layer, for errors.

    Raises:
        ConfigError: the method is unknown or needs `hessian`, or `pattern.of` does not divide the columns.
    """
    if method not in SPARSITY_METHODS:
        raise ConfigError(f"sparsity method is {method!r}; it is one of {', '.join(SPARSITY_METHODS)}")
    check_pattern(pattern, {name: weight.shape[1]})
    if method == "magnitude":
        return weight.masked_fill(~mask_of(weight.abs(), pattern), 0)
    if hessian is None:
        raise ConfigError(f"sparsity method {method} needs a calibration text; give some, or use magnitude")
    if method == "wanda":
        scores = weight.abs() * hessian.diagonal().clamp(min=0).sqrt().to(weight.dtype)
        return weight.masked_fill(~mask_of(scores, pattern), 0)
    return _sparsegpt(weight, pattern, hessian)


def mask_of(scores: Tensor, pattern: SparsePattern) -> Tensor:
    """Return True where a weight stays: the largest scores of each row, or of each group of neighbours."""
    rows, columns = scores.shape
    grouped = scores.reshape(rows, -1, pattern.of) if pattern.of else scores[:, None]
    keep = pattern.keep if pattern.of else columns - round(pattern.share * columns)
    order = grouped.argsort(dim=2, descending=True, stable=True)[..., :keep]
    return torch.zeros_like(grouped, dtype=torch.bool).scatter_(2, order, True).reshape(rows, columns)


def _sparsegpt_scores(weight: Tensor, diagonal: Tensor, is_read: Tensor) -> Tensor:
    """Return SparseGPT's scores; those of features that the calibration text never uses are below all others, in the
    order of magnitude, since the damped factor has no information about them."""
    return torch.where(is_read, (weight / diagonal).square(), -1 / (1 + weight.abs()))


def _sparsegpt(weight: Tensor, pattern: SparsePattern, hessian: Tensor) -> Tensor:
    columns = weight.shape[1]
    factor = inverse_factor(hessian)
    is_read = hessian.diagonal() > 0
    left = weight.clone()
    found = torch.empty_like(weight)
    width = max(_COLUMNS // pattern.of, 1) * pattern.of if pattern.of else _COLUMNS
    for start in range(0, columns, width):
        stop = min(start + width, columns)
        block, errors = left[:, start:stop], weight.new_empty(len(weight), stop - start)
        diagonal = factor.diagonal()[start:stop]
        stays = mask_of(_sparsegpt_scores(block, diagonal, is_read[start:stop]), pattern)
        for place in range(stop - start):
            if pattern.of and place % pattern.of == 0:  # scores of the compensated weights
                near = slice(place, place + pattern.of)
                scores = _sparsegpt_scores(block[:, near], diagonal[near], is_read[start:stop][near])
                stays[:, near] = mask_of(scores, pattern)
            value = block[:, place] * stays[:, place]
            error = (block[:, place] - value) / diagonal[place]
            block[:, place + 1 :] -= error[:, None] * factor[start + place, start + place + 1 : stop]
            found[:, start + place], errors[:, place] = value, error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return found
