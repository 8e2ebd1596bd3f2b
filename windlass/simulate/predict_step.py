"""Prediction of a training step from a model, a configuration and a cluster: its time, and the causes of waits."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from windlass.base.errors import ConfigError
from windlass.config import Config
from windlass.parallel.model_shape import ModelShape
from windlass.simulate.cluster import Cluster
from windlass.simulate.event_loop import SimulatedTask
from windlass.simulate.model_blocks import global_model_flops
from windlass.simulate.step_lanes import COMPUTE, RankLanes
from windlass.simulate.step_prediction import KindPrediction, Span, StepPrediction
from windlass.simulate.step_tasks import StepTasks
from windlass.simulate.step_workload import StepWork, describe_step

# Allowed relative difference between the number of parameters of a model and that of a decoder of the same sizes.
_CLOSE = 0.05


def predict_step(
    model: nn.Module | ModelShape,
    config: Config,
    cluster: Cluster,
    *,
    world_size: int | None = None,
    length: int = 1024,
    checkpointing: str | None = None,
    fused: bool = False,
    linear_dtype: str = "",
    timeline: bool = False,
    step: int = 1,
    data_rank: int = 0,
    tp_rank: int = 0,
) -> StepPrediction:
    """Predict one optimizer step of `model` under `config` on `cluster`, in steady state.

    Nothing is allocated and no rank starts: the model may be on the meta device, or be described by its sizes.

    Args:
        model: A model of transformers, or its sizes.
        cluster: Hosts and links; see `windlass.simulate.cluster_file`.
        world_size: Number of ranks, which fill hosts in order; None: all devices of the cluster.
        length: Tokens of a sample.
        checkpointing: `none`, `full` or `selective`; None: as the configuration has it, see `describe_step`.
        fused: Operations between matrix products are fused (torch.compile).
        linear_dtype: `fp8` for linear layers in FP8.
        timeline: Record the spans of ranks and links.
        step: Number of the step, from 1, for an optimizer that reduces gradients itself ([Note: kinds of steps]).
        data_rank: Data-parallel rank whose compressed messages are counted ([Note: bytes of messages]).
        tp_rank: Rank along tp whose parts of uneven shards are counted.

    Raises:
        ConfigError: the configuration does not fit the ranks or cannot be simulated, the cluster has fewer devices than
            ranks, or simpy is not installed.
        ModelError: the model's sizes are unknown.
    """
    world = world_size or cluster.devices
    work = describe_step(
        model, config, world, length, checkpointing=checkpointing, fused=fused, linear_dtype=linear_dtype, step=step,
        data_rank=data_rank, tp_rank=tp_rank,
    )  # fmt: skip
    return predict_work(work, cluster, timeline=timeline)


def predict_work(work: StepWork, cluster: Cluster, *, timeline: bool = False) -> StepPrediction:
    """Predict the step that `work` describes, as `predict_step` does.

    Raises:
        ConfigError: the cluster has fewer devices than ranks.
    """
    if work.grid.world > cluster.devices:
        raise ConfigError(
            f"{cluster.name} has {cluster.devices} devices ({cluster.hosts} hosts of {cluster.host.devices}), and the "
            f"run has {work.grid.world} ranks; add hosts, or lower --world-size"
        )
    tasks = StepTasks(work, cluster, coarse=False if timeline else None)
    seconds = tasks.run()
    busy = [_compute_seconds(tasks.loop.tasks, stage.lanes) for stage in tasks.stages]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    lanes = tasks.stages[slowest].lanes
    kinds: dict[str, float] = {}
    busy_links: dict[str, float] = {}
    for (_, kind), nbytes in tasks.loop.link_bytes.items():
        kinds[kind] = max(kinds.get(kind, 0.0), nbytes)
    for (_, kind), used in tasks.loop.link_busy.items():
        busy_links[kind] = max(busy_links.get(kind, 0.0), used / seconds if seconds else 0.0)
    return StepPrediction(
        seconds=seconds,
        world_size=work.grid.world,
        tokens=work.tokens,
        model_flops=global_model_flops(work, cluster.device),
        device_flops=lanes.flops,
        peak_flops=cluster.device.peak(work.style.dtype),
        compute_seconds=busy[slowest],
        waits=_waits(tasks.loop.tasks, lanes, seconds),
        moved=[{axis: dict(moved) for axis, moved in stage.lanes.moved.items()} for stage in tasks.stages],
        link_bytes=kinds,
        link_busy=busy_links,
        spans=_spans(tasks.loop.tasks) if timeline else [],
        notes=_notes(work, cluster),
    )


def predict_kinds(work: StepWork, cluster: Cluster) -> list[KindPrediction]:
    """Predict a step of each kind, for an optimizer whose steps differ ([Note: kinds of steps]); empty for others.

    Raises:
        ConfigError: the cluster has fewer devices than ranks.
    """
    found = []
    for one in work.kinds if len(work.kinds) > 1 else ():
        predicted = predict_work(replace(work, messages=one.messages), cluster)
        received = max(sum(sum(of.values()) for of in axes.values()) for axes in predicted.moved)
        found.append(KindPrediction(one.messages.kind, one.step, one.share, predicted.seconds, received))
    return found


def _compute_seconds(tasks: list[SimulatedTask], lanes: RankLanes) -> float:
    stream = (lanes.process, COMPUTE)
    return sum(task.end - task.begin for task in tasks if task.kind == COMPUTE and stream in task.streams)


def _waits(tasks: list[SimulatedTask], lanes: RankLanes, seconds: float) -> dict[str, float]:
    """Return the idle seconds of a rank's device, by kind of the task that the next computation waited for."""
    stream, waits, free = (lanes.process, COMPUTE), dict[str, float](), 0.0
    for task in (one for one in tasks if stream in one.streams):
        if task.begin > free:
            cause = max(task.after, key=lambda one: one.end, default=None)
            _count(waits, "pipeline" if cause is None or cause.kind == COMPUTE else cause.kind, task.begin - free)
        if task.kind != COMPUTE:  # on a CPU a collective occupies the cores that compute, so it counts as a wait
            _count(waits, task.kind, task.end - task.begin)
        free = max(free, task.end)
    if seconds > free:
        last = max(tasks, key=lambda one: one.end)
        own = stream in last.streams or last.kind != COMPUTE
        _count(waits, last.kind if own else "pipeline", seconds - free)
    return waits


def _count(waits: dict[str, float], kind: str, seconds: float) -> None:
    waits[kind] = waits.get(kind, 0.0) + seconds


def _spans(tasks: list[SimulatedTask]) -> list[Span]:
    found = []
    for task in tasks:
        if task.end > task.begin:
            found += [
                Span(process, lane, task.name, task.begin, task.end, task.nbytes) for process, lane in task.streams
            ]
            found += [
                Span("links", f"{kind} of {process}", task.name, task.begin + task.seconds, task.end, int(nbytes))
                for (process, kind), nbytes in task.loads.items()
                if nbytes and task.end > task.begin + task.seconds
            ]
    return found


def _notes(work: StepWork, cluster: Cluster) -> list[str]:
    notes = [
        f"rates: {cluster.device.name} reaches {cluster.device.matmul_efficiency:.0%} of its peak in products and "
        f"{cluster.device.memory_efficiency:.0%} of its memory's rate; "
        f"links {cluster.host.nic.efficiency:.0%} of theirs"
    ]
    if work.model_numel and abs(work.shape.numel - work.model_numel) > _CLOSE * work.model_numel:
        notes.append(
            f"the model has {work.model_numel:,} parameters, and a decoder of its sizes has {work.shape.numel:,}: "
            "parts of the model that differ from a decoder are not simulated"
        )
    if len(work.kinds) > 1:
        notes.append(
            f"{work.reduces_itself} has several kinds of steps (--step); in this one gradients are sent as: "
            f"{work.messages.kind}"
        )
    elif work.reduces_itself:
        notes.append(
            f"{work.reduces_itself} reduces gradients itself, with messages that are not simulated; the prediction "
            "reduces gradients in full"
        )
    if work.shape.experts and work.grid.ep > 1:
        notes.append("tokens are spread evenly over experts")
    return notes
