"""Several engines in one process: actor, critic and frozen reference, one joint backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import oracle
from tests.dist.harness import run_ranks
from tests.dist.laws import Setting, ds_config, whole_params
from tests.models import LossOutside, Place, mse, rows
from tests.oracle import SEED, Recipe, relative_error

STEPS = 4


def built(offset: int, rank: int) -> nn.Module:
    torch.manual_seed(SEED + offset + rank)
    return LossOutside()


def joint_loss(actor: Any, critic: Any, reference: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The critic judges what the actor says; the actor stays near the reference."""
    said, _ = actor(batch["x"])
    judged, _ = critic(said)
    with torch.no_grad():
        before, _ = reference(batch["x"])
    return mse(judged, batch["y"]) + 0.1 * mse(said, before)


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
    found = {"losses": losses, "actor": whole_params(actor.module), "critic": whole_params(critic.module)}
    for engine in (actor, critic, reference):
        engine.destroy()
    return found


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


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "engine"])
@pytest.mark.parametrize("stages", [(0, 0, 0), (1, 2, 3), (2, 3, 0), (3, 3, 3)])
def test_a_joint_backward_trains_both(stages: tuple[int, int, int], plain: bool, accumulation: int) -> None:
    """Each engine divides its own gradients by the accumulation steps, once, though they pass through the other."""
    wanted = in_one_process(2, accumulation)
    transport = "shm" if plain == (accumulation == 1) else "gloo"
    found_by_rank = run_ranks(three_engines, 2, stages, transport, plain, accumulation, transport=transport)
    for rank, found in enumerate(found_by_rank):
        assert found["losses"] == pytest.approx(wanted["losses"][rank], rel=1e-6)
        for name in ("actor", "critic"):
            error, where = relative_error(found[name], wanted[name])
            assert error < 1e-6, (name, where)
