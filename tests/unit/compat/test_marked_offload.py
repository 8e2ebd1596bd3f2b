"""Tests that marked tensors are offloaded to host memory when autograd saves them. The device here is the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from windlass.base.errors import ModelError
from windlass.compat.accelerator import get_accelerator
from windlass.compat.marked_offload import CheckpointHiddenStatesOffload
from windlass.parallel import activation_store

SIZE = 64


@pytest.fixture
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_store, "has_separate_memory", lambda device: True)


def _trained(context: CheckpointHiddenStatesOffload | None, *, spoil: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(4, SIZE, requires_grad=True)
    layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(4)]
    hidden = x
    for layer in layers:
        if context is not None:
            context.mark(hidden)
        given, hidden = hidden, checkpoint(layer, hidden, use_reentrant=False)
    if spoil:
        with torch.no_grad():
            given.add_(1)
    hidden.square().sum().backward()
    return x.grad, [layer.weight.grad for layer in layers]  # type: ignore[return-value,misc]


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize(("keeps", "streams"), [(0, True), (1, False), (2, True), (9, True)])
def test_offload_keeps_gradients_and_leaves_the_newest_on_the_device(keeps: int, streams: bool) -> None:
    expected = _trained(None)
    context = CheckpointHiddenStatesOffload(use_streams=streams, min_offload_bytes=0, keep_last_count=keeps)
    for _ in range(2):  # entering the context again resets all counts
        with context:
            actual = _trained(context)
        assert torch.equal(actual[0], expected[0]) and all(map(torch.equal, actual[1], expected[1]))
        stats, stay = context.stats, min(keeps, 4)
        assert (stats.marked_tensors, stats.offloaded_tensors, stats.restored_tensors) == (4, 4 - stay, 4 - stay)
        assert stats.kept_last_tensors == stay and stats.offloaded_bytes == (4 - stay) * 4 * 4 * SIZE
        assert stats.saved_tensors_seen > 4 and not context._newest


@pytest.mark.usefixtures("_apart")
def test_in_place_change_of_a_saved_tensor_is_an_error() -> None:
    context = CheckpointHiddenStatesOffload(min_offload_bytes=0, keep_last_count=9)
    with context, pytest.raises(ModelError, match="changed in place"):
        _trained(context, spoil=True)


def test_nothing_is_offloaded_on_cpu() -> None:
    context = CheckpointHiddenStatesOffload(min_offload_bytes=0, keep_last_count=0)
    with context:
        _trained(context)
    assert (context.stats.marked_tensors, context.stats.skipped_marked_tensors) == (4, 4)


def test_layers_of_transformers_are_marked_while_a_context_is_active() -> None:
    from transformers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states.sin()

    own: Any = GradientCheckpointingLayer.__call__
    layer = Layer()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    layer.train()
    outer, inner = (CheckpointHiddenStatesOffload(min_offload_bytes=0) for _ in range(2))
    states = torch.randn(4, SIZE, requires_grad=True)
    with pytest.raises(ZeroDivisionError), outer:
        with inner:
            layer(states)
        assert GradientCheckpointingLayer.__call__ is not own
        layer(states)
        with pytest.raises(RuntimeError, match="not re-entrant"):
            outer.__enter__()
        raise ZeroDivisionError
    assert GradientCheckpointingLayer.__call__ is own
    layer(states)
    assert (outer.stats.marked_tensors, inner.stats.marked_tensors) == (1, 1) and not outer._marks


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last_count = -1 is negative"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("pins", [True, False])
def test_host_buffers_are_reused_and_pinned_by_the_accelerator(monkeypatch: pytest.MonkeyPatch, pins: bool) -> None:
    pinned = []
    monkeypatch.setattr(
        get_accelerator(),
        "pin_memory",
        lambda tensor, make_copy: pinned.append(tensor.shape) or torch.empty_like(tensor),
    )
    context = CheckpointHiddenStatesOffload(use_pin_memory=pins, min_offload_bytes=0, keep_last_count=0)
    expected = _trained(None)
    for _ in range(3):
        with context:
            actual = _trained(context)
        assert torch.equal(actual[0], expected[0]) and all(map(torch.equal, actual[1], expected[1]))
    # Four buffers serve all 12 tensors. A strided tensor uses the same buffers as a dense one.
    assert len(pinned) == (4 if pins else 0)
    flat, key = context._empty_cpu_like(torch.zeros(4 * SIZE))
    assert flat.shape == (4 * SIZE,) and len(pinned) == (4 if pins else 0)
    assert key == context._buffer_key(torch.zeros(2 * 4 * SIZE)[::2])
    assert context._empty_cpu_like(torch.zeros(8, 6)[:, ::2])[0].is_contiguous()


@pytest.mark.usefixtures("_apart")
def test_pool_keeps_at_most_the_configured_number_of_buffers() -> None:
    context = CheckpointHiddenStatesOffload(
        use_pin_memory=False, min_offload_bytes=0, keep_last_count=0, max_cpu_buffer_pool_count=1
    )
    with context:
        _trained(context)
    _, key = context._empty_cpu_like(torch.zeros(1))
    store = context._empty_cpu_like.__self__
    assert key not in store._free and [len(free) for free in store._free.values()] == [1]
