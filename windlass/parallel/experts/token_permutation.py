"""Permutation of tokens to one row per chosen expert, sorted by expert, and the weighted sum back to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class TokenPermutation:
    """Order of the slots (a slot is one of the `k` experts of a token) sorted by expert.

    Attributes:
        sorted_slots: `[tokens x k]`, slot numbers in sorted order; unused slots last.
        slot_positions: `[tokens, k]`, position of each slot in that order.
        tokens_per_expert: `[experts]`, used slots of each expert.
    """

    sorted_slots: torch.Tensor
    slot_positions: torch.Tensor
    tokens_per_expert: torch.Tensor


def sort_by_expert(index: torch.Tensor, num_experts: int) -> TokenPermutation:
    """Sort the slots by expert; slots of one expert keep the order of their tokens. Does not synchronize with the
    device.

    Args:
        index: `[tokens, k]`, the expert of each slot; `num_experts` or more for an unused slot.
    """
    sorted_experts, slots = torch.sort(index.reshape(-1), stable=True)
    edges = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=index.device, dtype=index.dtype))
    place = torch.empty_like(slots)
    place[slots] = torch.arange(slots.shape[0], device=slots.device)
    return TokenPermutation(slots, place.view(index.shape), edges[1:] - edges[:-1])


def permute_tokens(tokens: torch.Tensor, permutation: TokenPermutation, used_slots: int) -> torch.Tensor:
    """Return `[used_slots, hidden]`, the token of each used slot, sorted by expert.

    Args:
        tokens: `[tokens, hidden]`.
        used_slots: number of used slots.
    """
    rows: torch.Tensor = _PermuteTokens.apply(tokens, permutation.sorted_slots[:used_slots], permutation.slot_positions)
    return rows


def unpermute_tokens(rows: torch.Tensor, weights: torch.Tensor, permutation: TokenPermutation) -> torch.Tensor:
    """Return `[tokens, hidden]`, the weighted sum of the rows of each token's slots, in fp32 or wider.

    Args:
        rows: `[used_slots, hidden]`, sorted by expert. Unused slots count as zeros.
        weights: `[tokens, k]`.
    """
    tokens: torch.Tensor = _UnpermuteTokens.apply(
        rows, weights, permutation.sorted_slots[: rows.shape[0]], permutation.slot_positions
    )
    return tokens


def reorder_rows(rows: torch.Tensor, permutation: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return `rows[permutation]`. The backward uses `inverse`, the inverse permutation."""
    permuted: torch.Tensor = _ReorderRows.apply(rows, permutation, inverse)
    return permuted


class _PermuteTokens(torch.autograd.Function):
    """Gather whose backward is a gather too: it needs no atomic additions, so the sums are deterministic."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, slots: torch.Tensor, slot_positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slot_positions)
        return tokens.index_select(0, slots // max(slot_positions.shape[1], 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        found = gradient.new_zeros((place.shape[0], gradient.shape[1]), dtype=wide)
        for choice in place.unbind(1):  # one choice at a time: a [tokens, k, hidden] tensor would need much memory
            found += _rows_of_slots(gradient, choice)
        return found.to(gradient.dtype), None, None


class _UnpermuteTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, slot_positions: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, slots, slot_positions)
        wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
        found = rows.new_zeros((slot_positions.shape[0], rows.shape[1]), dtype=wide)
        for choice, weight in zip(slot_positions.unbind(1), weights.unbind(1), strict=True):
            found += _rows_of_slots(rows, choice) * weight[:, None]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, slots, place = ctx.saved_tensors
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_tokens = gradient.index_select(0, slots // max(place.shape[1], 1))
            of_rows = (of_tokens * weights.reshape(-1).index_select(0, slots)[:, None]).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            each = [(gradient * _rows_of_slots(rows, choice)).sum(-1) for choice in place.unbind(1)]
            of_weights = torch.stack(each, dim=1).to(weights.dtype)
        return of_rows, of_weights, None, None


class _ReorderRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, permutation: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, permutation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


def _rows_of_slots(rows: torch.Tensor, slot_positions: torch.Tensor) -> torch.Tensor:
    """Return `[tokens, hidden]`, the row of one slot of each token; zeros for an unused slot."""
    used = rows.shape[0]
    if used == 0:
        return rows.new_zeros((slot_positions.shape[0], rows.shape[1]))
    return rows.index_select(0, slot_positions.clamp(max=used - 1)).masked_fill_(slot_positions.ge(used)[:, None], 0.0)
