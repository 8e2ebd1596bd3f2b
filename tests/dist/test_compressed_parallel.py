"""Law: 1-bit LAMB, 0/1 Adam, DiLoCo and PowerSGD over tensor and pipeline parallel ranks equal their algorithm on the
whole model in one process, in plain PyTorch, if the codec is exact. PowerSGD compresses the shards of
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch

import windlass
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import ADAMW, CLIP, Case, Found, batch, build, config_of, hold_all, near, step_once, train
from tests.oracle import relative_error
from windlass.optim.zero_one_adam import StepKind, kind_of_step, steps_since_sync
from windlass.parallel.placement import Placement
from windlass.zero.update import one_bit_lamb_update
from windlass.zero.update.compressed_phase import CompressedPhase
from windlass.zero.update.one_bit_adam_update import OneBitAdamUpdate

STEPS, BETA1, BETA2 = 5, 0.9, 0.999
RULES: dict[str, dict[str, Any]] = {
    "OneBitLamb": {**ADAMW, "eps": 1e-3, "freeze_step": 2},
    "ZeroOneAdam": {
        **{**ADAMW, "eps": 1e-3},
        "var_freeze_step": 1,
        "var_update_scaler": 1,
        "local_step_scaler": 1,
        "local_step_clipper": 2,
    },
    "DiLoCo": {**ADAMW, "eps": 1e-3, "inner_steps": 2, "codec": "identity"},
    "PowerSGD": {"lr": 0.05, "momentum": 0.9, "rank": 2, "start_step": 1},
}
Tensors = dict[str, torch.Tensor]


def case_of(rule: str, axes: tuple[tuple[str, int], ...], model: str = "llama", **more: Any) -> Case:
    return Case(model, axes, optimizer=rule, params=tuple(RULES[rule].items()), bound=5e-5, **more)


def exact(cases: list[Case], steps: int = STEPS, *paths: str | None) -> list[Found]:
    """Train each case with a lossless codec."""
    with (
        patch.object(OneBitAdamUpdate, "codec_of", classmethod(lambda cls, optimizer: "identity")),
        patch.object(one_bit_lamb_update, "CompressedPhase", partial(CompressedPhase, codec="identity")),
    ):
        return [train(case, steps, *paths) for case in cases]


class Rule:
    """Algorithm on the whole model: weights of each data rank, and a step with the gradients of all data ranks."""

    def __init__(self, first: Tensors, options: dict[str, Any], readers: int) -> None:
        self.x, self.o, self.readers = first, options, readers

    def weights(self, reader: int) -> Tensors:
        return self.x

    def keeps_gradients(self, step: int) -> bool:
        """Return True if ranks do not reduce the gradients of a step, counted from 1."""
        raise NotImplementedError

    def step(self, step: int, gradients: list[Tensors]) -> None:
        raise NotImplementedError


class LambRule(Rule):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.m, self.v = ({n: torch.zeros_like(p) for n, p in self.x.items()} for _ in range(2))
        self.coefficient, self.factor = dict.fromkeys(self.x, 0.0), dict.fromkeys(self.x, 1.0)
        self.fresh: Tensors = {}

    def keeps_gradients(self, step: int) -> bool:
        return bool(step > self.o["freeze_step"])

    def step(self, step: int, gradients: list[Tensors]) -> None:
        freeze, frozen = self.o["freeze_step"], self.keeps_gradients(step)
        for name, x in self.x.items():
            g = torch.stack([one[name] for one in gradients]).mean(0)
            m = self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * g
            changed = self.fresh.setdefault(name, self.v[name].clone()) if frozen else self.v[name]
            changed.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
            root = self.v[name].sqrt() + self.o["eps"]
            plain = (m / root).masked_fill_(self.v[name] == 0, 0.0)
            update = plain + self.o["weight_decay"] * x
            if frozen:
                share = min(1.0, float(plain.norm() / update.norm()))
                factor = float((root / (changed.sqrt() + self.o["eps"])).max()) * share + 1 - share
                last = self.factor[name]
                factor = self.factor[name] = min(1.1 * last, max(0.9 * last, min(4.0, max(0.5, factor))))
                ratio = self.coefficient[name] * factor
            else:
                ratio = min(10.0, max(0.01, float(x.norm() / update.norm())))
                self.coefficient[name] = 0.9 * self.coefficient[name] + 0.1 * ratio
            size = self.o["lr"] * (1 - BETA2 ** min(step, freeze)) ** 0.5 / (1 - BETA1**step)
            self.x[name] = x - size * ratio * update


class ZeroOneRule(Rule):
    """0/1 Adam with the variance of the first step. Ranks take local steps at stage 0, and sum gradients otherwise."""

    def __init__(self, *given: Any, shards: bool) -> None:
        super().__init__(*given)
        zeros = {n: torch.zeros_like(p) for n, p in self.x.items()}
        self.shards, self.m, self.v, self.rates, self.decayed = shards, dict(zeros), dict(zeros), 0.0, 0.0
        # By rank: `own` are momenta; `kept` are local changes of the weights at stage 0, sums of gradients otherwise.
        self.own, self.kept = ([dict(zeros) for _ in range(self.readers)] for _ in range(2))

    def weights(self, reader: int) -> Tensors:
        if self.shards:
            return self.x
        return {name: x * (1 - self.decayed) - self.kept[reader][name] for name, x in self.x.items()}

    def keeps_gradients(self, step: int) -> bool:
        return bool(step > self.o["var_freeze_step"])

    def step(self, step: int, gradients: list[Tensors]) -> None:
        lr, keep = self.o["lr"], 1 - self.o["lr"] * self.o["weight_decay"]
        kind, rate = kind_of_step(step, self.o), lr / (1 - BETA1**step)
        if self.keeps_gradients(step):
            self.rates, self.decayed = self.rates * keep + rate, 1 - (1 - self.decayed) * keep
        for name in self.x:
            parts = [(1 - BETA1) * one[name] for one in gradients]
            if not self.keeps_gradients(step):
                g = torch.stack([one[name] for one in gradients]).mean(0)
                self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * g * g
                self._move(name, step, torch.stack(parts).mean(0))
                continue
            for own, kept, part in zip(self.own, self.kept, parts, strict=True):
                own[name] = BETA1 * own[name] + part
                kept[name] = (
                    kept[name] + part if self.shards else kept[name] * keep + rate * self._ratio(name, own[name])
                )
            if kind is not StepKind.SYNC:
                continue
            mean, steps = torch.stack([kept[name] for kept in self.kept]).mean(0), steps_since_sync(step, self.o)
            if self.shards:
                for number in range(steps):
                    self._move(name, step - steps + 1 + number, mean / steps)
            else:
                self.x[name] = self.x[name] * (1 - self.decayed) - mean
                self.m[name] = mean * self._root(name) / self.rates
            for own, kept in zip(self.own, self.kept, strict=True):
                own[name], kept[name] = self.m[name], torch.zeros_like(mean)
        if kind is not StepKind.LOCAL:
            self.rates = self.decayed = 0.0
            self.own = [dict(self.m) for _ in self.own]

    def _move(self, name: str, step: int, part: torch.Tensor) -> None:
        self.m[name] = BETA1 * self.m[name] + part
        size = self.o["lr"] / (1 - BETA1**step)
        self.x[name] = self.x[name] * (1 - self.o["lr"] * self.o["weight_decay"]) - size * self._ratio(
            name, self.m[name]
        )

    def _ratio(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        return (momentum / self._root(name)).masked_fill_(self.v[name] == 0, 0.0)

    def _root(self, name: str) -> torch.Tensor:
        return (self.v[name] / (1 - BETA2)).sqrt() + float(self.o["eps"])


class DiLoCoRule(Rule):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        zeros = {n: torch.zeros_like(p) for n, p in self.x.items()}
        self.m, self.v, self.local = ([dict(one) for _ in range(self.readers)] for one in (zeros, zeros, self.x))
        self.outer = dict(zeros)

    def weights(self, reader: int) -> Tensors:
        return self.local[reader]

    def keeps_gradients(self, step: int) -> bool:
        return True

    def step(self, step: int, gradients: list[Tensors]) -> None:
        lr, eps, decay = (self.o[key] for key in ("lr", "eps", "weight_decay"))
        for m, v, local, gradient in zip(self.m, self.v, self.local, gradients, strict=True):
            for name, g in gradient.items():
                m[name] = BETA1 * m[name] + (1 - BETA1) * g
                v[name] = BETA2 * v[name] + (1 - BETA2) * g * g
                move = m[name] / (1 - BETA1**step) / ((v[name] / (1 - BETA2**step)).sqrt() + eps)
                local[name] = local[name] * (1 - lr * decay) - lr * move
        if step % self.o["inner_steps"]:
            return
        for name, x in self.x.items():
            change = torch.stack([x - local[name] for local in self.local]).mean(0)
            self.outer[name] = 0.9 * self.outer[name] + change
            self.x[name] = x - 0.7 * (change + 0.9 * self.outer[name])
        self.local = [dict(self.x) for _ in range(self.readers)]


ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def parts_of(name: str, shape: torch.Size, tp: int) -> Iterator[tuple[slice, ...]]:
    """Yield the part of each tensor-parallel rank; one part if all of them hold the whole parameter."""
    dim = next((dim for dim, words in enumerate((ROWS, COLUMNS)) if any(word in name for word in words)), None)
    if dim is None:
        yield (slice(None),)
        return
    length = shape[dim] // tp
    for rank in range(tp):
        yield (slice(None),) * dim + (slice(rank * length, (rank + 1) * length),)


class LowRankRule(Rule):
    """PowerSGD, applied to the shard of each of `tp` ranks."""

    def __init__(self, *given: Any, tp: int) -> None:
        super().__init__(*given)
        self.tp = tp
        self.momentum = {n: torch.zeros_like(p) for n, p in self.x.items()}
        self.owed = [{n: torch.zeros_like(p) for n, p in self.x.items()} for _ in range(self.readers)]
        self.thin: dict[tuple[str, int], torch.Tensor] = {}

    def keeps_gradients(self, step: int) -> bool:
        return bool(step > self.o["start_step"])

    def step(self, step: int, gradients: list[Tensors]) -> None:
        for name, x in self.x.items():
            mean = torch.stack([one[name] for one in gradients]).mean(0)
            if self.keeps_gradients(step) and self.readers > 1 and x.dim() == 2:
                for number, place in enumerate(parts_of(name, x.shape, self.tp)):
                    mean[place] = self._low_rank(name, number, [one[name][place] for one in gradients], place)
            self.momentum[name] = self.o["momentum"] * self.momentum[name] + mean
            self.x[name] = x - self.o["lr"] * self.momentum[name]

    def _low_rank(self, name: str, number: int, parts: list[torch.Tensor], place: tuple[slice, ...]) -> torch.Tensor:
        """Return the low-rank approximation of one part's mean over data ranks."""
        matrices = [part + owed[name][place] for part, owed in zip(parts, self.owed, strict=True)]
        if (name, number) not in self.thin:
            draw = torch.Generator().manual_seed(crc32(name.encode()))
            self.thin[name, number] = torch.randn(matrices[0].shape[1], self.o["rank"], generator=draw)
        basis = torch.linalg.qr(self.thin[name, number])[0]
        left = torch.linalg.qr(torch.stack([one @ basis for one in matrices]).sum(0))[0]
        thin = self.thin[name, number] = torch.stack([one.t() @ left for one in matrices]).mean(0)
        result: torch.Tensor = left @ thin.t()
        for one, owed in zip(matrices, self.owed, strict=True):
            owed[name][place] = one - result
        return result


def reference(
    name: str,
    tied: bool,
    readers: int,
    accumulation: int,
    steps: int,
    rule: str,
    params: tuple[tuple[str, Any], ...],
    tp: int,
    shards: bool,
) -> dict[str, Any]:
    """Train in one process by one of the algorithms above."""
    model = build(name, tied=tied).train()
    named = dict(model.named_parameters())
    first = {n: p.detach().clone() for n, p in named.items()}
    makers: dict[str, Any] = {
        "OneBitLamb": LambRule,
        "ZeroOneAdam": partial(ZeroOneRule, shards=shards),
        "DiLoCo": DiLoCoRule,
        "PowerSGD": partial(LowRankRule, tp=tp),
    }
    algorithm: Any = makers[rule](first, dict(params), readers)
    results: dict[str, Any] = {"losses": [], "norms": [], "grads": []}
    for step in range(steps):
        losses, gradients = [], []
        for reader in range(readers):
            with torch.no_grad():
                for key, parameter in named.items():
                    parameter.copy_(algorithm.weights(reader)[key])
            loss = torch.stack([model(**batch(step, micro, reader)).loss for micro in range(accumulation)]).mean()
            gradients.append(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))
            losses.append(float(loss.detach()))
        mean = {key: torch.stack([one[key] for one in gradients]).mean(0) for key in named}
        # Steps without a reduction of gradients report the root mean square of the ranks' norms.
        squares = [float(sum(g.double().square().sum() for g in one.values())) for one in (mean, *gradients)]
        norm = (sum(squares[1:]) / readers if algorithm.keeps_gradients(step + 1) else squares[0]) ** 0.5
        for key, value in (("losses", losses), ("norms", norm), ("grads", mean)):
            results[key].append(value)
        clip = min(1.0, CLIP / (norm + 1e-6))
        algorithm.step(step + 1, [{key: g * clip for key, g in one.items()} for one in gradients])
    return {**results, "params": algorithm.x, "names": set(model.state_dict())}


def hold_law(case: Case, found: list[Found]) -> None:
    hold_all(case, found, partial(reference, tp=dict(case.axes).get("tp", 1), shards=case.stage > 0), STEPS)
    for one in found:  # replicas along all axes stay bitwise equal
        for other in found:
            for name in one.params.keys() & other.params.keys():
                assert torch.equal(one.params[name], other.params[name]), name


TP, PP, BOTH = (("tp", 2),), (("pp", 2),), (("pp", 2), ("tp", 2))
QUICK = [case_of(rule, TP, "llama-short", stage=int(rule == "OneBitLamb"), world=4) for rule in RULES]


def test_layouts_train_as_one_process() -> None:
    by_rank = run_ranks(exact, 4, QUICK, timeout=120.0)
    for number, case in enumerate(QUICK):
        hold_law(case, [found[number] for found in by_rank])


CASES = [
    *(case_of("OneBitLamb", TP, stage=stage, world=4, accumulation=2) for stage in (0, 2)),
    *(case_of("ZeroOneAdam", axes, stage=stage, world=4) for axes, stage in ((TP, 1), (TP, 2), (PP, 1), (PP, 2))),
    case_of("OneBitLamb", TP, stage=0, host=True),
    # three heads over two ranks: parts of unequal size
    *(case_of("OneBitLamb", TP, "uneven", stage=stage, world=4) for stage in (0, 1)),
    case_of("DiLoCo", TP, "uneven", world=4),
    *(case_of("OneBitLamb", axes, "gpt2", stage=stage, tied=True) for axes, stage in ((BOTH, 0), (TP, 1))),
    *(
        case_of(rule, axes, model, tied=tied, accumulation=2, world=4)
        for rule in RULES
        for axes, model, tied in ((PP, "llama", False), (PP, "gpt2", True), (BOTH, "llama", True))
    ),
    *(case_of(rule, TP, accumulation=2, world=4) for rule in ("ZeroOneAdam", "DiLoCo", "PowerSGD")),
    # three data ranks, so that sums are of more than two messages
    *(case_of(rule, TP, "llama-short", stage=int(rule == "OneBitLamb"), world=6) for rule in RULES),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_trains_as_one_process(case: Case) -> None:
    hold_law(case, [found for (found,) in run_ranks(exact, case.ranks, [case], timeout=240.0)])


THREE = {"inner_steps": 3, "fragments": 3}


def with_params(case: Case, **more: Any) -> Case:
    return replace(case, params=tuple({**dict(case.params), **more}.items()))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"overlap_steps": 1}], ids=str)
@pytest.mark.parametrize("codec", ["int8", "sign"])
def test_a_parameter_of_two_stages_takes_outer_steps_at_the_same_time(more: dict[str, Any], codec: str) -> None:
    case = with_params(case_of("DiLoCo", PP, "gpt2", tied=True, world=4), codec=codec, **THREE, **more)
    found = run_ranks(train, 4, case, 5, timeout=120.0)
    for one in found:
        for other in found:
            for name in one.params.keys() & other.params.keys():
                assert torch.equal(one.params[name], other.params[name]), name
    assert "transformer.wte.weight" in found[0].params.keys() & found[-1].params.keys()


# Real codecs.

LOSSY = {
    "OneBitAdam": {**ADAMW, "eps": 1e-3, "freeze_step": 1, "max_update": 1.0},
    **RULES,
    "DiLoCo": {**RULES["DiLoCo"], "codec": "int8"},
}
LOCAL = ("DiLoCo", "ZeroOneAdam")  # at stage 0 their ranks take local steps


def lossy(rule: str, axes: tuple[tuple[str, int], ...], model: str = "llama-two", **more: Any) -> Case:
    """Return a case of a rule with its own codec."""
    return Case(model, axes, optimizer=rule, params=tuple(LOSSY[rule].items()), **{"world": 4, **more})


def lossy_cases(stages: tuple[int, ...], **more: Any) -> list[Case]:
    """Return the cases of all rules at these stages over tp, and over pp with a parameter of both stages."""
    return [
        lossy(rule, axes, "gpt2", tied=True, stage=stage, **more)
        for rule in LOSSY
        for axes in (TP, PP)
        for stage in stages
        if not stage or rule not in ("DiLoCo", "PowerSGD")
    ]


def require_equal_copies(case: Case, found: list[Found]) -> None:
    """Require the same bits on all ranks that hold the same values."""
    is_local = case.optimizer in LOCAL and not case.stage
    for one in found:
        for other in (other for other in found if other is not one):
            for name in one.params.keys() & other.params.keys():
                assert torch.equal(one.params[name], other.params[name]), name
                here, there = one.replicas[name], other.replicas[name]
                is_same = one.part[0] == other.part[0] or here.shape == one.params[name].shape
                if is_same and (one.reader == other.reader or not is_local):
                    assert torch.equal(here, there), name


RESUMED = [
    lossy("ZeroOneAdam", PP, stage=2, bf16=True),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (*lossy_cases((0, 1, 2)), *lossy_cases((0, 2), bf16=True, accumulation=2))
    ),
]


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_a_resumed_run_is_exact(case: Case, tmp_path: Path) -> None:
    straight = run_ranks(train, 4, case, 6, str(tmp_path), None, 3, timeout=120.0)
    resumed = run_ranks(train, 4, case, 3, None, str(tmp_path), timeout=120.0)
    for here, there in zip(straight, resumed, strict=True):
        assert here.losses[3:] == there.losses
        assert all(torch.equal(value, there.params[name]) for name, value in here.params.items())
    require_equal_copies(case, straight)
    require_equal_copies(case, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [TP, PP], ids=["tp", "pp"])
def test_bf16_is_near_fp32(axes: tuple[tuple[str, int], ...]) -> None:
    rules = [(rule, 0 if rule in ("DiLoCo", "PowerSGD") else number % 3) for number, rule in enumerate(RULES)]
    cases = [case_of(rule, axes, "llama-two", stage=stage, world=4, bf16=True) for rule, stage in rules]
    by_rank = run_ranks(exact, 4, cases, timeout=240.0)
    for number, case in enumerate(cases):
        found, tp = [results[number] for results in by_rank], dict(axes).get("tp", 1)
        wanted = reference(case.model, case.tied, 2, 1, STEPS, case.optimizer, case.params, tp, case.stage > 0)
        # Adam takes steps of full size with gradients of the size of their rounding error, so single elements differ.
        params = {name: value for one in found for name, value in one.params.items()}
        error, where = relative_error(params, wanted["params"])
        assert error <= 2e-2, f"{case}: {where} is off by {error:.2e}"
        for one in found:
            assert one.norms == pytest.approx(wanted["norms"], rel=3e-2), case
            means = [sum(losses) / 2 if axes == PP else losses[one.reader] for losses in wanted["losses"]]
            assert one.losses == pytest.approx(means, rel=3e-3), case
        require_equal_copies(case, found)


def on_tiers(cases: list[Case], folder: str, steps: int) -> list[list[Found]]:
    """Train each case with states on the device, in host memory and on disk."""
    tiers: list[dict[str, Any]] = [{"device": "none"}, {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}]
    return [
        [train(replace(case, zero=(("offload_optimizer", tier), ("sub_group_size", 5000))), steps) for tier in tiers]
        for case in cases
    ]


OFFLOADED = [
    lossy(rule, axes, stage=stage, accumulation=accumulation)
    for rule in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    for axes, stage, accumulation in ((TP, 1, 2), (TP, 2, 1), (PP, 1, 1), (PP, 2, 2))
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [OFFLOADED[at : at + 4] for at in (0, 4, 8)], ids=lambda cases: cases[0].optimizer)
def test_offloaded_states_change_nothing(cases: list[Case], tmp_path: Path) -> None:
    env = {"WINDLASS_EMULATE_DEVICE": "256M", "WINDLASS_EMULATE_LATE": "1"}  # a device with memory of its own
    for found in run_ranks(on_tiers, 4, cases, str(tmp_path), 5, env=env, timeout=240.0):
        for case, (plain, *others) in zip(cases, found, strict=True):
            for other in others:
                assert other.losses[0] == plain.losses[0]
                for name, value in plain.params.items():
                    if case.optimizer == "OneBitLamb":  # sums of squares in another order
                        near(other.params[name], value, f"{case} {name}", 2e-6)
                    else:
                        assert torch.equal(other.params[name], value), f"{case} {name}"


States = list[tuple[str, int, Placement, torch.Tensor]]  # name, data rank, part, values


def states_of(engine: Any) -> States:
    """Return this rank's per-rank states."""
    found, data = [], engine.mesh.dense.data.index
    for one in engine._sharded.update.rank_states():
        part = one.unit.placements[one.index]
        found.append((f"{part.global_name or one.name}/{one.key}", data, part, one.read().clone().view(one.shape)))
    return found


def states_around(case: Case, at: int, save: str | None, source: str | None) -> States:
    """Train up to step `at` and save, or load. Return this rank's states then, and train two more steps."""
    engine: Any = windlass.initialize(model=build(case.model, tied=case.tied), config=config_of(case))[0]
    if source is not None:
        engine.load_checkpoint(source)
    for step in range(engine.global_steps, at):
        step_once(engine, step, case.accumulation)
    found = states_of(engine)
    if save is not None:
        engine.save_checkpoint(save)
    for step in range(at, at + 2):
        step_once(engine, step, case.accumulation)
    assert all(torch.isfinite(windlass.zero.full_param(p)).all() for p in engine.module.parameters())
    engine.destroy()
    return found


def whole_states(by_rank: list[States], ranks: int) -> Tensors:
    """Return each state of the whole model, `[ranks, *shape]`. Copies of a part must have the same bits."""
    found: Tensors = {}
    for name, data, part, values in (one for states in by_rank for one in states):
        rows = found.setdefault(name, torch.full((ranks, *part.global_shape), float("nan")))
        for box in part.shard_boxes():
            here = tuple(slice(start, start + size) for start, size in zip(box.global_offsets, box.sizes, strict=True))
            there = tuple(slice(start, start + size) for start, size in zip(box.local_offsets, box.sizes, strict=True))
            known = rows[data][here]
            assert bool(known.isnan().all()) or torch.equal(known, values[there]), f"{name}: copies differ"
            rows[data][here] = values[there]
    assert all(not rows.isnan().any() for rows in found.values())
    return found


NONE = (("tp", 1),)
MOVES = [  # axes and ranks of the save and of the load
    ((TP, 4), (NONE, 2)),
    ((PP, 4), (NONE, 2)),
    ((NONE, 2), (TP, 4)),
    ((NONE, 2), (PP, 4)),
    ((TP, 4), (PP, 4)),
    ((PP, 4), (NONE, 3)),
    ((NONE, 3), (TP, 4)),
]


@pytest.mark.parametrize(
    ("rule", "stage", "moves"),
    [
        ("OneBitAdam", 0, MOVES[1:2]),
        *(
            pytest.param(rule, stage, MOVES, marks=pytest.mark.slow)
            for rule in LOSSY
            for stage in ((0,) if rule in ("DiLoCo", "PowerSGD") else (0, 1, 2))
        ),
    ],
    ids=lambda value: f"{len(value)}" if isinstance(value, list) else str(value),
)
def test_error_feedback_moves_to_another_layout(rule: str, stage: int, moves: list[Any], tmp_path: Path) -> None:
    """Rows of data ranks stay the same on an equal number of data ranks, and each gets their mean on another one.
    Errors of owners follow their elements.
    """
    at, saved = 4, dict[Any, Tensors]()
    for before, after in moves:
        first, other = (lossy(rule, axes, stage=stage, world=world) for axes, world in (before, after))
        ranks = [case.world // case.axes[0][1] for case in (first, other)]
        if before not in saved:
            states = run_ranks(states_around, first.world, first, at, str(tmp_path / f"{before}"), None)
            saved[before] = whole_states(states, ranks[0])
        states = run_ranks(states_around, other.world, other, at, None, str(tmp_path / f"{before}"))
        loaded, is_same = whole_states(states, ranks[1]), ranks[0] == ranks[1]
        assert loaded.keys() == saved[before].keys() and any(name.endswith("/worker_error") for name in loaded)
        for name, rows in saved[before].items():
            if name.endswith("/warm_start"):  # depends on tp
                continue
            if name.endswith("/server_error"):
                torch.testing.assert_close(loaded[name].sum(0), rows.sum(0), rtol=1e-6, atol=1e-12)
            elif is_same:
                assert torch.equal(loaded[name], rows), (before, after, name)
            else:
                mean = rows.mean(0).expand_as(loaded[name])
                torch.testing.assert_close(loaded[name], mean, rtol=1e-6, atol=1e-12)
        assert any(bool(rows.any()) for name, rows in saved[before].items() if name.endswith("/worker_error"))


def errors_around_a_nan(cases: list[Case]) -> list[tuple[str, States, States]]:
    """Return the error of a step in which one data rank has a gradient that is NaN, and the states before and after."""
    found = []
    for case in cases:
        engine: Any = windlass.initialize(model=build(case.model, tied=case.tied), config=config_of(case))[0]
        for step in range(4):
            step_once(engine, step, 1)
        before, reader = states_of(engine), engine.data_loading_ranks[1]
        hooks = [
            parameter.register_hook(lambda gradient: gradient * float("nan"))
            for name, parameter in engine.module.named_parameters()
            if name.endswith("layers.1.input_layernorm.weight") and reader == 1
        ]
        with pytest.raises(windlass.WindlassError) as caught:
            step_once(engine, 4, 1)
        for hook in hooks:
            hook.remove()
        found.append((f"{type(caught.value).__name__} {caught.value}", before, states_of(engine)))
        engine.destroy()
    return found


@pytest.mark.slow  # test_one_bit_adam.py has all rules without axes
@pytest.mark.parametrize("axes", [TP, PP], ids=["tp", "pp"])
def test_a_nan_is_named_and_never_enters_the_error_feedback(axes: tuple[tuple[str, int], ...]) -> None:
    stages = {"OneBitAdam": 1, "OneBitLamb": 2, "ZeroOneAdam": 1}
    cases = [lossy(rule, axes, stage=stages.get(rule, 0)) for rule in LOSSY]
    for found in run_ranks(errors_around_a_nan, 4, cases, timeout=120.0):
        for case, (text, before, after) in zip(cases, found, strict=True):
            assert text.startswith("LossError") and "'model.layers.1.input_layernorm.weight'" in text, (case, text)
            assert any(bool(values.any()) for *_, values in before), case
            for one, other in zip(before, after, strict=True):
                assert one[:2] == other[:2] and torch.equal(one[3], other[3]), (case, one[0])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_loads_at_another_tensor_parallel_size(rule: str, tmp_path: Path) -> None:
    case = case_of(rule, TP, world=4)
    run_ranks(exact, 4, [case], 3, str(tmp_path), timeout=120.0)
    same = run_ranks(exact, 4, [case], 2, None, str(tmp_path), timeout=120.0)[0][0]
    alone = replace(case, axes=(("tp", 1),), world=2)
    other = run_ranks(exact, 2, [alone], 2, None, str(tmp_path), timeout=120.0)[0][0]
    for name, value in other.params.items():  # PowerSGD begins with a new basis
        near(value, same.params[name], name, 2e-2 if rule == "PowerSGD" else 5e-5)
