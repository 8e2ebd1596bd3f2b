"""Tests of several engines in one process: actor, critic and frozen reference with one joint backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_averages_and_generation import TIERS, env_of
from tests.models import LossOutside, Place, mse, rows
from tests.oracle import SEED, Recipe, relative_error

STEPS = 3


def built(offset: int, rank: int) -> nn.Module:
    torch.manual_seed(SEED + offset + rank)
    return LossOutside()


def joint_loss(actor: Any, critic: Any, reference: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the loss of the critic on the actor's output, plus the output's distance from the reference."""
    text, _ = actor(batch["x"])
    judged, _ = critic(text)
    with torch.no_grad():
        before, _ = reference(batch["x"])
    return mse(judged, batch["y"]) + 0.1 * mse(text, before)


def three_engines(stages: tuple[int, int, int], transport: str, plain: bool, accumulation: int) -> dict[str, Any]:
    import windlass

    rank = dist.get_rank()
    recipe = Recipe(accumulation=accumulation)
    models = [built(offset, rank) for offset in (0, 10, 20)]
    configs = [ds_config(recipe, Setting(stage=stage, transport=transport)) for stage in stages]
    del configs[2]["optimizer"]
    actor, critic, reference = (
        windlass.initialize(model=model, config=config)[0] for model, config in zip(models, configs, strict=True)
    )
    reference.eval()
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = joint_loss(actor, critic, reference, rows(Place(step, micro, rank)))
            if plain:
                loss.backward()
            else:
                actor.backward(loss)
            actor.step()
            critic.step()
            losses.append(float(loss.detach()))
    results = {"losses": losses, "actor": whole_params(actor.module), "critic": whole_params(critic.module)}
    for engine in (actor, critic, reference):
        engine.destroy()
    return results


def in_one_process(ranks: int, accumulation: int) -> dict[str, Any]:
    actor, critic, reference = (built(offset, 0) for offset in (0, 10, 20))
    optimizers = [oracle.make_optimizer(Recipe(), list(m.parameters())) for m in (actor, critic)]
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(ranks):
                loss = joint_loss(actor, critic, reference, rows(Place(step, micro, rank)))
                (loss / ranks / accumulation).backward()
                losses[rank].append(float(loss.detach()))
        for model, optimizer in zip((actor, critic), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    named = [{n: p.detach() for n, p in m.named_parameters()} for m in (actor, critic)]
    return {"losses": losses, "actor": named[0], "critic": named[1]}


# The rows not marked slow contain every pair of values of any two of `stages`, `plain` and `steps`.
JOINT = [
    pytest.param(stages, plain, steps, marks=[pytest.mark.slow] if (number + plain + (steps == 1)) % 2 else [])
    for number, stages in enumerate([(0, 0, 0), (1, 2, 3), (2, 3, 0), (3, 3, 3)])
    for plain in (True, False)
    for steps in (1, 3)
]


@pytest.mark.parametrize(("stages", "plain", "accumulation"), JOINT)
def test_a_joint_backward_trains_both(stages: tuple[int, int, int], plain: bool, accumulation: int) -> None:
    """Each engine divides its own gradients by the accumulation steps once, though both share one backward."""
    expected = in_one_process(2, accumulation)
    transport = "shm" if plain == (accumulation == 1) else "gloo"
    found_by_rank = run_ranks(three_engines, 2, stages, transport, plain, accumulation, transport=transport)
    for rank, actual in enumerate(found_by_rank):
        assert actual["losses"] == pytest.approx(expected["losses"][rank], rel=1e-6)
        for name in ("actor", "critic"):
            error, where = relative_error(actual[name], expected[name])
            assert error < 1e-6, (name, where)


def mixed(precisions: tuple[str, str], tiers: tuple[str, str], folder: str, plain: bool) -> dict[str, Any]:
    """Train two engines with the given precisions and tiers, and with loss scales of 128 and 1024 under fp16.

    Args:
        plain: call `loss.backward()` on a loss that the first engine has scaled, instead of its `backward`.
    """
    import windlass

    rank, recipe = dist.get_rank(), Recipe()
    engines = []
    for offset, precision, tier, scale in zip((0, 10), precisions, tiers, (128.0, 1024.0), strict=True):
        setting = Setting(stage=3, zero=tuple((key, {**value, "nvme_path": folder}) for key, value in TIERS[tier]))
        config = ds_config(recipe, setting)
        if precision != "fp32":
            config[precision] = {"enabled": True} | ({"loss_scale": scale} if precision == "fp16" else {})
        engines.append(windlass.initialize(model=built(offset, rank), config=config)[0])
    actor, critic = engines
    dtypes = [next(engine.parameters()).dtype for engine in engines]
    for step in range(STEPS):
        batch = rows(Place(step, 0, rank))
        text, _ = actor(batch["x"].to(dtypes[0]))
        judged, _ = critic(text.to(dtypes[1]))
        loss = mse(judged.float(), batch["y"])
        if plain:
            actor.scale(loss).backward()
        else:
            actor.backward(loss)
        actor.step()
        critic.step()
    results = {"actor": whole_params(actor.module), "critic": whole_params(critic.module)}
    for engine in engines:
        engine.destroy()
    return results


@pytest.mark.parametrize(
    ("precisions", "tiers", "plain"),
    [
        (("fp32", "fp32"), ("disk", "host"), False),
        (("fp16", "fp32"), ("device", "device"), True),
        (("fp32", "fp16"), ("host", "device"), False),
        pytest.param(("fp16", "fp16"), ("device", "disk"), False, marks=pytest.mark.slow),
        pytest.param(("fp16", "bf16"), ("host", "device"), False, marks=pytest.mark.slow),
    ],
)
def test_each_engine_has_its_own_precision_and_tiers(
    precisions: tuple[str, str], tiers: tuple[str, str], plain: bool, tmp_path: Any
) -> None:
    """Each engine keeps its precision and tiers, and removes its own loss scale from its gradients.

    The loss carries only one of the scales.
    """
    models = [built(offset, 0) for offset in (0, 10)]
    optimizers = [oracle.make_optimizer(Recipe(), list(m.parameters())) for m in models]
    for step in range(STEPS):
        for rank in range(2):
            batch = rows(Place(step, 0, rank))
            (mse(models[1](models[0](batch["x"])[0])[0], batch["y"]) / 2).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    bound = 1e-6 if set(precisions) == {"fp32"} else 5e-3
    for result in run_ranks(mixed, 2, precisions, tiers, str(tmp_path), plain, env=env_of("host")):
        for name, model in zip(("actor", "critic"), models, strict=True):
            error, where = relative_error(result[name], {n: p.detach() for n, p in model.named_parameters()})
            assert error < bound, (name, where)


class Fails(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it failed")


def after_a_failure() -> list[dict[str, torch.Tensor]]:
    """Run a step of one engine, with and without an earlier failed backward of another engine."""
    import windlass

    result, x = [], rows(Place(0, 0, dist.get_rank()))["x"]
    for fails in (True, False):
        config = ds_config(Recipe(), Setting(stage=1))
        half = {**config, "fp16": {"enabled": True, "loss_scale": 128.0}}
        models = built(0, 0), built(10, 0)
        failing, alone = (
            windlass.initialize(model=m, config=c)[0] for m, c in zip(models, (half, config), strict=True)
        )
        if fails:
            with pytest.raises(RuntimeError, match="it failed"):
                failing.scale(Fails.apply(failing(x.half())[0]).float().square().mean()).backward()
        alone(x)[0].square().mean().backward()
        alone.step()
        result.append(whole_params(alone.module))
        failing.destroy()
        alone.destroy()
    return result


def test_failed_backward_leaves_no_loss_scale() -> None:
    for after, before in run_ranks(after_a_failure, 2):
        assert all(torch.equal(after[name], before[name]) for name in before)
