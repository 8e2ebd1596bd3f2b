"""Prediction of the memory that each candidate configuration needs.

It is made in the first trial run of the search, which has the model and a batch.

[Note: forecast] Traces of one and of two samples ([Note: traced memory]) are extrapolated to larger micro-batches: the
bytes of every event grow linearly with the micro-batch. Rank 0 predicts before the first forward, so that the result
exists even if that forward runs out of memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from windlass.base.atomic_file import write_atomically
from windlass.base.errors import ModelError, WindlassError
from windlass.base.log import logger
from windlass.config import Config, load_config
from windlass.config.config_overrides import override_keys
from windlass.parallel.model_checkpointing import can_checkpoint, disable_checkpointing, enable_checkpointing
from windlass.parallel.sequence.batch_sharding import SHARD_KEY
from windlass.plan.activation_trace import ActivationTrace, ForwardArguments, MemoryEvent
from windlass.plan.memory_plan import DEVICE, HOST
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.model_copy import copy_without_values
from windlass.plan.offloaded_activations import activation_tier_of
from windlass.plan.plan_run import RunShape, micro_batch_of, trace_of
from windlass.plan.planned_layout import PlannedLayout, Target, plan_layout, stage_ranks
from windlass.simulate.step_workload import shape_of
from windlass.zero.setup.unit_partition import find_blocks
from windlass.zero.setup.zero_settings import UnitRules

ATTRIBUTE = "windlass.tune.memory_forecast:start_forecast"
_MOMENTS = ("init", "load", "forward", "backward", "step")


@dataclass(frozen=True)
class ForecastOrder:
    """Request for a forecast.

    Attributes:
        candidates: Overrides of each candidate, by its name.
        result: Path of the JSON file to write.
        plans_memory: Predict memory. If False, only the properties of the model are written.
    """

    candidates: dict[str, dict[str, Any]]
    result: str
    plans_memory: bool = True

    def write(self, path: Path) -> None:
        """Write the request."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> ForecastOrder:
        """Read a request."""
        return cls(**json.loads(Path(path).read_text()))


@dataclass
class ForecastResult:
    """Properties of the model and of the machine, and predicted memory of the candidates.

    Attributes:
        parameters: Number of elements of the model.
        tokens: Elements of a sample in the first tensor of the batch.
        fed: Samples of the first batch: first dimension of its first tensor.
        micro: Micro-batch of the trial that made the forecast.
        can_checkpoint: The model has a switch for activation checkpointing.
        device: `cpu` or `cuda`.
        device_name: Name of the GPU; empty on a CPU.
        device_total: Memory of a GPU in bytes; 0 on a CPU.
        shape: Sizes of a model of transformers (`ModelShape`); empty for others.
        blocks: Number of blocks of the model.
        base: Bytes of a process without the model.
        device_bytes, host_bytes: Predicted peak by candidate name, of the rank with the largest; host memory is
            without `base`.
        problem: Reason why the first candidate without a prediction has none; empty if all candidates have one.
    """

    parameters: int = 0
    tokens: int = 1
    fed: int = 0
    micro: int = 0
    can_checkpoint: bool = False
    device: str = "cpu"
    device_name: str = ""
    device_total: int = 0
    shape: dict[str, Any] = field(default_factory=dict)
    blocks: int = 0
    base: int = 0
    device_bytes: dict[str, int] = field(default_factory=dict)
    host_bytes: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def start_forecast(
    order_path: str,
    raw: dict[str, Any],
    model: nn.Module,
    world_size: int,
    base: int,
    *,
    own_checkpointing: bool = False,
) -> Callable[[int, tuple[Any, ...], dict[str, Any]], None]:
    """Copy the shapes of `model` before it is sharded, and return a function that writes the forecast.

    The function takes the micro-batch, and the positional and keyword arguments of the first forward.

    Args:
        order_path: File with the `ForecastOrder`.
        raw: The program's own configuration.
        base: Bytes of the process without the model.
        own_checkpointing: The program enables activation checkpointing itself, whatever the configuration requests.
    """
    order = ForecastOrder.read(order_path)
    facts = facts_of(model, base)
    planner: CandidatePlanner | None = None
    if order.plans_memory:
        if any(hasattr(p, "ds_numel") and p.ds_numel != p.numel() for p in model.parameters()):
            facts.problem = "the model is built sharded, so rank 0 does not have its shapes"
        else:
            try:
                shapes = copy_without_values(model, lambda tensor: torch.empty_like(tensor, device="meta"))
            except ModelError as error:
                facts.problem = str(error)
            else:
                planner = CandidatePlanner(shapes, raw, world_size, facts.device, own_checkpointing=own_checkpointing)

    def predict(micro: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = BatchShape(micro, args, kwargs)
        facts.micro, facts.fed, facts.tokens = micro, batch.fed, batch.tokens
        if planner is not None:
            for name, overrides in order.candidates.items():
                try:
                    facts.device_bytes[name], facts.host_bytes[name] = planner.peaks(overrides, batch)
                except Exception as error:  # the search continues without this prediction, whichever error it is
                    kind = "" if isinstance(error, WindlassError) else f"{type(error).__name__}: "
                    facts.problem = facts.problem or " ".join(f"{name}: {kind}{error}".split())
            if facts.problem:
                logger.warning("the memory of some configurations is not predicted; the first error: %s", facts.problem)
        write_atomically(Path(order.result), json.dumps(asdict(facts)))

    return predict


def facts_of(model: nn.Module, base: int) -> ForecastResult:
    """Return the properties of a model and of this machine, without predictions."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ForecastResult(
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        can_checkpoint=can_checkpoint(model),
        device=device,
        device_name=torch.cuda.get_device_name(0) if device == "cuda" else "",
        device_total=torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0,
        shape=_sizes_of(model),
        blocks=len(find_blocks(model, UnitRules())) - 1,
        base=base,
    )


class BatchShape:
    """Shape of the first batch of a trial, from which batches of other sizes are made.

    Attributes:
        fed: Size of the first dimension of the batch's first tensor.
        tokens: Elements of a sample in that tensor.
    """

    def __init__(self, micro: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        shapes: list[torch.Size] = []
        tree_map(lambda value: shapes.append(value.shape) if isinstance(value, torch.Tensor) else None, (args, kwargs))
        first = next((shape for shape in shapes if shape), torch.Size([micro]))
        self.fed, self.tokens = first[0], max(1, first.numel() // max(1, first[0]))

    def make(self, micro: int, length: int) -> Callable[[], ForwardArguments]:
        """Return a function that makes a batch of `micro` samples of zeros. `length` is not used.

        Raises:
            ModelError: the batch is one rank's part along sp, for which attention would need the other ranks.
        """
        if SHARD_KEY in self._kwargs:
            raise ModelError(
                "the batch has only this rank's tokens along parallel.sp, so the memory of its forward cannot be traced"
            )

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            rows = micro if value.shape[0] == self.fed else value.shape[0]
            return torch.zeros((rows, *value.shape[1:]), dtype=value.dtype)

        def make() -> ForwardArguments:
            return ForwardArguments(*tree_map(resized, (self._args, self._kwargs)))

        return make


class CandidatePlanner:
    """Predictor of the peak memory of candidate configurations of one model.

    Args:
        model: The model on the meta device.
        raw: The program's configuration.
        device: `cpu` or `cuda`.
        own_checkpointing: See `start_forecast`.
    """

    def __init__(
        self, model: nn.Module, raw: dict[str, Any], world_size: int, device: str, *, own_checkpointing: bool = False
    ) -> None:
        self._own_checkpointing = own_checkpointing
        self._model, self._raw, self._world, self._device = model, raw, world_size, device
        self._traces: dict[tuple[Any, ...], ActivationTrace | Exception] = {}
        self._peaks: dict[str, tuple[int, int]] = {}

    def peaks(self, overrides: dict[str, Any], batch: BatchShape) -> tuple[int, int]:
        """Return the predicted peaks of device and host memory of a rank, in bytes: of all pipeline stages, the largest
        of each."""
        raw = override_keys(self._raw, {**overrides, **_WITHOUT_EFFECT})
        config = load_config(raw)
        target = Target(self._device, config.comm.transport)
        if not _reduces_in_chunks(config, target, self._world):
            raw = override_keys(raw, {_REDUCE_BUCKET: None})
        known = json.dumps(raw, sort_keys=True, default=str)
        if known not in self._peaks:
            if can_checkpoint(self._model):
                (enable_checkpointing if self._checkpoints(config) else disable_checkpointing)(self._model)
            peaks = [self._peaks_of(rank, config, batch, target) for rank in stage_ranks(config, self._world)]
            self._peaks[known] = max(device for device, _ in peaks), max(host for _, host in peaks)
        return self._peaks[known]

    def _peaks_of(self, rank: int, config: Config, batch: BatchShape, target: Target) -> tuple[int, int]:
        """Return the peaks of device and host memory of one rank."""
        layout = plan_layout(self._model, config, self._world, target, rank=rank)
        micro = micro_batch_of(config, self._world)
        trace = self._trace(config, layout, rank, micro, batch, target)
        plan = MemoryPlanner(layout.model, config, layout, trace).plan(self._world, micro, batch.tokens)
        return plan.peak(DEVICE, _MOMENTS), plan.peak(HOST, _MOMENTS)

    def _checkpoints(self, config: Config) -> bool:
        return self._own_checkpointing or config.activation_checkpointing.enabled

    def _trace(
        self, config: Config, layout: PlannedLayout, rank: int, micro: int, batch: BatchShape, target: Target
    ) -> ActivationTrace:
        """Return the trace of a micro-batch, extrapolated from those of one and two samples if both create and free the
        same storages in the same order.
        """
        dtypes = (layout.settings.param_dtype, config.torch_autocast.enabled, config.torch_autocast.dtype)
        # The axes divide the model and its batches, and tiling and recomputation change what autograd saves.
        parallel = (config.parallel.model_dump_json(), config.pipeline.model_dump_json())
        # A pipeline's trace has several micro-batches; other traces have one.
        batches = config.resolve_batch(self._world).accumulation if layout.mesh.pp.size > 1 else 1
        tier = activation_tier_of(config, has_own_memory=target.has_own_memory)
        kind = (self._checkpoints(config), tier, dtypes, len(layout.blocks), parallel, batches, rank)
        run = RunShape(self._world, batch.tokens, target, make_batch=batch.make)

        def traced(samples: int) -> ActivationTrace:
            if (*kind, samples) not in self._traces:
                try:
                    self._traces[*kind, samples] = trace_of(config, layout, run, samples)
                except Exception as error:  # stored: other candidates would fail in the same way
                    self._traces[*kind, samples] = error
            found = self._traces[*kind, samples]
            if isinstance(found, Exception):
                raise found.with_traceback(None)  # the traceback would keep the activations of the trace
            return found

        one, two = traced(1), traced(2)
        return extend_trace(one, two, micro) if _are_alike(one, two) else traced(micro)


_REDUCE_BUCKET = "zero_optimization.reduce_bucket_size"
_WITHOUT_EFFECT = dict.fromkeys(("zero_optimization.allgather_bucket_size", "zero_optimization.overlap_comm"))
"""Keys that the planner does not read. Candidates that differ only in these share a prediction."""


def _reduces_in_chunks(config: Config, target: Target, world_size: int) -> bool:
    """Return True if the planner reads `reduce_bucket_size`: if CPU ranks do not read each other's buffers."""
    zero = config.zero_optimization
    quantizes = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights or zero.zero_quantized_gradients
    return not target.has_own_memory and world_size > 1 and (quantizes or not target.shares_memory(world_size))


def _are_alike(one: ActivationTrace, two: ActivationTrace) -> bool:
    """Return True if both traces create and free the same storages in the same order."""
    numbers = [[number for number, _ in trace.storages] for trace in (one, two)]
    return len(one.events) == len(two.events) and numbers[0] == numbers[1]


def extend_trace(one: ActivationTrace, two: ActivationTrace, micro: int) -> ActivationTrace:
    """Return the trace of `micro` samples, extrapolated linearly from those of one and two samples."""

    def at(first: int, second: int) -> int:
        return first + (micro - 1) * (second - first)

    events = [
        MemoryEvent(a.phase, a.kind, a.name, at(a.peak, b.peak), at(a.live, b.live))
        for a, b in zip(one.events, two.events, strict=True)
    ]
    return ActivationTrace(
        events,
        saved=at(one.saved, two.saved),
        saved_by_autograd=at(one.saved_by_autograd, two.saved_by_autograd),
        inputs=at(one.inputs, two.inputs),
        stored=at(one.stored, two.stored),
        tier=one.tier,
        storages=[(number, at(a, b)) for (number, a), (_, b) in zip(one.storages, two.storages, strict=True)],
    )


def _sizes_of(model: nn.Module) -> dict[str, Any]:
    """Return the sizes of a model of transformers; an empty dict for other models."""
    try:
        return asdict(shape_of(model))
    except WindlassError:
        return {}
