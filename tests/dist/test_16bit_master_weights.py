"""Tests that 16-bit master weights, gradients and optimizer states equal plain PyTorch in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.models import ROWS, Place, cast

STEPS, ACCUMULATION, SCALE = 4, 2, 128  # SCALE is a power of two, so that scaling rounds nothing
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
FP16 = {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": SCALE}
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}


@dataclass(frozen=True)
class Case:
    """Configuration of 16-bit master weights. `zero` has more keys of `zero_optimization`, such as offloads."""

    precision: str
    states: str = "fp32"
    stage: int = 1
    optimizer: str = "AdamW"
    zero: tuple[tuple[str, Any], ...] = ()
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def delayed(self) -> bool:
        """Return True if `zero` sets `delayed_update`."""
        return "delayed_update" in str(self.zero)

    def config(self) -> dict[str, Any]:
        section = {"bf16": BF16, "fp16": FP16}[self.precision]
        if self.states == "bf16":
            section = {**section, "bf16_optimizer_states": True}
        params = ADAMW if self.optimizer == "AdamW" else {"lr": 0.05, "momentum": 0.9}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 0.0,
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": {"stage": self.stage, **dict(self.zero)},
            self.precision: section,
            **self.more,
        }


def added(parts: dict[tuple[int, int], torch.Tensor], ranks: int, at_each: bool, handed: bool) -> torch.Tensor:
    """Return the mean over ranks of the sum over micro-batches, in the dtype of the parts.

    By default each rank's parts are added up first. With `at_each`, the parts of all ranks are summed at each
    micro-batch, and this sum is rounded once, when it is added to the total of the earlier micro-batches. With
    `handed`, the sum is also rounded before this addition, because it is copied to other memory.
    """
    if not at_each:
        of_ranks = [parts[rank, 0] + parts[rank, 1] for rank in range(ranks)]
        return torch.stack(of_ranks).sum(0) / ranks
    total = torch.zeros_like(parts[0, 0])
    for micro in range(ACCUMULATION):
        everyone = torch.stack([parts[rank, micro] for rank in range(ranks)]).float().sum(0) / ranks
        if handed:
            everyone = everyone.to(total.dtype).float()
        total = (total.float() + everyone).to(total.dtype)
    return total


def plain(name: str, case: Case, ranks: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Train in one process that keeps everything in 16 bits, as plain PyTorch does. Return losses and parameters.

    With fp32 states the optimizer steps a widened copy, and its result is rounded. Gradients are accumulated in 16 bits
    in the order of the stage: over ranks at each backward if gradients are sharded, otherwise once.
    """
    subject = specimen(name)
    dtype, scale = {"bf16": (torch.bfloat16, 1), "fp16": (torch.float16, SCALE)}[case.precision]
    model = oracle.build(subject).to(dtype)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    stepped = [torch.nn.Parameter(p.detach().to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[case.states])))
               for _, p in named]  # fmt: skip
    kind: Any = getattr(torch.optim, case.optimizer)
    optimizer = kind(stepped, **case.config()["optimizer"]["params"], fused=True)
    losses = []
    for step in range(STEPS):
        parts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        of_step: list[float] = []
        for rank in range(ranks):
            for micro in range(ACCUMULATION):
                batch = cast(subject.batch(Place(step, micro, rank)), dtype)
                of_step.append(float(subject.train(model, batch, lambda loss, **_: (loss * scale).backward())))
                for n, p in named:
                    if p.grad is not None:
                        parts.setdefault(n, {})[rank, micro] = p.grad / ACCUMULATION
                        p.grad = None
        sums = {n: added(of, ranks, case.stage >= 2, case.delayed) for n, of in parts.items()}
        for (n, p), item in zip(named, stepped, strict=True):
            with torch.no_grad():
                item.copy_(p)
            item.grad = sums[n].to(item.dtype) / scale if n in sums else None
        optimizer.step()
        with torch.no_grad():
            for (_, p), item in zip(named, stepped, strict=True):
                p.copy_(item)
        losses.append(of_step)
    return losses, {n: p.detach().float().clone() for n, p in named}


def trained(name: str, cases: list[Case], folder: str) -> list[Any]:
    """Train each case on this rank.

    Return for each case the losses, the parameters, the dtypes of masters and states, whether the parameters
    themselves are the masters, and whether a resumed run is equal.
    """
    results = []
    for number, case in enumerate(cases):
        try:
            results.append(_trained(name, case, f"{folder}/{number}"))
        except Exception as error:
            error.add_note(f"under {case}")
            raise
    return results


def _trained(name: str, case: Case, folder: str) -> Any:
    subject, rank = specimen(name), dist.get_rank()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    config = case.config()

    def run(engine: Any, first: int, last: int) -> list[list[float]]:
        losses = []
        for step in range(first, last):
            of_step = []
            for micro in range(ACCUMULATION):
                batch = cast(subject.batch(Place(step, micro, rank)), dtype)
                of_step.append(float(subject.train(engine, batch, engine.backward)))
                engine.step()
            losses.append(of_step)
        return losses

    engine = start(subject, config)
    losses = run(engine, 0, STEPS // 2)
    engine.save_checkpoint(folder)
    losses += run(engine, STEPS // 2, STEPS)
    full = {n: value.float() for n, value in whole_params(engine.module).items()}
    masters = engine._sharded.masters
    with masters.resident([unit for unit in engine._sharded.units if unit.trainable]):
        kept = {chunk.values().dtype for chunk in masters.chunks if chunk.numel}
        states = {t.dtype for chunk in masters.chunks for t in masters.state_offload.tensors(chunk)}
    shared = not any(masters.is_separate(unit) for unit in engine._sharded.units if unit.trainable)
    engine.destroy()
    again = start(subject, config)
    again.load_checkpoint(folder)
    run(again, STEPS // 2, STEPS)
    resumed = {n: value.float() for n, value in whole_params(again.module).items()}
    again.destroy()
    same = all(torch.equal(full[n], resumed[n]) for n in full)
    return losses, full, kept, states, shared, same


def loaded(folder: str, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], ...]:
    """Return masters at a save and after its load with `config`, then first moments at the save and after the load."""
    subject = specimen("tied")
    engine = start(subject, {**config, "zero_optimization": {"stage": 1}})
    for step in range(2):
        batch = cast(subject.batch(Place(step, 0, dist.get_rank())), torch.bfloat16)
        subject.train(engine, batch, engine.backward)
        engine.step()
    engine.save_checkpoint(folder)
    saved, moments = whole_params(engine.module), engine.optimizer.state_dict()["state"]
    engine.destroy()
    again = start(subject, config)
    again.load_checkpoint(folder)
    result, after = whole_params(again.module), again.optimizer.state_dict()["state"]
    again.destroy()
    return (
        saved,
        result,
        {str(k): v["exp_avg"] for k, v in moments.items()},
        {str(k): v["exp_avg"] for k, v in after.items()},
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_master_weights_can_be_loaded_from_16_bit_weights(stage: int, tmp_path: Path) -> None:
    zero = {"stage": stage, "load_from_fp32_weights": False, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": zero,
    }
    for saved, result, moments, after in run_ranks(loaded, 2, str(tmp_path / "saved"), config):
        for name, value in saved.items():
            assert not torch.equal(value, value.bfloat16().float())
            assert torch.equal(result[name], value.bfloat16().float()), name
        assert moments.keys() == after.keys()
        assert all(torch.equal(after[key], value) for key, value in moments.items())


def cases(tmp_path: Path, precision: str, states: str) -> list[Case]:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    late = {"device": "cpu", "delayed_update": True, "delayed_update_start": 99}
    results = [Case(precision, states, stage) for stage in range(4)]
    results += [
        Case(precision, states, 2, zero=(("offload_optimizer", {"device": "cpu"}), ("sub_group_size", 300))),
        Case(precision, states, 3, zero=(("offload_optimizer", nvme), ("offload_param", nvme))),
        Case(precision, states, 3, zero=(("offload_optimizer", late), ("sub_group_size", 300))),
        Case(precision, states, 2, optimizer="SGD"),
    ]
    return results


@pytest.mark.parametrize(
    ("ranks", "precision", "states"),
    [
        # The rows on two ranks cover the same precisions and states.
        *(
            pytest.param(1, *other, marks=pytest.mark.slow)
            for other in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp32"))
        ),
        pytest.param(2, "bf16", "fp32", marks=pytest.mark.slow),
        *((2, *each) for each in (("bf16", "bf16"), ("fp16", "fp32"))),
    ],
)
def test_training_with_16_bit_master_weights_equals_plain_training(
    ranks: int, precision: str, states: str, tmp_path: Path
) -> None:
    rows = cases(tmp_path, precision, states)
    traces = run_ranks(trained, ranks, "tied", rows, str(tmp_path / "saved"), transport="gloo", timeout=240.0)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    kept_states = {"fp32": torch.float32, "bf16": torch.bfloat16}[states]
    for number, case in enumerate(rows):
        expected, parameters = plain("tied", case, ranks)
        for rank, trace in enumerate(traces):
            losses, full, kept, of_states, shared, same = trace[number]
            assert losses == [of[rank * ACCUMULATION : (rank + 1) * ACCUMULATION] for of in expected], case
            for n, value in parameters.items():
                assert torch.equal(full[n], value), (case, n, (full[n] - value).abs().max())
            assert kept <= {narrow} and of_states <= {kept_states}, (case, kept, of_states)
            assert shared == (not case.delayed and "nvme" not in str(case.zero)), case
            assert same, f"{case}: a resumed run goes another way"
