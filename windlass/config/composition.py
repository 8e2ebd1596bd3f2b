"""The composition matrix: which features work together. This file is the only place that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from windlass.config.axes import size_of
from windlass.config.offload import is_away

if TYPE_CHECKING:
    from windlass.config.root import Config

Choice = tuple[str, str]
"""An axis and one of its values, such as `("precision", "bf16")`."""


@dataclass(frozen=True)
class Value:
    """A value of an axis: what it means, why it is not offered (empty: it is), and what a test of it needs."""

    means: str
    unbuilt: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Pair:
    """Two choices on different axes, and whether they work together; `because` says why not."""

    first: Choice
    second: Choice
    works: bool
    because: str = ""
    needs: frozenset[str] = frozenset()


AXES: dict[str, dict[str, Value]] = {
    "stage": {
        "0": Value("nothing is cut over the ranks"),
        "1": Value("optimizer states and master weights are cut"),
        "2": Value("gradients are cut too"),
        "3": Value("parameters are cut too"),
    },
    "param_home": {
        "device": Value("parameters at rest stay on the device"),
        "host": Value("parameters at rest are in host memory"),
        "nvme": Value("parameters at rest are in files"),
    },
    "state_home": {
        "device": Value("master weights and optimizer states stay on the device"),
        "host": Value("they are in host memory, and the step runs there"),
        "nvme": Value("they are in files"),
    },
    "optimizer": {
        "elementwise": Value("every element is updated from itself alone: Adam, AdamW, SGD, Adagrad, Lion, ..."),
        "whole": Value("a parameter is updated as a whole: Lamb, Muon, and every optimizer not known elementwise"),
        "onebit": Value("compressed reductions inside the optimizer", "not yet built: 1-bit optimizers"),
    },
    "precision": {
        "fp32": Value("everything in fp32"),
        "bf16": Value("bf16 parameters, fp32 master weights"),
        "fp16": Value("fp16 parameters, fp32 master weights, a loss scale"),
        "autocast": Value("fp32 parameters under torch.autocast"),
    },
    "accumulation": {
        "one": Value("one micro-batch a step"),
        "many": Value("several micro-batches a step"),
    },
    "parallel": {
        "data": Value("one group of data-parallel ranks"),
        "mics": Value("cuts inside groups of data ranks (dp_replicate, mics_shard_size), replicas between them"),
        "hpz": Value("backward gathers from groups of zero_hpz_partition_size ranks"),
    },
    "pp": {
        "one": Value("every rank has all layers"),
        "many": Value("layers are spread over the stages of a pipeline", needs="transformer"),
    },
    "tp": {
        "one": Value("every rank has whole matrices"),
        "many": Value("matrices are cut over ranks", needs="transformer"),
    },
    "sp": {
        "one": Value("every rank has whole sequences"),
        "many": Value("sequences are cut over ranks", needs="transformer"),
    },
    "ep": {
        "one": Value("every rank has all experts"),
        "many": Value("experts are spread over ranks", needs="transformer"),
    },
    "checkpointing": {
        "none": Value("all activations are kept"),
        "reentrant": Value("torch's reentrant activation checkpointing"),
        "nonreentrant": Value("torch's non-reentrant activation checkpointing"),
        "host": Value("windlass.checkpointing.checkpoint keeps its inputs in host memory"),
        "nvme": Value("windlass.checkpointing.checkpoint keeps its inputs in files"),
    },
    "adapters": {
        "none": Value("all parameters train"),
        "frozen base": Value("frozen base weights with trainable adapters beside them, as LoRA has"),
    },
    "transport": {
        "shm": Value("CPU ranks of one host through shared memory"),
        "gloo": Value("gloo"),
        "nccl": Value("NCCL", needs="gpu"),
    },
    "backward": {
        "engine": Value("engine.backward(loss)"),
        "plain": Value("loss.backward()"),
    },
    "overlap": {
        "off": Value("communication after computation"),
        "on": Value("communication while computing"),
    },
    "update": {
        "at once": Value("the next forward computes with what a step made"),
        "delayed": Value("a step runs on the host while the next forward and backward do"),
    },
}

EXCEPTIONS: dict[frozenset[Choice], str] = {
    frozenset({("stage", "0"), ("parallel", "mics")}): "stage 0 cuts nothing, so there is nothing to cut inside groups",
    frozenset({("stage", "0"), ("parallel", "hpz")}): "only stage 3 releases parameters and gathers them again",
    frozenset({("stage", "1"), ("parallel", "hpz")}): "only stage 3 releases parameters and gathers them again",
    frozenset({("stage", "2"), ("parallel", "hpz")}): "only stage 3 releases parameters and gathers them again",
    frozenset({("parallel", "hpz"), ("param_home", "host")}): "a second copy on the device would undo the offload",
    frozenset({("parallel", "hpz"), ("param_home", "nvme")}): "a second copy on the device would undo the offload",
    frozenset({("stage", "0"), ("param_home", "host")}): "only stage 3 releases parameters",
    frozenset({("stage", "1"), ("param_home", "host")}): "only stage 3 releases parameters",
    frozenset({("stage", "2"), ("param_home", "host")}): "only stage 3 releases parameters",
    frozenset({("stage", "0"), ("param_home", "nvme")}): "only stage 3 releases parameters",
    frozenset({("stage", "1"), ("param_home", "nvme")}): "only stage 3 releases parameters",
    frozenset({("stage", "2"), ("param_home", "nvme")}): "only stage 3 releases parameters",
    frozenset({("stage", "0"), ("update", "delayed")}): "stage 0 keeps all states on every rank; use stage 1 or more",
    frozenset({("state_home", "device"), ("update", "delayed")}): "a step on the device has nothing to hide behind",
    frozenset({("optimizer", "whole"), ("update", "delayed")}): "whole parameters need other ranks amid an update",
    frozenset({("backward", "plain"), ("pp", "many")}): "a pipeline runs its backwards itself, in engine.train_batch",
}
"""Pairs that do not work although both halves might; every pair of offered values that is not here works."""

ELEMENTWISE = frozenset(
    (
        *(
            "Adam",
            "AdamW",
            "SGD",
            "Adagrad",
            "Lion",
            "Adadelta",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
        ),
        *("MuAdam", "MuAdamW", "MuSGD"),
        *("CPUAdam", "CPUAdagrad", "CPULion", "CPUSGD"),
    )
)
ONE_BIT = frozenset(("OneBitAdam", "ZeroOneAdam", "OneBitLamb"))


def verdict(first: Choice, second: Choice) -> Pair:
    """Whether two choices work together.

    Raises:
        KeyError: an axis or value that the matrix does not have.
    """
    values = (AXES[first[0]][first[1]], AXES[second[0]][second[1]])
    unbuilt = "; ".join(sorted({value.unbuilt for value in values if value.unbuilt}))
    because = unbuilt or EXCEPTIONS.get(frozenset((first, second)), "")
    return Pair(first, second, not because, because, frozenset(value.needs for value in values if value.needs))


def pairs() -> list[Pair]:
    """The verdict of every pair of choices on different axes."""
    choices = {axis: [(axis, value) for value in values] for axis, values in AXES.items()}
    return [verdict(a, b) for x, y in combinations(AXES, 2) for a in choices[x] for b in choices[y]]


def working_pairs(available: Iterable[str] = ()) -> list[Pair]:
    """The pairs that work and need nothing but what is `available` (such as `"gpu"`)."""
    at_hand = frozenset(available)
    return [pair for pair in pairs() if pair.works and pair.needs <= at_hand]


def uncovered(cases: Iterable[Mapping[str, str]], available: Iterable[str] = ()) -> list[Pair]:
    """The working pairs that none of `cases` (descriptions, as from `describe`) reaches.

    Raises:
        KeyError: a case names an axis or value that the matrix does not have.
    """
    reached: set[frozenset[Choice]] = set()
    for case in cases:
        for choice in case.items():
            AXES[choice[0]][choice[1]]
        reached.update(frozenset(pair) for pair in combinations(case.items(), 2))
    return [pair for pair in working_pairs(available) if frozenset((pair.first, pair.second)) not in reached]


def refused(case: Mapping[str, str]) -> list[Pair]:
    """The pairs of a description that do not work although each half is offered."""
    offered = [choice for choice in case.items() if not AXES[choice[0]][choice[1]].unbuilt]
    found = (verdict(first, second) for first, second in combinations(offered, 2))
    return [pair for pair in found if not pair.works]


def describe(config: Config, **facts: str) -> dict[str, str]:
    """The value of every axis under `config`; `facts` (axis=value) say what a configuration does not tell."""
    zero = config.zero_optimization
    case = {
        "stage": str(zero.stage),
        "param_home": _home(zero.offload_param),
        "state_home": _home(zero.offload_optimizer),
        "optimizer": _optimizer_kind(config),
        "precision": _precision(config),
        "accumulation": "many" if (config.gradient_accumulation_steps or 1) > 1 else "one",
        "parallel": _parallel(config),
        **{axis: "many" if size_of(config, axis) > 1 else "one" for axis in ("pp", "tp", "sp", "ep")},
        "checkpointing": _checkpointing(config),
        "adapters": "none",
        "transport": "shm" if config.comm.transport == "auto" else config.comm.transport,
        "backward": "engine",
        "overlap": "on" if zero.overlaps else "off",
        "update": "delayed" if zero.offload_optimizer and zero.offload_optimizer.delayed_update else "at once",
    }
    for axis, value in facts.items():
        AXES[axis][value]
        case[axis] = value
    return case


def _home(section: object) -> str:
    if not is_away(section):
        return "device"
    return "host" if getattr(section, "device", "") == "cpu" else "nvme"


def _optimizer_kind(config: Config) -> str:
    if config.optimizer is None or config.optimizer.type.lower() in {name.lower() for name in ELEMENTWISE}:
        return "elementwise"
    return "onebit" if config.optimizer.type in ONE_BIT else "whole"


def _precision(config: Config) -> str:
    if config.fp16.enabled:
        return "fp16"
    if config.bf16.enabled:
        return "bf16"
    return "autocast" if config.torch_autocast.enabled else "fp32"


def _checkpointing(config: Config) -> str:
    section = config.activation_checkpointing
    if section.nvme_path:
        return "nvme"
    return "host" if section.cpu_checkpointing else "none"


def _parallel(config: Config) -> str:
    zero = config.zero_optimization
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        return "hpz"
    groups = zero.mics_shard_size > 0 or config.parallel.dp_replicate > 1
    return "mics" if zero.stage > 0 and groups else "data"
