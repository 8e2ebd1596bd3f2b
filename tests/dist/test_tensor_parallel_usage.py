"""Tests of other uses of a tensor-parallel model: generation, recomputation, freezing, dropout, 16 bits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.causal_models import build, language
from tests.dist.harness import run_ranks
from tests.dist.tensor_parallel_runs import (
    EXACT,
    NORMS,
    added_up,
    pair,
    tensor_axis,
    whole_gradients,
)
from tests.hf_models import checkpointed
from tests.oracle import relative_error
from windlass.parallel.tensor import (
    apply_tensor_parallel,
)


def generated(name: str, options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    plain, model, _, _ = pair(name, {"use_cache": True}, options)
    ids = language(2)["input_ids"]
    requested: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain.eval(), model.eval()
    return plain.generate(ids, **requested).tolist(), model.generate(ids, **requested).tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in ("llama", "qwen3", "gpt2", "phi3", "gpt_bigcode")), ("llama", NORMS), ("mixtral", NORMS)],
    ids=str,
)
def test_sharded_model_generates_with_its_cache(name: str, options: dict[str, Any]) -> None:
    """A decode step has one token. With sequence sharding over three ranks, two ranks have no token in this step."""
    for expected, actual in run_ranks(generated, 3, name, options):
        assert actual == expected
        assert len(actual[0]) == 13


def inferred(name: str, options: dict[str, Any]) -> float:
    plain, model, _, _ = pair(name, {}, options)
    with torch.inference_mode():
        ids = language(2)["input_ids"]
        expected, actual = plain(input_ids=ids).logits, model(input_ids=ids).logits
    return relative_error({"logits": actual}, {"logits": expected})[0]


@pytest.mark.parametrize("options", [{}, NORMS], ids=str)
def test_sharded_model_runs_in_inference_mode(options: dict[str, Any]) -> None:
    assert max(run_ranks(inferred, 2, "llama", options)) < EXACT


def recomputed(name: str, reentrant: bool, options: dict[str, Any]) -> float:
    """Run forwards of different lengths before their backwards, as preference losses do."""
    plain, model, axis, _ = pair(name, {}, options)
    for item in (plain, model):
        checkpointed(item, reentrant=reentrant)
        item.enable_input_require_grads()
        losses = [item(**language(seed, length=length)).loss for seed, length in ((0, 7), (1, 10), (2, 8))]
        (losses[0] + 2 * losses[1] + 3 * losses[2]).backward()
    added_up(model, axis)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return relative_error(whole_gradients(model, axis), expected)[0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, NORMS], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_can_be_recomputed(name: str, reentrant: bool, options: dict[str, Any]) -> None:
    assert max(run_ranks(recomputed, 3, name, reentrant, options)) < EXACT


def frozen(name: str) -> float:
    """Train only the query projections and the norms. Return the error of their gradients."""
    plain, model, axis, _ = pair(name, {}, {})
    for item in (plain, model):
        for parameter, value in item.named_parameters():
            value.requires_grad_("q_proj" in parameter or "norm" in parameter)
        item(**language(0)).loss.backward()
    added_up(model, axis)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return relative_error(whole_gradients(model, axis), expected)[0]


def test_parameters_can_be_frozen() -> None:
    assert max(run_ranks(frozen, 2, "qwen3")) < EXACT


def narrow(name: str, options: dict[str, Any], autocast: bool) -> tuple[float, float]:
    plain, model, axis, _ = pair(name, {}, options)
    if not autocast:
        plain.bfloat16(), model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want, have = (item(**language(0)).loss for item in (plain, model))
    want.backward(), have.backward()
    added_up(model, axis)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return abs(float(have) / float(want) - 1), relative_error(whole_gradients(model, axis), expected)[0]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_bf16_and_autocast_are_near_the_plain_model(name: str, autocast: bool) -> None:
    for options in ({}, NORMS, {"tp_overlap_chunks": 2}):
        for loss, gradients in run_ranks(narrow, 2, name, options, autocast):
            assert loss < 1e-2
            assert gradients < 6e-2


def hidden_states() -> list[torch.Tensor]:
    """Return the live tensors `[3, tokens, features]` of this process, which may have run other tests."""
    import gc

    gc.collect()
    results = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    return [item for item in results if item.dim() == 3 and len(item) == 3]


def kept_after(options: dict[str, Any]) -> list[list[int]]:
    """Return the shapes of hidden states that are alive after a step and were not before it.

    gloo's threads free sent tensors a little after the wait for them has returned.
    """
    _, model, _, _ = pair("llama", {}, options)
    before = hidden_states()
    model(**language(0, samples=3, length=11)).loss.backward()
    deadline = time.monotonic() + 10
    while True:
        left = [list(item.shape) for item in hidden_states() if not any(item is other for other in before)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@pytest.mark.parametrize("options", [{}, NORMS], ids=str)
def test_no_activation_survives_a_step(options: dict[str, Any]) -> None:
    assert run_ranks(kept_after, 2, options) == [[], []]


def dropped(options: dict[str, Any]) -> dict[str, Any]:
    """Return loss and dropout masks of a GPT-2, and the error of recomputed gradients. Rng states of ranks differ."""
    changes = {"n_embd": 32, "n_head": 4, "attn_pdrop": 0.4, "resid_pdrop": 0.3, "embd_pdrop": 0.2}
    axis = tensor_axis()
    model = build("gpt2", **changes).train()
    model.config._attn_implementation = "eager"
    torch.manual_seed(50 + axis.index)
    apply_tensor_parallel(model, axis, **options)
    masks: list[torch.Tensor] = []
    attention = model.transformer.h[0].attn
    attention.register_forward_hook(lambda module, args, output: masks.append(output[1][:, :1] == 0))
    residual: list[torch.Tensor] = []
    attention.resid_dropout.register_forward_hook(lambda module, args, output: residual.append(output == 0))
    batch = language(0, samples=4, length=9)
    before = torch.get_rng_state()
    loss = model(**batch).loss
    loss.backward()
    plainly = {name: value.grad.clone() for name, value in model.named_parameters()}
    after = torch.get_rng_state()
    checkpointed(model, reentrant=False)
    model.zero_grad()
    torch.set_rng_state(before)
    model(**batch).loss.backward()
    again = {name: value.grad for name, value in model.named_parameters()}
    return {
        "loss": float(loss),
        "local": masks[0],
        "whole": residual[0],
        "again": relative_error(again, plainly)[0],
        "state": after,
        "recomputed": torch.equal(masks[0], masks[-1]) and len(masks) == 3,
    }


@pytest.mark.parametrize("options", [{}, NORMS], ids=str)
def test_dropout_differs_on_sharded_and_agrees_on_replicated_activations(options: dict[str, Any]) -> None:
    first, second = run_ranks(dropped, 2, options)
    assert first["loss"] == second["loss"]
    assert not torch.equal(first["local"], second["local"])
    if options:  # the sequence is sharded too: 5 and 4 of 9 tokens
        assert first["whole"].shape[1] == 5 and second["whole"].shape[1] == 4
        assert not torch.equal(first["whole"][:, :4], second["whole"])
    else:
        assert torch.equal(first["whole"], second["whole"])
    assert torch.equal(first["state"], second["state"])
    for seen in (first, second):
        assert 0.2 < float(seen["whole"].float().mean()) < 0.4
        assert seen["recomputed"]
        assert seen["again"] < EXACT


def router_with_noise() -> torch.Tensor:
    """Return a router's gradient. Nothing but its noise is random, and ranks start with different generator states."""
    axis = tensor_axis()
    model = build("mixtral", router_jitter_noise=0.3).train()
    torch.manual_seed(50 + axis.index)
    apply_tensor_parallel(model, axis)
    model(**language(0)).loss.backward()
    return model.model.layers[0].mlp.gate.weight.grad


def test_routers_draw_the_same_noise_on_all_ranks() -> None:
    first, second = run_ranks(router_with_noise, 2)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)


def replicated_attention() -> tuple[torch.Tensor, bool, float]:
    """Return dropout mask and share of zeros of replicated attention, and True if recomputation repeats all masks."""
    axis = tensor_axis()
    model = build("olmo2", attention_dropout=0.4).train()
    model.config._attn_implementation = "eager"
    apply_tensor_parallel(model, axis, tp_sequence_norms=True)
    masks: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: masks.append(output[1] == 0))
    checkpointed(model, reentrant=False)
    model(**language(0, length=8)).loss.backward()
    assert len(masks) == 4 and not torch.equal(masks[0], masks[1])
    share = float(masks[0].float().mean())
    return masks[0], torch.equal(masks[0], masks[3]) and torch.equal(masks[1], masks[2]), share


def test_full_sequence_modules_drop_the_same_elements_on_all_ranks() -> None:
    (first, again, share), (second, also, _) = run_ranks(replicated_attention, 2)
    assert torch.equal(first, second)
    assert again and also
    assert share > 0.5  # 28 of 64 for causality, and 0.4 of the other weights
