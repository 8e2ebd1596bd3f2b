"""Tests that a tensor-parallel model has the same loss, logits, gradients and parameters as in one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.causal_models import CAUSAL, VOCABULARY, language
from tests.dist.harness import RankError, run_ranks
from tests.dist.tensor_parallel_runs import (
    EXACT,
    NORMS,
    pair,
    tensor_axis,
    trained_beside,
)
from tests.oracle import relative_error
from windlass.parallel.placement import compute_shard_range
from windlass.parallel.tensor import (
    get_sharded_vocabulary,
    vocab_parallel_cross_entropy,
)
from windlass.parallel.tensor.layer_stacks import LayerStack, find_layer_stacks
from windlass.parallel.tensor.rank_ranges import count_elements
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, TensorParallelPlan

NOISY = {"olmo2": 4e-5, "qwen3_next": 4e-5}  # bounds: their norms amplify rounding; see the test in float64

# (model, changes to its configuration, ranks, options)
LAWS: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    *((name, {}, 2, {}) for name in CAUSAL),
    # heads, features and tokens that cannot be split evenly; key heads that several ranks need, or fewer than ranks
    ("llama", {}, 3, {}),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}, 4, {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 45}, 4, {}),
    ("qwen3", {}, 3, {}),
    ("qwen3", {}, 4, {}),
    ("gpt2", {}, 3, {}),
    ("gpt2", {"n_embd": 32, "n_head": 4}, 4, {}),
    ("phi3", {}, 3, {}),
    ("phi3", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 4, {}),
    ("opt", {}, 3, {}),
    ("bert", {}, 3, {}),
    ("mixtral", {}, 3, {}),
    ("mixtral", {"num_key_value_heads": 1, "intermediate_size": 25, "experts_implementation": "eager"}, 4, {}),
    ("gpt_oss", {}, 3, {}),
    ("olmo2", {}, 3, {}),
    ("deepseek_v2", {}, 3, {}),
    ("gpt_bigcode", {}, 3, {}),
    ("gpt_bigcode", {"multi_query": False}, 4, {}),
    ("falcon", {"new_decoder_architecture": True, "num_attention_heads": 8}, 3, {}),
    ("falcon", {"multi_query": False, "alibi": True}, 3, {}),
    ("bloom", {}, 3, {}),
    # hidden states between layers sharded along the sequence of 7 tokens
    *((name, {}, 2, NORMS) for name in ("llama", "gpt2", "opt", "bert", "bloom", "phi3", "mixtral", "gpt_oss")),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, 2, NORMS),
    *((name, {}, 3, NORMS) for name in ("qwen3", "falcon", "olmo2", "llama4", "deepseek_v2", "qwen2_moe")),
    ("llama", {"attention_bias": True, "mlp_bias": True}, 4, NORMS),
    ("gpt2", {"n_embd": 32, "n_head": 4}, 4, NORMS),
    # reductions that overlap with the computation of the next tokens
    ("llama", {}, 2, {"tp_overlap_chunks": 3}),
    ("gpt2", {}, 3, {"tp_overlap_chunks": 4}),
    ("mixtral", {}, 2, {"tp_overlap_chunks": 100}),  # more chunks than tokens
]


# Families that each resemble one of phi3, gemma2, mixtral, deepseek_v2, gpt_neox and bloom.
ALIKE = ("glm", "gemma3", "granitemoe", "deepseek_v3", "gptj", "gpt_neo", "mpt")


def _quick(law: tuple[str, dict[str, Any], int, dict[str, Any]]) -> Any:
    """Mark as slow the cases that add little to the others.

    These are most cases on three ranks, some on four ranks or with sequence sharding, and the models in `ALIKE`.
    """
    name, changes, ranks, options = law
    alike = ranks > 2 and not changes and name not in ("llama", "gpt2", "mixtral")
    alike |= ranks == 4 and (name == "gpt2" or "attention_bias" in changes and options != NORMS)
    alike |= ranks == 2 and options == NORMS and name in ("opt", "bert", "phi3")
    alike |= ranks == 3 and options == {"tp_overlap_chunks": 4} or name == "falcon" and changes.get("alibi", False)
    alike |= ranks == 4 and name in ("phi3", "gpt_bigcode")
    alike |= (ranks, changes, options) == (2, {}, {}) and name in ALIKE
    marks = [pytest.mark.slow] if alike else []
    return pytest.param(name, changes, ranks, options, marks=marks)


@pytest.mark.parametrize(("name", "changes", "ranks", "options"), [_quick(law) for law in LAWS], ids=str)
def test_sharded_model_equals_the_full_model(
    name: str, changes: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    for apart in run_ranks(trained_beside, ranks, name, changes, options):
        assert apart.loss < EXACT, apart
        assert apart.logits < EXACT, apart
        assert apart.gradients[0] < NOISY.get(name, EXACT), apart
        assert apart.parameters[0] < EXACT, apart


@pytest.mark.parametrize("options", [{}, NORMS], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2"])
def test_float64_logits_agree_in_float64(name: str, options: dict[str, Any]) -> None:
    """The loss is computed in float32, as in transformers, so gradients agree in float32 only."""
    for apart in run_ranks(trained_beside, 3, name, {}, options, 2, torch.float64):
        assert apart.logits < 1e-13, apart
        assert apart.gradients[0] < 2e-6, apart


# ------------------------------------------------------------------------------------------------------------ volume


_LOSS_NUMBERS = 3  # numbers per token in the loss: maximum, sum, and the label's logit, of 4 bytes each


def count_step_bytes(
    plan: TensorParallelPlan,
    rank: int,
    *,
    batch: int,
    tokens: int,
    hidden: int,
    itemsize: int,
    top_k: int = 0,
    stacks: list[LayerStack] | None = None,
) -> Counter[str]:
    """Compute the bytes that a rank receives in the forward and backward of one micro-batch with labels, by operation.

    With n ranks and B = batch x tokens x hidden x itemsize: each chain, and each module of experts, costs an all-reduce
    of B in forward and one in backward, `2 B (n - 1) / n` bytes each; the embedding costs one in forward, and the head
    one in backward. A module of experts also reduces top_k numbers a token, and the loss reduces three. A layer with
    the style COLUMN_GATHERED or ROW_SPLIT also costs an all-gather of features. With sequence sharding, chains use
    all-gathers and reduce-scatters instead, with the same number of bytes.

    The formula assumes no recomputation, that all parameters are trained, and that each chain has one input tensor
    (latent attention has several, of other widths).

    Args:
        plan: plan of the model.
        rank: index of the rank along the axis.
        batch, tokens: samples, and the length of each.
        hidden: features between layers.
        itemsize: bytes of an element of the hidden states.
        top_k: experts per token.
        stacks: layer stacks with sequence sharding; None: none.
    """
    nbytes: Counter[str] = Counter()
    ranks, rows = plan.ranks, batch * tokens
    if ranks == 1:
        return nbytes

    def all_reduce(numbers: int, size: int = itemsize) -> None:
        nbytes["all_reduce"] += 2 * numbers * size * (ranks - 1) // ranks

    def all_gather(features: int, own: int) -> None:
        nbytes["all_gather"] += rows * (features - own) * itemsize

    start, stop = compute_shard_range(tokens, ranks, rank)
    own = batch * (stop - start) * hidden * itemsize
    full = rows * hidden * itemsize
    chains = {chain for stack in stacks or [] for chain in stack.chains}
    for shard in plan.shards:
        if shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT) and shard.chain in chains:
            nbytes["all_gather"] += 2 * (full - own)
            nbytes["reduce_scatter"] += 2 * own * (ranks - 1)
        elif shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT):
            all_reduce(rows * hidden)
            all_reduce(rows * hidden)
        elif shard.style is ShardStyle.EXPERTS:
            all_reduce(rows * hidden)
            all_reduce(rows * hidden)
            all_reduce(rows * top_k)
        elif shard.style is ShardStyle.VOCABULARY:
            all_reduce(rows * hidden)
        if shard.style in (ShardStyle.COLUMN_GATHERED, ShardStyle.ROW_SPLIT):
            all_gather(shard.sharded_size, count_elements(shard.rank_ranges[rank]))
    for stack in stacks or []:
        nbytes["all_gather"] += (2 + 2 * len(stack.full_sequence_modules)) * (full - own)
    all_reduce(rows, 4)
    all_reduce((_LOSS_NUMBERS - 1) * rows, 4)
    return nbytes


def moved_and_predicted(name: str, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    _, model, axis, plan = pair(name, {}, options)
    model.config.output_router_logits = False
    axis.traffic.reset()
    model(**language(0)).loss.backward()
    stacks = find_layer_stacks(model, plan) if options.get("tp_sequence_norms") else None
    config = model.config
    chosen = config.num_experts_per_tok if name in ("mixtral", "gpt_oss") else 0
    predicted = count_step_bytes(
        plan, axis.index, batch=2, tokens=7, hidden=config.hidden_size, itemsize=4, top_k=chosen, stacks=stacks
    )
    return dict(axis.traffic.bytes_moved), dict(predicted)


@pytest.mark.parametrize(
    ("options", "ranks"), [({}, 2), ({}, 3), (NORMS, 2), (NORMS, 3), ({"tp_overlap_chunks": 2}, 2)]
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "olmo2"])
def test_bytes_equal_the_formula(name: str, options: dict[str, Any], ranks: int) -> None:
    for moved, predicted in run_ranks(moved_and_predicted, ranks, name, options):
        assert moved == predicted


def test_a_llama_layer_costs_four_all_reduces() -> None:
    """On 2 ranks an all-reduce of B bytes moves B: 4 in each of 2 layers, one of the embedding and one of the head."""
    tensor = 2 * 7 * 32 * 4
    by_hand = (2 * 4 + 2) * tensor + 3 * 2 * 7 * 4
    for moved, _ in run_ranks(moved_and_predicted, 2, "llama", {}):
        assert moved == {"all_reduce": by_hand}


# -------------------------------------------------------------------------------------------------- the loss by itself


def losses_of_parts(sizes: list[int], dtype: torch.dtype, z_loss: float) -> tuple[float, float]:
    axis = tensor_axis()
    generator = torch.Generator().manual_seed(3)
    full = (torch.randn(11, sum(sizes), generator=generator) * 6).to(dtype)
    labels = torch.randint(0, sum(sizes), (11,), generator=generator)
    labels[2] = labels[7] = -1
    weights = torch.rand(11, generator=generator)
    plain = full.clone().requires_grad_()
    wide = plain.float()
    expected = functional.cross_entropy(wide, labels, ignore_index=-1, reduction="none")
    expected = expected + z_loss * (labels != -1) * wide.logsumexp(-1).square()
    (expected * weights).sum().backward()
    start = sum(sizes[: axis.index])
    part = full[:, start : start + sizes[axis.index]].clone().requires_grad_()
    actual = vocab_parallel_cross_entropy(part, labels, axis, sizes=sizes, ignore_index=-1, z_loss=z_loss)
    (actual * weights).sum().backward()
    assert part.grad is not None and part.grad.dtype == dtype and plain.grad is not None
    assert float(actual[2]) == 0 and not part.grad[7].any()
    loss = relative_error({"loss": actual}, {"loss": expected})[0]
    there = plain.grad[:, start : start + sizes[axis.index]]
    return loss, relative_error({"gradient": part.grad}, {"gradient": there})[0]


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [([5, 5], "float32"), ([1, 9, 4], "float32"), ([6, 7], "bfloat16")], ids=str
)
def test_vocabulary_parallel_losses_equal_the_full_loss(sizes: list[int], dtype: str, z_loss: float) -> None:
    exact = 1e-6 if dtype == "float32" else 1e-2
    for loss, gradient in run_ranks(losses_of_parts, len(sizes), sizes, getattr(torch, dtype), z_loss):
        assert loss < 1e-6
        assert gradient < exact


def wrong_label() -> None:
    vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 6]), tensor_axis())


def test_label_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RankError, match="a label is outside the vocabulary"):
        run_ranks(wrong_label, 2)


def wrong_token() -> None:
    _, model, _, _ = pair("llama", {}, {})
    model(input_ids=torch.tensor([[3, VOCABULARY]]))


def test_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RankError, match="a token is outside the vocabulary"):
        run_ranks(wrong_token, 2)


def logits_and_losses(name: str) -> dict[str, Any]:
    plain, model, axis, _ = pair(name, {}, {})
    batch = language(1)
    seen: dict[str, Any] = {"part": model(**batch).logits.shape[-1]}
    vocabulary = get_sharded_vocabulary(model)
    assert vocabulary is not None
    items = torch.tensor(5)
    with torch.no_grad():
        seen["items"] = float(
            model(**batch, num_items_in_batch=items).loss - plain(**batch, num_items_in_batch=items).loss
        )
        vocabulary.keeps_logits_sharded = True
        cut = model(input_ids=batch["input_ids"]).logits
        vocabulary.keeps_logits_sharded = False
        seen["cut"] = cut.shape[-1]
        expected = plain(**batch)
        seen["together"] = float((vocabulary.gather_logits(cut) - expected.logits).abs().max())
        actual = model.eval()(**batch)
    seen["whole"] = actual.logits.shape[-1]
    seen["evaluated"] = abs(float(actual.loss - expected.loss))
    seen["own"] = vocabulary.sizes[axis.index]
    return seen


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_logits_stay_sharded_only_if_the_model_trains_on_labels(name: str) -> None:
    for seen in run_ranks(logits_and_losses, 2, name):
        assert seen["part"] == seen["cut"] == seen["own"] < VOCABULARY
        assert seen["whole"] == VOCABULARY
        assert max(abs(seen[key]) for key in ("items", "together", "evaluated")) < 1e-5
