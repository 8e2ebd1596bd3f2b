"""Tests of sorting rows by expert: rows of one expert keep their order, and rows and gradients are restored."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.experts.expert_capacity import compute_expert_capacity, drop_over_capacity
from windlass.parallel.experts.expert_dispatch import dispatch_and_combine
from windlass.parallel.experts.grouped_linear import RowGroups
from windlass.parallel.experts.token_permutation import permute_tokens, reorder_rows, sort_by_expert, unpermute_tokens


@st.composite
def routings(draw: Any) -> tuple[torch.Tensor, int]:
    """Draw expert numbers `[tokens, k]`, with empty slots among them, and the number of experts."""
    experts, k, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 7))
    slots = draw(st.lists(st.integers(0, experts), min_size=k * tokens, max_size=k * tokens))
    return torch.tensor(slots, dtype=torch.int64).view(tokens, k), experts


@given(routings())
def test_slots_are_sorted_stably(routing: tuple[torch.Tensor, int]) -> None:
    index, experts = routing
    order, flat = sort_by_expert(index, experts), index.reshape(-1).tolist()
    assert order.sorted_slots.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])
    assert order.tokens_per_expert.tolist() == [flat.count(expert) for expert in range(experts)]
    assert order.sorted_slots[order.slot_positions.reshape(-1)].tolist() == list(range(len(flat)))


@given(routings(), st.integers(0, 2**16))
@settings(deadline=None)
def test_permute_and_unpermute_are_sums_over_slots(routing: tuple[torch.Tensor, int], seed: int) -> None:
    index, experts = routing
    torch.manual_seed(seed)
    tokens, k = index.shape
    hidden = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(tokens, k, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(experts, dtype=torch.float64)

    def through(rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return rows * factors[groups.expert_of(rows)][:, None]

    actual = dispatch_and_combine(
        hidden, index, weights, num_experts=experts, axis=single_rank_axis("ep"), run_local_experts=through
    )
    scale = torch.cat([factors, factors.new_zeros(1)])[index]
    expected = hidden * (weights * scale).sum(-1, keepdim=True)
    torch.testing.assert_close(actual, expected)
    pull = torch.randn_like(actual)
    for have, want in zip(
        torch.autograd.grad(actual, (hidden, weights), pull),
        torch.autograd.grad(expected, (hidden, weights), pull),
        strict=True,
    ):
        torch.testing.assert_close(have, want)


def test_permute_and_unpermute_pass_gradcheck() -> None:
    torch.manual_seed(0)
    index = torch.tensor([[0, 2], [3, 1], [2, 3], [2, 0]])  # 3 is an empty slot
    order = sort_by_expert(index, 3)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    back = torch.randperm(6)
    assert torch.autograd.gradcheck(lambda x: permute_tokens(x, order, 6), (hidden,))
    assert torch.autograd.gradcheck(lambda r, w: unpermute_tokens(r, w, order), (rows, weights))
    assert torch.autograd.gradcheck(lambda r: reorder_rows(r, back, back.argsort()), (rows,))


@given(routings(), st.integers(0, 4), st.sampled_from(["position", "random", "score"]), st.integers(0, 2**16))
@settings(deadline=None)
def test_experts_keep_tokens_of_first_priority(
    routing: tuple[torch.Tensor, int], room: int, priority: Any, seed: int
) -> None:
    index, experts = routing
    torch.manual_seed(seed)
    scores = torch.rand(index.shape)
    torch.manual_seed(seed + 1)
    actual = drop_over_capacity(index, experts, room, priority, scores)
    torch.manual_seed(seed + 1)
    draws = torch.rand(index.numel()).view(index.shape) if priority == "random" else None
    slots = [(t, place) for place in range(index.shape[1]) for t in range(index.shape[0])]
    if priority != "position":
        rank = draws if draws is not None else -scores
        slots.sort(key=lambda slot: (rank[slot].item(), slot))
    expected, taken = index.clone(), [0] * (experts + 1)
    for slot in slots:
        expert = int(index[slot])
        if expert == experts or taken[expert] == room:
            expected[slot] = experts
        else:
            taken[expert] += 1
    assert actual.tolist() == expected.tolist()


def test_capacity_is_rounded_up() -> None:
    assert compute_expert_capacity(10, 4, 1, 1.0, 0) == 3
    assert compute_expert_capacity(100, 10, 1, 1.1, 0) == 11  # 100 * 1.1 / 10 is 11.000000000000002 in floats
    assert compute_expert_capacity(10, 4, 2, 1.25, 0) == 7
    assert compute_expert_capacity(3, 8, 1, 1.0, 4) == 4
