"""Tests of loads after a layer was frozen, unfrozen or added, or groups changed. By default each load is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.harness import run_ranks
from tests.dist.test_offload import LATE, offload_to
from tests.oracle import relative_error

WIDTH = 8
Groups = Callable[[nn.Module], list[dict[str, Any]]]


class Net(nn.Module):
    """Sequence of a few layers."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - 0.5).square().mean()


def net(layers: int = 3, frozen: int | None = None, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net(layers)
    if frozen is not None:
        made.layers[frozen].requires_grad_(False)
    return made


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def separate_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups with a separate rate for the first layer."""
    first = list(model.layers[0].parameters())
    rest = [p for p in model.parameters() if all(p is not item for item in first)]
    return [{"params": first, "lr": 0.001}, {"params": rest}]


def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def engine_for(model: nn.Module, groups: Groups, stage: int, tier: str, folder: str) -> Any:
    import windlass

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 50,
            **dict(offload_to(tier, tier if stage == 3 else "none", folder)),
        },
    }
    return windlass.initialize(model=model, optimizer=optimizer(groups(model)), config=config)[0]


def steps(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()


def plain_steps(model: nn.Module, stepped: torch.optim.Optimizer, first: int, last: int) -> None:
    """Run the work of two ranks in one process."""
    for step in range(first, last):
        stepped.zero_grad()
        ((model(batch(step, 0)) + model(batch(step, 1))) / 2).backward()
        stepped.step()


def whole(engine: Any) -> dict[str, torch.Tensor]:
    import windlass

    return {name: windlass.zero.full_param(p).detach().clone() for name, p in engine.module.named_parameters()}


@contextmanager
def listening() -> Iterator[list[str]]:
    text: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: text.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(handler)
    yield text
    logging.getLogger("windlass").removeHandler(handler)


def freeze(model: Net, stepped: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Freeze the middle layer in plain torch."""
    model.layers[1].requires_grad_(False)
    gone = {id(p) for p in model.layers[1].parameters()}
    (group,) = stepped.param_groups
    group["params"] = [p for p in group["params"] if id(p) not in gone]
    for parameter in model.layers[1].parameters():
        stepped.state.pop(parameter)
        parameter.grad = None
    return stepped


def unfreeze(model: Net, stepped: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Unfreeze the middle layer in plain torch."""
    model.layers[1].requires_grad_(True)
    stepped.param_groups[0]["params"] += list(model.layers[1].parameters())
    return stepped


def add(model: Net, stepped: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Add a fourth layer in plain torch, as the second engine's model has it."""
    model.layers.append(net(4, seed=9).layers[3])
    stepped.param_groups[0]["params"] += list(model.layers[3].parameters())
    return stepped


def regroup(model: Net, stepped: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Change the groups in plain torch, with the same states."""
    other = optimizer(separate_groups(model))
    for parameter, state in stepped.state.items():
        other.state[parameter] = state
    return other


# name: the first model and groups, the second ones, the same change in plain torch, keywords of the load
CASES: dict[str, tuple[Any, ...]] = {
    "freeze": ({}, trained, {"frozen": 1}, trained, freeze, {"load_optimizer_strict": False}),
    "thaw": ({"frozen": 1}, trained, {}, trained, unfreeze, {"load_optimizer_strict": False}),
    "add": ({}, trained, {"layers": 4}, trained, add,
            {"load_optimizer_strict": False, "load_module_strict": False}),
    "regroup": ({}, trained, {}, separate_groups, regroup, {"load_optimizer_strict": False}),
}  # fmt: skip
SAID = {
    "freeze": [
        "loaded",
        "unexpected (state/layers.1.",
        "optimizer: 4 parameters matched, 0 missing, 2 unexpected (lay",
    ],
    "thaw": [
        "18 tensors matched, 0 missing, 0 unexpected",
        "optimizer: 4 parameters matched, 2 missing (layers.1.bias, layers.1.weight), 0 unexpected",
    ],
    "add": ["2 missing (param/layers.3.bias, param/layers.3.weight), 0 unexpected", "2 missing (layers.3.bias, lay"],
    "regroup": ["optimizer: 6 parameters matched, 0 missing, 0 unexpected; groups that keep their own hyper-parame"],
}
REFUSED = {
    "freeze": "2 unexpected (layers.1.bias, layers.1.weight). Build it with the same groups; or load with "
    "load_optimizer_strict=False",
    "thaw": "2 missing (layers.1.bias, layers.1.weight)",
    "add": "2 missing (layers.3.bias, layers.3.weight)",
    "regroup": "the checkpoint has 1 optimizer groups, this optimizer has 2",
}


def load_into(name: str, stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Save with one model or grouping and load with another. Return the result, and plain torch's."""
    from windlass.base.errors import CheckpointError

    before, groups, after, other_groups, change, keywords = CASES[name]
    model = net(**before)
    engine = engine_for(model, groups, stage, tier, folder)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    other = engine_for(net(**after, seed=9), other_groups, stage, tier, folder)
    untouched = whole(other)
    refused = ""
    try:
        other.load_checkpoint(folder)
    except CheckpointError as error:
        refused = str(error)
    kept = relative_error(whole(other), untouched)[0]
    with listening() as text:
        other.load_checkpoint(folder, **keywords)
    steps(other, 2, 5)
    actual = whole(other)
    other.destroy()
    plain = net(**before)
    stepped = optimizer(groups(plain))
    plain_steps(plain, stepped, 0, 2)
    plain_steps(plain, change(plain, stepped), 2, 5)
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    return {"refused": refused, "kept": kept, "said": text, "error": relative_error(actual, expected)}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(
    ("stage", "tier"),
    [(3, "nvme"), pytest.param(0, "none", marks=pytest.mark.slow), pytest.param(2, "cpu", marks=pytest.mark.slow)],
)
def test_selected_parts_are_loaded(name: str, stage: int, tier: str, tmp_path: Any) -> None:
    for result in run_ranks(load_into, 2, name, stage, tier, str(tmp_path), env=LATE):
        assert REFUSED[name] in result["refused"] and result["kept"] == 0.0
        for text in SAID[name]:
            assert any(text in line for line in result["said"]), (text, result["said"])
        assert result["error"][0] <= 1e-6, result["error"]


def only_the_module(folder: str) -> dict[str, Any]:
    """Load with `load_module_only`. Return the parameters' relative error, and values that the load does not change."""
    engine = engine_for(net(), trained, 3, "none", folder)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    expected = whole(engine)
    engine.destroy()
    other = engine_for(net(seed=9), separate_groups, 1, "none", folder)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    other.load_checkpoint(f"{folder}/global_step2", tag=".", load_module_only=True)  # the path of the checkpoint itself
    import windlass

    states = [windlass.zero.full_state(p, "exp_avg") for p in other.module.parameters()]
    results = {
        "error": relative_error(whole(other), expected)[0],
        "steps": other.global_steps,
        "states": [state for state in states if state is not None],
        "rates": [group["lr"] for group in other.optimizer.param_groups],
        "random": bool((torch.get_rng_state() == before).all()),
    }
    other.destroy()
    return results


def test_module_only(tmp_path: Any) -> None:
    for result in run_ranks(only_the_module, 2, str(tmp_path)):
        assert result == {"error": 0.0, "steps": 0, "states": [], "rates": [0.001, 0.01], "random": True}


def random_states_of_another_layout(folder: str) -> tuple[bool, bool]:
    """Return whether random states are restored along dp, where they were saved, and along tp."""
    import windlass

    restored = []
    for parallel in ({}, {}, {"tp": 2}):
        config = {"train_micro_batch_size_per_gpu": 4, "parallel": parallel}
        model = net(layers=4)
        engine = windlass.initialize(model=model, optimizer=optimizer(trained(model)), config=config)[0]
        torch.manual_seed(dist.get_rank())
        if not restored:
            engine.save_checkpoint(folder)
        torch.manual_seed(77)
        engine.load_checkpoint(folder)
        restored.append(torch.initial_seed() != 77)
        engine.destroy()
    return restored[1], restored[2]


def test_random_states_are_not_restored_into_another_layout(tmp_path: Any) -> None:
    assert run_ranks(random_states_of_another_layout, 2, str(tmp_path)) == [(True, False)] * 2


def with_a_schedule(folder: str) -> list[float]:
    """Return the rates after a schedule with one group is loaded into one with two."""
    import windlass

    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    rates = []
    for groups in (trained, separate_groups):
        model = net()

        def slower(stepped: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(stepped, lambda step: 0.5**step)

        engine = windlass.initialize(
            model=model, optimizer=optimizer(groups(model)), lr_scheduler=slower, config=config
        )
        if groups is trained:
            steps(engine[0], 0, 2)
            engine[0].save_checkpoint(folder)
        else:
            engine[0].load_checkpoint(folder, load_optimizer_strict=False)
            steps(engine[0], 2, 3)
            rates = engine[0].get_lr()
        engine[0].destroy()
    return rates


def test_schedule_with_other_groups_continues(tmp_path: Any) -> None:
    assert run_ranks(with_a_schedule, 2, str(tmp_path)) == [pytest.approx([0.001 / 8, 0.01 / 8])] * 2


def unfrozen_with_an_average(tier: str, folder: str) -> dict[str, Any]:
    """Load an average of a model with a frozen layer into a model in which that layer is trained."""
    import windlass

    engine = engine_for(net(frozen=1), trained, 3, tier, f"{folder}/first")
    average = windlass.zero.ExponentialMovingAverage(engine, 0.5)
    for step in range(2):
        steps(engine, step, step + 1)
        average.update()
    engine.save_checkpoint(folder)
    requested = {name: average.full_param(p).clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    weights = whole(engine)
    engine.destroy()
    other = engine_for(net(seed=9), trained, 2, tier, f"{folder}/second")
    average = windlass.zero.ExponentialMovingAverage(other, 0.5)
    other.load_checkpoint(folder, load_optimizer_strict=False)
    results = {name: average.full_param(p).clone() for name, p in other.module.named_parameters()}
    other.destroy()
    expected = {**weights, **requested}
    return {name: bool(torch.equal(results[name], expected[name])) for name in expected}


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_average_of_unfrozen_parameters_starts_with_a_copy(tier: str, tmp_path: Any) -> None:
    for result in run_ranks(unfrozen_with_an_average, 2, tier, str(tmp_path)):
        assert len(result) == 6 and all(result.values()), result


def average_of_before(folder: str) -> bool:
    """Load a checkpoint saved before an average's first update, after the average has begun."""
    import windlass

    engine = engine_for(net(), trained, 3, "none", folder)
    average = windlass.zero.ExponentialMovingAverage(engine, 0.9)
    engine.save_checkpoint(folder)
    steps(engine, 0, 2)
    average.update()
    engine.load_checkpoint(folder)
    steps(engine, 0, 1)
    average.update()
    weights = whole(engine)
    same = all(torch.equal(average.full_param(p), weights[name]) for name, p in engine.module.named_parameters())
    engine.destroy()
    return same and average.updates == 1


def test_average_saved_before_its_first_update_restarts(tmp_path: Any) -> None:
    assert run_ranks(average_of_before, 2, str(tmp_path)) == [True, True]


def with_other_implementations(folder: str) -> list[tuple[Any, Any]]:
    """Load a checkpoint of torch's default implementation into engines with other implementations."""
    import windlass

    found = []
    for number, choice in enumerate(({}, {"foreach": True}, {"fused": False})):
        model = net()
        chosen = torch.optim.AdamW(model.parameters(), lr=1e-2, **choice)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        engine = windlass.initialize(model=model, optimizer=chosen, config=config)[0]
        if not number:
            steps(engine, 0, 1)
            engine.save_checkpoint(folder, tag="a")
        engine.load_checkpoint(folder, tag="a")
        found.append((chosen.param_groups[0]["foreach"], chosen.param_groups[0]["fused"]))
        engine.destroy()
    return found


def test_a_load_keeps_the_implementation_of_this_run(tmp_path: Any) -> None:
    (found,) = run_ranks(with_other_implementations, 1, str(tmp_path))
    assert found[1:] == [(True, None), (None, False)]


def with_other_optimizers(stage: int, folder: str) -> list[str]:
    """Load one optimizer's states into others, strictly and not, and train a step. Return the errors."""
    import windlass

    makers = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
        "Lion": lambda parameters: windlass.optim.Lion(parameters, lr=1e-2),
        "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        "Muon": lambda parameters: windlass.optim.Muon(parameters, lr=1e-2),
    }
    found = []
    for number, (name, make) in enumerate(makers.items()):
        for strict in (True, False):
            model = net()
            groups = [
                {"params": [p for p in model.parameters() if (p.dim() > 1) is matrices]} for matrices in (True, False)
            ]
            config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
            engine = windlass.initialize(model=model, optimizer=make(groups), config=config)[0]
            steps(engine, 0, 1)
            if not number and strict:
                engine.save_checkpoint(folder, tag="a")
            before = engine.optimizer.state_dict()["state"], whole(engine)
            try:
                engine.load_checkpoint(folder, tag="a", load_optimizer_strict=strict)
            except windlass.WindlassError as error:
                assert strict
                found.append(f"{name}: {error}")
                after = engine.optimizer.state_dict()["state"], whole(engine)
                torch.testing.assert_close(after, before, rtol=0, atol=0)
            steps(engine, 1, 2)
            engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_states_of_another_optimizer_are_refused_or_left_out(stage: int, tmp_path: Any) -> None:
    for adagrad, sgd, muon in run_ranks(with_other_optimizers, 2, stage, str(tmp_path)):
        assert adagrad.startswith("Adagrad: ") and "exp_avg, exp_avg_sq, step of" in adagrad
        assert "Adagrad needs sum" in adagrad and "load_optimizer_states=False" in adagrad
        assert "SGD needs momentum_buffer" in sgd
        assert "Muon needs momentum_buffer" in muon


def loaded_by_other_paths(folder: str) -> str:
    """Load one checkpoint by a different path on each rank, then a different checkpoint. Return the latter's error."""
    import windlass

    rank = dist.get_rank()
    engine = engine_for(net(), trained, 1, "none", folder)
    steps(engine, 0, 1)
    for tag in ("a", "b"):
        engine.save_checkpoint(f"{folder}/runs", tag=tag)
    Path(folder, f"runs{rank}").symlink_to(Path(folder, "runs"))
    Path(folder, f"a{rank}").symlink_to(Path(folder, "runs", "a"))
    for directory, tag in ((f"runs{rank}", "a"), (f"a{rank}", ".")):
        assert engine.load_checkpoint(f"{folder}/{directory}", tag=tag)[0] is not None
    with pytest.raises(windlass.WindlassError) as refused:
        engine.load_checkpoint(f"{folder}/runs", tag="ab"[rank])
    engine.destroy()
    return str(refused.value)


def test_ranks_load_one_checkpoint_by_any_path(tmp_path: Any) -> None:
    for text in run_ranks(loaded_by_other_paths, 2, str(tmp_path)):
        assert f"rank 1 loads {tmp_path}/runs/b and rank 0 {tmp_path}/runs/a; pass the same directory" in text
