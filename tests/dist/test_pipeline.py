"""Tests that a pipeline of ranks computes the same losses and gradients as one process, under every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist.harness import RankError, run_ranks
from tests.dist.pipeline_models import (
    WIDTH,
    Seen,
    Setting,
    evaluate,
    expected,
    in_16_bits,
    row_batch,
    steps,
    text,
    transformer,
    unlike,
)
from tests.dist.quick_rows import in_shares, share
from tests.oracle import relative_error
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.comm_volumes import StepWorkload, compute_step_volumes
from windlass.parallel.model_shape import from_transformers

BOUND = 1e-6
_expected = cache(expected)


def _settings(ranks: int, micros: range | tuple[int, ...]) -> list[Setting]:
    results = [Setting(name, m) for m in micros for name in ("gpipe", "1f1b", "zero-bubble")]
    return results + [Setting("interleaved", m, 2) for m in micros] + [Setting("gpipe", micros[-1], 8 // ranks)]


def _hold(name: str, ranks: int, settings: list[Setting]) -> list[list[Seen]]:
    by_rank = run_ranks(steps, ranks, name, settings, timeout=240.0)
    for number, setting in enumerate(settings):
        expected = _expected(name, setting.micros)
        seen = [result[number] for result in by_rank]
        assert [len(entry.losses) for entry in seen] == [0] * (ranks - 1) + [setting.micros]
        assert seen[-1].losses == pytest.approx(expected.losses, rel=BOUND), (name, setting)
        grads = {}
        for item in seen:
            for key, gradient in item.grads.items():
                if key in grads:
                    assert (grads[key] == gradient).all(), f"{key} of {name} differs between its ranks"
                grads[key] = gradient
        error, where = relative_error(grads, expected.grads)
        assert error <= BOUND, f"{name} {setting}: gradient of {where} off by {error:.2e}"
    return by_rank


@pytest.mark.parametrize("ranks", [2, 3, 4])
@in_shares
def test_every_schedule_and_number_of_micro_batches(ranks: int, every: bool) -> None:
    _hold("row", ranks, _settings(ranks, tuple(share(range(1, 9), ranks, 3, every))))


def _on_few_and_four(names: list[str], few: int, four: tuple[str, ...]) -> list[Any]:
    """Return rows of each name on `few` and on four ranks; on four, names outside of `four` are slow."""
    marks = [[] if name in four else [pytest.mark.slow] for name in names]
    return [(name, few) for name in names] + [
        pytest.param(name, 4, marks=mark) for name, mark in zip(names, marks, strict=True)
    ]


NESTED = ["several", "named", "in place", "tied", "thrice", "row frozen", "row ragged"]
TRANSFORMERS = ["llama", "llama tied", "llama checkpointed", "gpt2", "mixtral", "falcon"]


@pytest.mark.parametrize(("name", "ranks"), _on_few_and_four(NESTED, 3, ("several", "tied")))
@in_shares
def test_any_nested_value_passes_between_layers(name: str, ranks: int, every: bool) -> None:
    on_four = [Setting("1f1b", 5), Setting("interleaved", 3, 2), Setting("zero-bubble", 6)]
    settings = on_four if ranks == 4 else _settings(3, (1, 4))
    _hold(name, ranks, share(settings, list(NESTED).index(name), 3, every))


@pytest.mark.parametrize(("name", "ranks"), _on_few_and_four(TRANSFORMERS, 2, ("llama tied", "mixtral")))
@in_shares
def test_transformers_models(name: str, ranks: int, every: bool) -> None:
    on_four = [Setting("1f1b", 5), Setting("interleaved", 5, 2), Setting("zero-bubble", 4)]
    settings = on_four if ranks == 4 else _settings(2, (1, 3))
    _hold(name, ranks, share(settings, list(TRANSFORMERS).index(name), 3, every))


def _row_bytes(micros: int) -> int:
    """Return the bytes of all activations across one stage boundary.

    A micro-batch has 2 x length x WIDTH elements of 4 bytes.
    """
    return sum(4 * 2 * row_batch("row", micro)[0].shape[1] * WIDTH for micro in range(micros))


@pytest.mark.parametrize("setting", [Setting("1f1b", 5), Setting("interleaved", 4, 2), Setting("zero-bubble", 3)])
def test_only_activations_are_sent_between_stages(setting: Setting) -> None:
    """Each micro-batch sends exactly one activation and one gradient across each stage boundary."""
    once = _row_bytes(setting.micros)
    results = [item[0].moved for item in run_ranks(steps, 2, "row", [setting], True)]
    assert [moved.get("activations", 0) for moved in results] == [once * (setting.each - 1), once * setting.each]
    assert [moved.get("gradients", 0) for moved in results] == [once * setting.each, once * (setting.each - 1)]
    assert all(moved.keys() <= {"activations", "gradients"} for moved in results)


def test_only_hidden_states_are_sent_between_transformer_stages() -> None:
    results = [item[0].moved for item in run_ranks(steps, 3, "llama", [Setting("1f1b", 4)], True)]
    tokens = sum(text(micro)["input_ids"].numel() for micro in range(4))
    width = transformer("llama").config.hidden_size
    once = 4 * tokens * width
    assert results == [{"gradients": once}, {"activations": once, "gradients": once}, {"activations": once}]


@pytest.mark.parametrize("setting", [Setting("1f1b", 4), Setting("interleaved", 4, 2)])
def test_router_logits_are_sent_as_in_the_formula(setting: Setting) -> None:
    results = [item[0].moved for item in run_ranks(steps, 2, "mixtral", [setting], True)]
    tokens = sum(text(micro)["input_ids"].numel() for micro in range(4))
    shape = from_transformers(transformer("mixtral").config.to_dict())
    # the bytes of four micro-batches are those of one micro-batch with all tokens
    work = StepWorkload(tokens, activation_bytes=4, virtual_stages=setting.each)
    for pipe, moved in enumerate(results):
        reported = {
            item.tensors: item.nbytes
            for item in compute_step_volumes(shape, MeshShape(pp=2), work, pipe)
            if item.axis == "pp"
        }
        logits, back = reported.get("logits of routers", 0), reported.get("gradients of logits of routers", 0)
        assert bool(logits) == (pipe == 1 or setting.each == 2) and bool(back) == (pipe == 0 or setting.each == 2)
        assert moved.get("activations", 0) == reported.get("activations", 0) + logits
        assert moved.get("gradients", 0) == reported.get("gradients of activations", 0) + back


def test_shapes_are_sent_once_per_micro_batch_shape() -> None:
    first = [item[0].moved.get("headers", 0) for item in run_ranks(steps, 2, "row", [Setting("1f1b", 3)])]
    longer = [item[0].moved.get("headers", 0) for item in run_ranks(steps, 2, "row", [Setting("1f1b", 8)])]
    assert first == longer and first[0] == 0 < first[1] < 3 * 400  # less than 400 for each of 3 lengths


def test_shared_parameter_gradients_are_sent_to_every_holder() -> None:
    settings = [Setting("1f1b", 2)]
    tied = [item[0] for item in run_ranks(steps, 3, "tied", settings)]
    first, middle, last = (item.grads.get("tied_modules.embed.weight") for item in tied)
    assert middle is None and first.any() and torch.equal(first, last)


def test_evaluation_returns_losses_and_outputs() -> None:
    for name, each in (("row", 1), ("row", 2), ("llama tied", 2), ("several", 1)):
        expected = _expected(name, 4).losses
        actual = run_ranks(evaluate, 3 if each == 1 else 4, name, 4, each)
        assert [len(losses) for losses, _ in actual] == [0] * (len(actual) - 1) + [4]
        losses, outputs = actual[-1]
        assert losses == pytest.approx(expected, rel=BOUND)
        assert all(output.shape[0] == 2 for output in outputs) and len(outputs) == 4


@pytest.mark.parametrize("name", ["row", "gpt2"])
def test_in_16_bits_losses_fall(name: str) -> None:
    losses = run_ranks(in_16_bits, 2, name)[-1]
    assert losses[-1] < 0.95 * losses[0]


def test_changing_output_shape_raises_and_names_the_option() -> None:
    with pytest.raises(RankError, match=r"stage 0 returned torch.float32 \[2, 2, 8\] .* dynamic_shape=True"):
        run_ranks(unlike, 2)
