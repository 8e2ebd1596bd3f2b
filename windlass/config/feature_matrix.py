"""Matrix of features and the pairs of them that work together. All rules about combinations are in this file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from windlass.config.axis_sizes import axis_size
from windlass.config.offload_section import is_offloaded
from windlass.config.optimizer_section import COMPRESSED_OPTIMIZERS

if TYPE_CHECKING:
    from windlass.config.root_config import Config

FeatureChoice = tuple[str, str]
"""An axis of the matrix and one of its values, such as `("precision", "bf16")`."""


@dataclass(frozen=True)
class FeatureValue:
    """Value of an axis: its meaning; the reason why it is not built (empty: it is built); and the equipment that its
    tests require, such as `gpu` or `transformer` (empty: none).
    """

    meaning: str
    not_built_reason: str = ""
    requirement: str = ""


@dataclass(frozen=True)
class FeaturePair:
    """Two choices on different axes, and whether they work together; `reason` is empty if they do."""

    first: FeatureChoice
    second: FeatureChoice
    is_supported: bool
    reason: str = ""
    requirements: frozenset[str] = frozenset()


FEATURES: dict[str, dict[str, FeatureValue]] = {
    "stage": {
        "0": FeatureValue("nothing is sharded over ranks"),
        "1": FeatureValue("optimizer states and master weights are sharded"),
        "2": FeatureValue("gradients are sharded too"),
        "3": FeatureValue("parameters are sharded too"),
    },
    "param_tier": {
        "device": FeatureValue("sharded parameters stay on the device"),
        "host": FeatureValue("sharded parameters are in host memory"),
        "nvme": FeatureValue("sharded parameters are in files"),
    },
    "state_tier": {
        "device": FeatureValue("master weights and optimizer states stay on the device"),
        "host": FeatureValue("master weights and optimizer states are in host memory, and the step runs there"),
        "nvme": FeatureValue("master weights and optimizer states are in files"),
    },
    "optimizer": {
        "elementwise": FeatureValue("each element is updated independently: Adam, AdamW, SGD, Adagrad, Lion, ..."),
        "whole_parameter": FeatureValue(
            "a parameter is updated as a whole: Lamb, Muon, and every optimizer not known elementwise"
        ),
        "onebit": FeatureValue(
            "OneBitAdam, ZeroOneAdam, OneBitLamb, DiLoCo, PowerSGD: they send compressed messages by themselves"
        ),
    },
    "precision": {
        "fp32": FeatureValue("everything in fp32"),
        "bf16": FeatureValue("bf16 parameters, fp32 master weights"),
        "fp16": FeatureValue("fp16 parameters, fp32 master weights, a loss scale"),
        "autocast": FeatureValue("fp32 parameters under torch.autocast"),
    },
    "accumulation": {
        "one": FeatureValue("one micro-batch a step"),
        "many": FeatureValue("several micro-batches a step"),
    },
    "parallel": {
        "data": FeatureValue("one group of data-parallel ranks"),
        "mics": FeatureValue("shards in groups of data ranks (dp_replicate, mics_shard_size), replicas between groups"),
        "hpz": FeatureValue("backward all-gathers from groups of zero_hpz_partition_size ranks"),
    },
    "pp": {
        "one": FeatureValue("every rank has all layers"),
        "many": FeatureValue("layers are distributed over pipeline stages", requirement="transformer"),
    },
    "tp": {
        "one": FeatureValue("every rank has full matrices"),
        "many": FeatureValue("matrices are sharded over ranks", requirement="transformer"),
    },
    "sp": {
        "one": FeatureValue("every rank has full sequences"),
        "many": FeatureValue("sequences are sharded over ranks", requirement="transformer"),
    },
    "ep": {
        "one": FeatureValue("every rank has all experts"),
        "many": FeatureValue("experts are distributed over ranks", requirement="transformer"),
    },
    "checkpointing": {
        "none": FeatureValue("all activations are kept"),
        "reentrant": FeatureValue("torch's reentrant activation checkpointing (in a pipeline: not with zero-bubble)"),
        "nonreentrant": FeatureValue("torch's non-reentrant activation checkpointing"),
        "host": FeatureValue("windlass.checkpointing.checkpoint saves inputs in host memory"),
        "nvme": FeatureValue("windlass.checkpointing.checkpoint saves inputs in files"),
    },
    "adapters": {
        "none": FeatureValue("all parameters train"),
        "frozen base": FeatureValue("frozen base weights with trainable adapters, as in LoRA"),
    },
    "transport": {
        "shm": FeatureValue("CPU ranks of one host through shared memory"),
        "gloo": FeatureValue("gloo"),
        "nccl": FeatureValue("NCCL", requirement="gpu"),
        "mpi": FeatureValue("MPI, through mpi4py", requirement="mpi"),
    },
    "backward": {
        "engine": FeatureValue("engine.backward(loss)"),
        "plain": FeatureValue("loss.backward()"),
    },
    "overlap": {
        "off": FeatureValue("communication after computation"),
        "on": FeatureValue("communication while computing"),
    },
    "update": {
        "at once": FeatureValue("the next forward uses the updated parameters"),
        "delayed": FeatureValue("a step runs on the host during the next forward and backward"),
    },
}

_ONE_DATA_AXIS = "the optimizer's compressed messages need a single group of data-parallel ranks"
INCOMPATIBLE_PAIRS: dict[frozenset[FeatureChoice], str] = {
    frozenset({("stage", "0"), ("parallel", "mics")}): "stage 0 shards nothing, so there is nothing to shard in groups",
    frozenset({("stage", "0"), ("parallel", "hpz")}): "only stage 3 reshards and unshards parameters",
    frozenset({("stage", "1"), ("parallel", "hpz")}): "only stage 3 reshards and unshards parameters",
    frozenset({("stage", "2"), ("parallel", "hpz")}): "only stage 3 reshards and unshards parameters",
    frozenset({("parallel", "hpz"), ("param_tier", "host")}): "secondary shards on the device would undo the offload",
    frozenset({("parallel", "hpz"), ("param_tier", "nvme")}): "secondary shards on the device would undo the offload",
    frozenset({("stage", "0"), ("param_tier", "host")}): "only stage 3 shards parameters",
    frozenset({("stage", "1"), ("param_tier", "host")}): "only stage 3 shards parameters",
    frozenset({("stage", "2"), ("param_tier", "host")}): "only stage 3 shards parameters",
    frozenset({("stage", "0"), ("param_tier", "nvme")}): "only stage 3 shards parameters",
    frozenset({("stage", "1"), ("param_tier", "nvme")}): "only stage 3 shards parameters",
    frozenset({("stage", "2"), ("param_tier", "nvme")}): "only stage 3 shards parameters",
    frozenset({("stage", "0"), ("update", "delayed")}): "stage 0 keeps all states on every rank; use stage 1 or more",
    frozenset({("state_tier", "device"), ("update", "delayed")}): "only a step on the host can be delayed",
    frozenset({("optimizer", "whole_parameter"), ("update", "delayed")}): "a delayed step cannot gather parameters",
    frozenset({("backward", "plain"), ("pp", "many")}): "engine.train_batch runs the backwards of a pipeline",
    frozenset({("optimizer", "onebit"), ("stage", "3")}): "no rank has whole gradients and parameters to compress",
    frozenset({("optimizer", "onebit"), ("param_tier", "host")}): "only stage 3 shards parameters",
    frozenset({("optimizer", "onebit"), ("param_tier", "nvme")}): "only stage 3 shards parameters",
    frozenset({("optimizer", "onebit"), ("parallel", "hpz")}): "only stage 3 reshards and unshards parameters",
    frozenset({("optimizer", "onebit"), ("parallel", "mics")}): _ONE_DATA_AXIS,
    **{frozenset({("optimizer", "onebit"), (axis, "many")}): _ONE_DATA_AXIS for axis in ("sp", "ep")},
    frozenset({("optimizer", "onebit"), ("update", "delayed")}): "a delayed step cannot send compressed messages",
}
"""Pairs of built features that do not work together. Every pair of built features that is not listed works."""

ELEMENTWISE_OPTIMIZERS = frozenset(
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


def check_pair(first: FeatureChoice, second: FeatureChoice) -> FeaturePair:
    """Check whether two choices work together.

    Raises:
        KeyError: the matrix does not have this axis or value.
    """
    values = (FEATURES[first[0]][first[1]], FEATURES[second[0]][second[1]])
    unbuilt = "; ".join(sorted({value.not_built_reason for value in values if value.not_built_reason}))
    because = unbuilt or INCOMPATIBLE_PAIRS.get(frozenset((first, second)), "")
    return FeaturePair(
        first, second, not because, because, frozenset(value.requirement for value in values if value.requirement)
    )


def all_pairs() -> list[FeaturePair]:
    """Check every pair of choices on different axes."""
    choices = {axis: [(axis, value) for value in values] for axis, values in FEATURES.items()}
    return [check_pair(a, b) for x, y in combinations(FEATURES, 2) for a in choices[x] for b in choices[y]]


def supported_pairs(available: Iterable[str] = ()) -> list[FeaturePair]:
    """List the pairs that work and require nothing beyond `available` (such as `"gpu"`)."""
    at_hand = frozenset(available)
    return [pair for pair in all_pairs() if pair.is_supported and pair.requirements <= at_hand]


def uncovered_pairs(cases: Iterable[Mapping[str, str]], available: Iterable[str] = ()) -> list[FeaturePair]:
    """List the supported pairs that none of `cases` covers. Each case is a dict as from `describe_features`.

    Raises:
        KeyError: a case has an axis or value that the matrix does not have.
    """
    reached: set[frozenset[FeatureChoice]] = set()
    for case in cases:
        for choice in case.items():
            FEATURES[choice[0]][choice[1]]
        reached.update(frozenset(pair) for pair in combinations(case.items(), 2))
    return [pair for pair in supported_pairs(available) if frozenset((pair.first, pair.second)) not in reached]


def unsupported_pairs(case: Mapping[str, str]) -> list[FeaturePair]:
    """List the pairs of a case that do not work together although each feature is built."""
    offered = [choice for choice in case.items() if not FEATURES[choice[0]][choice[1]].not_built_reason]
    found = (check_pair(first, second) for first, second in combinations(offered, 2))
    return [pair for pair in found if not pair.is_supported]


def describe_features(config: Config, **facts: str) -> dict[str, str]:
    """Return the value of every axis under `config`. `facts` (axis=value) set axes that no key determines."""
    zero = config.zero_optimization
    micro_batches = config.gradient_accumulation_steps or config.pipeline.micro_batches or 1
    case = {
        "stage": str(zero.stage),
        "param_tier": _tier(zero.offload_param),
        "state_tier": _tier(zero.offload_optimizer),
        "optimizer": _optimizer_kind(config),
        "precision": _precision(config),
        "accumulation": "many" if micro_batches > 1 else "one",
        "parallel": _parallel(config),
        **{axis: "many" if axis_size(config, axis) > 1 else "one" for axis in ("pp", "tp", "sp", "ep")},
        "checkpointing": _checkpointing(config),
        "adapters": "none",
        "transport": "shm" if config.comm.transport == "auto" else config.comm.transport,
        "backward": "engine",
        "overlap": "on" if zero.overlap_comm_enabled else "off",
        "update": "delayed" if zero.offload_optimizer and zero.offload_optimizer.delayed_update else "at once",
    }
    for axis, value in facts.items():
        FEATURES[axis][value]
        case[axis] = value
    return case


def find_setting(config: Config, axis: str) -> tuple[str, object]:
    """Return the key of `config` that determines the value of `axis`, and the value of the key.

    Args:
        axis: an axis that occurs in `INCOMPATIBLE_PAIRS`.
    """
    zero = config.zero_optimization
    key = {
        "stage": "zero_optimization.stage",
        "param_tier": "zero_optimization.offload_param.device",
        "state_tier": "zero_optimization.offload_optimizer.device",
        "optimizer": "optimizer.type",
        "update": "zero_optimization.offload_optimizer.delayed_update",
    }.get(axis, f"parallel.{axis}")
    if axis == "parallel" and _parallel(config) == "hpz":
        key = "zero_optimization.zero_hpz_partition_size"
    elif axis == "parallel":
        key = "zero_optimization.mics_shard_size" if zero.mics_shard_size > 0 else "parallel.dp_replicate"
    if axis in ("pp", "tp", "sp", "ep"):
        return key, axis_size(config, axis)  # another section, such as `tensor_parallel`, may set the size
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return key, value


def _tier(section: object) -> str:
    if not is_offloaded(section):
        return "device"
    return "host" if getattr(section, "device", "") == "cpu" else "nvme"


def _optimizer_kind(config: Config) -> str:
    if config.optimizer is None or config.optimizer.type.lower() in {name.lower() for name in ELEMENTWISE_OPTIMIZERS}:
        return "elementwise"
    return "onebit" if config.optimizer.type in COMPRESSED_OPTIMIZERS else "whole_parameter"


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
