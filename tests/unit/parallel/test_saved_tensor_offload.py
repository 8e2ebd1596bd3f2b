"""Tests of offloaded saved tensors: each is moved once and fetched before its use, parameters are never moved, and
errors are raised."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.parallel.checkpointed_models import Layer, differences, ids, trained
from tests.unit.parallel.fake_activation_store import FarPlace
from windlass.base.errors import ModelError
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader

LATE = [False, True]


def keeping(keeper: SavedTensorOffloader) -> saved_tensors_hooks:
    """Return a context in which `keeper` offloads the saved tensors."""
    return saved_tensors_hooks(keeper.pack, keeper.unpack)


@pytest.mark.parametrize("name", ["Net", "Tied", "Twice", "Frozen", "Shapes", "Uneven"])
@pytest.mark.parametrize("late", LATE)
def test_offloaded_model_computes_equal_results(name: str, late: bool) -> None:
    keeper = SavedTensorOffloader(FarPlace(late=late), min_offload_bytes=0)

    def through(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        with keeping(keeper):
            return function(*args, **kwargs)

    assert not differences(trained(name, through), trained(name, lambda f, /, *a, **k: f(*a, **k)))
    assert keeper.counters.offloaded_bytes > 0 and keeper.counters.fetched_bytes > 0
    gc.collect()
    assert keeper.counters.stored_bytes["cpu"] == 0, "what no graph needs is gone"


def test_offloaded_tensors_leave_the_device_and_parameters_stay() -> None:
    layer, place = Layer(), FarPlace()
    keeper = SavedTensorOffloader(place, min_offload_bytes=0)
    inputs = torch.randn(8, 32, requires_grad=True)
    refs = []
    with keeping(keeper):
        x = inputs * 1.0
        refs.append(StorageWeakRef(x.untyped_storage()))
        for _ in range(2):
            x = layer(x)
            refs.append(StorageWeakRef(x.untyped_storage()))
        loss = x.square().sum()
    del x
    assert all(ref.expired() for ref in refs)
    weights = {parameter.numel() for parameter in layer.parameters()}
    assert not weights & set(place.put_there), "no weight, and no transposed weight, was moved"
    loss.backward()
    assert inputs.grad is not None


def test_tensor_saved_as_many_views_is_offloaded_once() -> None:
    place = FarPlace()
    keeper = SavedTensorOffloader(place, min_offload_bytes=0)
    x = torch.randn(6, 8, requires_grad=True)
    with keeping(keeper):
        y = x * 1.0  # autograd saves nothing for this product
        loss = (y * y).sum() + (y.t() @ y).sum() + y.view(-1).square().sum() + (y.expand(2, 6, 8) ** 2).sum()
        z = y * 3.0
        loss = loss + (z * z).sum()
    assert place.put_there.count(48) == 2, "y and z"
    assert keeper.counters.deduplicated_bytes >= 3 * 48 * 4
    loss.backward()
    want = torch.autograd.grad(sum(((x * c) ** 2).sum() for c in (1, 1, 3)) + 2 * (x**2).sum() + (x.t() @ x).sum(), x)[
        0
    ]
    torch.testing.assert_close(x.grad, want)


def test_tensor_at_a_reused_address_is_distinguished() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=0)
    weight = torch.randn(64, requires_grad=True)
    losses, inputs = [], []
    with keeping(keeper):
        for number in range(20):  # each x is freed at once, so that the next gets its address
            x = torch.full((64,), float(number))
            inputs.append(x.clone())
            losses.append((weight * x).sum())
            del x
    for loss, x in zip(losses, inputs, strict=True):
        assert torch.equal(torch.autograd.grad(loss, weight)[0], x)


def test_small_tensors_stay_on_the_device_and_are_counted() -> None:
    place = FarPlace()
    keeper = SavedTensorOffloader(place, min_offload_bytes=1024)
    x = torch.randn(255, requires_grad=True), torch.randn(256, requires_grad=True)
    with keeping(keeper):
        loss = sum((part * 1.0).exp().sum() for part in x)
    assert place.put_there == [256] and keeper.counters.kept_bytes == 255 * 4
    loss.backward()


@pytest.mark.parametrize("numel", [10, 1000])
def test_in_place_change_is_an_error_as_in_torch(numel: int) -> None:
    """A change in place is an error as in plain PyTorch, for small tensors that stay and large ones in flight."""
    keeper = SavedTensorOffloader(FarPlace(late=True), min_offload_bytes=1024)
    x = torch.randn(numel, requires_grad=True)
    y = x * 1.0
    with keeping(keeper):
        loss = (y * y).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        loss.backward()


def test_offloaded_tensor_keeps_its_saved_values() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=0)
    x = torch.randn(1000, requires_grad=True)
    y = x * 1.0
    with keeping(keeper):
        loss = (y * y).sum()
    with torch.no_grad():
        y.add_(1)
        want = 2 * x
    loss.backward()
    assert torch.equal(x.grad, want)  # type: ignore[arg-type]


def test_number_of_transfers_in_flight_is_limited() -> None:
    keeper = SavedTensorOffloader(FarPlace(late=True, under_way=2), min_offload_bytes=0)
    refs, losses = [], []
    for _ in range(6):
        x = torch.randn(100, requires_grad=True) * 1.0
        refs.append(StorageWeakRef(x.untyped_storage()))
        with keeping(keeper):
            losses.append(x.exp().sum())
        del x
    with keeping(keeper):
        y = torch.randn(7, requires_grad=True) * 1.0
        losses.append((y * y).sum())
    exps = keeper.store.put_there.count(100)  # type: ignore[attr-defined]
    assert exps == 6
    assert sum(kept.finish_transfer(wait=False) is False for ref in keeper._in_flight if (kept := ref())) <= 2


def test_each_tensor_is_fetched_once_and_all_but_the_first_are_prefetched() -> None:
    place = FarPlace()
    keeper = SavedTensorOffloader(place, min_offload_bytes=0)
    x = torch.randn(100, requires_grad=True)
    with keeping(keeper):
        y = x
        for _ in range(6):
            y = y.sin()  # autograd saves the input of sin
    place.fetched.clear()
    y.sum().backward()
    assert len(place.fetched) == 6, "each is fetched once"
    assert keeper.counters.prefetched_bytes == 5 * 400, "all but the first that was needed"


def test_shared_tensor_is_fetched_once_and_then_freed() -> None:
    place = FarPlace()
    keeper = SavedTensorOffloader(place, min_offload_bytes=0)
    x = torch.randn(100, requires_grad=True)
    mask = torch.rand(100)
    with keeping(keeper):
        y = x
        for _ in range(6):
            y = (y * mask).sin()
    del mask
    place.fetched.clear()
    y.sum().backward()
    assert len(place.fetched) == 7, "the mask, and six inputs of sin"
    assert not keeper._cached


def test_nothing_is_kept_after_the_backward() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=0)
    x = torch.randn(100, requires_grad=True)
    mask = torch.rand(100)
    with keeping(keeper):
        first, second = x * mask, (x * 2) * mask
    first.sum().backward()
    assert not keeper._cached, "the second has not asked for the mask yet"
    second.sum().backward()


def test_memory_in_use_is_bounded() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=0)
    x = torch.randn(100, requires_grad=True)
    masks = [torch.rand(100) for _ in range(5)]
    held: list[int] = []
    with keeping(keeper):
        y = x
        for mask in masks * 2:
            y = y * mask
            y.register_hook(lambda _: held.append(len(keeper._cached)))
    y.sum().backward()
    assert max(held) == 2
    want = torch.ones(100)
    for mask in masks * 2:
        want = want * mask
    torch.testing.assert_close(x.grad, want)


def test_graph_can_be_traversed_twice() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=0)
    x = torch.randn(50, requires_grad=True)
    with keeping(keeper):
        loss = (x.sin() * x.exp()).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)[0]
    second = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, second)
    torch.testing.assert_close(
        torch.autograd.grad(first.sum(), x)[0],
        torch.autograd.grad(torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)[0].sum(), x)[0],
    )


def test_outputs_that_save_themselves_create_no_cycle() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=10_000)
    gc.disable()
    try:
        x = torch.randn(100, requires_grad=True)
        with keeping(keeper):
            y = x.exp()
        ref = StorageWeakRef(y.untyped_storage())
        del y
        assert ref.expired()
    finally:
        gc.enable()


def test_kinds_of_tensors_that_are_not_offloaded() -> None:
    keeper = SavedTensorOffloader(FarPlace(), min_offload_bytes=0)
    parameter = nn.Parameter(torch.randn(4, 4))
    overlapping = torch.arange(10.0).unfold(0, 4, 2)
    for tensor in (parameter, parameter.t(), parameter[:2], torch.randn(3, dtype=torch.complex64).conj()):
        assert not keeper.is_offloadable(tensor)
    packed = keeper.pack(overlapping)
    assert torch.equal(keeper.unpack(packed), overlapping)
    assert keeper.is_offloadable(ids()) and keeper.is_offloadable(torch.randn(3))
    assert keeper.counters.offloaded_bytes == 0
