"""Plan of a run: from a model and a configuration to the memory of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError
from windlass.config import Config
from windlass.config.offload_section import AutoOffload
from windlass.engine.tier_planning import placement_table
from windlass.plan.activation_trace import BACKWARD, FORWARD, ActivationTrace, MemoryEvent, trace_step
from windlass.plan.memory_plan import MemoryPlan
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.planned_layout import PLANNED_RATES, PlannedLayout, Target, plan_layout
from windlass.plan.planned_model import language_batch
from windlass.plan.rank_limits import RankLimits
from windlass.zero.core.tier_choice import TierMemory


@dataclass(frozen=True)
class RunShape:
    """Properties of a run beside its configuration.

    Attributes:
        world_size: Number of ranks.
        length: Tokens of a sample.
        target: Machine.
        sharded_init: The model is built under `zero.Init` or `from_pretrained`.
        activations: Bytes of activations of a micro-batch, if the model cannot be traced; None: trace it.
        make_batch: Returns, for a micro-batch and a length, a function that makes a batch.
        limits: Memory of a rank, for which `offload` chooses tiers.
    """

    world_size: int = 1
    length: int = 1024
    target: Target = Target()
    sharded_init: bool = False
    activations: int | None = None
    make_batch: Callable[[int, int], Callable[[], Any]] = language_batch
    limits: RankLimits = RankLimits()


def plan_memory(model: nn.Module, config: Config, run: RunShape) -> MemoryPlan:
    """Predict the memory of one rank that trains `model`, which may be on the meta device, with `config`.

    Raises:
        ConfigError: the configuration is not supported, or its batch or axes do not fit the ranks.
        ModelError: the model cannot be traced.
    """
    memory = TierMemory(1 << 62) if config.offload is not None else None
    layout = plan_layout(model, config, run.world_size, run.target, memory=memory)
    micro = micro_batch_of(config, run.world_size)
    trace = trace_of(config, layout, run, micro)
    if config.offload is not None:
        memory = _memory_beside(trace, config.offload, run)
        layout = plan_layout(model, config, run.world_size, run.target, memory=memory)
    planner = MemoryPlanner(layout.model, config, layout, trace, sharded_init=run.sharded_init)
    plan = planner.plan(run.world_size, micro, run.length)
    plan.notes += plan_notes(config, run, layout)
    return plan


def _memory_beside(trace: ActivationTrace, section: AutoOffload, run: RunShape) -> TierMemory:
    """Return the memory of a rank beside its activations.

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
    """Return the trace of a micro-batch, or one that holds the given bytes of activations."""
    blocks = [block.name for block in layout.blocks]
    if run.activations is not None:
        return _given_trace(run.activations)
    amp = config.torch_autocast
    autocast = parse_dtype(config.dtype_table().compute_dtype) if amp.enabled else None
    return trace_step(
        layout.model,
        run.make_batch(micro, run.length),
        blocks,
        param_dtype=layout.settings.param_dtype,
        autocast_dtype=autocast,
    )


def _given_trace(activations: int) -> ActivationTrace:
    events = [MemoryEvent(phase, "done", "", activations, activations) for phase in (FORWARD, BACKWARD)]
    return ActivationTrace(events, saved=activations, saved_by_autograd=activations)


def plan_notes(config: Config, run: RunShape, layout: PlannedLayout) -> list[str]:
    """Return what a plan assumes, and what it does not count."""
    notes = []
    if config.optimizer is None:
        notes.append("the configuration has no optimizer: states of Adam, 8 bytes an element, are assumed")
    if run.target.has_own_memory:
        notes.append("not counted: the CUDA context, memory of NCCL, workspaces of cuBLAS and fragmentation")
    else:
        notes.append("not counted: the interpreter and its libraries; holes of the heap are a measured share of it")
    if layout.staging:
        notes.append("staging is an upper bound: how far it fills depends on the speed of the disk")
    if layout.choice is not None:
        notes += placement_table(layout.units, layout.choice, PLANNED_RATES)
        notes.append("tiers are chosen by rates of a typical machine; a run measures its own")
    if run.activations is not None:
        notes.append("activations are the given bytes; unsharded parameters of stage 3 are not counted")
    return notes
