"""Memory plan of a rank for a model and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError, ModelError
from windlass.config import Config
from windlass.config.offload_section import AutoOffload
from windlass.engine.tier_planning import placement_table
from windlass.parallel.model_checkpointing import disable_checkpointing, enable_checkpointing, is_checkpointing
from windlass.parallel.pipeline.apply_pipeline_parallel import get_pipeline_stages
from windlass.parallel.pipeline.pipeline_schedules import build_schedule
from windlass.parallel.pipeline.staged_model import StagedModel
from windlass.parallel.pipeline.transfer_order import add_transfers
from windlass.plan.activation_trace import (
    BACKWARD,
    FORWARD,
    ActivationTrace,
    MemoryEvent,
    PipelineStep,
    trace_pipeline,
    trace_step,
)
from windlass.plan.memory_plan import DEVICE, HOST, MemoryPlan
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.offloaded_activations import activation_tier_of
from windlass.plan.planned_layout import PLANNED_RATES, PlannedLayout, Target, plan_layout, stage_ranks
from windlass.plan.planned_model import language_batch
from windlass.plan.rank_limits import RankLimits, missing_bytes
from windlass.zero.setup.tier_choice import TierMemory

_MICRO_BATCHES_OF_A_STAGE = 3  # a schedule repeats itself after 3 * total_stages micro-batches


@dataclass(frozen=True)
class RunShape:
    """Properties of a run that its configuration does not contain.

    Attributes:
        world_size: Number of ranks.
        length: Tokens of a sample.
        target: Device and transport of the ranks.
        sharded_init: The model is built under `zero.Init` or `from_pretrained`.
        activations: Bytes of activations of a micro-batch, for a model that cannot be traced; None: trace the model.
        make_batch: Function that returns, for a micro-batch size and a length, a function that makes a batch.
        limits: Memory of a rank; `offload` chooses tiers that fit into it.
    """

    world_size: int = 1
    length: int = 1024
    target: Target = Target()
    sharded_init: bool = False
    activations: int | None = None
    make_batch: Callable[[int, int], Callable[[], Any]] = language_batch
    limits: RankLimits = RankLimits()


TraceCache = dict[tuple[Hashable, ...], ActivationTrace]
"""Traces by variant, checkpointing, tier of activations, micro-batch, rank and number of blocks. The ZeRO stage and the
tiers of states do not change a trace."""


def plan_memory(
    model: nn.Module, config: Config, run: RunShape, *, traces: TraceCache | None = None, variant: Hashable = None
) -> MemoryPlan:
    """Predict the memory of one rank that trains `model`, which may be on the meta device, with `config`.

    For a pipeline, the result is the plan of the stage that exceeds the limits of `run` most; if none does, of the
    stage that needs most of the memory in which ranks compute. `activation_checkpointing.enabled` switches on the
    model's activation checkpointing during the call, as `initialize` does for a run.

    Args:
        traces: Traces of earlier calls for the same model and run. A trace with the same key, see `TraceCache`,
            is used again; new traces are added. None: trace anew.
        variant: Further properties that a trace depends on, such as activation checkpointing of the model.

    Raises:
        ConfigError: the configuration is not supported, or its batch or axes do not fit the ranks.
        ModelError: the model has no trainable parameter, cannot be traced, or has no switch for the activation
            checkpointing that `config` enables.
    """
    if run.activations is None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model has no trainable parameter, so there is no backward to plan: set requires_grad on parameters to "
            "train, or give the bytes of activations of a micro-batch with --activations"
        )
    traces = {} if traces is None else traces
    with _with_checkpointing(model, enabled=config.activation_checkpointing.enabled):
        plans = [_plan_rank(model, config, run, rank, traces, variant) for rank in stage_ranks(config, run.world_size)]
    place = DEVICE if run.target.has_own_memory else HOST
    peaks = [plan.peak(place) for plan in plans]
    missing = [sum(missing_bytes(plan, run.limits).values()) for plan in plans]
    shown = max(range(len(plans)), key=lambda stage: (missing[stage], peaks[stage]))
    if len(plans) > 1:
        plans[shown].notes.append(_stage_note(shown, peaks, place, exceeds=missing[shown] > 0))
    return plans[shown]


@contextmanager
def _with_checkpointing(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Enable the model's activation checkpointing if `enabled`, and restore its state at the end of the context."""
    switches = enabled and not is_checkpointing(model)
    if enabled:
        enable_checkpointing(model, "activation_checkpointing.enabled")
    try:
        yield
    finally:
        if switches:
            disable_checkpointing(model)


def _plan_rank(
    model: nn.Module, config: Config, run: RunShape, rank: int, traces: TraceCache, variant: Hashable
) -> MemoryPlan:
    memory = TierMemory(1 << 62) if config.offload is not None else None
    place = partial(plan_layout, model, config, run.world_size, run.target, rank=rank, host_memory=run.limits.host)
    layout = place(memory=memory)
    micro = micro_batch_of(config, run.world_size)
    tier = activation_tier_of(config, has_own_memory=run.target.has_own_memory)
    key = (variant, config.activation_checkpointing.enabled, tier, micro, rank, len(layout.blocks))
    if key not in traces:
        traces[key] = trace_of(config, layout, run, micro)
    trace = traces[key]
    if config.offload is not None:
        memory = _memory_beside(trace, config.offload, run)
        layout = place(memory=memory)
    planner = MemoryPlanner(layout.model, config, layout, trace, sharded_init=run.sharded_init)
    plan = planner.plan(run.world_size, micro, run.length)
    plan.notes += plan_notes(config, run, layout)
    if trace.assumes_loss:
        plan.notes.append("the forward returns no loss: the mean of its output is planned, not the loss of the script")
    return plan


def _stage_note(shown: int, peaks: list[int], place: str, *, exceeds: bool) -> str:
    sizes = ", ".join(f"{peak / 2**20:,.1f}" for peak in peaks)
    reason = "exceeds the limits most" if exceeds else "needs most"
    return (
        f"the table shows pipeline stage {shown}, which {reason}; peaks of all stages in MiB of {place} memory: {sizes}"
    )


def _memory_beside(trace: ActivationTrace, section: AutoOffload, run: RunShape) -> TierMemory:
    """Return the memory that a rank's activations leave free.

    Raises:
        ConfigError: the limit of the device, or of a CPU rank, is unknown.
    """
    activations = max((event.peak for event in trace.events), default=0)
    host = section.host_memory or run.limits.host
    space = (section.disk_space or run.limits.disk or 1 << 62) if section.nvme_path else None
    if not run.target.has_own_memory:
        if host is None:
            raise ConfigError('"offload" is set: give the memory of a CPU rank, --host-memory 64GB')
        return TierMemory(host - activations, None, space)
    if run.limits.device is None:
        raise ConfigError('"offload" is set: give the memory of a GPU, --gpu h200')
    device = run.limits.device - activations
    return TierMemory(min(device, section.device_memory or device), host or 1 << 62, space)


def micro_batch_of(config: Config, world_size: int) -> int:
    """Return the micro-batch of a rank.

    Raises:
        ConfigError: the batch sizes do not fit `world_size` ranks, or there are none.
    """
    return config.resolve_batch(world_size, "--world-size").micro


def trace_of(config: Config, layout: PlannedLayout, run: RunShape, micro: int) -> ActivationTrace:
    """Return the trace of a micro-batch; if `run.activations` is set, a trace with only these bytes."""
    blocks = [block.name for block in layout.blocks]
    if run.activations is not None:
        return _given_trace(run.activations)
    amp = config.torch_autocast
    autocast = parse_dtype(config.dtype_table().compute_dtype) if amp.enabled else None
    dtype = layout.settings.param_dtype
    make_batch = run.make_batch(micro, run.length)
    options: dict[str, Any] = {"param_dtype": dtype, "autocast_dtype": autocast}
    options["activation_tier"] = activation_tier_of(config, has_own_memory=run.target.has_own_memory)
    if layout.mesh.pp.size > 1:
        step = _pipeline_step(config, layout, run, micro)
        return trace_pipeline(layout.model, make_batch, blocks, step, **options)
    return trace_step(layout.model, make_batch, blocks, **options)


def _pipeline_step(config: Config, layout: PlannedLayout, run: RunShape, micro: int) -> PipelineStep:
    """Return the actions of a pipeline rank, with no more micro-batches than its memory depends on."""
    axis, section = layout.mesh.pp, config.pipeline
    stages = get_pipeline_stages(layout.model)
    if not isinstance(stages, StagedModel):
        raise ModelError(
            "the memory of a PipelineModule with parallel.pp above 1 cannot be traced; give the bytes of "
            "activations of a micro-batch with --activations"
        )
    accumulation = config.resolve_batch(run.world_size, "--world-size").accumulation
    # GPipe holds the activations of all micro-batches; other schedules those of at most `total_stages`
    if section.schedule != "gpipe":
        accumulation = min(accumulation, _MICRO_BATCHES_OF_A_STAGE * stages.total_stages)
    virtual = section.resolved_virtual_stages
    schedule = build_schedule(section.schedule, axis.size, accumulation, virtual)
    example = stages.trace.example_hidden
    length = -(-run.length // layout.mesh.sp.size)
    hidden = (micro, length, example.shape[-1]), layout.settings.param_dtype or example.dtype
    return PipelineStep(add_transfers(schedule)[axis.index], axis, accumulation, hidden)


def _given_trace(activations: int) -> ActivationTrace:
    events = [MemoryEvent(phase, "done", "", activations, activations) for phase in (FORWARD, BACKWARD)]
    return ActivationTrace(events, saved=activations, saved_by_autograd=activations)


def plan_notes(config: Config, run: RunShape, layout: PlannedLayout) -> list[str]:
    """Return the notes of a plan: its assumptions, and the memory that it does not count."""
    notes = []
    if config.optimizer is None:
        notes.append("the configuration has no optimizer: states of Adam, 8 bytes an element, are assumed")
    elif layout.states.are_assumed:
        notes.append(f"{layout.states.name} has an update of its own: 8 bytes of states an element are assumed")
    if layout.states.rank_keys:
        keys = ", ".join(layout.states.rank_keys)
        notes.append(
            f"{layout.states.name}: the table counts {keys} on each rank, although a run allocates them at the first "
            "step that takes local gradients; the messages of such a step are not counted"
        )
    if layout.states.steps_whole:
        notes.append(f"{layout.states.name}: the whole parameters that a step gathers are not counted")
    if run.target.has_own_memory:
        notes.append("not counted: the CUDA context, memory of NCCL, workspaces of cuBLAS and fragmentation")
    else:
        notes.append(
            "not counted: the interpreter and its libraries; holes of the heap follow a model of glibc's malloc"
        )
    if layout.staging:
        notes.append("staging is an upper bound: how far it fills depends on the speed of the disk")
        if run.limits.host is None:
            notes.append("staging is a share of this machine's free memory; for another machine give --host-memory")
    if layout.choice is not None:
        notes += placement_table(layout.units, layout.choice, PLANNED_RATES)
        notes.append("tiers are chosen by rates of a typical machine; a run measures its own")
    if run.activations is not None:
        notes.append("activations are the given bytes; unsharded parameters of stage 3 are not counted")
    return notes
