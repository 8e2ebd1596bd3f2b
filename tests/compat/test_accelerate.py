"""Tests that accelerate with DeepSpeed configurations trains as plain PyTorch, at every stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.conftest import ROOT, SCRIPTS, require_package, start
from windlass.compat.stand_in_path import stand_in_environment

require_package("accelerate")

_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


def _config(stage: int, own: bool = True, zero: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    section = {"stage": stage, **(zero or {})}
    if stage == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.1,
        "zero_optimization": section,
        **({} if own else {"optimizer": _OPTIMIZER}),
        **others,
    }


_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
_CASES: dict[str, dict[str, Any]] = {
    **{f"stage-{stage}": {"config": _config(stage), "resume": True} for stage in range(4)},
    **{f"dummy-{stage}": {"config": _config(stage, own=False)} for stage in (0, 2, 3)},
    **{f"accumulated-{stage}": {"config": _config(stage), "accumulation": 2} for stage in range(4)},
    "host": {"config": _config(3, zero=_HOST), "resume": True},
    "scheduled": {"config": _config(2), "scheduler": True},
    "dummy-scheduled": {"config": _config(3, own=False), "scheduler": True},
    "two-2": {"config": _config(2, train_micro_batch_size_per_gpu=0), "two": True},
    "two-3": {"config": _config(3, train_micro_batch_size_per_gpu=0), "two": True},
}
Told = dict[str, dict[str, Any]]


def _plain(scheduled: bool = False) -> dict[str, Any]:
    """Train in plain PyTorch on full batches."""
    from tests.compat.scripts import accelerate_training

    net = accelerate_training.model()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step) if scheduled else 1.0)
    x, y = accelerate_training.batches().tensors
    results: dict[str, Any] = {"losses": [], "norms": []}
    for start_ in range(0, len(x), accelerate_training.WORLD_BATCH):
        part = slice(start_, start_ + accelerate_training.WORLD_BATCH)
        loss = (net(x[part]) * net.scale - y[part]).square().mean()
        loss.backward()
        results["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, accelerate_training.CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        results["losses"].append(loss.item())
    results["weights"] = net.state_dict()
    return results


# Cases of `make test`: three on one rank; every kind of case on two ranks, though not at every stage.
_QUICK = {
    1: ("stage-3", "dummy-2", "two-2"),
    2: [name for name in _CASES if name not in ("stage-1", "dummy-0", "accumulated-1", "accumulated-2", "two-3")],
}


def _rows(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, ranks, marks=() if name in _QUICK[ranks] else pytest.mark.slow)
        for ranks in (1, 2)
        for name in names
    ]


@pytest.fixture(scope="module")
def result_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Return the results of a case by name and ranks. One run computes all quick cases, another run all slow ones."""
    out = tmp_path_factory.mktemp("accelerate")
    results: dict[tuple[int, bool], Told] = {}

    def get(name: str, ranks: int) -> dict[str, Any]:
        key = ranks, name in _QUICK[ranks]
        if key not in results:
            results[key] = {}  # a failing run is not repeated
            requested = {name: case for name, case in _CASES.items() if (name in _QUICK[ranks]) is key[1]}
            cases = json.loads(json.dumps([{"name": name, "ranks": ranks, **case} for name, case in requested.items()]))
            for case in cases:
                if case["config"]["train_micro_batch_size_per_gpu"] == 0:
                    case["config"]["train_micro_batch_size_per_gpu"] = 8 // ranks
            (out / f"cases-{ranks}.json").write_text(json.dumps(cases))
            start("accelerate_training.py", out, out / f"cases-{ranks}.json", ranks=ranks)
            results[key] = json.loads((out / f"results-{ranks}.json").read_text())
        return results[key][name]

    return get


@pytest.mark.parametrize(("name", "ranks"), _rows([name for name in _CASES if not name.startswith("two")]))
def test_training_equals_plain_pytorch(result_of: Callable[[str, int], dict[str, Any]], name: str, ranks: int) -> None:
    """Losses, gradient norms, gathered weights and losses after `load_state` equal plain PyTorch's."""
    plain, item = _plain(scheduled="scheduled" in name), result_of(name, ranks)
    steps = _CASES[name].get("accumulation", 1)
    means = [sum(item["losses"][i : i + steps]) / steps for i in range(0, len(item["losses"]), steps)]
    assert item["processes"] == ranks
    assert means == pytest.approx(plain["losses"], abs=2e-6)
    assert item["norms"] == pytest.approx(plain["norms"], rel=2e-5)
    assert item["weights"].keys() == plain["weights"].keys()
    for key, value in plain["weights"].items():
        torch.testing.assert_close(torch.tensor(item["weights"][key]), value, atol=2e-6, rtol=1e-5)
    if "resumed" in item:
        assert item["resumed"] == pytest.approx(plain["losses"][3:], abs=2e-6)


@pytest.mark.parametrize(("name", "ranks"), _rows(["two-2", "two-3"]))
def test_two_models_in_one_accelerator(result_of: Callable[[str, int], dict[str, Any]], name: str, ranks: int) -> None:
    """A student with its teacher in one Accelerator, and two models in two Accelerators, train as in plain PyTorch."""
    from tests.compat.scripts import accelerate_training

    def clipped(net: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), accelerate_training.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def ready(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = accelerate_training.model(seed)
        return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

    (student, first), (critic, second), teacher = ready(0), ready(3), accelerate_training.model(7).requires_grad_(False)
    x, y = (entry.split(accelerate_training.WORLD_BATCH) for entry in accelerate_training.batches().tensors)
    losses = [clipped(student, first, (student(a) - teacher(a)).square().mean()) for a in x]
    both = [
        [
            clipped(student, first, (student(a) - b).square().mean()),
            clipped(critic, second, (critic(a) - b).square().mean()),
        ]
        for a, b in zip(x, y, strict=True)
    ]
    item = result_of(name, ranks)
    assert item["losses"] == pytest.approx(losses, abs=2e-6)
    for actual, expected in zip(item["both"], both, strict=True):
        assert actual == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_accelerate_launch_starts_the_ranks(tmp_path: Path) -> None:
    """`accelerate launch --use_deepspeed` finds the compat layer by PYTHONPATH alone."""
    cases = [{"name": "stage-2", "ranks": 2, "config": _config(2)}]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--zero_stage", "2"]
    command += [
        "--main_process_port",
        "0",
        str(SCRIPTS / "accelerate_training.py"),
        str(tmp_path),
        str(tmp_path / "cases.json"),
    ]
    done = subprocess.run(command, env=env | stand_in_environment(env), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "results-2.json").read_text())["stage-2"]
    assert result["processes"] == 2
    assert result["losses"] == pytest.approx(_plain()["losses"], abs=2e-6)
