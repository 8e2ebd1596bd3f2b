"""Kernels for one tile of attention, i.e. for a range of queries and a range of keys.

Let `L` be the log-sum-exp of all scores of a query. A tile contributes `exp(scores - L) V` to the output, and its
contribution to every gradient follows from `L` and the output of all tiles (T. Dao, "FlashAttention-2", arXiv
2307.08691, algorithm 2). So tiles can be computed in any order, on any rank, and summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from windlass.attention.mask_pattern import MaskBand
from windlass.parallel.sequence.attention_dropout import AttentionDropout
from windlass.parallel.sequence.attention_tiles import Tile

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value `[samples, heads, tokens, features]`, with equal numbers of heads; or their gradients."""

Attended = tuple[torch.Tensor, torch.Tensor]
"""Output `[samples, heads, queries, features]` and log-sum-exp of the scores `[samples, heads, queries]`."""

MAX_TILE_SIZE = 1024
"""Largest number of queries, and of keys, in a tile, for kernels that hold all scores of a tile in memory."""


@dataclass(frozen=True)
class ScoreSpec:
    """Computation of attention weights: `score = scale * query . key`, then soft cap, mask band, softmax and dropout.

    Attributes:
        scale: factor of the scores.
        softcap: bound `c` of the scores, which become `c * tanh(score / c)`; None: no bound.
        mask_band: distances (query minus key position) that are visible, for tiles of the kinds "band" and "causal".
        dropout: dropout of the weights; None: no dropout.
    """

    scale: float
    softcap: float | None
    mask_band: MaskBand
    dropout: AttentionDropout | None = None


class TileKernel(Protocol):
    """Kernel for tiles.

    Attributes:
        max_tile_size: largest number of queries, and of keys, in a tile; None: no limit.
    """

    max_tile_size: int | None

    def forward(self, qkv: Qkv, tile: Tile, score_spec: ScoreSpec) -> Attended:
        """Return the tile's output and log-sum-exp."""
        ...

    def backward(self, gradient: torch.Tensor, qkv: Qkv, attended: Attended, tile: Tile, score_spec: ScoreSpec) -> Qkv:
        """Return this tile's part of the gradients of query, key and value.

        Args:
            gradient: gradient of the output.
            attended: output and log-sum-exp of all tiles.
        """
        ...


class MatmulTileKernel:
    """Kernel of matrix products, for any tile on any device. It holds all scores of the tile, in fp32 or fp64."""

    max_tile_size: int | None = MAX_TILE_SIZE

    def forward(self, qkv: Qkv, tile: Tile, score_spec: ScoreSpec) -> Attended:
        query, key, value = map(_upcast, qkv)
        scores = self._scores(query, key, tile, score_spec)
        lse = scores.logsumexp(dim=-1)
        weights = (scores - _zero_if_unseen(lse).unsqueeze(-1)).exp_()
        if score_spec.dropout is not None:
            weights *= score_spec.dropout.weight_factors(query.shape[1], tile, query.device)
        return weights @ value, lse

    def backward(self, gradient: torch.Tensor, qkv: Qkv, attended: Attended, tile: Tile, score_spec: ScoreSpec) -> Qkv:
        query, key, value, gradient = *map(_upcast, qkv), _upcast(gradient)
        output, lse = attended
        scores = self._scores(query, key, tile, score_spec)
        weights = (scores - _zero_if_unseen(lse).unsqueeze(-1)).exp()
        to_weights = gradient @ value.transpose(-1, -2)
        mean = (gradient * _upcast(output)).sum(dim=-1, keepdim=True)
        if score_spec.dropout is None:
            to_value = weights.transpose(-1, -2) @ gradient
        else:
            factors = score_spec.dropout.weight_factors(query.shape[1], tile, query.device)
            to_value = (weights * factors).transpose(-1, -2) @ gradient
            to_weights *= factors
        to_scores = weights.mul_(to_weights.sub_(mean))
        if score_spec.softcap is not None:  # weights of masked pairs are 0, but 0 * inf would be nan
            to_scores *= 1 - (scores.masked_fill_(scores == -torch.inf, 0) / score_spec.softcap).square_()
        to_scores *= score_spec.scale
        return to_scores @ key, to_scores.transpose(-1, -2) @ query, to_value

    def _scores(self, query: torch.Tensor, key: torch.Tensor, tile: Tile, score_spec: ScoreSpec) -> torch.Tensor:
        scores = (query @ key.transpose(-1, -2)).mul_(score_spec.scale)
        if score_spec.softcap is not None:
            scores = scores.div_(score_spec.softcap).tanh_().mul_(score_spec.softcap)
        if tile.kind != "full":
            q = torch.arange(query.shape[2], device=query.device)
            k = torch.arange(key.shape[2], device=query.device)
            scores.masked_fill_(~score_spec.mask_band.allows(q[:, None] - k + tile.distance), -torch.inf)
        return scores


class FlashTileKernel:
    """Flash attention kernels of torch: for full and causal tiles, without soft cap and dropout."""

    max_tile_size: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        # CUDA's backward takes the cumulative lengths and the dropout state of the forward
        self._saved_for_backward: tuple[Any, ...] = ()

    def forward(self, qkv: Qkv, tile: Tile, score_spec: ScoreSpec) -> Attended:
        (query, key, value), causal = qkv, tile.kind == "causal"
        if not self._cuda:
            cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, scale=score_spec.scale
            )
            return cpu[0], cpu[1]
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=score_spec.scale
        )
        self._saved_for_backward = (found[2], found[3], found[6], found[7])
        return found[0], found[1]

    def backward(self, gradient: torch.Tensor, qkv: Qkv, attended: Attended, tile: Tile, score_spec: ScoreSpec) -> Qkv:
        (query, key, value), causal = qkv, tile.kind == "causal"
        output, lse = attended[0].contiguous(), attended[1].contiguous()
        if not self._cuda:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, output, lse, 0.0, causal, scale=score_spec.scale
            )
            return found[0], found[1], found[2]
        sequences_q, sequences_k, seed, offset = self._saved_for_backward
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient.contiguous(),
            query,
            key,
            value,
            output,
            lse,
            sequences_q,
            sequences_k,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            seed,
            offset,
            scale=score_spec.scale,
        )
        return found[0], found[1], found[2]


class TileKernels:
    """Selection of a kernel for each tile of one call: torch's flash kernel if it supports the tile, else matrix
    products."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_spec: ScoreSpec) -> None:
        self._plain = MatmulTileKernel()
        plain = score_spec.softcap is not None or score_spec.dropout is not None
        self._fused = None if plain or not _supports_flash(query, key, value) else FlashTileKernel(query.device)

    @property
    def max_tile_size(self) -> int | None:
        """Largest number of queries, and of keys, in a tile; None: no limit."""
        return self._plain.max_tile_size if self._fused is None else self._fused.max_tile_size

    def kernel_for(self, tile: Tile) -> TileKernel:
        """Return the kernel for this tile."""
        return self._plain if self._fused is None or tile.kind == "band" else self._fused


def _supports_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if torch has a flash kernel for these tensors."""
    if not (query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]):
        return False
    if query.device.type == "cpu":
        return query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    usable = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    recent = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return usable and recent and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _zero_if_unseen(lse: torch.Tensor) -> torch.Tensor:
    """Replace -inf by 0, so that queries that see no key get weights of 0 instead of nan."""
    return lse.masked_fill(lse == -torch.inf, 0)
