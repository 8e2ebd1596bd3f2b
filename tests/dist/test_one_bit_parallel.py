"""Law: 1-bit Adam over tensor and pipeline parallel ranks equals its rule in one process, if its codec is exact; with
one bit, ranks that hold the same parameter keep the same bits, and a checkpoint loads at another tensor parallel size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import ADAMW, CLIP, Case, Found, batch, build, hold_all, near, train
from windlass.zero.update.one_bit_adam_update import OneBitAdamUpdate

FREEZE, STEPS = 1, 3
PARAMS = (*{**ADAMW, "eps": 1e-3}.items(), ("freeze_step", FREEZE))  # above the rounding of a frozen variance


def one_bit(model: str, axes: tuple[tuple[str, int], ...], **more: Any) -> Case:
    return Case(model, axes, optimizer="OneBitAdam", params=PARAMS, **more)


def exact(case: Case) -> Found:
    """Train with a codec that leaves nothing out."""
    with patch.object(OneBitAdamUpdate, "codec_of", classmethod(lambda cls, optimizer: "identity")):
        return train(case, STEPS)


def frozen_adam(
    name: str, tied: bool, readers: int, accumulation: int, steps: int, rule: str, params: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """Train in one process: AdamW, whose variance is constant after `FREEZE` steps."""
    model, options = build(name, tied=tied).train(), dict(params)
    lr, eps, decay, (beta1, beta2) = options["lr"], options["eps"], options["weight_decay"], (0.9, 0.999)
    named = dict(model.named_parameters())
    m, v = ({name: torch.zeros_like(p) for name, p in named.items()} for _ in range(2))
    results: dict[str, Any] = {"losses": [], "norms": [], "grads": []}
    for step in range(1, steps + 1):
        losses, sums, squares = [], {name: torch.zeros_like(p) for name, p in named.items()}, 0.0
        for reader in range(readers):
            loss = torch.stack([model(**batch(step - 1, micro, reader)).loss for micro in range(accumulation)]).mean()
            loss.backward()
            losses.append(float(loss.detach()))
            squares += sum(float(p.grad.double().square().sum()) for p in named.values() if p.grad is not None)
            for key, parameter in named.items():
                assert parameter.grad is not None
                sums[key] += parameter.grad / readers
                parameter.grad = None
        # norm of the mean gradient before the freeze, afterwards root mean square of the local norms
        mean = sum(float(g.double().square().sum()) for g in sums.values()) ** 0.5
        norm = mean if step <= FREEZE else (squares / readers) ** 0.5
        clip = min(1.0, CLIP / (norm + 1e-6))
        results["losses"].append(losses)
        results["norms"].append(norm)
        results["grads"].append(dict(sums))
        with torch.no_grad():
            for key, parameter in named.items():
                gradient = sums[key] * clip
                m[key] = beta1 * m[key] + (1 - beta1) * gradient
                if step <= FREEZE:
                    v[key] = beta2 * v[key] + (1 - beta2) * gradient * gradient
                root = (v[key] / (1 - beta2 ** min(step, FREEZE))).sqrt() + eps
                move = (m[key] / root).masked_fill_(v[key] == 0, 0.0)
                parameter.mul_(1 - lr * decay).sub_(move, alpha=lr / (1 - beta1**step))
    results["params"] = {n: p.detach().clone() for n, p in named.items()}
    results["names"] = set(model.state_dict())
    return results


CASES = [
    one_bit("llama", (("tp", 2),), stage=1, bound=3e-5),
    pytest.param(one_bit("llama", (("tp", 2),), stage=2, world=4, bound=3e-5), marks=pytest.mark.slow),
    pytest.param(one_bit("llama-short", (("tp", 2),), stage=1, world=6, bound=3e-5), marks=pytest.mark.slow),
    pytest.param(
        one_bit("gpt2", (("pp", 2), ("tp", 2)), stage=0, tied=True, accumulation=2, bound=3e-5), marks=pytest.mark.slow
    ),
    pytest.param(one_bit("llama", (("pp", 2),), stage=1, world=4, accumulation=2, bound=3e-5), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_trains_as_one_process(case: Case) -> None:
    hold_all(case, run_ranks(exact, case.ranks, case, timeout=120.0), frozen_adam, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_one_bit_over_parallel_ranks(stage: int, tmp_path: Path) -> None:
    case = one_bit("llama", (("tp", 2),), stage=stage, world=4)
    found = run_ranks(train, 4, case, STEPS, str(tmp_path), timeout=120.0)
    for one in found:
        assert all(torch.equal(value, found[0].params[name]) for name, value in one.params.items())
    same = run_ranks(train, 4, case, 2, None, str(tmp_path), timeout=120.0)
    other = run_ranks(
        train, 2, one_bit("llama", (("tp", 1),), stage=stage, world=2), 2, None, str(tmp_path), timeout=120.0
    )
    # Error feedback is the same, but fragments, which have scales of their own, differ.
    for name, value in other[0].params.items():
        assert torch.allclose(value, same[0].params[name], atol=4 * dict(PARAMS)["lr"]), name


ZERO_ONE = (*ADAMW.items(), ("var_freeze_step", 2), ("var_update_scaler", 1), ("local_step_scaler", 2))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_zero_one_adam_over_tensor_parallel_ranks_trains_as_on_one(stage: int) -> None:
    alone = Case("llama", (("tp", 1),), stage=stage, world=1, optimizer="ZeroOneAdam", params=ZERO_ONE)
    (expected,) = run_ranks(train, 1, alone, 5)
    parts = Case("llama", (("tp", 2),), stage=stage, optimizer="ZeroOneAdam", params=ZERO_ONE)
    for found in run_ranks(train, 2, parts, 5):
        for name, value in expected.params.items():
            near(found.params[name], value, name, 3e-5)
