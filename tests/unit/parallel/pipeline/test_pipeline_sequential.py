"""Tests that a layer sequence built in stages has the values and names of a sequence built in full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.inference.stage_link import open_stage_link, split_for_inference
from windlass.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult

WIDTH = 4


def _linear(out: int = WIDTH) -> LayerSpec:
    return LayerSpec(nn.Linear, WIDTH, out)


class Noisy(nn.Module):
    """Layer that draws more random numbers than it has parameters."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        seen.append(1)
        self.weight = nn.Parameter(torch.randn(3) + torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class Stubborn(nn.Module):
    """Layer that reads its values during construction, which fails on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        assert float(self.weight.sum()) < 1e9


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the rank and the world size of this process."""

    def place(rank: int, world: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return place


def _layers(seen: list[int]) -> list[Any]:
    return [
        TiedLayerSpec("embed", nn.Embedding, 7, WIDTH),
        _linear(),
        torch.tanh,
        LayerSpec(Noisy, seen),
        LayerSpec(nn.Dropout, 0.0),
        _linear(),
        LayerSpec(Noisy, seen),
        TiedLayerSpec("embed", nn.Embedding, 7, WIDTH, forward_fn=lambda m, x: F.linear(x, m.weight)),
    ]


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("seed_layers", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_stages_have_the_values_of_the_full_model(at: Any, world: int, seed_layers: bool, each: int) -> None:
    torch.manual_seed(5)
    if seed_layers:
        expected: dict[str, Tensor] = {}
        for number, (name, layer) in enumerate([("tied_modules.embed", nn.Embedding), ("1", nn.Linear)]):
            torch.manual_seed(40 + number)
            made = layer(7, WIDTH) if layer is nn.Embedding else layer(WIDTH, WIDTH)
            expected |= {f"{name}.{key}": value for key, value in made.state_dict().items()}
    else:
        plain = nn.Sequential(
            nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Noisy([]), nn.Dropout(), nn.Linear(WIDTH, WIDTH)
        )
        plain.append(Noisy([]))
        expected = {
            key.replace("0.", "tied_modules.embed.", 1) if key.startswith("0.") else key: value
            for key, value in plain.state_dict().items()
        }
        after = torch.get_rng_state()
    results: dict[str, Tensor] = {}
    for rank in range(world):
        at(rank, world)
        torch.manual_seed(5)
        before, seen = torch.get_rng_state(), []
        model = PipelineSequential(
            _layers(seen), num_stages=world, seed_layers=seed_layers, base_seed=40, virtual_stages=each,
            partition_method="uniform" if world * each < 6 else [1, 3, 0, 3, 0, 3, 3, 3],
        )  # fmt: skip
        assert (model.stage_id, model.num_stages, len(model.stages)) == (rank, world, each)
        for key, value in model.state_dict().items():
            assert key not in results or torch.equal(results[key], value)
            results[key] = value
        assert torch.equal(torch.get_rng_state(), before if seed_layers else after)
    assert all(torch.equal(results[key], value) for key, value in expected.items())
    names = {"tied_modules.embed.weight", "1.weight", "1.bias", "3.weight", "5.weight", "5.bias", "6.weight"}
    assert results.keys() == names


def test_seed_layers_builds_only_local_layers(at: Any) -> None:
    for rank in range(3):
        at(rank, 3)
        seen: list[int] = []
        PipelineSequential([LayerSpec(Noisy, seen) for _ in range(6)], 3, seed_layers=True, partition_method="uniform")
        assert len(seen) == 6 + 2  # all 6 on the meta device, to count parameters, then the 2 local ones


def test_full_module_can_be_partitioned_later(at: Any) -> None:
    torch.manual_seed(1)
    full = PipelineSequential(_layers([]), partition_method="uniform").state_dict()
    for rank in range(2):
        torch.manual_seed(1)
        late = PipelineSequential(_layers([]), partition_method="uniform")
        late.keep_stages(rank, 2)
        at(rank, 2)
        torch.manual_seed(1)
        early = PipelineSequential(_layers([]), num_stages=2, partition_method="uniform")
        late.keep_stages(rank, 2)  # a second call with the same stages has no effect
        assert list(late.state_dict()) == list(early.state_dict())
        assert all(torch.equal(late.state_dict()[key], full[key]) for key in early.state_dict())
        assert late.shared_parameters == early.shared_parameters == {"tied_modules.embed.weight": (0, 1)}
        with pytest.raises(ConfigError, match="built as stage . of 2 with 1 parts on each rank; .* 2 of 3 with 1"):
            late.keep_stages(2, 3)


def test_modules_and_functions_are_layers(at: Any) -> None:
    at(1, 2)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    model = PipelineSequential([first, torch.relu, last], num_stages=2, partition_method="uniform")
    assert list(dict(model.named_parameters())) == ["2.weight", "2.bias"] and model.get_submodule("2") is last
    x = torch.randn(3, WIDTH)
    assert torch.equal(model(x), last(torch.relu(x)))


def test_stage_is_read_from_the_topology(at: Any) -> None:
    class Coordinates:
        pipe = 1

    class Topology:
        def get_dim(self, axis: str) -> int:
            return {"pipe": 2}[axis]

        def get_coord(self, rank: int) -> Coordinates:
            assert rank == 2
            return Coordinates()

    at(2, 4)
    model = PipelineSequential([_linear() for _ in range(4)], topology=Topology())
    assert (model.stage_id, model.num_stages) == (1, 2) and [name for name, _ in model.named_children()][1:] == [
        "2",
        "3",
    ]
    with pytest.raises(ConfigError, match="num_stages is 4, and the topology has 2"):
        PipelineSequential([_linear() for _ in range(4)], 4, Topology())


def test_last_stage_computes_the_loss() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return self.weight * F.mse_loss(out, y)

    x, y = torch.randn(2, 3, WIDTH)
    model = PipelineSequential([_linear(), _linear()], loss_fn=Weighted())
    ended = model.run_stage(model, 0, None, (x, y))
    assert isinstance(ended, MicroBatchResult) and ended.loss is not None
    assert torch.equal(ended.loss, F.mse_loss(model(x), y)) and "loss_fn.weight" in model.state_dict()
    assert model.run_stage(model, 0, None, (x, y), compute_loss=False).loss is None
    own = PipelineSequential([_linear(), lambda out: out.sum()])
    assert torch.equal(own.run_stage(own, 0, None, x).loss, own(x))


def test_loss_parameters_are_on_the_last_stage_only(at: Any) -> None:
    for rank in range(2):
        at(rank, 2)
        model = PipelineSequential([_linear(), _linear()], num_stages=2, loss_fn=nn.Linear(2, 2))
        assert ("loss_fn.weight" in model.state_dict()) is (rank == 1)
        assert isinstance(model.loss_fn, nn.Linear)


@pytest.mark.parametrize("interval", [0, 1, 2, 3])
def test_checkpointed_segments_give_equal_gradients_and_save_less(interval: int) -> None:
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.calls += 1
            return torch.tanh(super().forward(x))

    torch.manual_seed(0)
    model = PipelineSequential(
        [LayerSpec(Counted, WIDTH, WIDTH) for _ in range(5)] + [torch.relu], activation_checkpoint_interval=interval
    )
    x = torch.randn(2, WIDTH, requires_grad=True)
    model(x).sum().backward()
    assert Counted.calls == (5 if not interval else 10)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_activation_checkpoint_interval(0)
    model(x).sum().backward()
    assert all(torch.equal(have, p.grad) for have, p in zip(grads, model.parameters(), strict=True))


def test_checkpointed_segments_and_their_function() -> None:
    called: list[int] = []

    def by_hand(function: Any, *args: Any) -> Any:
        called.append(len(args))
        return function(*args)

    pair = lambda x: (x, x)  # noqa: E731
    back = lambda given: given[0]  # noqa: E731
    layers = [_linear(), torch.relu, pair, LayerSpec(nn.Identity), back, LayerSpec(nn.LayerNorm, WIDTH)]
    model = PipelineSequential(layers, activation_checkpoint_interval=1, activation_checkpoint_func=by_hand)
    model(torch.randn(2, WIDTH))
    assert called == [1, 1]
    called.clear()
    model.checkpointable_layers = ["Identity"]
    model(torch.randn(2, WIDTH))
    assert called == [2]


def test_impossible_partition_is_refused_with_numbers(at: Any) -> None:
    at(0, 4)
    linear = [_linear() for _ in range(6)]
    with pytest.raises(ConfigError, match="4 ranks can't be split into num_stages = 3"):
        PipelineSequential(linear, num_stages=3)
    with pytest.raises(ConfigError, match=r"6 layers can't be split into 8 stages \(4 ranks, 2 on each\)"):
        PipelineSequential(linear, num_stages=4, virtual_stages=2)
    with pytest.raises(
        ModelError, match=r"stage 1 of 2 has no parameters: layers 2 to 3 \(ReLU, Tanh\), split by 'uniform'"
    ):
        PipelineSequential(
            [_linear(), _linear(), LayerSpec(nn.ReLU), LayerSpec(nn.Tanh)], num_stages=2, partition_method="uniform"
        )
    shared = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ModelError, match=r"layers 0 and 3 \(Linear\) share a parameter .* TiedLayerSpec"):
        PipelineSequential([shared, _linear(), _linear(), shared], num_stages=2)
    with pytest.raises(ModelError, match="a layer is a LayerSpec, a module or a function, not 3"):
        PipelineSequential([3])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="subclass of torch.nn.Module"):
        LayerSpec(lambda: nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="has no parameter 'weights'"):
        PipelineSequential([TiedLayerSpec("e", nn.Linear, 2, 2, tied_weight_attr="weights")])
    with pytest.raises(ModelError, match=r"pair \(inputs, labels\), not a dict of 1"):
        PipelineSequential([_linear()], loss_fn=F.mse_loss).check_batch({"x": 1})


def test_layers_that_fail_on_meta_are_counted_by_building() -> None:
    before = torch.get_rng_state()
    assert PipelineSequential([LayerSpec(Stubborn)], seed_layers=True).parts == [0, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_sequential_is_built_on_the_meta_device(at: Any) -> None:
    at(1, 2)
    with torch.device("meta"):
        model = PipelineSequential([_linear() for _ in range(4)], num_stages=2)
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert all(p.is_meta for p in model.parameters())


def test_specs_print_as_they_are_written() -> None:
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "LayerSpec(Linear, 2, 3, bias=False)"


def test_inference_refuses_a_pipeline_module_and_leaves_it_unchanged() -> None:
    model = PipelineSequential([_linear(), _linear(), _linear(), _linear()])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    axis: Any = SimpleNamespace(index=0, size=2)
    for act in (split_for_inference, open_stage_link):
        with pytest.raises(ModelError, match="PipelineSequential is a pipeline module already; pass a plain model"):
            act(model, axis)
        after = model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
