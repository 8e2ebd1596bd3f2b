"""Draw of tokens by temperature, min-p, top-k and top-p.

On the CPU each row is computed by itself, so its token does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.token_sampling import draw_tokens as native_draw
from windlass.kernels.token_sampling import find_sampling_path

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.intp]


def greatest(scores: torch.Tensor) -> tuple[list[float], list[int]]:
    """Return the highest score of each row and the first token that has it: `scores.max(dim=-1)`. NaN counts as the
    highest.

    Args:
        scores: float32 `[rows, vocabulary]`.
    """
    if not scores.is_cpu or 0 in scores.shape:
        best, tokens = scores.max(dim=-1)
        return best.tolist(), tokens.tolist()
    values = scores.numpy()
    found = values.argmax(axis=-1)  # several times faster than torch
    return values[np.arange(len(found)), found].tolist(), found.tolist()


def draw_tokens(scores: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Return a token for each row: the inverse of its cumulative distribution at its random number.

    Args:
        scores: `[rows, vocabulary]`; the highest of each row is finite.
        params: sampling parameters of each row, none greedy.
        uniforms: random number of each row, in [0, 1).
    """
    if not scores.is_cpu:
        return draw_together(scores, params, uniforms).tolist()
    if (path := find_sampling_path()) is not None:
        vocabulary = scores.shape[-1]  # as a limit it excludes nothing, and a larger one may not fit into a float
        settings = [
            (p.temperature, min(max(p.top_k, 0), vocabulary), p.top_p, p.min_p, p.min_p_is_last, uniform)
            for p, uniform in zip(params, uniforms, strict=True)
        ]
        return native_draw(scores.contiguous().float(), np.array(settings, dtype=np.float64), path)
    return [draw_one(row, one, uniform) for row, one, uniform in zip(scores, params, uniforms, strict=True)]


def draw_one(scores: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Draw a token from `scores` `[vocabulary]` on the CPU, without native kernels."""
    # subtract the highest score, or a low temperature would overflow
    scaled = (scores - scores.max()) / params.temperature
    # numpy selects few of many elements several times faster than torch
    weights: FloatArray = scaled.exp().numpy()
    ids = None
    if 0 < params.top_k < len(scores):
        ids = np.flatnonzero(scaled.numpy() >= float(scaled.topk(params.top_k).values[-1]))
    if params.min_p and not params.min_p_is_last:
        ids = _likely(weights, ids, params.min_p)
    if params.top_p < 1:
        ids = _nucleus(weights, ids, params.top_p)
    if params.min_p and params.min_p_is_last:
        ids = _likely(weights, ids, params.min_p)
    if ids is None:
        return _invert(weights, uniform)
    return int(ids[_invert(weights[ids], uniform)])


def draw_together(scores: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Draw tokens for all rows at once, without a device sync."""
    device = scores.device

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), device)[:, None]

    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    weights = scaled.exp()
    limits = [p.top_k if 0 < p.top_k < scores.shape[-1] else 0 for p in params]
    if any(limits):
        ordered = scaled.topk(max(limits), dim=-1).values
        places = upload(torch.tensor([max(limit - 1, 0) for limit in limits]), device)[:, None]
        lowest = ordered.gather(1, places).masked_fill(column(limits) == 0, -torch.inf)
        weights = weights.masked_fill(scaled < lowest, 0)
    weights = weights.masked_fill(weights < column([0.0 if p.min_p_is_last else p.min_p for p in params]), 0)
    if any(p.top_p < 1 for p in params):
        ordered, ids = weights.double().sort(dim=-1, descending=True, stable=True)
        cumulative = ordered.cumsum(dim=-1)
        mass = cumulative[:, -1:] * column([p.top_p for p in params], torch.float64)
        dropped = cumulative - ordered >= mass
        dropped &= column([p.top_p for p in params]) < 1
        dropped[:, 0] = False
        weights = weights.masked_fill(torch.zeros_like(dropped).scatter(1, ids, dropped), 0)
    if any(p.min_p and p.min_p_is_last for p in params):
        weights = weights.masked_fill(weights < column([p.min_p if p.min_p_is_last else 0.0 for p in params]), 0)
    cumulative = weights.double().cumsum(dim=-1)
    places = torch.searchsorted(cumulative, column(uniforms, torch.float64) * cumulative[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(places, last)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device. A copy to a GPU is queued, and the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _likely(weights: FloatArray, ids: IntArray | None, min_p: float) -> IntArray:
    """Return the ids, of `ids` or of all tokens, with at least `min_p` of the likeliest token's weight, which is 1."""
    likely = (weights if ids is None else weights[ids]) >= np.float32(min_p)
    return np.flatnonzero(likely) if ids is None else ids[likely]


def _nucleus(weights: FloatArray, ids: IntArray | None, top_p: float) -> IntArray:
    """Return the ids of the nucleus in ascending order: the fewest likeliest tokens with at least `top_p` of the total
    weight.

    Args:
        ids: Tokens to choose from, in ascending order; None: all tokens.
    """
    among = weights if ids is None else weights[ids]
    order = np.argsort(-among, kind="stable")  # the first of equally likely tokens come first
    before = among[order].cumsum(dtype=np.float64) - among[order]
    kept = np.sort(order[: max(int((before < float(among.sum()) * top_p).sum()), 1)])
    return kept if ids is None else ids[kept]


def _invert(weights: FloatArray, uniform: float) -> int:
    """Return the index of the first cumulative weight above `uniform` times the sum of all weights."""
    cumulative = weights.cumsum(dtype=np.float64)
    return _place(cumulative, weights, uniform * float(cumulative[-1]))


def _place(cumulative: npt.NDArray[np.float64], weights: FloatArray, target: float) -> int:
    # side="right" skips weights of 0; rounding must not lead past the last weight above 0
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place < len(weights) and weights[place] > 0:
        return place
    return int(np.flatnonzero(weights)[-1])
