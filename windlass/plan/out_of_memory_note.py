"""Text for an out-of-memory error: predicted memory, actual memory, and the cheapest change that fits.

[Note: order of changes] Single changes are tried first, in the order of the time that they cost: ZeRO stages 0 to 2
send the same bytes in a step of one micro-batch; a smaller micro-batch with more accumulation keeps the global batch
and the work; checkpointing computes each layer's forward twice; stage 3 sends 1.5 times the bytes; offloading is slower
than all of these. If no single change fits, combinations of them ([Note: order of the ladder]) are tried with a
micro-batch of one sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.compute_device import local_world_size
from windlass.base.device_memory import emulated_device_memory
from windlass.base.errors import ModelError, WindlassError
from windlass.config import Config
from windlass.config.config_overrides import override_keys
from windlass.engine.out_of_memory import NOTE_START, FailedRun
from windlass.observe.memory_usage import device_memory, peak_resident_bytes, resident_bytes
from windlass.parallel.model_checkpointing import (
    can_checkpoint,
    disable_checkpointing,
    enable_checkpointing,
    is_checkpointing,
)
from windlass.plan.activation_trace import ForwardArguments
from windlass.plan.choose_config import Rung, choose_config, load_supported
from windlass.plan.memory_plan import DEVICE, HOST, MemoryPlan
from windlass.plan.model_copy import copy_of_trained_model
from windlass.plan.plan_run import RunShape, TraceCache, plan_memory
from windlass.plan.planned_layout import Target
from windlass.plan.planned_model import build_on_meta, language_batch
from windlass.plan.rank_limits import RankLimits, missing_bytes

_MIB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MemoryChange:
    """Change of a configuration.

    Attributes:
        text: the change, for the user.
        config: the changed configuration.
        checkpointing: True if activations are checkpointed.
        micro_batch: samples of a forward.
    """

    text: str
    config: dict[str, Any]
    checkpointing: bool
    micro_batch: int


def out_of_memory_note(failed: FailedRun) -> str:
    """Return the note: actual memory, and, if the run can be planned, prediction and cheapest change that fits."""
    lines = [f"{NOTE_START} in the {failed.moment}: {actual_memory(failed)}"]
    try:
        lines += _predicted_lines(failed)
    except Exception as error:  # the memory in use is shown in any case
        lines.append(
            f"not predicted ({_first_line(error)}); see docs/planning.md for configurations that need less memory"
        )
    return "\n".join(lines)


def actual_memory(failed: FailedRun) -> str:
    """Return a text with the memory in use at the error, its peak if known, and the limit."""
    limit = memory_limit(failed)
    of = f" (limit {_size(limit)})" if limit is not None else ""
    place, emulated = device_memory(failed.device), emulated_device_memory()
    if place is not None:
        return (
            f"{_size(place.allocated)} of the device in use now, {_size(place.peak_allocated)} at the peak{of}; "
            f"torch's allocator holds {_size(place.reserved)}"
        )
    if emulated is not None:
        return (
            f"{_size(emulated.used)} of the emulated device in use{of}; it counts windlass' own buffers without "
            "activations"
        )
    now, peak = resident_bytes(), peak_resident_bytes()
    if now is None or peak is None:
        return "unknown (no /proc here)"
    return f"{_size(now)} of host memory resident now, {_size(peak)} at the peak{of}"


def memory_limit(failed: FailedRun) -> int | None:
    """Return the bytes that a rank may use: of its GPU, or of host memory if its device is a CPU. None: unknown."""
    emulated = emulated_device_memory()
    if emulated is not None:
        return emulated.budget
    if failed.device.type == "cuda":
        return int(torch.cuda.mem_get_info(failed.device)[1])
    limits = [_physical_bytes(), _cgroup_bytes()]
    known = [limit // local_world_size() for limit in limits if limit is not None]
    return min([*known, *_process_limits()], default=None)


def possible_changes(config: dict[str, Any], micro: int, accumulation: int, failed: FailedRun, *, checkpointed: bool,
                     can_checkpoint: bool) -> Iterator[MemoryChange]:  # fmt: skip
    """Yield single changes in the order of their cost, see [Note: order of changes]."""
    stage = failed.config.zero_optimization.stage
    has_ranks = failed.world_size > 1
    for higher in range(stage + 1, 3) if has_ranks else ():
        yield MemoryChange(f"zero_optimization.stage {higher}", _with_zero(config, stage=higher), checkpointed, micro)
    smaller, more = micro, accumulation
    while smaller > 1 and smaller % 2 == 0:
        smaller, more = smaller // 2, more * 2
        text = (
            f"train_micro_batch_size_per_gpu {smaller} and gradient_accumulation_steps {more} (the same global batch)"
        )
        yield MemoryChange(text, with_micro_batch(config, smaller, more), checkpointed, smaller)
    if can_checkpoint and not checkpointed:
        changed = override_keys(config, {"activation_checkpointing.enabled": True})
        yield MemoryChange("activation_checkpointing.enabled true", changed, True, micro)
    if has_ranks and stage < 3:
        yield MemoryChange("zero_optimization.stage 3", _with_zero(config, stage=3), checkpointed, micro)
    if failed.has_own_memory:
        states = {"offload_optimizer": {"device": "cpu"}}
        yield MemoryChange(
            "zero_optimization.offload_optimizer.device cpu",
            _with_zero(config, stage=max(stage, 1), **states),
            checkpointed,
            micro,
        )
        both = {**states, "offload_param": {"device": "cpu"}}
        yield MemoryChange(
            "zero_optimization.stage 3 with offload_optimizer and offload_param on cpu",
            _with_zero(config, stage=3, **both),
            checkpointed,
            micro,
        )


def with_micro_batch(config: dict[str, Any], micro: int, accumulation: int) -> dict[str, Any]:
    """Return the configuration with another micro-batch and accumulation."""
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    return override_keys(config, {**sizes, "pipeline.micro_batches": None})  # another spelling of accumulation steps


def planning_copy(failed: FailedRun) -> nn.Module:
    """Return a copy of the model on the meta device, for a forecast of its memory: all of it, in the dtypes that it had
    before the engine cast it. It is a copy of the trained model; one that is divided or changed in place is built again
    from its configuration, which models of transformers have.

    Raises:
        ModelError: an attribute of the model cannot be copied, or the model is divided and has no configuration.
    """
    # Where the configuration sets a dtype, the engine may have cast the parameters already, and the plan casts its own.
    casts = failed.config.bf16.enabled or failed.config.fp16.enabled

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = casts and isinstance(tensor, nn.Parameter) and tensor.dtype in (torch.bfloat16, torch.float16)
        return torch.empty(tensor.shape, dtype=torch.float32 if is_cast else tensor.dtype, device="meta")

    changed = _in_place_changes(failed)
    if not changed:
        return copy_of_trained_model(failed.model, empty)
    config, kind = getattr(failed.model, "config", None), type(failed.model)
    if not hasattr(config, "to_dict"):
        raise ModelError(
            f"{', '.join(changed)} changed {kind.__name__} in place, and only models of transformers can be built again"
        )
    found = build_on_meta(lambda: kind(copy.deepcopy(config)), kind.__name__)
    given = dict(failed.model.named_parameters())
    for name, parameter in found.named_parameters():
        if (own := given.get(name)) is not None:
            parameter.requires_grad_(own.requires_grad)
            if not casts:
                parameter.data = parameter.data.to(own.dtype)
    return found


def _in_place_changes(failed: FailedRun) -> list[str]:
    """Return the keys of the configuration that have divided the model or changed its modules."""
    section, sizes = failed.config.parallel, failed.config.axes(failed.world_size).sizes
    axes = [axis for axis in ("pp", "ep", "tp", "sp") if sizes.get(axis, 1) > 1]
    flags = [flag for flag in ("tiled_mlp", "tiled_loss", "recompute") if getattr(section, flag)]
    return [f"parallel.{name}" for name in (*axes, *flags)]


def _make_batch(failed: FailedRun, micro: int) -> Callable[[int, int], Callable[[], Any]]:
    """Return the function that makes batches like the one that the engine saw.

    Args:
        micro: Samples of that batch.
    """
    shapes = failed.batch
    if shapes is not None and not shapes.unknown:
        return lambda samples, _: lambda: ForwardArguments(*shapes.make(samples, micro))
    if not hasattr(failed.model, "config") and not _counts_no_activations(failed):
        unknown = f"the batch has a {shapes.unknown[0]}" if shapes is not None else "no forward has run"
        raise ModelError(f"{unknown}, so the shapes of a micro-batch are not known")
    return language_batch


def _predicted_lines(failed: FailedRun) -> list[str]:
    batch = failed.config.resolve_batch(failed.world_size)
    model = planning_copy(failed)
    # Transformers sets this flag on each module; the model-wide property has different names in different versions.
    checkpointed = is_checkpointing(failed.model)
    limit, place = memory_limit(failed), DEVICE if failed.has_own_memory else HOST
    limits = RankLimits(device=limit) if place == DEVICE else RankLimits(host=limit)
    run = RunShape(
        failed.world_size,
        _length(failed),
        Target("cuda" if failed.has_own_memory else "cpu", failed.config.comm.transport),
        activations=0 if _counts_no_activations(failed) else None,
        make_batch=_make_batch(failed, batch.micro),
        limits=limits,
    )
    traces: TraceCache = {}
    plan = _plan(model, failed.config, run, traces, checkpointing=checkpointed)
    lines = [f"predicted for this configuration: {_peak_text(plan, place)}"]
    if any(trace.assumes_loss for trace in traces.values()):
        lines.append("the forward returns no loss, so the memory of the script's own loss is not predicted")
    if limit is None:
        return [*lines, "the limit of the memory is unknown, so no change is proposed"]
    if not missing_bytes(plan, limits):
        lines.append(
            "the prediction fits: other programs, fragmentation, or tensors of the script take the rest; "
            "choose a configuration that needs less than the prediction"
        )
    options = {"checkpointed": checkpointed, "can_checkpoint": can_checkpoint(model)}
    most = min(limit, plan.peak(place) - 1)  # a change must need less than the configuration that failed
    try:
        return [*lines, _cheapest_change(failed, model, run, limits, traces, most, options)]
    except WindlassError as error:
        return [*lines, f"no change is proposed ({_first_line(error)})"]


def _cheapest_change(failed: FailedRun, model: nn.Module, run: RunShape, limits: RankLimits, traces: TraceCache,
                     most: int, options: dict[str, bool]) -> str:  # fmt: skip
    """Return the line with the cheapest change that needs at most `most` bytes."""
    raw, place = failed.config.raw, DEVICE if failed.has_own_memory else HOST
    batch = failed.config.resolve_batch(failed.world_size)
    for change in possible_changes(raw, batch.micro, batch.accumulation, failed, **options):
        config, problem = load_supported(change.config)
        if problem:
            continue  # initialize would refuse this configuration
        try:
            changed = _plan(model, config, run, traces, checkpointing=change.checkpointing)
        except ModelError:
            continue  # the model may accept no other micro-batch than its script's
        if changed.peak(place) <= most:
            return f"cheapest change that fits: {change.text}; predicted {_peak_text(changed, place)}"
    smallest = with_micro_batch(raw, 1, batch.accumulation * batch.micro)
    choice = choose_config(model, smallest, run, limits)
    best = choice.chosen or choice.nearest
    text = f"{_rung_text(best.rung)}, train_micro_batch_size_per_gpu 1"
    if choice.chosen is not None:
        return f"cheapest change that fits: {text}; predicted {_peak_text(best.plan, place)}"
    missing = sum(best.missing.values())
    return f"no change fits; the nearest is {text}, which lacks {_size(missing)}: use more ranks or shorter samples"


def _length(failed: FailedRun) -> int:
    """Return the tokens of a sample."""
    if failed.batch is not None and failed.batch.first is not None:
        return failed.batch.first[1]
    return int(getattr(getattr(failed.model, "config", None), "max_position_embeddings", 1024))


def _plan(model: nn.Module, config: Config, run: RunShape, traces: TraceCache, *, checkpointing: bool) -> MemoryPlan:
    _switch_checkpointing(model, checkpointing)
    return plan_memory(model, config, run, traces=traces, variant=checkpointing)


def _counts_no_activations(failed: FailedRun) -> bool:
    return failed.moment == "load" or (failed.device.type == "cpu" and emulated_device_memory() is not None)


def _rung_text(rung: Rung) -> str:
    return str(rung).replace("stage ", "zero_optimization.stage ", 1)


def _with_zero(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    return override_keys(config, {f"zero_optimization.{key}": value for key, value in values.items()})


def _switch_checkpointing(model: nn.Module, wanted: bool) -> None:
    if can_checkpoint(model):
        (enable_checkpointing if wanted else disable_checkpointing)(model)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _peak_text(plan: MemoryPlan, place: str) -> str:
    moment = plan.peak_moment(place)
    kinds = sorted(plan.moments[moment].of(place).items(), key=lambda item: -item[1])[:5]
    parts = ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in kinds if nbytes)
    return f"{_size(plan.peak(place))} of {place} memory in the {moment} ({parts})"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f} MiB" if nbytes < 10 << 30 else f"{nbytes / (1 << 30):,.1f} GiB"


def _physical_bytes() -> int | None:
    import os

    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _cgroup_bytes() -> int | None:
    try:
        text = _CGROUP.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _process_limits() -> list[int]:
    import resource

    found = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return [limit for limit in found if limit != resource.RLIM_INFINITY]
