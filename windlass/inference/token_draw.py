"""Draw of tokens by temperature, min-p, top-k and top-p.

[Note: exact nucleus] The nucleus is a few of 100,000 tokens, and sorting all of them takes longer than a small model's
step. So tokens whose weight is at least a threshold are sorted alone, if they reach `top_p` together; else the
threshold is lowered, down to all tokens. The result does not depend on the threshold that was enough.

On the CPU each row is computed by itself, so its token has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windlass.inference.sampling_params import SamplingParams

_THRESHOLDS = (1e-2, 1e-4, 1e-6)
_CHUNK = 512


def draw_tokens(scores: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Return a token for each row, int64 `[rows]`: the inverse of the cumulative distribution at its number.

    Args:
        scores: `[rows, vocabulary]`; the highest of each row is finite.
        params: of each row, none greedy.
        uniforms: of each row, in [0, 1).
    """
    if not scores.is_cpu:
        return draw_together(scores, params, uniforms)
    drawn = [draw_one(row, one, uniform) for row, one, uniform in zip(scores, params, uniforms, strict=True)]
    return torch.tensor(drawn, dtype=torch.long)


def draw_one(scores: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Draw a token by `scores` `[vocabulary]`."""
    # relative to the highest score, or a low temperature would overflow
    scaled = (scores - scores.max()) / params.temperature
    weights = scaled.exp()
    ids = None
    if 0 < params.top_k < len(scores):
        ids = (scaled >= scaled.topk(params.top_k).values[-1]).nonzero()[:, 0]
    if params.min_p:  # the likeliest token has the weight 1
        ids = (weights >= params.min_p).nonzero()[:, 0] if ids is None else ids[weights[ids] >= params.min_p]
    if params.top_p < 1:
        ids = _nucleus(weights, ids, params.top_p)
    if ids is None:
        return _invert_in_chunks(weights, uniform)
    return int(ids[_invert(weights[ids], uniform)])


def draw_together(scores: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Draw tokens for all rows at once, without waiting for the device."""
    device = scores.device

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    weights = scaled.exp()
    for row, p in enumerate(params):
        if 0 < p.top_k < scores.shape[-1]:
            weights[row] = weights[row].masked_fill(scaled[row] < scaled[row].topk(p.top_k).values[-1], 0)
    weights = weights.masked_fill(weights < column([p.min_p for p in params]), 0)
    if any(p.top_p < 1 for p in params):
        ordered, ids = weights.double().sort(dim=-1, descending=True, stable=True)
        cumulative = ordered.cumsum(dim=-1)
        mass = cumulative[:, -1:] * column([p.top_p for p in params], torch.float64)
        dropped = cumulative - ordered >= mass
        dropped &= column([p.top_p for p in params]) < 1
        dropped[:, 0] = False
        weights = weights.masked_fill(torch.zeros_like(dropped).scatter(1, ids, dropped), 0)
    cumulative = weights.double().cumsum(dim=-1)
    places = torch.searchsorted(cumulative, column(uniforms, torch.float64) * cumulative[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(places, last)


def _nucleus(weights: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """Return the likeliest of the tokens `ids` (None: all) whose weights together first reach `top_p`, sorted."""
    among = weights if ids is None else weights[ids]
    mass = float(among.sum()) * top_p
    for threshold in (*_THRESHOLDS, 0.0):
        chosen = (among >= threshold).nonzero()[:, 0]
        ordered, places = among[chosen].double().sort(descending=True, stable=True)
        cumulative = ordered.cumsum(0)
        if threshold == 0 or cumulative[-1] >= mass:
            break
    count = max(int((cumulative - ordered < mass).sum()), 1)
    chosen = chosen[places[:count]]
    return chosen if ids is None else ids[chosen]


def _invert(weights: torch.Tensor, uniform: float) -> int:
    """Return the place of the first cumulative weight above `uniform` of their sum."""
    cumulative = weights.double().cumsum(0)
    return _place(cumulative, weights, uniform * float(cumulative[-1]))


def _invert_in_chunks(weights: torch.Tensor, uniform: float) -> int:
    """Compute `_invert` by sums of chunks, and then in the chunk that is hit."""
    whole = len(weights) // _CHUNK
    if whole < 2:
        return _invert(weights, uniform)
    sums = weights[: whole * _CHUNK].view(whole, _CHUNK).sum(dim=-1)
    sums = torch.cat([sums, weights[whole * _CHUNK :].sum()[None]])
    cumulative = sums.double().cumsum(0)
    target = uniform * float(cumulative[-1])
    chunk = _place(cumulative, sums, target)
    inside = weights[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    rest = target - float(cumulative[chunk - 1]) if chunk else target
    return chunk * _CHUNK + _place(inside.double().cumsum(0), inside, rest)


def _place(cumulative: torch.Tensor, weights: torch.Tensor, target: float) -> int:
    # right=True skips weights of 0; rounding must not exceed the last weight above 0
    place = int(torch.searchsorted(cumulative, torch.tensor(target, dtype=torch.float64), right=True))
    if place < len(weights) and weights[place] > 0:
        return place
    return int(weights.nonzero()[-1])
