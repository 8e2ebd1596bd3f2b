"""Tests that mixtures of experts train at every stage as plain PyTorch, replicated or sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.dist.equivalence_runs import Setting, backward_of, ds_config
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares
from tests.hf_experts import FAMILIES, language
from tests.models import Place, Specimen
from tests.models.specimen import WIDTH, mse, rows
from tests.oracle import Recipe, Trace, relative_error
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.experts import MixtureOfExperts, StackedMLP, apply_expert_parallel

BOUND = 1e-5
STEPS = 2


class Mixed(nn.Module):
    """Mixtures of modules and of stacked experts. Most experts of `sparse` get no token of a batch of three."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.sparse = MixtureOfExperts(WIDTH, expert, 8, k=1, drop_tokens=False)
        self.full = MixtureOfExperts(
            WIDTH, expert, 3, k=2, capacity_factor=0.8, min_capacity=1, use_residual=True, **_STILL
        )
        self.stacked = MixtureOfExperts(WIDTH, StackedMLP(WIDTH, 12, 5), 5, k=3, drop_tokens=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = torch.zeros(())
        for layer in (self.sparse, self.full, self.stacked):
            hidden, extra, _ = layer(x)
            x, loss = x + hidden, loss + 0.01 * extra
        return mse(self.head(x), y) + loss


_STILL = {"top2_2nd_expert_sampling": False}


def of_place(place: Place) -> dict[str, Tensor]:
    return language(1000 * place.step + place.rank)


def output_loss(call: Callable[..., Any], batch: Any, backward: Callable[..., None]) -> Tensor:
    loss: Tensor = call(**batch).loss
    backward(loss)
    return loss.detach()


SPECIMENS: dict[str, Specimen] = {
    "mixed": Specimen("mixed", Mixed, rows),
    **{name: Specimen(name, FAMILIES[name].build, of_place, output_loss) for name in ("mixtral", "deepseek_v3")},
}


def train(name: str, grid: MeshShape, settings: list[Setting]) -> list[Trace]:
    """Train under each setting. Return this rank's losses, norms, and on rank 0 the full final model."""
    import windlass

    subject, result = SPECIMENS[name], []
    mesh = build_mesh(grid)
    rank = mesh.world.ranks[mesh.world.index]
    for setting in settings:
        torch.manual_seed(oracle.SEED)
        model = subject.build()
        apply_expert_parallel(model, mesh.ep)
        config = {**ds_config(Recipe(), setting), "parallel": {"ep": grid.ep}}
        engine: Any = windlass.initialize(model=model, config=config)[0]
        trace, backward = Trace(), backward_of(engine, False)
        for step in range(STEPS):
            loss = subject.train(engine, subject.batch(Place(step, 0, rank)), backward)
            engine.step()
            trace.losses.append([[float(loss)]])
            trace.norms.append(float(engine.grad_norm()))
        state = engine.full_state_dict()
        trace.model = {key: value.detach().clone() for key, value in state.items()} if rank == 0 else {}
        engine.destroy()
        result.append(trace)
    return result


@cache
def expected(name: str, ranks: int) -> Trace:
    return oracle.train(SPECIMENS[name], Recipe(ranks=ranks, steps=STEPS))


GRIDS = [
    ("mixed", MeshShape(dp_shard=2)),
    ("mixed", MeshShape(ep=3)),
    ("mixed", MeshShape(dp_shard=2, ep=2)),
    ("mixtral", MeshShape(ep=2)),
    ("mixtral", MeshShape(dp_shard=2, ep=2)),
    ("deepseek_v3", MeshShape(ep=4)),
]


@in_shares
@pytest.mark.parametrize(("number", "name", "grid"), [(n, *row) for n, row in enumerate(GRIDS)])
def test_moe_models_train_at_every_stage(number: int, name: str, grid: MeshShape, every: bool) -> None:
    settings = [Setting(stage=stage) for stage in (range(4) if every else [3 if number % 2 else number // 2])]
    by_rank = run_ranks(train, grid.world, name, grid, settings, transport="gloo", timeout=240)
    requested = expected(name, grid.world)
    for number, setting in enumerate(settings):
        for rank, traces in enumerate(by_rank):
            for step in range(STEPS):
                (have,), want = traces[number].losses[step][0], requested.losses[step][rank][0]
                assert abs(have - want) <= BOUND * abs(want), (setting.stage, rank, step)
                have, want = traces[number].norms[step], requested.norms[step]
                assert abs(have - want) <= BOUND * want, (setting.stage, rank, step)
        full = {key: value for key, value in by_rank[0][number].model.items() if key in requested.model}
        error, where = relative_error(full, requested.model)
        assert error <= BOUND, (setting.stage, where, error)
