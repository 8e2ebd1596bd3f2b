"""Tests that a loss without full logits equals the loss, for bare tensors and unmodified models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.parallel.sequence.tiled_models import Largest
from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.sequence.long_context import apply_long_context
from windlass.parallel.sequence.tiled_loss import get_default_tile_tokens, tiled_loss
from windlass.parallel.sequence_loss import ModelLoss, shift_targets


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("chunk", [1, 4, 9, 100, None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tiled_loss_equals_the_loss(chunk: int | None, with_bias: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    bias = torch.randn(11, requires_grad=True) if with_bias else None
    labels = torch.randint(0, 11, (2, 9))
    labels[0, :5] = -100
    given = [hidden, weight] + ([bias] if bias is not None else [])
    actual = tiled_loss(hidden, weight, labels, chunk, bias=bias)
    expected = plain_loss(hidden, weight, labels, bias)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, given), torch.autograd.grad(expected, given))


def test_mean_may_use_another_count() -> None:
    hidden, weight, labels = torch.randn(9, 6), torch.randn(11, 6), torch.randint(0, 11, (9,))
    mean = tiled_loss(hidden, weight, labels, 2)
    torch.testing.assert_close(tiled_loss(hidden, weight, labels, 2, num_items=36), mean / 4)


def test_only_logits_of_one_tile_are_in_memory() -> None:
    weight = torch.randn(50, 4, requires_grad=True)
    for tokens in (100, 200, 400):
        hidden = torch.randn(tokens, 4, requires_grad=True)
        labels = torch.randint(0, 50, (tokens,))
        with Largest() as largest:
            tiled_loss(hidden, weight, labels, 8).backward()
        assert largest.elements == max(8 * 50, tokens * 4)
        with Largest() as largest:
            plain_loss(hidden, weight, labels, None).backward()
        assert largest.elements == tokens * 50


def test_default_tile_is_256_mib_of_logits() -> None:
    assert get_default_tile_tokens(128_256) == 523 and get_default_tile_tokens(2**40) == 1


# ------------------------------------------------------------------------------------------------------------ models


def build(name: str, **changes: Any) -> Any:
    import transformers as hf

    torch.manual_seed(1)
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 60, "use_cache": False, **changes}
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=16,
                n_head=2,
                n_layer=2,
                n_positions=128,
                vocab_size=60,
                bos_token_id=0,
                eos_token_id=0,
                **changes,
            )
        )
    kinds = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig),
        "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config),
        "granite": (hf.GraniteForCausalLM, hf.GraniteConfig),
        "cohere": (hf.CohereForCausalLM, hf.CohereConfig),
    }
    model, config = kinds[name]
    more = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 40}
    return model(config(**{**small, **more, **({"head_dim": 8} if name == "gemma2" else {})}))


def trained(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def a_batch(tokens: int = 21) -> dict[str, Tensor]:
    ids = torch.randint(1, 60, (2, tokens), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[1, :6] = -100
    return {"input_ids": ids, "labels": labels}


PLAIN_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", PLAIN_GPT2),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.3}),
    ],
)
def test_unmodified_model_trains_equally(name: str, changes: dict[str, Any]) -> None:
    model = build(name, **changes)
    long = copy.deepcopy(model)
    apply_long_context(long, tiled_mlp=5, tiled_loss=4)
    expected, actual = trained(model, a_batch()), trained(long, a_batch())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert long(**a_batch()).logits is not None  # without gradients the logits are not deferred
    long.eval()
    model.eval()
    for given in (a_batch(), {"input_ids": a_batch()["input_ids"]}):
        torch.testing.assert_close(long(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)


def test_outputs_of_a_model_that_trains_have_no_logits() -> None:
    model = build("llama")
    apply_long_context(model, tiled_mlp=False, recompute=False)
    model.train()
    output = model(**a_batch())
    assert "logits" not in output and output.logits is None
    assert len(model(**a_batch(), return_dict=False)) == 1
    assert model(input_ids=a_batch()["input_ids"]).logits.shape == (2, 21, 60)
    assert model(a_batch()["input_ids"], labels=a_batch()["labels"]).logits is None


def test_largest_tensors_do_not_grow_with_the_vocabulary_times_the_tokens() -> None:
    sizes = {}
    for tokens in (64, 128):
        for long in (False, True):
            model = build("llama", vocab_size=2000, max_position_embeddings=128)
            if long:
                apply_long_context(model, tiled_mlp=8, tiled_loss=8)
            ids = torch.randint(0, 2000, (1, tokens))
            model.train()
            with Largest() as largest:
                model(input_ids=ids, labels=ids).loss.backward()
            sizes[tokens, long] = largest.elements
    assert (sizes[64, False], sizes[128, False]) == (64 * 2000, 128 * 2000)
    assert sizes[64, True] == sizes[128, True] == 2000 * 16  # the largest tensor is the embedding


def test_access_to_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    apply_long_context(model, tiled_mlp=False, recompute=False)
    model.train()
    loss = model._loss_function

    def looks_by(looking: Callable[[Any], Any]) -> Callable[..., Tensor]:
        return lambda logits, labels, **kwargs: loss(looking(logits), labels, **kwargs)

    for looking in (
        lambda logits: logits + torch.ones(60),
        lambda logits: logits[..., :3],
        lambda logits: torch.softmax(logits, -1),
        lambda logits: logits * torch.ones(60),
        lambda logits: logits.shape and logits,
        lambda logits: torch.mul(logits, torch.ones(60)),
    ):
        monkeypatch.setattr(model, "_loss_function", looks_by(looking))
        with pytest.raises((ModelError, TypeError), match="tiled_loss=False|unsupported operand"):
            model(**a_batch())
    monkeypatch.setattr(model, "_loss_function", loss)
    assert model(**a_batch()).loss > 0  # the model still works after the error


def test_invalid_requests_are_refused() -> None:
    with pytest.raises(ModelError, match="recompute=False"):
        apply_long_context(build("llama"), recompute=False, activation_tier="cpu")
    with pytest.raises(ConfigError, match="and only then"):
        apply_long_context(build("llama"), activation_tier="nvme")
    with pytest.raises(ModelError, match="not a transformers model"):
        apply_long_context(nn.Linear(3, 3))
    model = build("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ModelError, match="has a loss function of its own"):
        apply_long_context(model)


def test_loss_function_accepts_the_arguments_of_transformers() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = ModelLoss()
    logits, labels = torch.randn(2, 7, 11), torch.randint(0, 11, (2, 7))
    labels[0, :3] = -100
    counts = [{}, {"num_items_in_batch": 50}, {"num_items_in_batch": torch.tensor(50)}]
    for more in (*counts, {"shift_labels": shift_targets(labels)}):
        expected = ForCausalLMLoss(logits, labels, vocab_size=11, **more)
        torch.testing.assert_close(loss(logits, labels, vocab_size=11, **more), expected)
    with pytest.raises(ModelError, match="needs labels"):
        loss(logits)
