"""Law: 1-bit Adam over tensor and pipeline parallel ranks equals its rule in one process, with an exact codec and with
one bit; a checkpoint loads at another tensor parallel size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import windlass
from tests.dist import test_one_bit_adam as one_bit_adam
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import ADAMW, CLIP, Case, Found, batch, build, config_of, hold_all, near, train
from tests.dist.test_compressed_parallel import parts_of
from tests.dist.test_one_bit_adam import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    Simulation,
    fragments,
    one_thread,  # noqa: F401 - a fixture
    snapshot,
)
from tests.dist.test_one_bit_adam import FREEZE as FROZEN
from windlass.zero.update.one_bit_adam_update import OneBitAdamUpdate

FREEZE, STEPS = 1, 3
PARAMS = (*{**ADAMW, "eps": 1e-3}.items(), ("freeze_step", FREEZE))  # eps is above the rounding of a frozen variance


def one_bit(model: str, axes: tuple[tuple[str, int], ...], **more: Any) -> Case:
    return Case(model, axes, optimizer="OneBitAdam", params=PARAMS, **more)


def exact(case: Case, steps: int = STEPS, *paths: str | None) -> Found:
    """Train with the codec `identity`, which rounds nothing."""
    with patch.object(OneBitAdamUpdate, "codec_of", classmethod(lambda cls, optimizer: "identity")):
        return train(case, steps, *paths)


def frozen_adam(
    name: str, tied: bool, readers: int, accumulation: int, steps: int, rule: str, params: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """Train in one process with an AdamW whose variance is constant after `FREEZE` steps."""
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
    one_bit("llama-short", (("tp", 2),), stage=1, world=4, bound=3e-5),
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
def test_a_checkpoint_loads_at_another_tensor_parallel_size(stage: int, tmp_path: Path) -> None:
    case = one_bit("llama", (("tp", 2),), stage=stage, world=4)
    run_ranks(exact, 4, case, STEPS, str(tmp_path), timeout=120.0)
    same = run_ranks(exact, 4, case, 2, None, str(tmp_path), timeout=120.0)
    alone = one_bit("llama", (("tp", 1),), stage=stage, world=2)
    other = run_ranks(exact, 2, alone, 2, None, str(tmp_path), timeout=120.0)
    for name, value in other[0].params.items():
        near(value, same[0].params[name], name, 3e-5)


SIGNED = {
    "lr": LR,
    "betas": [BETA1, BETA2],
    "eps": EPS,
    "weight_decay": DECAY,
    "freeze_step": FROZEN,
    "max_update": 1.0,
}
SIGNED_STEPS = FROZEN + 3


def train_with_one_bit(case: Case) -> dict[str, Any]:
    """Train, and return the state at the freeze, this rank's layouts, its replicas and the whole parameters."""
    engine: Any = windlass.initialize(model=build(case.model, tied=case.tied), config=config_of(case))[0]
    found: dict[str, Any] = {"tp": engine.mesh.tp.index}
    for step in range(SIGNED_STEPS):
        if step == FROZEN:
            found["frozen"] = snapshot(engine)
        engine.backward(engine(**batch(step, 0, engine.data_loading_ranks[1])).loss)
        engine.step()
    found["replicas"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found["params"] = {
        name: windlass.zero.full_param(p).detach().clone() for name, p in engine.module.named_parameters()
    }
    engine.destroy()
    return found


class PartedSimulation(Simulation):
    """The compressed phase in one process, with separate messages for the part on each tensor-parallel rank."""

    def __init__(self, case: one_bit_adam.Case, model: Case, layouts: list[Any], frozen: dict[str, Any]) -> None:
        self.case, self.model = case, build(model.model, tied=model.tied).train()
        self.named, tp = list(self.model.named_parameters()), len(layouts)
        self.places = {
            f"{name}@{number}": (name, place)
            for name, parameter in self.named
            for number, place in enumerate(parts_of(name, parameter.shape, tp))
        }
        by_rank = [fragments(one, case.ranks) for one in layouts]
        self.pieces = {key: by_rank[int(key[-1])][name] for key, (name, _) in self.places.items()}
        self.x, self.m, self.v = (self._parted(frozen[key]) for key in ("params", "m", "v"))
        self.replicas = {key: value.clone() for key, value in self.x.items()}
        self.worker = [{key: torch.zeros_like(value) for key, value in self.x.items()} for _ in range(case.ranks)]
        self.server = {key: torch.zeros_like(value) for key, value in self.x.items()}

    def _parted(self, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: whole[name][place].reshape(-1).clone() for key, (name, place) in self.places.items()}

    def whole(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: torch.empty_like(parameter) for name, parameter in self.named}
        for key, (name, place) in self.places.items():
            found[name][place] = parts[key].view_as(found[name][place])
        return found

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            with torch.no_grad():
                for name, value in self.whole(self.replicas).items():
                    self.model.get_parameter(name).copy_(value)
            gradients = []
            for reader in range(self.case.ranks):
                loss = self.model(**batch(step, 0, reader)).loss
                found = torch.autograd.grad(loss, [parameter for _, parameter in self.named])
                gradients.append(self._parted({n: g for (n, _), g in zip(self.named, found, strict=True)}))
            squares = sum(float(g.double().square().sum()) for one in gradients for g in one.values())
            clip = min(1.0, CLIP / ((squares / self.case.ranks) ** 0.5 + 1e-6))
            for key in self.x:
                self._update(key, step + 1, [one[key] for one in gradients], clip)


@pytest.mark.parametrize("stage", [0, 1])
def test_parts_of_tensor_parallel_ranks_have_messages_of_one_bit(stage: int) -> None:
    case = Case("llama-short", (("tp", 2),), stage=stage, world=4, optimizer="OneBitAdam", params=tuple(SIGNED.items()))
    by_rank = run_ranks(train_with_one_bit, 4, case, timeout=120.0)
    layouts = [next(one["frozen"]["layouts"] for one in by_rank if one["tp"] == tp) for tp in range(2)]
    params = (("freeze_step", FROZEN), ("max_update", 1.0))
    simulation = PartedSimulation(
        one_bit_adam.Case(stage, 2, clipping=CLIP, params=params), case, layouts, by_rank[0]["frozen"]
    )
    simulation.run(FROZEN, SIGNED_STEPS)
    wanted = simulation.whole(simulation.x)
    for found in by_rank:
        for name, value in found["params"].items():
            near(value, wanted[name], name, 3e-5)
            others = [one["replicas"][name] for one in by_rank if one["tp"] == found["tp"]]
            assert all(torch.equal(found["replicas"][name], other) for other in others), name
