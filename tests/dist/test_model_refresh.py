"""Tests of a model that changes during a run: unfrozen layers, added and removed modules, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.equivalence_runs import Setting, ds_config, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_averages_and_generation import TIERS, env_of
from tests.oracle import SEED, Recipe, relative_error

WIDTH, ROWS, STEPS = 8, 4, 3
OPTIMIZERS = {
    "AdamW": (("lr", 1e-2), ("weight_decay", 0.01)),
    "SGD": (("lr", 0.05), ("momentum", 0.9)),
    "Adafactor": (("lr", 1e-2),),
    "Muon": (("lr", 1e-2),),
}


class Growing(nn.Module):
    """Three layers, the first of which may be frozen, and a head that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.more: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        text = x * self.scale
        return text if self.more is None else text + self.more(x)


def head() -> nn.Module:
    torch.manual_seed(SEED + 7)  # the same on all ranks
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def changed(model: Any, optimizer: Any, step: int, how: str) -> None:
    """Change the model before this step, with plain PyTorch calls."""
    if how == "unfrozen" and step == STEPS:
        model.layers[0].requires_grad_(True)
    if how == "unfrozen and given" and step == STEPS:
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 3e-3})
    if how == "added" and step == STEPS:
        model.more = head()
        optimizer.add_param_group({"params": list(model.more.parameters()), "lr": 3e-3})
    if how == "exchanged" and step == STEPS:
        gone = {id(p) for p in model.layers[1].parameters()}
        model.layers[1] = nn.Sequential(*head())
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if id(p) not in gone] + list(model.layers[1].parameters())
    if how == "paused":
        changed(model, optimizer, step, "added")
        model.layers[1].requires_grad_(step not in range(STEPS - 1, STEPS + 2))
    if how == "twice":
        changed(model, optimizer, step, "added")
        changed(model, optimizer, step - 1, "unfrozen")


def prepared(how: str) -> tuple[Growing, list[nn.Parameter]]:
    torch.manual_seed(SEED)
    model = Growing()
    if how in ("unfrozen", "unfrozen amid", "unfrozen and given", "twice"):
        model.layers[0].requires_grad_(False)
    in_groups = [p for p in model.parameters() if p.requires_grad or how in ("unfrozen", "unfrozen amid", "twice")]
    return model, in_groups


def optimizer_of(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    import windlass

    made: torch.optim.Optimizer = getattr(windlass.optim if kind == "Muon" else torch.optim, kind)(
        parameters, **dict(OPTIMIZERS[kind])
    )
    return made


def averaged(averages: dict[str, Tensor], model: nn.Module, *, begin: bool = False) -> None:
    """Begin averages of new parameters at their values. Unless `begin`, update the other averages."""
    for name, parameter in model.named_parameters():
        if name not in averages:
            averages[name] = parameter.detach().clone()
        elif not begin:
            averages[name].lerp_(parameter.detach(), 0.2)


def plainly(how: str, ranks: int, kind: str) -> tuple[list[list[float]], dict[str, Tensor], dict[str, Tensor]]:
    model, in_groups = prepared(how)
    optimizer = optimizer_of(kind, in_groups)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    averages: dict[str, Tensor] = {}
    for step in range(3 * STEPS):
        changed(model, optimizer, step, how)
        if step > 1:
            averaged(averages, model, begin=True)
        for micro in range(2):
            if how == "unfrozen amid" and step == STEPS and micro == 1:
                model.layers[0].requires_grad_(True)
            for rank in range(ranks):
                x, y = batch(2 * step + micro, rank)
                loss = (model(x) - y).square().mean()
                (loss / ranks / 2).backward()
                losses[rank].append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step:
            averaged(averages, model)
    params = {name: p.detach() for name, p in model.named_parameters()}
    return losses, params, {name: averages[name] for name in params}


def sharded(how: str, kind: str, stage: int, transport: str, tier: str, folder: str) -> dict[str, Any]:
    import windlass

    rank = dist.get_rank()
    model, in_groups = prepared(how)
    zero = {key: value | {"nvme_path": folder} for key, value in TIERS[tier] if stage == 3 or key != "offload_param"}
    recipe = Recipe(accumulation=2, optimizer=kind, optimizer_params=OPTIMIZERS[kind])
    config = ds_config(recipe, Setting(stage=stage, transport=transport, zero=tuple(zero.items())))
    del config["optimizer"]
    optimizer = optimizer_of(kind, in_groups)
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    average = windlass.zero.ExponentialMovingAverage(engine, 0.8)
    losses = []
    for step in range(3 * STEPS):
        changed(engine.module, engine.optimizer, step, how)
        if how == "exchanged" and step == STEPS:
            engine.refresh()
        for micro in range(2):
            if how == "unfrozen amid" and step == STEPS and micro == 1:
                engine.module.layers[0].requires_grad_(True)
            x, y = batch(2 * step + micro, rank)
            loss = (engine(x) - y).square().mean()
            engine.backward(loss)
            if micro == 0:
                with pytest.raises(windlass.WindlassError, match="middle of a step"):
                    engine.refresh()
            engine.step()
            losses.append(float(loss.detach()))
        if step:
            average.update()
    results = {"losses": losses, "params": whole_params(engine.module), "steps": engine.global_steps}
    results["averages"] = {name: average.full_param(p) for name, p in engine.module.named_parameters()}
    with average.applied(), pytest.raises(windlass.WindlassError, match="while the averages are applied"):
        engine.refresh()
    engine.destroy()
    return results


@pytest.mark.parametrize(
    ("how", "kind", "ranks", "stage", "transport", "tier"),
    [
        ("unfrozen", "AdamW", 2, 3, "shm", "host"),
        ("added", "AdamW", 2, 3, "gloo", "device"),
        ("twice", "SGD", 2, 2, "shm", "device"),
        ("exchanged", "AdamW", 2, 3, "shm", "device"),
        ("added", "Muon", 2, 3, "shm", "device"),
        ("paused", "AdamW", 2, 3, "shm", "host"),
        ("unfrozen amid", "AdamW", 2, 2, "gloo", "device"),
        pytest.param("unfrozen amid", "SGD", 2, 1, "shm", "disk", marks=pytest.mark.slow),
        pytest.param("unfrozen amid", "Adafactor", 3, 3, "shm", "host", marks=pytest.mark.slow),
        pytest.param("unfrozen amid", "AdamW", 2, 0, "shm", "device", marks=pytest.mark.slow),
        pytest.param("exchanged", "Adafactor", 3, 2, "gloo", "disk", marks=pytest.mark.slow),
        pytest.param("unfrozen and given", "AdamW", 2, 1, "gloo", "disk", marks=pytest.mark.slow),
        pytest.param("unfrozen", "Adafactor", 2, 3, "gloo", "device", marks=pytest.mark.slow),
        pytest.param("added", "Adafactor", 2, 2, "shm", "device", marks=pytest.mark.slow),
        pytest.param("twice", "AdamW", 2, 3, "shm", "disk", marks=pytest.mark.slow),
        pytest.param("twice", "AdamW", 1, 0, "gloo", "device", marks=pytest.mark.slow),
        pytest.param("added", "SGD", 3, 3, "shm", "host", marks=pytest.mark.slow),
        pytest.param("paused", "Adafactor", 2, 1, "gloo", "disk", marks=pytest.mark.slow),
        pytest.param("paused", "SGD", 1, 0, "gloo", "device", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_changes_trains_as_in_one_process(
    how: str, kind: str, ranks: int, stage: int, transport: str, tier: str, tmp_path: Any
) -> None:
    expected, params, averages = plainly(how, ranks, kind)
    everywhere = run_ranks(
        sharded, ranks, how, kind, stage, transport, tier, str(tmp_path), transport=transport, env=env_of(tier)
    )
    for rank, actual in enumerate(everywhere):
        assert actual["steps"] == 3 * STEPS
        assert actual["losses"] == pytest.approx(expected[rank], rel=1e-5)
        assert set(actual["params"]) == set(params)
        error, where = relative_error(actual["params"], params)
        assert error < 1e-5, where
        error, where = relative_error(actual["averages"], averages)
        assert error < 1e-5, where


def refused_refresh() -> list[str]:
    """Try a refresh that is refused and leaves the engine unchanged, and add a parameter without refresh."""
    import windlass

    model, in_groups = prepared("exchanged")
    config = ds_config(Recipe(optimizer="AdamW", optimizer_params=OPTIMIZERS["AdamW"]), Setting(stage=3))
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=torch.optim.AdamW(in_groups), config=config)[0]

    def trains(step: int) -> None:
        x, y = batch(step, dist.get_rank())
        engine.backward((engine(x) - y).square().mean())
        engine.step()

    def error_text(call: Any) -> str:
        with pytest.raises(windlass.WindlassError) as refused:
            call()
        return str(refused.value)

    trains(0)
    before = engine.fingerprint()
    kept, model.layers[1] = model.layers[1], head()
    results = [error_text(engine.refresh), error_text(lambda: engine.save_checkpoint("nowhere"))]
    model.layers[1] = kept
    assert engine.fingerprint() == before
    trains(1)
    assert engine.fingerprint() != before
    model.more = head()
    engine.optimizer.param_groups[0]["params"] += list(model.more.parameters())
    results.append(error_text(lambda: trains(2)))
    engine.zero_grad()
    engine.refresh()
    trains(3)
    engine.destroy()
    for call in (engine.step, engine.full_state_dict, engine.fingerprint, lambda: engine.save_checkpoint("nowhere")):
        assert "this engine was destroyed" in error_text(call)
    return results


def test_refused_refresh_leaves_the_engine_unchanged() -> None:
    for refused, saved, unseen in run_ranks(refused_refresh, 2):
        assert "optimizer group 0, parameter 3" in refused and "from the group" in refused
        assert "'layers.1.0.weight' is new" in saved and "engine.refresh()" in saved
        assert "'more.0.weight' has a gradient" in unseen and "engine.refresh()" in unseen


def behind_the_engine() -> str:
    import windlass

    model, in_groups = prepared("unfrozen")
    config = ds_config(Recipe(optimizer="AdamW", optimizer_params=OPTIMIZERS["AdamW"]), Setting(stage=2))
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=torch.optim.AdamW(in_groups), config=config)[0]
    model.layers[0].requires_grad_(True)
    x, y = batch(0, dist.get_rank())
    engine.backward((model(x) - y).square().mean())
    with pytest.raises(windlass.WindlassError, match=r"layers\.0\.weight") as refused:
        engine.step()
    engine.destroy()
    return str(refused.value)


def test_step_that_would_ignore_a_gradient_is_refused() -> None:
    for text in run_ranks(behind_the_engine, 2):
        assert "engine.refresh()" in text


def uneven_refresh() -> str:
    """Add a module after a backward that only rank 0 ran. Return the error of `refresh`."""
    import windlass

    model, in_groups = prepared("added")
    config = ds_config(Recipe(optimizer="AdamW", optimizer_params=OPTIMIZERS["AdamW"]), Setting(stage=1))
    del config["optimizer"]
    config["gradient_accumulation_steps"] = 2
    engine = windlass.initialize(model=model, optimizer=torch.optim.AdamW(in_groups), config=config)[0]
    x, y = batch(0, dist.get_rank())
    loss = (engine(x) - y).square().mean()
    if dist.get_rank() == 0:
        engine.backward(loss)
    model.more = head()
    with pytest.raises(windlass.WindlassError) as refused:
        engine.refresh()
    engine.zero_grad()
    engine.refresh()
    engine.destroy()
    return str(refused.value)


def test_refresh_is_refused_on_all_ranks_if_one_has_a_gradient() -> None:
    for text in run_ranks(uneven_refresh, 2):
        assert "in the middle of a step" in text
