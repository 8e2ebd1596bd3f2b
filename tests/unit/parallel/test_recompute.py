"""Tests that checkpointed models give bitwise the results of plain ones, with their inputs on any tier."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.parallel.checkpointed_models import NETS, Layer, Net, differences, ids, plainly, trained
from tests.unit.parallel.fake_activation_store import FarPlace
from windlass import checkpointing
from windlass.base.errors import ModelError
from windlass.parallel.activation_store import DeviceStore
from windlass.parallel.checkpoint_profiler import CheckpointProfiler
from windlass.parallel.recompute import RecomputeSettings, recompute
from windlass.parallel.rng_tracker import rng_tracker
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader

PLACES: dict[str, Callable[[], Any]] = {
    "as they are": lambda: None,
    "buffer": lambda: DeviceStore(4),
    "far": FarPlace,
    "far and late": lambda: FarPlace(late=True),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    rng_tracker.reset()


def manner(place: Any = None) -> RecomputeSettings:
    keeper = None if place is None else SavedTensorOffloader(place, min_offload_bytes=0)
    return RecomputeSettings(keeper, CheckpointProfiler(log_times=False, synchronize=False))


def through(how: RecomputeSettings) -> Callable[..., Any]:
    """Return a checkpoint function with these settings."""
    return lambda function, /, *args, **kwargs: recompute(how, function, args, kwargs)


@cache
def plain_result(name: str, autocast: bool = False) -> dict[str, Tensor]:
    return trained(name, plainly, autocast=autocast)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NETS)
def test_checkpointing_keeps_results(name: str, place: str) -> None:
    how = manner(PLACES[place]())
    assert not differences(trained(name, through(how)), plain_result(name))
    if how.offloader is not None:
        assert how.offloader.counters.offloaded_bytes > 0
        gc.collect()
        assert not any(how.offloader.counters.stored_bytes.values())


@pytest.mark.parametrize("place", ["as they are", "far"])
def test_a_recomputation_runs_under_the_same_autocast(place: str) -> None:
    want = plain_result("Net", autocast=True)
    assert differences(want, plain_result("Net")), "it does compute in 16 bits"
    assert not differences(trained("Net", through(manner(PLACES[place]())), autocast=True), want)


def test_checkpoint_works_without_configure() -> None:
    assert not differences(trained("Nested", checkpointing.checkpoint), plain_result("Nested"))


def saved_bytes(run: Callable[[], Any]) -> int:
    """Return the bytes that autograd saves during `run`, each storage once, without parameters."""
    storages: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def test_only_inputs_are_saved() -> None:
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Layer() for _ in range(4))
    x = torch.randn(4, 10, 32, requires_grad=True)

    def forward(how: Callable[..., Any]) -> Tensor:
        h = x * 1.0
        for block in blocks:
            h = how(block, h)
        return h

    plain, less = saved_bytes(lambda: forward(plainly)), saved_bytes(lambda: forward(through(manner())))
    assert less == 4 * x.nbytes < plain / 4
    how = manner(FarPlace())
    assert saved_bytes(lambda: forward(through(how))) == 0
    assert how.offloader is not None and how.offloader.counters.offloaded_bytes == 4 * x.nbytes


@pytest.mark.parametrize("how", ["argument", "keyword", "partial"])
def test_offloaded_inputs_are_freed(how: str) -> None:
    """The storage of every layer's input is freed right after the forward: no other reference remains."""
    torch.manual_seed(0)
    blocks, refs = [Layer() for _ in range(4)], []
    call = through(manner(FarPlace()))

    def forward() -> Tensor:
        x = torch.randn(4, 10, 32, requires_grad=True) * 1.0
        for block in blocks:
            refs.append(StorageWeakRef(x.untyped_storage()))
            scale = torch.ones(64) * 1.0
            refs.append(StorageWeakRef(scale.untyped_storage()))
            if how == "partial":
                x = call(partial(partial(block.forward, scale=scale), x))
            else:
                x = call(block, x=x, scale=scale) if how == "keyword" else call(block, x, scale)
            del scale
        return x.sum()

    loss = forward()
    assert len(refs) == 8 and all(ref.expired() for ref in refs)
    loss.backward()


def test_nested_checkpoints_offload_the_outer_inputs_only() -> None:
    place = FarPlace()
    model = Net(plainly)
    call = through(manner(place))

    def both(x: Tensor) -> Tensor:
        return call(model.blocks[1], call(model.blocks[0], x))

    x = torch.randn(4, 10, 32, requires_grad=True)
    call(both, x).sum().backward()
    assert place.put_there == [x.numel()]


def test_checkpoint_without_gradients_is_a_plain_call() -> None:
    place, seen = FarPlace(), []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x * 2

    with torch.no_grad():
        result = through(manner(place))(function, torch.ones(3))
    assert seen == [False] and torch.equal(result, 2 * torch.ones(3)) and not place.put_there


def test_changes_of_argument_containers_are_visible_and_not_repeated() -> None:
    cache: list[Tensor] = []
    sizes = []

    def function(x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x * 2)
        sizes.append(len(cache))
        return x.sin() * len(cache)

    x = torch.randn(5, requires_grad=True)
    through(manner(FarPlace()))(function, x, cache).sum().backward()
    assert len(cache) == 1 and sizes == [1, 1], "the recomputation began from the list as it was"
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_exceptions_propagate_and_leave_no_state() -> None:
    call = through(manner(FarPlace()))

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        call(fails, torch.ones(3, requires_grad=True))
    assert not differences(trained("Net", call), plain_result("Net"))


def test_named_generators_are_restored() -> None:
    rng_tracker.add("model-parallel-rng", 5)

    def function(x: Tensor) -> Tensor:
        with rng_tracker.fork():
            x = torch.nn.functional.dropout(x, 0.5)
        return x * torch.nn.functional.dropout(x, 0.5)

    start = rng_tracker.get_states()
    results = []
    for how in (plainly, through(manner(FarPlace()))):
        rng_tracker.set_states(start)
        torch.manual_seed(3)
        x = torch.ones(64, requires_grad=True)
        y = how(function, how(function, x))
        y.sum().backward()
        results.append((y.detach(), x.grad, rng_tracker.get_states()["model-parallel-rng"], torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]
    assert not torch.equal(results[0][2], start["model-parallel-rng"]), "numbers were drawn"


def test_seeds_in_use_are_those_of_the_current_generators() -> None:
    rng_tracker.add("first", 5)
    states = rng_tracker.get_states()
    assert torch.equal(states["first"], torch.manual_seed(5).get_state())
    rng_tracker.reset()
    rng_tracker.add("other", 7)
    rng_tracker.set_states(states)
    with rng_tracker.fork("first"):
        torch.rand(3)
    with pytest.raises(ModelError, match="seed 5 exists already"):
        rng_tracker.add("second", 5)
    rng_tracker.add("other", 7)
    rng_tracker.add("third", -1)
    with pytest.raises(ModelError, match="seed -1 exists already"):
        rng_tracker.add("fourth", -1)


def test_region_inside_a_checkpoint_offloads_nothing(tmp_path: Any) -> None:
    x = torch.randn(4, 10, 32, requires_grad=True)
    layer = Layer(dropout=0.0)

    def function(x: Tensor) -> Tensor:
        with checkpointing.offload_saved_tensors("nvme", nvme_path=str(tmp_path), min_offload_bytes=0) as counts:
            moved.append(counts)
            return layer(x)

    moved: list[Any] = []
    through(manner())(function, x).sum().backward()
    assert len(moved) == 2 and moved[0].offloaded_bytes == 0
    with torch.enable_grad():
        want = torch.autograd.grad(layer(x).sum(), x)[0]
    assert torch.equal(x.grad, want)  # type: ignore[arg-type]
    checkpointing.reset()


def test_inputs_of_a_checkpoint_in_a_region_are_offloaded_by_the_region() -> None:
    place = FarPlace()
    keeper, layer = SavedTensorOffloader(place, min_offload_bytes=0), Layer()
    x = torch.randn(4, 10, 32, requires_grad=True)
    with saved_tensors_hooks(keeper.pack, keeper.unpack):
        y = through(manner())(layer, x)
    assert place.put_there == [x.numel()]
    y.sum().backward()


def test_identical_inputs_stay_identical() -> None:
    same: list[bool] = []

    def function(x: Tensor, others: dict[str, Tensor]) -> Tensor:
        same.append(x is others["x"])
        return x * others["x"]

    x = torch.randn(5, requires_grad=True)
    place = FarPlace()
    through(manner(place))(function, x, {"x": x}).sum().backward()
    assert same == [True, True] and place.put_there == [5]
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]


def test_transformers_model_uses_checkpoint() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, use_cache=False
    )

    def grads(how: Callable[..., Any] | None) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).train()
        if how is not None:
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=how)
        model(input_ids=ids(), labels=ids()).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    place = FarPlace()
    assert not differences(grads(through(manner(place))), grads(None))
    hidden = 4 * 10 * 32
    assert place.put_there.count(hidden) == 3, "hidden states of each layer, which transformers hides in a partial"
