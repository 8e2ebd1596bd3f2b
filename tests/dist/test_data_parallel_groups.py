"""Tests that layers sharded over tp and experts over ep, placed by hand, train as one process at every stage.

A checkpoint of one layout loads in another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.hand_placed_model import VOCABULARY, parted, whole
from tests.dist.harness import RankError, run_ranks

STEPS, ROWS = 2, 2

GRIDS = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "ep2": {"ep": 2},
    "dp2-tp2": {"tp": 2},
    "dp2-ep2": {"ep": 2},
    "ep2-tp2": {"ep": 2, "tp": 2},
    "copies2-tp2": {"dp_replicate": 2, "tp": 2},
    "copies2-ep2": {"dp_replicate": 2, "ep": 2},
}
WORLDS = {"tp2": 2, "ep2": 2}


def _config(stage: int, grid: dict[str, int], transport: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, **(more or {})},
        "parallel": grid,
        "comm": {"transport": transport},
    }


def _batch(step: int, readers: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (readers * ROWS, 6), generator=generator)


def _engine(config: dict[str, Any]) -> tuple[Any, int, int]:
    """Return the engine, this rank's index among the data-loading ranks, and the number of data-loading ranks."""
    import torch.distributed as dist

    import windlass
    from windlass.comm.mesh import build_mesh
    from windlass.comm.mesh_shape import MeshShape
    from windlass.config import load_config

    axes = load_config(config).axes(dist.get_world_size())
    mesh = build_mesh(MeshShape(**axes.sizes))
    engine, *_ = windlass.initialize(model=parted(mesh), config=config)
    count, number = engine.data_loading_ranks
    return engine, number, count


def _train(config: dict[str, Any], steps: int, save: str | None, load_from: str | None) -> dict[str, Any]:
    import windlass

    engine, reader, readers = _engine(config)
    if load_from is not None:
        engine.load_checkpoint(load_from)
    results: dict[str, Any] = {"losses": [], "grads": [], "norms": [], "start": engine.fingerprint()}
    for step in range(engine.global_steps, engine.global_steps + steps):
        loss = engine(_batch(step, readers)[reader * ROWS : (reader + 1) * ROWS])
        engine.backward(loss)
        results["grads"].append({n: windlass.zero.full_grad(p) for n, p in engine.module.named_parameters()})
        engine.step()
        results["losses"].append(loss.item())
        results["norms"].append(engine.get_global_grad_norm())
    results["params"] = {n: windlass.zero.full_param(p).detach() for n, p in engine.module.named_parameters()}
    states = {n: windlass.zero.full_state(p, "exp_avg") for n, p in engine.module.named_parameters()}
    results["states"], results["end"], results["reader"] = states, engine.fingerprint(), reader
    results["model"] = engine.full_state_dict()
    if save is not None:
        engine.save_checkpoint(save)
    engine.destroy()
    return results


def _plain(readers: int, steps: int) -> dict[str, Any]:
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.02)
    results: dict[str, Any] = {"losses": [], "grads": [], "norms": []}
    for step in range(steps):
        parts = _batch(step, readers).split(ROWS)
        losses = [model(part) for part in parts]
        torch.stack(losses).mean().backward()
        results["grads"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        results["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)))
        optimizer.step()
        optimizer.zero_grad()
        results["losses"].append([loss.item() for loss in losses])
    results["params"] = {n: p.detach() for n, p in model.named_parameters()}
    results["states"] = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    return results


def _near(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    scale = float(other.abs().max()) or 1.0
    assert one.shape == other.shape, what
    assert float((one - other).abs().max()) <= 1e-5 * scale, what


def _some(every: list[Any], step: int) -> list[Any]:
    """Return all cases, with all but every `step`-th marked slow."""
    return [
        item if n % step == 0 else pytest.param(*_values(item), marks=pytest.mark.slow) for n, item in enumerate(every)
    ]


def _values(one: Any) -> tuple[Any, ...]:
    return one if isinstance(one, tuple) else (one,)


_COMBINED = [(name, stage, kind) for kind in ("gloo", "shm") for name in GRIDS for stage in range(4)]


@pytest.mark.parametrize(("name", "stage", "kind"), _some(_COMBINED, 9))
def test_parameter_parts_train_like_the_full_parameter(name: str, stage: int, kind: str) -> None:
    actual = run_ranks(_train, WORLDS.get(name, 4), _config(stage, GRIDS[name], kind), STEPS, None, None)
    readers = 1 + max(entry["reader"] for entry in actual)
    expected = _plain(readers, STEPS)
    for item in actual:
        for step in range(STEPS):
            assert item["losses"][step] == pytest.approx(expected["losses"][step][item["reader"]], rel=1e-5)
            assert item["norms"][step] == pytest.approx(expected["norms"][step], rel=1e-5)
            for name, gradient in expected["grads"][step].items():
                _near(item["grads"][step][name], gradient, f"gradient of {name} in step {step}")
        for what in ("params", "states"):
            for name, value in expected[what].items():
                _near(item[what][name], value, f"{what} {name}")
    assert len({str(entry["end"]) for entry in actual}) == 1
    state = actual[0]["model"]
    assert set(state) == set(whole().state_dict())
    for name, value in expected["params"].items():
        _near(state[name], value, name)


_LAYOUTS = [("tp2", 3), ("dp2-ep2", 2), ("ep2-tp2", 3), ("copies2-tp2", 1), ("tp4", 0), ("ep2", 3)]


# In `make test` each layout is either saved or loaded, once; all other pairs are slow.
_PAIRS = [
    pytest.param(saved, loaded, marks=() if at % 2 == 0 and to == at + 1 else pytest.mark.slow)
    for at, saved in enumerate(_LAYOUTS)
    for to, loaded in enumerate(_LAYOUTS)
]


@pytest.mark.parametrize(("saved", "loaded"), _PAIRS)
def test_checkpoint_of_one_layout_resumes_in_another(
    saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path
) -> None:
    item = _run(saved, 2, str(tmp_path), None)
    other = _run(loaded, 1, None, str(tmp_path))
    assert item[0]["end"] == other[0]["start"]


def _run(layout: tuple[str, int], steps: int, save: str | None, source: str | None) -> list[dict[str, Any]]:
    name, stage = layout
    return run_ranks(_train, WORLDS.get(name, 4), _config(stage, GRIDS[name], "auto"), steps, save, source)


def _ask_with_other_inputs(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    engine, *_ = _engine(config)
    engine(_batch(dist.get_rank(), 1))


def test_different_samples_along_tp_are_refused() -> None:
    with pytest.raises(RankError, match=r"ranks 0 and 1 are neighbours along tp and\s+got different inputs"):
        run_ranks(_ask_with_other_inputs, 2, _config(1, {"tp": 2}, "auto"))


class Ends(torch.nn.Module):
    """One end of a pipeline, or both. Each end has the same embedding and a matrix of its own."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        if ends == (1,):
            self.table = self.embed  # the embedding has another name at this end
            del self.embed
        made = [torch.nn.Linear(8, VOCABULARY), torch.nn.Linear(8, VOCABULARY)]
        self.heads = torch.nn.ModuleDict({str(end): made[end] for end in ends})

    def words(self) -> torch.nn.Embedding:
        """Return the embedding under either name."""
        result = self._modules.get("embed", self._modules.get("table"))
        assert isinstance(result, torch.nn.Embedding)
        return result

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        losses = [
            torch.nn.functional.cross_entropy(head(self.words()(ids)).flatten(0, 1), ids.flatten())
            for head in self.heads.values()
        ]
        return torch.stack(losses).sum()


def _train_ends(config: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    import windlass
    from windlass.comm.mesh_shape import MeshShape
    from windlass.config import load_config
    from windlass.parallel.placement import Placement, make_full_ranges, set_placement

    grid = MeshShape(**load_config(config).axes(dist.get_world_size()).sizes)
    stage = grid.coordinates(dist.get_rank())["pp"]
    model = Ends((stage,))
    weight = model.words().weight
    shape = tuple(weight.shape)
    set_placement(weight, Placement(shape, make_full_ranges(shape), shared_stages=(0, 1), global_name="embed.weight"))
    engine, *_ = windlass.initialize(model=model, config=config)
    count, number = engine.data_loading_ranks
    norms = []
    for step in range(STEPS):
        engine.backward(engine(_batch(step, count)[number * ROWS : (number + 1) * ROWS]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"model": engine.full_state_dict(), "norms": norms, "print": str(engine.fingerprint())}


_ENDS = [(world, stage, kind) for kind in ("gloo", "shm") for world in (2, 4) for stage in range(4)]


@pytest.mark.parametrize(("world", "stage", "kind"), _some(_ENDS, 3))
def test_parameter_shared_by_two_stages_counts_once(world: int, stage: int, kind: str) -> None:
    result = run_ranks(_train_ends, world, _config(stage, {"pp": 2}, kind))
    model = Ends((0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.02)
    for step in range(STEPS):
        parts = _batch(step, world // 2).split(ROWS)
        torch.stack([model(part) for part in parts]).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4))
        assert [item["norms"][step] for item in result] == pytest.approx([norm] * world, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert set(result[0]["model"]) == {*model.state_dict(), "table.weight"}
    for name, value in model.state_dict().items():
        _near(result[0]["model"][name], value, name)
    assert len({item["print"] for item in result}) == 1
