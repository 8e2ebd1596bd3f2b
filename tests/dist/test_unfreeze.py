"""Tests of unfreezing parameters in place during a run: training equals plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.custom_optimizers import Foreign
from tests.dist.harness import run_ranks
from tests.dist.test_offload import LATE, offload_to
from tests.dist.test_partial_load import Net, batch, plain_steps, whole
from tests.oracle import relative_error
from windlass import checkpoint


class Momentum(Foreign):
    """User-defined optimizer that keeps an average of the gradients."""

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(gradient, 0.3)
        p.sub_(state["mean"], alpha=lr)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "stranger": lambda parameters: Momentum(parameters, lr=0.05),
}


def net(seed: int = 0) -> Net:
    """Return a model that trains only its first and last bias, which are smaller than the weights to unfreeze."""
    torch.manual_seed(seed)
    made = Net(4)
    made.requires_grad_(False)
    for layer in (made.layers[0], made.layers[3]):
        assert isinstance(layer.bias, nn.Parameter)
        layer.bias.requires_grad_(True)
    return made


def planned_unfreezing(model: Any) -> list[list[nn.Parameter]]:
    """Return the parameters to unfreeze after two steps (a layer and a bias), and after three (other weights)."""
    layers = model.layers
    return [[*layers[1].parameters(), layers[2].bias], [layers[2].weight, layers[3].weight, layers[0].weight]]


def engine_for(model: nn.Module, kind: str, everything: bool, stage: int, tier: str, folder: str, bits: str) -> Any:
    import windlass

    zero = dict(offload_to(tier, tier if stage == 3 else "none", folder))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 50, **zero},
    }
    if bits != "fp32":
        config[bits] = {"enabled": True}
    expected = [p for p in model.parameters() if everything or p.requires_grad]
    return windlass.initialize(model=model, optimizer=OPTIMIZERS[kind](expected), config=config)[0]


def steps(engine: Any, first: int, last: int, bits: str = "fp32") -> None:
    dtype = torch.float32 if bits == "fp32" else torch.bfloat16
    for step in range(first, last):
        for row in batch(step, dist.get_rank()).to(dtype).chunk(1):
            engine.backward(engine(row))
            engine.step()


def in_turn(cases: list[tuple[Any, ...]], folder: str) -> list[dict[str, Any]]:
    """Train, unfreeze twice, save, and resume in a fully trainable engine. Return the results, and plain torch's."""
    results = []
    for number, (kind, everything, stage, tier) in enumerate(cases):
        place = f"{folder}/{number}"
        engine = engine_for(net(), kind, everything, stage, tier, place, "fp32")
        steps(engine, 0, 2)
        for step, parameters in enumerate(planned_unfreezing(engine.module), 2):
            laid_out = engine._sharded
            for parameter in parameters:
                parameter.requires_grad_(True)
            if not everything:
                engine.optimizer.add_param_group({"params": parameters})
            steps(engine, step, step + 1)
            assert engine._sharded is laid_out  # the layout is the same: nothing was gathered and sharded again
        engine.save_checkpoint(place)
        taken = engine.fingerprint()
        steps(engine, 4, 6)
        params = whole(engine)
        engine.destroy()
        model = net()
        model.requires_grad_(True)
        other = engine_for(model, kind, True, stage, tier, place, "fp32")
        other.load_checkpoint(place, load_optimizer_strict=False)
        same = other.fingerprint() == taken
        steps(other, 4, 6)
        resumed = whole(other)
        other.destroy()
        results.append({"params": params, "resumed": resumed, "same": same, "plain": plain(kind)})
    return results


def plain(kind: str) -> dict[str, torch.Tensor]:
    model = net()
    stepped = OPTIMIZERS[kind](list(model.parameters()))
    plain_steps(model, stepped, 0, 2)
    for step, parameters in enumerate(planned_unfreezing(model), 2):
        for parameter in parameters:
            parameter.requires_grad_(True)
        plain_steps(model, stepped, step, step + 1)
    plain_steps(model, stepped, 4, 6)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


CASES = [
    ("AdamW", True, 0, "none"),
    ("AdamW", False, 1, "cpu"),
    ("stranger", True, 2, "none"),
    ("AdamW", True, 3, "nvme"),
    ("stranger", False, 3, "nvme"),
    ("AdamW", True, 3, "none"),
]


def hold(ranks: int, transport: str, cases: list[tuple[Any, ...]], folder: Any) -> None:
    for by_rank in zip(*run_ranks(in_turn, ranks, cases, str(folder), env=LATE, transport=transport), strict=True):
        for result in by_rank:
            if ranks == 2:  # the reference in plain torch simulates two ranks
                assert relative_error(result["params"], result["plain"])[0] <= 1e-6
            assert result["same"]
            assert relative_error(result["resumed"], result["params"])[0] <= 1e-6


def test_unfreezing_equals_plain_torch(transport: str, tmp_path: Any) -> None:
    hold(2, transport, CASES[transport == "gloo" :: 2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unfreezing_equals_plain_torch_in_every_case(ranks: int, transport: str, tmp_path: Any) -> None:
    hold(ranks, transport, CASES, tmp_path)


def in_sixteen_bits(stage: int, tier: str, folder: str) -> float:
    """Return the largest change of an unfrozen parameter."""
    engine = engine_for(net(), "AdamW", True, stage, tier, folder, "bf16")
    steps(engine, 0, 1, "bf16")
    before = whole(engine)["layers.1.weight"].float()
    engine.module.layers[1].requires_grad_(True)
    engine.refresh()
    steps(engine, 1, 3, "bf16")
    after = whole(engine)["layers.1.weight"]
    engine.destroy()
    assert after.dtype == torch.float32
    return float((after - before).abs().max())


@pytest.mark.parametrize(("stage", "tier"), [(2, "cpu"), (3, "nvme")])
def test_unfreezing_in_bf16_updates_fp32_master_weights(stage: int, tier: str, tmp_path: Any) -> None:
    result = run_ranks(in_sixteen_bits, 2, stage, tier, str(tmp_path), env=LATE)
    assert result[0] == result[1] and 0.01 < result[0] < 0.03


def unfrozen_on_one_rank(alone: bool, stage: int) -> str:
    """Unfreeze different layers on ranks 0 and 1, or (`alone`) a layer on rank 0 only. Return the error."""
    import windlass

    engine, rank = engine_for(net(), "AdamW", True, stage, "none", "", "fp32"), dist.get_rank()
    steps(engine, 0, 2)
    if rank == 0 or not alone:
        engine.module.layers[1 + rank].requires_grad_(True)
    with pytest.raises(windlass.WindlassError) as caught:
        steps(engine, 2, 4)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_unfreeze_different_parameters_raise(stage: int, transport: str) -> None:
    for text in run_ranks(unfrozen_on_one_rank, 2, False, stage, transport=transport):
        assert "'layers.1.weight'" in text and "trained, in group 0 of the optimizer on rank 0" in text
        assert "frozen, in group 0 of the optimizer on rank 1" in text
    for text in run_ranks(unfrozen_on_one_rank, 2, True, stage, transport=transport):
        assert "rank 0 is at a change of parameters or states, rank 1 is at a step" in text


def loads_of_frozen(stage: int) -> list[tuple[list[str], bool]]:
    """Load a plain optimizer's states before and after the frozen parameters are unfrozen.

    Return for each load its warnings, and whether the frozen parameters have the states afterwards.
    """
    model = net()
    model.requires_grad_(True)
    stepped = OPTIMIZERS["AdamW"](list(model.parameters()))
    plain_steps(model, stepped, 0, 1)
    engine = engine_for(net(), "AdamW", True, stage, "none", "", "fp32")
    results = []
    for requires in (False, True):
        texts: list[str] = []
        if requires:
            engine.module.requires_grad_(True)
            engine.refresh()
        with patch.object(logging.getLogger("windlass"), "warning", texts.append):
            engine.optimizer.load_state_dict(stepped.state_dict())
        results.append((texts, len(engine.optimizer.state_dict()["state"]) == len(stepped.state)))
    engine.destroy()
    return results


@pytest.mark.parametrize("stage", [0, 3])
def test_states_of_frozen_parameters_are_dropped_with_a_warning(stage: int) -> None:
    for (texts, complete), after in run_ranks(loads_of_frozen, 2, stage):
        assert len(texts) == 1 and not complete
        assert "drops the states of 6 parameters frozen since initialize, 'layers.0.weight' first" in texts[0]
        assert after == ([], True)


class Tied(nn.Module):
    """Model with a tied first and last weight, and a frozen layer and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def to_and_fro(model: Any, step: int) -> None:
    """Freeze and unfreeze parameters in the planned steps."""
    tied, (first, second, third) = model.first.weight, model.layers
    for when, what, trained in (
        (1, second, False), (2, first.weight, True), (3, second, True), (3, tied, False), (5, tied, True),
        (5, third, True),
    ):  # fmt: skip
        if step == when:
            what.requires_grad_(trained)


def frozen_again(stage: int, tier: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    import windlass

    engine = engine_for(Tied(), "AdamW", True, stage, tier, folder, "fp32")
    average = windlass.zero.ExponentialMovingAverage(engine, 0.9)
    for step in range(7):
        to_and_fro(engine.module, step)
        steps(engine, step, step + 1)
        average.update()
        if step == 4:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
    results = {name: average.full_param(p) for name, p in engine.module.named_parameters()}
    results = {"params": whole(engine), "averages": results}
    engine.destroy()
    return results


@pytest.mark.parametrize(
    ("stage", "tier"),
    [(3, "none"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, "none"), (1, "nvme"), (3, "nvme")])],
)
def test_freeze_and_unfreeze_with_an_average(stage: int, tier: str, transport: str, tmp_path: Any) -> None:
    model = Tied()
    stepped = OPTIMIZERS["AdamW"](list(model.parameters()))
    averages: dict[str, torch.Tensor] = {}
    for step in range(7):
        to_and_fro(model, step)
        plain_steps(model, stepped, step, step + 1)
        for name, parameter in model.named_parameters():
            averages.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for result in run_ranks(frozen_again, 2, stage, tier, str(tmp_path), env=LATE, transport=transport):
        assert relative_error(result["params"], params)[0] <= 1e-6
        assert relative_error(result["averages"], averages)[0] <= 1e-6


def adapted(folder: str, stage: int, way: str) -> bool:
    """Save a run that unfroze a bias, and load it in an engine that trained the bias from the start, or the reverse.

    Return True if both engines then have the same fingerprint.
    """
    engines = []
    for changed in (way == "to a new one", way != "to a new one"):
        torch.manual_seed(0)
        model = Net(12)
        model.requires_grad_(False)
        biases = [layer.bias for layer in model.layers[:2]]
        for bias in biases[:1] if changed else biases:
            bias.requires_grad_(True)
        engine = engine_for(model, "AdamW", True, stage, "none", folder, "fp32")
        if changed:
            steps(engine, 0, 1)
            biases[1].requires_grad_(True)
        if not engines:
            steps(engine, 1, 3)
            engine.save_checkpoint(folder)
        else:
            steps(engine, 3, 4)
            engine.load_checkpoint(folder)
        engines.append(engine)
    first, second = (engine.fingerprint() for engine in engines)
    for engine in engines:
        engine.destroy()
    return first == second


@pytest.mark.parametrize("way", ["to a new one", "from a new one"])
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_with_one_unfrozen(stage: int, way: str, tmp_path: Any) -> None:
    assert run_ranks(adapted, 2, str(tmp_path), stage, way) == [True, True]
    absent = checkpoint.read_plain(tmp_path)["absent"]
    assert "layers.1.weight" in absent and "layers.1.bias" not in absent
