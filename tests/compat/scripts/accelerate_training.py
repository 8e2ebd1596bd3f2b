"""Script that trains small models with accelerate over DeepSpeed, as accelerate's guides show, and writes the results.

accelerate_training.py OUT CASES       CASES: JSON, a list of {"name", "config", ...}; see `Case`
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, WORLD_BATCH, STEPS, CLIP = 12, 8, 6, 0.1


@dataclass
class Case:
    """Run of one model.

    Args:
        resume: save the state after half of the steps, continue, load it, and continue from there again.
    """

    name: str
    config: dict[str, Any]
    ranks: int
    accumulation: int = 1
    resume: bool = False
    scheduler: bool = False


def model(seed: int = 0) -> nn.Module:
    """Return a small network with a frozen layer and a buffer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    net[2].weight.requires_grad_(False)
    net.register_buffer("scale", torch.tensor(2.0))
    return net


def batches() -> TensorDataset:
    """Return inputs and targets of all steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(WORLD_BATCH * STEPS, WIDTH, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def run(case: Case, out: Path) -> dict[str, Any]:
    """Train one model with the training loop of accelerate's guides."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(case.config)))
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=case.accumulation)
    set_seed(0)
    net = model()
    trained = [p for p in net.parameters() if p.requires_grad]
    own = "optimizer" not in case.config
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if own else DummyOptim(trained, lr=1e-2, weight_decay=0.01)
    loader = DataLoader(batches(), batch_size=WORLD_BATCH // case.ranks // case.accumulation)
    things: list[Any] = [net, optimizer, loader]
    if case.scheduler:
        if own:
            things.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // case.ranks)))
        else:
            things.append(
                DummyScheduler(
                    optimizer,
                    lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
                )
            )
    engine, optimizer, loader, *rest = accelerator.prepare(*things)
    results: dict[str, Any] = {"losses": [], "norms": []}
    half = STEPS // 2 * case.accumulation
    for count, (x, y) in enumerate(loader, 1):
        with accelerator.accumulate(engine):
            loss = (engine(x) * engine.module.scale - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(engine.parameters(), CLIP)
                results["norms"].append(float(norm))
            optimizer.step()
            for schedule in rest:
                schedule.step()
            optimizer.zero_grad()
        results["losses"].append(accelerator.gather(loss.detach()).mean().item())
        if case.resume and count == half:
            accelerator.save_state(str(out / f"{case.name}-{case.ranks}-state"))
    if case.resume:
        accelerator.load_state(str(out / f"{case.name}-{case.ranks}-state"))
        results["resumed"] = []
        for number, (x, y) in enumerate(loader):
            if number < half:
                continue
            with accelerator.accumulate(engine):
                loss = (engine(x) * engine.module.scale - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                for schedule in rest:
                    schedule.step()
                optimizer.zero_grad()
            results["resumed"].append(accelerator.gather(loss.detach()).mean().item())
    full = accelerator.get_state_dict(engine)
    if accelerator.is_main_process:
        results["weights"] = {name: value.float().tolist() for name, value in full.items()}
    results["processes"] = accelerator.num_processes
    accelerator.free_memory()
    return results


def run_two(case: Case, out: Path) -> dict[str, Any]:
    """Train two pairs of models.

    A student learns from a teacher in one Accelerator, each with its own configuration. Then a generator and its critic
    are trained by two Accelerators, which share one state.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    teachers = {key: value for key, value in case.config.items() if key not in ("optimizer", "scheduler")}
    teachers = json.loads(json.dumps(teachers))
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(case.config))),
        "teacher": DeepSpeedPlugin(hf_ds_config=teachers),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    student, teacher = model(0), model(7).requires_grad_(False)
    optimizer: Any = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(batches(), batch_size=WORLD_BATCH // case.ranks)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(teacher)
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for x, _ in loader:
        with torch.no_grad():
            expected = teacher(x)
        loss = (student(x) - expected).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())

    second = Accelerator()
    critic = model(3)
    judge: Any = torch.optim.AdamW([p for p in critic.parameters() if p.requires_grad], lr=1e-2)
    critic, judge = second.prepare(critic, judge)
    both = []
    for x, y in loader:
        loss = (student(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        verdict = (critic(x) - y).square().mean()
        second.backward(verdict)
        judge.step()
        both.append([accelerator.gather(item.detach()).mean().item() for item in (loss, verdict)])
    accelerator.free_memory()
    return {"losses": losses, "both": both}


def main(out: Path, cases: list[dict[str, Any]]) -> None:
    """Run all cases. Rank 0 writes the results."""
    results = {}
    for given in cases:
        gc.freeze()  # accelerate collects garbage often, and walking through all imports takes long
        two = given.pop("two", False)
        case = Case(**given)
        results[case.name] = (run_two if two else run)(case, out)
    if os.environ.get("RANK", "0") == "0":
        (out / f"results-{case.ranks}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
