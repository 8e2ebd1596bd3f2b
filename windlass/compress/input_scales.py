"""Scales of input features, folded into the preceding modules: SmoothQuant and AWQ.

[Note: folded scales] `W x = (W s) (x / s)`: the columns of all layers with one input are multiplied by `s`. The module
that computes the input is divided by `s`: a norm in its weight and bias, a linear layer in its rows and bias. The
model's function stays the same, and rounding errors change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from windlass.compress.integer_grid import plain_grid
from windlass.kernels.coded_formats import SAFE_MAGNITUDE
from windlass.kernels.weight_format import WeightFormat

_AWQ_STEPS = 20
_COMPARED_ROWS = 256  # approximate number of rows of a matrix on which scales are compared
_LEAST = 1e-4  # lower bound of a scale


def smoothing_scales(largest: Tensor, weights: Sequence[Tensor], strength: float = 0.5) -> Tensor:
    """Return `s_j = max|x_j| ** strength / max|w_j| ** (1 - strength)`, by Xiao et al. 2022
    (https://arxiv.org/abs/2211.10438). The scales reduce outliers of the inputs, so that int8 inputs have smaller
    errors.

    Args:
        largest: largest magnitude of each input feature, `[in_features]`; the scale of a feature with 0 is 1.
        weights: weights of all layers with this input.
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = largest.clamp(min=1e-5).pow(strength) / columns.clamp(min=1e-5).pow(1 - strength)
    return torch.where(largest > 0, scales, torch.ones_like(scales)).clamp(min=_LEAST)


def activation_aware_scales(
    mean: Tensor, weights: Sequence[Tensor], forms: Sequence[WeightFormat], hessian: Tensor
) -> tuple[Tensor, float, float]:
    """Return scales that make important features larger before rounding, by Lin et al. 2023 (AWQ,
    https://arxiv.org/abs/2306.00978).

    `s = mean|x| ** a`, divided by a constant. Of 20 values of `a` in [0, 1), the one with the least output error of the
    rounded layers is taken, see [Note: layer error]. In large matrices only evenly spaced rows are compared. Scales
    that make a weight larger than `SAFE_MAGNITUDE` are skipped.

    Args:
        mean: mean magnitude of each input feature.
        weights, forms: weights and formats of all layers with this input.
        hessian: sum of `x x^T` over the inputs.

    Returns:
        The scales, the output error of the compared rows without scales, and that with the scales.
    """
    best, narrow = torch.ones_like(mean), hessian.float()
    # scales belong to columns, so a sample of the rows is enough to compare them
    parts = [weight[:: max(len(weight) // _COMPARED_ROWS, 1)] for weight in weights]
    first = least = float("inf")
    for step in range(_AWQ_STEPS):
        scales = mean.clamp(min=_LEAST).pow(step / _AWQ_STEPS)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(min=_LEAST)
        error = 0.0
        for part, form in zip(parts, forms, strict=True):
            scaled = part * scales
            if float(scaled.abs().max()) > SAFE_MAGNITUDE:
                error = float("inf")
                break
            grid = plain_grid(form, scaled)
            error += output_error(grid.values(grid.codes(scaled)) / scales - part, narrow)
        if step == 0:
            first = error
        if error < least:
            least, best = error, scales
    return best, first, least


def output_error(change: Tensor, hessian: Tensor) -> float:
    """Return the squared error of a layer's outputs for a change of its weight; see [Note: layer error]."""
    return float(((change @ hessian.to(change.dtype)) * change).sum(dtype=torch.float64))


def fold_scales(producer: nn.Module, consumers: Sequence[nn.Linear], scales: Tensor) -> None:
    """Divide the outputs of a norm or linear layer by scales, and multiply the columns of its consumers; see [Note:
    folded scales]."""
    with torch.no_grad():
        weight = producer.get_parameter("weight")
        weight.div_(scales if weight.dim() == 1 else scales[:, None])
        bias = getattr(producer, "bias", None)
        if isinstance(bias, Tensor):
            bias.div_(scales)
        for consumer in consumers:
            consumer.weight.mul_(scales)
