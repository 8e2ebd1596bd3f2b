"""Tests that training continues from DeepSpeed's directories, at any stage and on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.deepspeed_checkpoint_writer import Trained, write
from tests.dist.harness import run_ranks

CLIENT = {"epoch": 7, "words": ["a", "b"], "t": torch.arange(3)}


class Net(nn.Module):
    """Tied, frozen and trained parameters of odd sizes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 7)
        self.mid = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 29, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.frozen(torch.tanh(self.mid(x)))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay, vectors without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def config_of(stage: int, precision: str) -> dict[str, Any]:
    """Return the configuration of all engines of this file."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
    }
    return config if precision == "fp32" else {**config, precision: {"enabled": True}}


def batch(step: int, rank: int) -> Tensor:
    """Return token ids [2, 6]."""
    return torch.randint(0, 29, (2, 6), generator=torch.Generator().manual_seed(step * 100 + rank))


def engine_for(
    stage: int,
    precision: str,
    seed: int,
    checkpoint: str = "windlass",
    load_universal: bool = False,
    initialize: Callable[..., Any] | None = None,
    **zero: Any,
) -> Any:
    import windlass

    torch.manual_seed(seed)
    model = Net()
    config = config_of(stage, precision)
    config["zero_optimization"] |= zero
    config["checkpoint"] = {"format": checkpoint, "load_universal": load_universal}
    return (initialize or windlass.initialize)(model=model, model_parameters=groups_of(model), config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    """Train and return the losses."""
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank()))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def whole_state(engine: Any) -> Trained:
    """Return an engine's full state on every rank."""
    import windlass

    module = engine.module
    named = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    groups = [[names[id(p)] for p in group["params"]] for group in engine.optimizer.param_groups]
    trained = [name for group in groups for name in group]
    state = engine.full_state_dict()
    keys = ("exp_avg", "exp_avg_sq")
    return Trained(
        module=state,
        buffers=["count"],
        tied={"head.weight": "embed.weight"},
        masters={name: windlass.zero.full_param(named[name]).detach().clone() for name in trained},
        groups=groups,
        moments={name: {key: windlass.zero.full_state(named[name], key) for key in keys} for name in trained},
        step=float(windlass.zero.full_state(named[trained[0]], "step")),
        hyper=[{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        steps=engine.global_steps,
        samples=engine.global_samples,
        schedule=engine.lr_scheduler.state_dict(),
        client=CLIENT,
    )


# stage, number of ranks and largest sub-group of DeepSpeed's files, and the stage of the load
CASES = [(0, 1, 1 << 30, 3), (1, 2, 1 << 30, 0), (2, 3, 1 << 30, 3), (3, 2, 1 << 30, 1), (3, 3, 60, 2), (3, 1, 60, 3)]


def continued(folder: str, precision: str) -> list[dict[str, Any]]:
    """Train, write the state as DeepSpeed would, and continue from each of its directories."""
    engine = engine_for(1, precision, 0)
    steps(engine, 0, 3)
    state = whole_state(engine)
    if dist.get_rank() == 0:
        for stage, ranks, sub_group, _ in CASES:
            write(
                Path(folder) / f"{stage}-{ranks}-{sub_group}",
                "global_step3",
                state,
                stage=stage,
                ranks=ranks,
                sub_group=sub_group,
            )
    expected = steps(engine, 3, 6)
    rates = engine.get_lr()
    engine.destroy()
    dist.barrier()
    results = []
    for stage, ranks, sub_group, here in CASES:
        other = engine_for(here, precision, 50)
        path, client = other.load_checkpoint(f"{folder}/{stage}-{ranks}-{sub_group}")
        counts = (other.global_steps, other.micro_steps, other.global_samples)
        losses = steps(other, 3, 6)
        results.append(
            {
                "path": path,
                "client": client,
                "counts": counts,
                "error": max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True)),
                "rates": (rates, other.get_lr()),
            }
        )
        other.destroy()
    return results


@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 1), ("bf16", 2)])
def test_training_resumes_from_deepspeed_directories(precision: str, ranks: int, tmp_path: Path) -> None:
    for result in run_ranks(continued, ranks, str(tmp_path), precision):
        for case, item in zip(CASES, result, strict=True):
            assert item["error"] <= 1e-6, case
            assert item["counts"] == (3, 3, 6 * ranks), case
            assert item["rates"][0] == item["rates"][1], case
            assert item["client"].keys() == CLIENT.keys() and item["client"]["words"] == ["a", "b"], case
            assert torch.equal(item["client"]["t"], torch.arange(3)), case


def weights_alone(folder: str) -> dict[str, Any]:
    """Load only weights, and load into a model whose optimizer has other groups."""
    engine = engine_for(3, "fp32", 0)
    steps(engine, 0, 1)
    state = whole_state(engine)
    engine.destroy()
    if dist.get_rank() == 0:
        write(Path(folder) / "zero", "t", state, stage=0, ranks=1)
    dist.barrier()
    import windlass

    torch.manual_seed(9)
    other = windlass.initialize(model=Net(), config=config_of(3, "fp32"))[0]  # one parameter group
    text = ""
    try:
        other.load_checkpoint(f"{folder}/zero")
    except windlass.WindlassError as error:
        text = str(error)
    other.load_checkpoint(f"{folder}/zero", load_optimizer_states=False, load_lr_scheduler_states=False)
    weights = other.full_state_dict()
    other.destroy()
    same = all(torch.equal(weights[name], state.module[name]) for name in weights)
    return {"said": text, "same": same}


def test_other_groups_are_named_and_weights_load_alone(tmp_path: Path) -> None:
    result = run_ranks(weights_alone, 1, str(tmp_path))[0]
    assert "saved optimizer have [2, 3] parameters, those of this optimizer [5]" in result["said"]
    assert result["same"]
