"""Laws: 1-bit Adam over tensor and pipeline parallel ranks equals its rule in one process with an exact codec; 1-bit
Adam, 1-bit LAMB and 0/1 Adam equal their simulations with one bit; a checkpoint loads at another tensor parallel size.
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
from tests.dist.parallel_runs import ADAMW, CLIP, Case, Found, batch, build, config_of, hold_all, near, step_once, train
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
from tests.dist.test_one_bit_lamb import LambSimulation
from tests.dist.test_zero_one_adam import GROUP as ZERO_ONE
from tests.dist.test_zero_one_adam import ZeroOneSimulation
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


OPTIONS = {"lr": LR, "betas": [BETA1, BETA2], "eps": EPS, "weight_decay": DECAY}
LIMITED = (("max_update", 1.0),)
SIGNED: dict[str, tuple[int, int, tuple[tuple[str, Any], ...]]] = {  # steps before the simulation, all steps, options
    "OneBitAdam": (FROZEN, FROZEN + 3, (("freeze_step", FROZEN), *LIMITED)),
    "OneBitLamb": (FROZEN, FROZEN + 3, (("freeze_step", FROZEN),)),
    "ZeroOneAdam": (1, 9, (*ZERO_ONE.items(), *LIMITED)),
}


def train_with_one_bit(case: Case) -> dict[str, Any]:
    """Train, and return the state at the freeze, this rank's layouts, its replicas and the whole parameters."""
    engine: Any = windlass.initialize(model=build(case.model, tied=case.tied), config=config_of(case))[0]
    begin, steps, _ = SIGNED[case.optimizer]
    found: dict[str, Any] = {"tp": engine.mesh.tp.index, "pp": engine.mesh.pp.index, "dp": engine.data_loading_ranks[1]}
    for step in range(steps):
        if step == begin:
            found["frozen"] = snapshot(engine)
            if case.optimizer == "OneBitLamb":
                named = engine.module.named_parameters()
                found["ratios"] = {name: float(windlass.zero.full_state(p, "coeff_freeze")) for name, p in named}
        step_once(engine, step, case.accumulation)
    found["replicas"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found["params"] = {
        name: windlass.zero.full_param(p).detach().clone() for name, p in engine.module.named_parameters()
    }
    engine.destroy()
    return found


class Parted:
    """Mixin of simulations: separate messages for the part of a parameter on each tensor-parallel rank."""

    def __init__(self, case: one_bit_adam.Case, by_rank: list[dict[str, Any]], model: Case) -> None:
        self.of_model, self.tp = model, dict(model.axes).get("tp", 1)
        first = [one for one in by_rank if not one["dp"]]
        frozen: dict[str, Any] = {
            key: {name: value for one in first for name, value in one["frozen"][key].items()}
            for key in ("params", "m", "v")
        }
        self.places = {
            f"{name}@{number}": (name, place)
            for name, value in frozen["params"].items()
            for number, place in enumerate(parts_of(name, value.shape, self.tp))
        }
        # by tensor-parallel rank: the layouts of all pipeline stages
        layouts = [
            [unit for one in first if one["tp"] == tp for unit in one["frozen"]["layouts"]] for tp in range(self.tp)
        ]
        frozen = {key: self._parted(value) for key, value in frozen.items()}
        more = []
        if "ratios" in by_rank[0]:
            ratios = {name: value for one in first for name, value in one["ratios"].items()}
            more.append({key: ratios[name] for key, (name, _) in self.places.items()})
        super().__init__(case, {**frozen, "layouts": layouts}, *more)  # type: ignore[call-arg]

    def _build(self, case: one_bit_adam.Case) -> torch.nn.Module:
        return build(self.of_model.model, tied=self.of_model.tied).train()

    def _cut(self, layouts: list[Any]) -> dict[str, list[slice]]:
        by_rank = [fragments(one, self.case.ranks) for one in layouts]  # type: ignore[attr-defined]
        return {key: by_rank[int(key[-1])][name] for key, (name, _) in self.places.items()}

    def _parameters(self) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for key, (name, _) in self.places.items():
            groups.setdefault(name, []).append(key)
        return list(groups.values())

    def _parted(self, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: whole[name][place].reshape(-1).clone() for key, (name, place) in self.places.items()}

    def whole(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: torch.empty_like(parameter) for name, parameter in self.named}  # type: ignore[attr-defined]
        for key, (name, place) in self.places.items():
            found[name][place] = parts[key].view_as(found[name][place])
        return found

    @torch.no_grad()
    def _load(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in self.whole(values).items():
            self.model.get_parameter(name).copy_(value)  # type: ignore[attr-defined]

    def _local(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        micros = range(self.of_model.accumulation)
        loss = torch.stack([self.model(**batch(step, micro, rank)).loss for micro in micros]).mean()  # type: ignore[attr-defined]
        found = torch.autograd.grad(loss, [parameter for _, parameter in self.named])  # type: ignore[attr-defined]
        return self._parted({n: g for (n, _), g in zip(self.named, found, strict=True)})  # type: ignore[attr-defined]


class PartedAdam(Parted, Simulation):
    """Simulation of 1-bit Adam."""


class PartedLamb(Parted, LambSimulation):
    """Simulation of 1-bit LAMB. Its trust ratios are those of whole parameters."""


class PartedZeroOne(Parted, ZeroOneSimulation):
    """Simulation of 0/1 Adam."""


SIMULATIONS: dict[str, Any] = {"OneBitAdam": PartedAdam, "OneBitLamb": PartedLamb, "ZeroOneAdam": PartedZeroOne}


def signed(rule: str, axes: tuple[tuple[str, int], ...], model: str, **more: Any) -> Case:
    return Case(model, axes, optimizer=rule, params=(*OPTIONS.items(), *SIGNED[rule][2]), **more)


TP, PP, BOTH = (("tp", 2),), (("pp", 2),), (("pp", 2), ("tp", 2))
SIGNED_CASES = [
    *(signed("OneBitAdam", TP, "llama-short", stage=stage, world=4) for stage in (0, 1)),
    signed("ZeroOneAdam", PP, "llama-two", stage=1, world=4, transport="gloo"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            signed("OneBitAdam", TP, "llama-short", stage=2, world=4, accumulation=2),
            *(
                signed("OneBitAdam", PP, "llama-two", stage=stage, world=4, accumulation=2, transport="gloo")
                for stage in (0, 1, 2)
            ),
            *(
                signed(rule, axes, model, stage=stage, world=4)
                for rule in ("OneBitLamb", "ZeroOneAdam")
                for axes, model in ((TP, "llama-short"), (PP, "llama-two"))
                for stage in (0, 1, 2)
                if (rule, axes, stage) != ("ZeroOneAdam", PP, 1)
            ),
            *(
                signed(rule, BOTH, "llama-two", stage=stage, world=8)
                for rule, stage in (("OneBitAdam", 2), ("OneBitLamb", 1), ("ZeroOneAdam", 1), ("ZeroOneAdam", 2))
            ),
        )
    ),
]


@pytest.mark.parametrize("case", SIGNED_CASES, ids=str)
def test_each_part_and_layer_has_messages_of_one_bit(case: Case) -> None:
    by_rank = run_ranks(train_with_one_bit, case.ranks, case, timeout=240.0)
    begin, steps, params = SIGNED[case.optimizer]
    of_law = one_bit_adam.Case(
        case.stage, 2, clipping=CLIP, optimizer=case.optimizer, params=params, begin=begin, steps=steps
    )
    simulation = SIMULATIONS[case.optimizer](of_law, by_rank, case)
    simulation.run(begin, steps)
    wanted = simulation.whole(simulation.x)
    is_local = case.optimizer == "ZeroOneAdam" and not case.stage  # ranks take local steps
    assert {name for one in by_rank for name in one["params"]} == wanted.keys()
    for found in by_rank:
        own = simulation.of_rank[found["dp"]] if case.optimizer == "ZeroOneAdam" else simulation.replicas
        for name, value in found["params"].items():
            near(value, wanted[name], name, 3e-5)  # ranks sum parts of gradients in another order
            is_parted, replica = f"{name}@1" in simulation.places, found["replicas"][name]
            near(replica, own[f"{name}@{found['tp'] if is_parted else 0}"].view_as(replica), name, 3e-5)
            for other in by_rank:
                same_part = other["pp"] == found["pp"] and (not is_parted or other["tp"] == found["tp"])
                if same_part and (other["dp"] == found["dp"] or not is_local):
                    assert torch.equal(replica, other["replicas"][name]), name
        moved = any(not torch.equal(found["params"][name], value) for name, value in found["replicas"].items())
        assert moved or not case.stage, "replicas equal the master weights, so that the law would hold of wide messages"
