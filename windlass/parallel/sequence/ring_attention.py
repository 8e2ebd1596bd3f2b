"""Ring attention: keys and values pass round a ring of ranks, and each rank merges the results of its queries.

H. Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889. Results of blocks are merged by their
log-sum-exp, in fp32. The backward passes keys and values round once more, followed by their gradients, to which every
rank adds its part. In the forward a rank receives `2 N k (R - 1) / R` elements, for N tokens with k features of keys
and k features of values on a ring of R ranks. In the backward it receives the same, and R blocks of gradients in fp32.
Tiles without visible pairs are not computed. With a sliding window, blocks that are visible to no rank are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.collective_activity import WaitScope
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.point_to_point import start_exchange, wait_for_transfers
from windlass.parallel.sequence.attention_tiles import Tile
from windlass.parallel.sequence.tile_kernels import ScoreSpec, TileKernels


class RingTransfer:
    """Transfer to the rank `shift` places further along the axis, and from the rank `shift` places before.

    The received tensors have the shapes of the sent ones. This object keeps the sent tensors alive until `wait`; they
    must not change before. It is `MeshAxis.shift`, split into start and wait.
    """

    def __init__(self, axis: MeshAxis, tensors: Sequence[torch.Tensor], shift: int) -> None:
        self._axis, self._send_buffers = axis, [tensor.contiguous() for tensor in tensors]
        self._works: list[Any] = []
        if shift % axis.size == 0:
            self._receive_buffers = self._send_buffers
            return
        self._receive_buffers = [torch.empty_like(tensor) for tensor in self._send_buffers]
        to, source = (axis.index + shift) % axis.size, (axis.index - shift) % axis.size
        self._works = start_exchange(
            axis.group,
            [(to, tensor) for tensor in self._send_buffers],
            [(source, tensor) for tensor in self._receive_buffers],
        )
        axis.traffic.add("pass_on", 0, sum(tensor.nbytes for tensor in self._receive_buffers))

    def wait(self) -> list[torch.Tensor]:
        """Return the received tensors, ready for later work on the current stream."""
        with WaitScope(f"a pass along {self._axis.name}"):
            wait_for_transfers(self._works)
        self._works, self._send_buffers = [], []
        return self._receive_buffers


@dataclass(frozen=True)
class RingContext:
    """Parameters of one attention call on one rank of a ring.

    Attributes:
        axis: mesh axis of the ring.
        ring_stride: distance along `axis` of neighbours on the ring.
        tiles_by_step: for each ring step, the visible tiles of the local queries and of the block of keys that arrives
            in this step. The block of step `i` is from the rank `i` places before. All ranks have the same number of
            steps.
        block_tokens: for each ring step, the number of tokens of its block.
        max_block_tokens: number of tokens that each block is padded to for sending.
        key_head_of: for each query head, the key head that it uses.
        score_spec: computation of scores and weights.
    """

    axis: MeshAxis
    ring_stride: int
    tiles_by_step: tuple[tuple[Tile, ...], ...]
    block_tokens: tuple[int, ...]
    max_block_tokens: int
    key_head_of: tuple[int, ...]
    score_spec: ScoreSpec

    def repeat_kv_heads(self, keys: torch.Tensor) -> torch.Tensor:
        """Repeat the heads of keys or values, so that there is one for each query head."""
        each = self._queries_per_key(keys.shape[1])
        if each is not None:
            return keys if each == 1 else keys.repeat_interleave(each, dim=1)
        return keys.index_select(1, torch.tensor(self.key_head_of, device=keys.device))

    def sum_kv_gradients(self, gradient: torch.Tensor, heads: int) -> torch.Tensor:
        """Sum a gradient over the query heads that share a key head: the transpose of `repeat_kv_heads`."""
        each = self._queries_per_key(heads)
        if each is not None:
            return gradient if each == 1 else gradient.unflatten(1, (heads, each)).sum(dim=2)
        total = gradient.new_zeros((gradient.shape[0], heads, *gradient.shape[2:]))
        return total.index_add_(1, torch.tensor(self.key_head_of, device=gradient.device), gradient)

    def _queries_per_key(self, heads: int) -> int | None:
        """Return the number of query heads of each of `heads` key heads; None if the numbers differ."""
        each = len(self.key_head_of) // max(heads, 1)
        return each if self.key_head_of == tuple(head for head in range(heads) for _ in range(each)) else None

    def send_to_next(self, tensors: Sequence[torch.Tensor], shift: int = 1) -> RingTransfer:
        """Start to send tensors to the rank `shift` places further on the ring."""
        return RingTransfer(self.axis, tensors, shift * self.ring_stride)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        context: RingContext,
        kernels: TileKernels,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        full = _MergedOutput(query, value.shape[-1])
        for step, (k, v, tiles, _) in enumerate(_ring_blocks(context, key, value)):
            if not tiles:
                continue
            k, v = (
                context.repeat_kv_heads(k[:, :, : context.block_tokens[step]]),
                context.repeat_kv_heads(v[:, :, : context.block_tokens[step]]),
            )
            for tile in tiles:
                qkv = _tile_slice(query, tile, "q"), _tile_slice(k, tile, "k"), _tile_slice(v, tile, "k")
                full.add(tile, *kernels.kernel_for(tile).forward(qkv, tile, context.score_spec))
        output = full.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, full.lse)
        ctx.ring_context, ctx.kernels = context, kernels
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring_context, kernels = ctx.ring_context, ctx.kernels
        query, key, value, output, lse = ctx.saved_tensors
        to_query = _wide_zeros(query)
        transfer: RingTransfer | None = None
        arrived: list[torch.Tensor] = []
        for step, (k, v, tiles, last) in enumerate(_ring_blocks(ring_context, key, value)):
            to_key, to_value = _wide_zeros(k), _wide_zeros(v)
            k_all, v_all = (ring_context.repeat_kv_heads(k), ring_context.repeat_kv_heads(v)) if tiles else (k, v)
            for tile in tiles:
                rows, (q0, q1), (k0, k1) = slice(*tile.samples), tile.queries, tile.keys
                qkv = _tile_slice(query, tile, "q"), _tile_slice(k_all, tile, "k"), _tile_slice(v_all, tile, "k")
                dq, dk, dv = kernels.kernel_for(tile).backward(
                    _tile_slice(gradient, tile, "q"),
                    qkv,
                    (_tile_slice(output, tile, "q"), lse[rows, :, q0:q1]),
                    tile,
                    ring_context.score_spec,
                )
                to_query[rows, :, q0:q1] += dq
                to_key[rows, :, k0:k1] += ring_context.sum_kv_gradients(dk.to(to_key.dtype), key.shape[1])
                to_value[rows, :, k0:k1] += ring_context.sum_kv_gradients(dv.to(to_value.dtype), key.shape[1])
            if transfer is not None:  # gradients of the same block, summed over the previous ranks
                before = transfer.wait()
                to_key, to_value = to_key.add_(before[0]), to_value.add_(before[1])
            arrived = [to_key, to_value]
            transfer = ring_context.send_to_next(arrived, -step if last else 1)
        if transfer is not None:
            arrived = transfer.wait()
        own = key.shape[2]
        return (
            None,
            None,
            to_query.to(query.dtype),
            arrived[0][:, :, :own].to(key.dtype),
            arrived[1][:, :, :own].to(value.dtype),
        )


def ring_attention(context: RingContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute the attention of this rank's queries to the keys of all ranks of the ring. Collective along the ring.

    Args:
        query: `[samples, heads, local tokens, features]`; key and value the same, with as many heads or fewer.

    Returns:
        `[samples, heads, local tokens, value features]`; 0 for queries that attend to no key.
    """
    # Fused kernels need contiguous features: without them torch's CPU kernel computes wrong values and raises no error.
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    kernels = TileKernels(query, key, value, context.score_spec)
    output: torch.Tensor = _RingAttention.apply(context, kernels, query, key, value)
    return output


def _ring_blocks(
    context: RingContext, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[Tile, ...], bool]]:
    """Yield `(keys, values, tiles, is last)` for each block. Meanwhile the next block is in transfer."""
    steps = len(context.tiles_by_step)
    block = [key, value]
    if steps > 1:
        block = [_pad_tokens(tensor, context.max_block_tokens) for tensor in block]
    for step, tiles in enumerate(context.tiles_by_step):
        coming = context.send_to_next(block) if step + 1 < steps else None
        yield block[0], block[1], tiles, coming is None
        if coming is not None:
            block = coming.wait()


class _MergedOutput:
    """Running merge of the outputs of tiles, by their log-sum-exp."""

    def __init__(self, query: torch.Tensor, features: int) -> None:
        self.output = _wide_zeros(query, features)
        self.lse = torch.full(query.shape[:3], -torch.inf, dtype=self.output.dtype, device=query.device)

    def add(self, tile: Tile, output: torch.Tensor, lse: torch.Tensor) -> None:
        place = slice(*tile.samples), slice(None), slice(*tile.queries)
        before, more = self.lse[place], lse.to(self.lse.dtype)
        both = torch.logaddexp(before, more)
        finite = both.masked_fill(both == -torch.inf, 0)
        kept = self.output[place] * (before - finite).exp_().unsqueeze(-1)
        self.output[place] = kept.add_(output * (more - finite).exp_().unsqueeze(-1))
        self.lse[place] = both


def _tile_slice(tensor: torch.Tensor, tile: Tile, side: str) -> torch.Tensor:
    start, stop = tile.queries if side == "q" else tile.keys
    return tensor[slice(*tile.samples), :, start:stop]


def _wide_zeros(tensor: torch.Tensor, features: int | None = None) -> torch.Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    shape = (*tensor.shape[:3], tensor.shape[3] if features is None else features)
    return torch.zeros(shape, dtype=wide, device=tensor.device)


def _pad_tokens(tensor: torch.Tensor, max_block_tokens: int) -> torch.Tensor:
    short = max_block_tokens - tensor.shape[2]
    return tensor if short == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, short))
