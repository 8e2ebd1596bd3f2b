"""Tests of parameters in no group of the optimizer: their gradients stay and accumulate, as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.equivalence_runs import Setting, ds_config, whole_params
from tests.dist.harness import run_ranks
from tests.models import Place, Regressor, rows
from tests.oracle import Recipe, relative_error

STEPS, CLIPPING = 5, 0.1  # CLIPPING is below the norm of every gradient
DROP = 2  # step before which a gradient is dropped
JOIN = {"head.bias": 3, "blocks.1.up.weight": 4, "blocks.1.up.bias": 4}  # steps before which they join the optimizer


def built() -> tuple[Regressor, dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Return a model, the parameters outside of the groups, and the optimizer of the others."""
    torch.manual_seed(5)
    model = Regressor()
    outside = {name: p for name, p in model.named_parameters() if name.startswith(("blocks.1.up", "head.bias"))}
    inside = [p for name, p in model.named_parameters() if name not in outside]
    return model, outside, torch.optim.SGD(inside, lr=0.05, momentum=0.9)


def plainly(ranks: int) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    model, outside, optimizer = built()
    seen: list[dict[str, Tensor | None]] = []
    for step in range(STEPS):
        change(model, outside, optimizer, step)
        for micro in range(2):
            for rank in range(ranks):
                (model(**rows(Place(step, micro, rank))) / ranks / 2).backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: p.grad.clone() if p.grad is not None else None for name, p in outside.items()})
    return seen, {name: p.detach() for name, p in model.named_parameters()}


def change(model: Any, outside: dict[str, nn.Parameter], optimizer: Any, step: int) -> None:
    """Drop one of the gradients that stay (step DROP), or let parameters join the optimizer (steps JOIN)."""
    if step == DROP:
        outside["blocks.1.up.weight"].grad = None
    if joining := [parameter for name, parameter in outside.items() if JOIN[name] == step]:
        optimizer.add_param_group({"params": joining, "lr": 0.02})


def sharded(setting: Setting) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    model, outside, optimizer = built()
    config = ds_config(Recipe(accumulation=2, clipping=CLIPPING), setting)
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    seen = []
    for step in range(STEPS):
        change(engine.module, outside, engine.optimizer, step)
        for micro in range(2):
            engine.backward(engine(**rows(Place(step, micro, dist.get_rank()))))
            engine.step()
        engine.finish_update()
        assert all((p.grad is None) == (step >= JOIN[name]) for name, p in outside.items())
        seen.append({name: windlass.zero.full_grad(p) for name, p in outside.items()})
    result = whole_params(engine.module)
    engine.destroy()
    return seen, result


def offloaded(folder: str) -> tuple[tuple[str, Any], ...]:
    place = {"device": "nvme", "nvme_path": folder}
    return ("offload_optimizer", place), ("offload_param", place)


@pytest.mark.parametrize("place", ["device", "disk", "delayed"])
def test_gradient_outside_the_groups_stays_after_a_step(stage: int, place: str, tmp_path: Any) -> None:
    if place != "device" and stage < 3:
        pytest.skip("tiers are the same code at all stages")
    zero = offloaded(str(tmp_path)) if place == "disk" else ()
    if place == "delayed":  # each update ends before the next forward
        zero = (("offload_optimizer", {"device": "cpu", "delayed_update": True}),)
    expected, weights = plainly(2)
    for seen, result in run_ranks(sharded, 2, Setting(stage=stage, zero=zero), transport="gloo"):
        for step in range(STEPS):
            error, where = relative_error(seen[step], expected[step])
            assert error < 1e-5, f"step {step}: {where}"
        error, where = relative_error(result, weights)
        assert error < 1e-5, where


def scaled() -> tuple[list[Tensor], list[Tensor]]:
    """Train in fp16 with a loss scale that doubles at each step.

    Return two lists of the gradient of `head.bias`, which is in no optimizer group: after and just before each step.
    """
    model, outside, optimizer = built()
    config = ds_config(Recipe(precision="fp16"), Setting(stage=2))
    del config["optimizer"]
    config["fp16"] |= {"initial_scale_power": 4, "loss_scale_window": 1}
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    stayed, scales = [], []
    for step in range(3):
        batch = {key: value.half() for key, value in rows(Place(step, 0, dist.get_rank())).items()}
        before = windlass.zero.full_grad(outside["head.bias"])
        engine.backward(engine(**batch))
        after = windlass.zero.full_grad(outside["head.bias"])
        engine.step()
        stayed.append(windlass.zero.full_grad(outside["head.bias"]))
        scales.append(after)
        assert before is None or torch.allclose(before, stayed[step - 1])
    assert engine.loss_scale() > 16
    engine.destroy()
    return stayed, scales


def test_a_new_loss_scale_does_not_change_a_gradient_that_stays() -> None:
    for stayed, scales in run_ranks(scaled, 2):
        for one, other in zip(stayed, scales, strict=True):
            assert torch.allclose(one, other, rtol=1e-6)


def refreshed() -> bool:
    model, outside, optimizer = built()
    config = ds_config(Recipe(), Setting(stage=3))
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(**rows(Place(0, 0, dist.get_rank()))))
    engine.step()
    model.extra = nn.Linear(2, 2)
    engine.refresh()
    result = windlass.zero.full_grad(outside["head.bias"]) is None
    engine.destroy()
    return result


def test_refresh_is_not_refused_for_a_gradient_that_stays() -> None:
    assert all(run_ranks(refreshed, 2))


def regrouped(setting: Setting, layers: int) -> list[tuple[float, float]]:
    """Train the last two of `layers` layers, then also the one before them, then only the last one.

    Return the gradient norm of each step of the engine and of plain PyTorch, and last the largest errors of a weight.
    """
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    model = copy.deepcopy(plain)
    optimizers = [
        torch.optim.SGD([{"params": list(net[place].parameters())} for place in (-1, -2)], lr=0.05, momentum=0.9)
        for net in (plain, model)
    ]
    config = ds_config(Recipe(clipping=CLIPPING), setting)
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=optimizers[1], config=config)[0]
    ranks, rank, norms = dist.get_world_size(), dist.get_rank(), []
    for step in range(5):
        for net, optimizer in zip((plain, model), (optimizers[0], engine.optimizer), strict=True):
            if step == 1:
                optimizer.add_param_group({"params": list(net[-3].parameters())})
            if step == 3:
                del optimizer.param_groups[1:]
        inputs = torch.randn(ranks, 3, 4, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(inputs[rank]).square().mean())
        engine.step()
        engine.finish_update()
        plain(inputs.flatten(0, 1)).square().mean().backward()
        stepped = [p for group in optimizers[0].param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(stepped, CLIPPING)
        optimizers[0].step()
        optimizers[0].zero_grad()
        norms.append((engine.grad_norm(), norm.item()))
    weights = whole_params(model)
    engine.destroy()
    return [*norms, (max(float((weights[name] - p).abs().max()) for name, p in plain.named_parameters()), 0.0)]


@pytest.mark.parametrize("place", ["device", "disk", "delayed"])
@pytest.mark.parametrize("layers", [5, 20])  # with 20 layers the parameters outside the groups share units
def test_norm_is_that_of_the_groups_when_they_change(stage: int, place: str, layers: int, tmp_path: Any) -> None:
    if place != "device" and stage < 3:
        pytest.skip("tiers are the same code at all stages")
    zero = offloaded(str(tmp_path)) if place == "disk" else ()
    if place == "delayed":
        zero = (("offload_optimizer", {"device": "cpu", "delayed_update": True}),)
    for norms in run_ranks(regrouped, 2, Setting(stage=stage, zero=zero), layers, transport="gloo"):
        for measured, expected in norms:
            assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6), norms


def overflowed() -> tuple[float, Tensor, Tensor]:
    """Return norm, and weights before and after a step in which only a parameter that left its group has a NaN."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model], lr=0.05)
    config = ds_config(Recipe(), Setting(stage=1))
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    before = windlass.zero.full_param(model[1].weight)
    del engine.optimizer.param_groups[0]
    model[0].bias.register_hook(lambda gradient: gradient * torch.nan)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    after = windlass.zero.full_param(model[1].weight)
    engine.destroy()
    return engine.grad_norm(), before, after


def test_a_nan_outside_the_groups_does_not_stop_a_step() -> None:
    for norm, before, after in run_ranks(overflowed, 2):
        assert norm > 0 and not torch.equal(before, after) and bool(after.isfinite().all())
