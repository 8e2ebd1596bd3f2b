"""Tests of sequence parallelism with other attention backends: results equal full attention with that backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_sequence_parallel import BATCHES, axis_of_all, batch, build, check_close, check_mean
from windlass.attention import AttentionBackend, AttentionMask, HeadSlice, attention, use_backend
from windlass.attention.eager_backend import EagerBackend
from windlass.base.errors import ModelError


class AlibiBackend(EagerBackend):
    """Eager attention with biases linear in the distance and a slope for each head (Press et al., arXiv 2108.12409)."""

    name = "alibi"
    depends_on_head = True

    def bias_scores(self, scores: Tensor, heads: HeadSlice) -> Tensor:
        slopes = 2.0 ** (-8.0 * torch.arange(heads.start + 1, heads.stop + 1) / heads.total)
        queries, keys = (torch.arange(length) for length in scores.shape[2:])
        return scores - slopes[:, None, None] * (queries[:, None] - keys).abs()


def loss_and_gradients(model: Any, given: dict[str, Any], backend: AttentionBackend | None) -> Any:
    model.train()
    with use_backend(backend):
        loss = model(**given).loss
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def alibi_law(cases: list[tuple[str, dict[str, Any], str]], recompute: bool) -> None:
    """Assert that loss and mean gradients equal those of one process with the same backend.

    Assert that the loss without the backend differs.
    """
    from windlass.attention import install_attention
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    for name, changes, kind in cases:
        given, case = batch(kind, 13), f"{name} {changes} {kind}"
        plain = build(name, **changes)
        install_attention(plain)
        wanted_loss, expected = loss_and_gradients(plain, dict(given), AlibiBackend())
        other_loss, _ = loss_and_gradients(build(name, **changes), dict(given), None)
        assert float((other_loss - wanted_loss).abs()) > 1e-4, case
        model = build(name, **changes)
        install_attention(model)
        apply_sequence_parallel(model, axis, sp_mode="ulysses")
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss, gradients = loss_and_gradients(model, dict(given), AlibiBackend())
        check_close(loss, wanted_loss, f"{case}: loss")
        check_mean(axis, gradients, expected, case)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(("world", "recompute"), [(1, False), (2, False), (2, True), (3, False)])
@in_shares
def test_biases_of_another_backend_over_sp(world: int, recompute: bool, every: bool) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        *(("llama", {"initializer_range": 0.3}, kind) for kind in BATCHES),
        ("llama", {"num_attention_heads": 6, "hidden_size": 48, "initializer_range": 0.3}, "left"),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}, "packed"),
        ("gemma2", {"initializer_range": 0.3}, "plain"),
        ("mistral", {"initializer_range": 0.3}, "packed"),
    ]
    run_ranks(alibi_law, world, share(cases, world + recompute, 2, every), recompute)


def own_module() -> None:
    """Compare outputs and gradients of `attention` on local shards with those on the full tensors."""
    from windlass.parallel.autograd_collectives import all_gather
    from windlass.parallel.sequence import use_shard
    from windlass.parallel.sequence.batch_sharding import SHARD_KEY, shard_batch
    from windlass.parallel.sequence.sequence_sharding import SequenceShardPattern

    axis = axis_of_all()
    torch.manual_seed(2)
    full = torch.randn(2, 12, 3, 4, 8, dtype=torch.float64)  # samples, tokens, q k v, heads, features
    for degree in (axis.size, 1):
        for backend in (None, "sdpa", AlibiBackend()):
            if degree == 1 and backend is not None:
                continue
            actual, requested = (full.clone().requires_grad_() for _ in range(2))
            with use_backend(backend):
                expected = attention(*requested.permute(2, 0, 3, 1, 4), is_causal=True)
            pattern = SequenceShardPattern(axis.size, degree, zigzag=degree == 1)
            local = shard_batch({"input_ids": torch.zeros(2, 12, dtype=torch.long)}, pattern, axis)
            shard = local[SHARD_KEY]
            part = shard.sharding.local_shard(actual, axis.index)
            with use_backend(backend), use_shard(shard):
                output = attention(*part.permute(2, 0, 3, 1, 4), is_causal=True)
            gathered = all_gather(output, axis, 2, shard.sharding.sizes)
            restored = shard.sharding.restore_order(gathered, 2)
            check_close(restored, expected, "output", 1e-9)
            gradient = torch.randn_like(expected)
            expected.backward(gradient)
            (restored * gradient).sum().div(axis.size).backward()
            assert actual.grad is not None and requested.grad is not None
            check_mean(axis, {"input": actual.grad * axis.size}, {"input": requested.grad}, str(backend), 1e-9)


@pytest.mark.parametrize("world", [1, 2])
def test_attention_on_shards_equals_attention_on_full_tensors(world: int) -> None:
    run_ranks(own_module, world)


class WholeLayers(EagerBackend):
    """Backend that cannot compute a subset of a layer's heads."""

    name = "whole_layers"
    computes_local_heads = False


def refusals() -> list[str]:
    from windlass.attention import ChunkedMask, get_active_backend, get_backend, install_attention
    from windlass.parallel.sequence import use_shard
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel
    from windlass.parallel.sequence.batch_sharding import SHARD_KEY, shard_batch
    from windlass.parallel.sequence.sequence_sharding import SequenceShardPattern
    from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel

    axis, text = axis_of_all(), []

    def tell(call: Any, backend: Any = None) -> None:
        with pytest.raises(Exception) as raised, use_backend(backend):
            call()
        assert get_active_backend() is None
        text.append(f"{type(raised.value).__name__}: {raised.value}")

    given = batch("plain", 12)
    ring, ulysses, dropping = build("llama"), build("llama"), build("llama", attention_dropout=0.5)
    apply_sequence_parallel(ring, axis, sp_mode="ring")
    for model in (ulysses, dropping):
        apply_sequence_parallel(model, axis)
    tell(lambda: ring(**given), AlibiBackend())
    tell(lambda: ulysses(**given), WholeLayers())
    tell(lambda: dropping.train()(**given), AlibiBackend())
    shard = shard_batch(given, SequenceShardPattern(axis.size, axis.size), axis)[SHARD_KEY]
    q = torch.zeros(2, 4, 6, 8)
    tell(lambda: get_backend("ring", shard=shard))
    assert get_backend("ulysses", shard=shard).name == "ulysses"

    def inside(*arguments: Any, **named: Any) -> None:
        with use_shard(shard):
            attention(q, q, q, *arguments, **named)

    tell(lambda: inside(AttentionMask(2, 6, 6, ChunkedMask(3))))
    tell(lambda: inside(torch.ones(6, 6, dtype=torch.bool)))
    tell(lambda: inside(softcap=2.0), "sdpa")
    tell(lambda: inside(position_bias=q))
    apply_tensor_parallel(sharded := build("llama"), axis)
    install_attention(sharded)
    tell(lambda: sharded(**given), AlibiBackend())
    assert ring(**given).loss.isfinite()
    return text


def test_unsupported_combinations_are_refused() -> None:
    expected = [
        'ModelError: the attention backend "alibi" is active together with sequence parallelism of the mode "ring"',
        'ModelError: the attention backend "whole_layers" is active .* computes_local_heads = True',
        "ModelError: LlamaAttention drops attention weights with probability 0.5; together with sequence parallelism",
        'ConfigError: the attention backend "ring" got a shard of the mode "ulysses"',
        "ModelError: the model requests an attention mask that is a ChunkedMask",
        r"ModelError: a module got a mask of its own \(Tensor\)",
        r"ModelError: a module passes \['softcap'\] to attention; the backend \"sdpa\"",
        r"ModelError: attention got \['position_bias'\], which the backend \"ulysses\" does not support",
        "ModelError: LlamaAttention computes 2 of 4 attention heads, and the backend",
    ]
    text = run_ranks(refusals, 2)
    assert text[0] == text[1] and len(text[0]) == len(expected)
    for actual, pattern in zip(text[0], expected, strict=True):
        assert re.match(pattern, actual), f"{pattern!r}: {actual!r}"
    assert issubclass(ModelError, ValueError)
