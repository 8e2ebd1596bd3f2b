"""Tests that expert parallelism equals one process on all ranks' tokens: losses, gradients, and predicted bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.hf_experts import FAMILIES, language
from tests.oracle import relative_error
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.experts import (
    MixtureOfExperts,
    StackedMLP,
    apply_expert_parallel,
    expert_parameters,
    update_router_biases,
)
from windlass.parallel.placement import compute_shard_range, get_placement

_COUNT_BYTES = 8  # row counts are sent as one int64 per expert

BOUND = 1e-5
Grads = dict[str, Tensor]


@dataclass
class Seen:
    """Results of one model on one rank: loss, gradients, placement of experts, received bytes."""

    loss: float
    grads: Grads
    experts: dict[str, tuple[int, int] | None]  # rows of the full tensor; None: this rank has all rows, the others none
    received: int


# ------------------------------------------------------------------------------------------------- changes of models


def as_it_is(model: nn.Module) -> None:
    pass


def one_sided(model: nn.Module) -> None:
    """Make all logits equal: every token chooses the same experts, which are on one rank."""
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "router.weight", "router.bias", "router.layer.weight")):
            nn.init.zeros_(parameter)


def recomputed(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})


def recomputed_reentrant(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def only_experts(model: nn.Module) -> None:
    """Freeze all but the experts, so that the first layer's tokens need no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)


def frozen_experts(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change
    for change in (as_it_is, one_sided, recomputed, recomputed_reentrant, only_experts, frozen_experts)
}


def build(family: str, change: str) -> nn.Module:
    model = FAMILIES[family].build().train()
    CHANGES[change](model)
    return model


# ------------------------------------------------------------------------------------------------- runs on a rank


def see(model: nn.Module, axis: MeshAxis, rank: int) -> Seen:
    """Shard the experts of a model, and run it forward and backward on the rank's tokens."""
    apply_expert_parallel(model, axis)
    axis.traffic.reset()
    loss = model(**language(rank)).loss
    loss.backward()
    where = {name: get_placement(parameter).ranges[0][0] for name, parameter in expert_parameters(model)}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Seen(loss.item(), grads, dict(where), axis.traffic.bytes_moved["all_to_all"])


def see_all(grid: MeshShape, cases: list[tuple[str, str]]) -> list[Seen]:
    mesh = build_mesh(grid)
    rank = mesh.world.ranks[mesh.world.index]
    return [see(build(*case), mesh.ep, rank) for case in cases]


# ---------------------------------------------------------------------------------------------- the reference


@cache
def expected(family: str, change: str, ranks: int) -> tuple[list[float], Grads, list[list[list[int]]]]:
    """Run one process on all ranks' tokens.

    Return losses, gradients of their mean, and the number of tokens of each expert by layer and rank.
    """
    model = build(family, change)
    chosen: list[list[list[int]]] = []
    for module in model.modules():
        # Llama 4's expert module does not receive the router's choices
        if type(module).__name__.endswith("Experts") and family != "llama4":
            counts: list[list[int]] = []
            chosen.append(counts)
            module.register_forward_pre_hook(_counting(counts, int(module.num_experts)))  # type: ignore[arg-type]
    losses = []
    for rank in range(ranks):
        loss = model(**language(rank)).loss
        (loss / ranks).backward()
        losses.append(loss.item())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, grads, chosen


def _counting(counts: list[list[int]], experts: int) -> Callable[..., None]:
    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        counts.append(torch.bincount(args[1].reshape(-1), minlength=experts).tolist())

    return count


def whole(seen: list[Seen], ranks: int) -> Grads:
    """Return full gradients of the mean loss: averaged over ranks for dense parameters, concatenated for experts."""
    results: Grads = {}
    for name, grad in seen[0].grads.items():
        if name not in seen[0].experts:
            results[name] = sum((entry.grads[name] for entry in seen), torch.zeros_like(grad)) / ranks
    for name in seen[0].experts:
        if name not in seen[0].grads:
            continue
        parts: dict[tuple[int, int], Tensor] = {}
        for item in seen:
            rows = item.experts[name]
            assert rows is not None
            parts[rows] = parts.get(rows, torch.zeros(())) + item.grads[name] / ranks
        results[name] = torch.cat([parts[rows] for rows in sorted(parts)])
    return results


def hold(seen: list[Seen], family: str, change: str, ranks: int) -> None:
    losses, grads, _ = expected(family, change, ranks)
    for rank, item in enumerate(seen):
        assert abs(item.loss - losses[rank]) <= BOUND * abs(losses[rank]), (family, change, rank)
    error, where = relative_error(whole(seen, ranks), grads)
    assert error <= BOUND, (family, change, where, error)


# ------------------------------------------------------------------------------------------------------------ the laws


@pytest.mark.parametrize("ranks", [2, 3, 4])
@in_shares
def test_transformers_models_equal_one_process(ranks: int, every: bool) -> None:
    cases = share([(family, "as_it_is") for family in FAMILIES], ranks, 3, every)
    by_rank = run_ranks(see_all, ranks, MeshShape(ep=ranks), cases, timeout=180)
    for number, (family, change) in enumerate(cases):
        hold([seen[number] for seen in by_rank], family, change, ranks)


def test_experts_over_a_part_of_the_data_ranks() -> None:
    cases = [("mixtral", "as_it_is"), ("olmoe", "as_it_is")]
    for grid in (MeshShape(dp_shard=2, ep=2), MeshShape(ep=2, sp=2)):
        by_rank = run_ranks(see_all, 4, grid, cases, timeout=120)
        for number, (family, change) in enumerate(cases):
            hold([seen[number] for seen in by_rank], family, change, 4)


def test_ranks_whose_experts_are_never_chosen() -> None:
    """All tokens choose experts of one rank. The gradients of the other rank's experts are zeros."""
    cases = [(family, "one_sided") for family in ("mixtral", "qwen3_moe", "dbrx", "gpt_oss")]
    by_rank = run_ranks(see_all, 2, MeshShape(ep=2), cases, timeout=120)
    for number, (family, change) in enumerate(cases):
        seen = [item[number] for item in by_rank]
        hold(seen, family, change, 2)
        assert seen[1].experts
        for name in seen[1].experts:
            assert sorted(bool(item.grads[name].any()) for item in seen) == [False, True], (family, name)


@pytest.mark.parametrize("change", ["recomputed", "recomputed_reentrant", "only_experts", "frozen_experts"])
def test_recomputed_and_partly_frozen_models(change: str) -> None:
    cases = [("mixtral", change), ("dbrx", change)]
    by_rank = run_ranks(see_all, 3, MeshShape(ep=3), cases, timeout=120)
    for number, (family, _) in enumerate(cases):
        hold([seen[number] for seen in by_rank], family, change, 3)


def count_dispatch_bytes(
    tokens_per_expert: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    rank: int,
    *,
    hidden: int,
    itemsize: int,
    backward: bool = True,
) -> int:
    """Compute the exact bytes that one rank receives from other ranks for one layer.

    In the forward, local experts receive rows of other ranks, and remote experts return the outputs of local tokens. In
    the backward, the gradients of both take the opposite way, with the same number of bytes.

    Args:
        tokens_per_expert: for each rank and expert, the number of the rank's tokens that choose the expert.
        spans: `[first, end)` of each rank's experts.
        rank: the receiving rank.
        hidden: elements of a row.
        itemsize: bytes of an element.
        backward: include the backward.
    """
    first, end = spans[rank]
    inward = sum(sum(counts[first:end]) for other, counts in enumerate(tokens_per_expert) if other != rank)
    outward = sum(tokens_per_expert[rank]) - sum(tokens_per_expert[rank][first:end])
    rows = (inward + outward) * hidden * itemsize
    return rows * (2 if backward else 1) + (len(spans) - 1) * (end - first) * _COUNT_BYTES


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_equal_the_formula(ranks: int) -> None:
    cases = [(family, "as_it_is") for family in ("mixtral", "deepseek_v3", "olmoe")]
    by_rank = run_ranks(see_all, ranks, MeshShape(ep=ranks), cases, timeout=120)
    for number, (family, change) in enumerate(cases):
        _, _, chosen = expected(family, change, ranks)
        assert len(chosen) == 2
        for rank, seen in enumerate(by_rank):
            spans = [compute_shard_range(len(chosen[0][0]), ranks, item) for item in range(ranks)]
            requested = sum(count_dispatch_bytes(layer, spans, rank, hidden=16, itemsize=4) for layer in chosen)
            assert seen[number].received == requested, (family, rank)


def half(grid: MeshShape) -> tuple[float, float, dict[str, float]]:
    """Return the loss with sharded bf16 experts, the loss of a full model, and the relative errors of gradients.

    All ranks have the same batch, so that the gradient of an expert is that of a full model times the number of ranks.
    """
    mesh = build_mesh(grid)
    full = FAMILIES["mixtral"].build().bfloat16()
    expected = full(**language(0)).loss
    expected.backward()
    gradients = {name: p.grad for name, p in full.named_parameters()}
    model = FAMILIES["mixtral"].build().bfloat16()
    apply_expert_parallel(model, mesh.ep)
    loss = model(**language(0)).loss
    loss.backward()
    errors = {}
    for name, parameter in model.named_parameters():
        placement, wanted = get_placement(parameter), gradients[name]
        if placement.is_expert:
            wanted = wanted[slice(*placement.ranges[0][0])] * grid.ep
        errors[name] = float((parameter.grad - wanted).float().norm() / wanted.float().norm())
    return loss.item(), expected.item(), errors


def test_bf16_experts_stay_close_to_a_full_model() -> None:
    for actual, expected, errors in run_ranks(half, 2, MeshShape(ep=2), timeout=120):
        assert abs(actual - expected) < 0.01 * abs(expected)
        assert all(error < 0.02 for error in errors.values()), errors


# --------------------------------------------------------------------------------------------- layers that users define

HIDDEN, EXPERTS = 8, 5
LAYERS: dict[str, dict[str, Any]] = {
    "top1 dropless": {"k": 1, "drop_tokens": False},
    "top2 dropless": {"k": 2, "drop_tokens": False},
    "top3 dropless": {"k": 3, "drop_tokens": False, "score_function": "sigmoid"},
    "top1 any left out": {"k": 1, "capacity_factor": 0.7, "min_capacity": 1},
    "top2 left out": {"k": 2, "capacity_factor": 0.7, "min_capacity": 1},
    "top3 left out": {"k": 3, "capacity_factor": 0.7, "min_capacity": 1},
    "residual": {"k": 1, "drop_tokens": False, "use_residual": True},
    "balanced": {"k": 2, "drop_tokens": False, "expert_bias_update_rate": 0.1},
    "stacked": {"k": 2, "drop_tokens": False, "stacked": True},
    "stacked left out": {"k": 1, "capacity_factor": 0.7, "min_capacity": 1, "stacked": True},
}


class Net(nn.Module):
    """Two mixtures of experts between dense layers, one narrow and one wide, as in PR-MoE's pyramids."""

    def __init__(self, *, stacked: bool = False, **words: Any) -> None:
        super().__init__()

        def expert(number: int) -> nn.Module:
            if stacked:
                return StackedMLP(HIDDEN, 12, number, bias=True)
            return nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN))

        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.narrow = MixtureOfExperts(HIDDEN, expert(EXPERTS - 1), EXPERTS - 1, **words)
        self.wide = MixtureOfExperts(HIDDEN, expert(EXPERTS), EXPERTS, **words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(tokens)
        hidden, item, _ = self.narrow(hidden)
        hidden, other, _ = self.wide(hidden)
        return self.last(hidden).square().sum() / 10 + 0.1 * (item + other)


def net(words: dict[str, Any], skewed: bool) -> Net:
    torch.manual_seed(3)
    built = Net(**words)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
            if skewed and "gate.wg" in name:
                parameter.zero_()
    return built


def tokens_of(rank: int, lengths: list[int]) -> Tensor:
    return torch.randn(lengths[rank], HIDDEN, generator=torch.Generator().manual_seed(50 + rank))


def see_layers(grid: MeshShape, lengths: list[int], skewed: bool) -> list[tuple[float, Grads, list[list[float]]]]:
    """Return for each kind of layer: loss, this rank's gradients, and router biases after one balancing step."""
    mesh = build_mesh(grid)
    rank, result = mesh.world.ranks[mesh.world.index], []
    for words in LAYERS.values():
        model = net(words, skewed)
        apply_expert_parallel(model, mesh.ep)
        torch.manual_seed(60 + rank)
        loss = model(tokens_of(rank, lengths))
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        update_router_biases(model, [MeshAxis("data", mesh.dense.data)])
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        result.append((loss.item(), grads, biases(model)))
    return result


def biases(model: nn.Module) -> list[list[float]]:
    return [buffer.tolist() for name, buffer in model.named_buffers() if name.endswith("balance_bias")]


def expect_layers(words: dict[str, Any], lengths: list[int], skewed: bool) -> tuple[list[float], Grads, Any]:
    model, losses = net(words, skewed), []
    for rank in range(len(lengths)):
        torch.manual_seed(60 + rank)
        loss = model(tokens_of(rank, lengths))
        (loss / len(lengths)).backward()
        losses.append(loss.item())
    update_router_biases(model, [])
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return losses, grads, biases(model)


def added_up(seen: list[Any], grid: MeshShape, wanted: Grads) -> Grads:
    """Return full gradients of the mean of all ranks' losses. Row shards are joined in the order of ranks along ep."""
    results: Grads = {}
    for rank, (_, grads, _) in enumerate(seen):
        first = grid.coordinates(rank)["ep"]
        for name, grad in grads.items():
            part = torch.zeros_like(wanted[name])
            start, stop = 0, len(wanted[name])
            if grad.shape != wanted[name].shape:
                start, stop = compute_shard_range(stop, grid.ep, first)
            part[start:stop] = grad / grid.world
            results[name] = results.get(name, torch.zeros(())) + part
    return results


@pytest.mark.parametrize(
    ("grid", "lengths", "skewed"),
    [
        (MeshShape(ep=2), [9, 14], False),
        pytest.param(MeshShape(ep=3), [9, 14, 4], False, marks=pytest.mark.slow),
        pytest.param(MeshShape(ep=4), [9, 14, 4, 7], False, marks=pytest.mark.slow),
        (MeshShape(dp_shard=2, ep=2), [9, 14, 4, 7], False),
        (MeshShape(ep=2), [9, 0], False),  # a rank without a token
        (MeshShape(ep=4), [9, 14, 4, 7], True),  # ranks whose experts receive no row
    ],
)
def test_user_defined_layers_equal_one_process(grid: MeshShape, lengths: list[int], skewed: bool) -> None:
    by_rank = run_ranks(see_layers, grid.world, grid, lengths, skewed, timeout=120)
    for number, (kind, words) in enumerate(LAYERS.items()):
        losses, expected, moved = expect_layers(words, lengths, skewed)
        seen = [item[number] for item in by_rank]
        for rank, (loss, _, bias) in enumerate(seen):
            assert abs(loss - losses[rank]) <= BOUND * max(1.0, abs(losses[rank])), (kind, rank)
            assert bias == moved, (kind, rank)
        assert bool(moved) == (kind == "balanced")
        error, where = relative_error(added_up(seen, grid, expected), expected)
        assert error <= BOUND, (kind, where, error)
        if skewed and words["k"] == 1:
            for layer in ("narrow", "wide"):  # one expert has all tokens
                busy = [
                    [g for name, g in grads.items() if layer in name and ".experts." in name] for _, grads, _ in seen
                ]
                assert [any(bool(grad.any()) for grad in grads) for grads in busy].count(True) == 1, (kind, layer)
