"""Reporting of an engine: startup lines, periodic log lines, monitors, and the memory report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from windlass.base import trace_ranges
from windlass.base.dtypes import dtype_name, is_castable
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.comm.traffic import Traffic
from windlass.config import Config
from windlass.config.optimizer_section import COMPRESSED_OPTIMIZERS
from windlass.engine.rank_state_checkpoint import rank_states
from windlass.engine.step_profiler import ProfiledEngine, StepProfiler
from windlass.observe.flop_profile import ModelProfile
from windlass.observe.memory_usage import device_memory, resident_bytes, see_memory_usage
from windlass.observe.monitor_writers import RunMonitor
from windlass.observe.phase_timers import Timers
from windlass.observe.run_record import RECORD_FILE, RECORD_FORMAT, RunRecord, machine_facts, without_secrets
from windlass.storage.io_rates import IoRates
from windlass.storage.slot import Tier
from windlass.zero.core.unit import ShardState, Unit
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.rank_state import RankNumber


class ReportedEngine(ProfiledEngine, Protocol):
    """Methods and attributes of an engine that its reporter reads. See `Engine`."""

    @property
    def global_rank(self) -> int: ...
    @property
    def global_samples(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    def get_lr(self) -> list[float]: ...
    def grad_norm(self) -> float | None: ...
    def fp16_enabled(self) -> bool: ...
    def loss_scale(self) -> float: ...
    def fingerprint(self) -> str: ...


class EngineReporter:
    """Log lines and monitors of one engine. Only rank 0 logs.

    Args:
        config: configuration with the interval of log lines, the monitors and the profilers.
        engine: the engine to report on.
        has_monitor: True to write values to the configured monitors and to the record of the run.
    """

    def __init__(self, config: Config, engine: ReportedEngine, *, has_monitor: bool) -> None:
        self._config, self._engine = config, engine
        self._timers = Timers(engine.device, enabled=config.wall_clock_breakdown)
        self._monitor = RunMonitor(config, engine.global_rank) if has_monitor else None
        writes = has_monitor and config.jsonl_monitor.enabled and engine.global_rank == 0
        self._record = RunRecord(_record_path(config)) if writes else None
        # Host clock: synchronizing the device at each phase would slow down the recorded run.
        self._host_timers = Timers("cpu", enabled=writes)
        self._step_ended = time.monotonic()
        self._finished_step: dict[str, Any] | None = None  # values of a step whose timer still runs
        counts_flops = config.flops_profiler.enabled and has_monitor and engine.global_rank == 0
        self._profiler = StepProfiler(config, engine) if counts_flops else None
        self._loss_sum: torch.Tensor | None = None
        self._losses = 0
        self._logged_keys: set[str] = set()
        self._last_payload: dict[str, int] = {}
        self._last_bytes_moved: dict[str, int] = {}
        self._last_bytes_across: dict[str, int] = {}
        if config.dump_state:
            logger.info(f"configuration: {config.model_dump(mode='json', exclude_defaults=True)}")

    @property
    def monitor(self) -> RunMonitor | None:
        """Writer of values to files and services; None if the engine has no optimizer."""
        return self._monitor

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Time the code inside the context, for `wall_clock_breakdown`, a record of the run, FLOPs, or a profile."""
        timer = self._timers(name)
        if self._profiler is not None:
            timer = self._profiler.phase(name, timer)
        if trace_ranges.recorder is None and self._record is None:
            return timer
        return self._traced(name, timer)

    @contextmanager
    def _traced(self, name: str, timer: AbstractContextManager[None]) -> Iterator[None]:
        with trace_ranges.traced(name), self._host_timers(name), timer:
            yield
        self._write_finished_step()

    def record_start(self, model: ShardedModel) -> None:
        """Write the configuration, the model and the machine to the record of the run, if there is one. Collective."""
        if self._record is None and model.mesh.pp.size == 1:
            return
        parameters, trained = _count_parameters(model)
        if self._record is None:
            return
        self._record.write(
            "run",
            format=RECORD_FORMAT,
            config=without_secrets(self._config.raw),
            machine=machine_facts(),
            world_size=model.mesh.world.size,
            mesh=str(model.mesh.grid),
            stage=model.policy.stage,
            transport=model.transport.name,
            parameters=parameters,
            trained=trained,
            step=self._engine.global_steps,
        )

    def record_checkpoint(self, action: str, path: str, seconds: float) -> None:
        """Add a saved or loaded checkpoint to the record of the run, if there is one."""
        if self._record is not None:
            self._record.write("checkpoint", action=action, path=path, seconds=seconds, step=self._engine.global_steps)

    def log_once(self, key: str, message: str) -> None:
        """Log a message unless one with the same key was logged before."""
        if key not in self._logged_keys:
            self._logged_keys.add(key)
            logger.info(message)

    def record_loss(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's loss to the mean of its step. The value is copied to the host only when it is shown."""
        value = loss.detach().float().reshape(())
        self._loss_sum = value.clone() if self._loss_sum is None else self._loss_sum + value
        self._losses += 1

    def record_step(self, traffic: Traffic) -> None:
        """Write and log the values that are due at the end of a step, and reset the step's counters.

        Args:
            traffic: counter of the step's traffic, which is reset.
        """
        engine = self._engine
        step, every = engine.global_steps, self._config.steps_per_print
        due = every is not None and math.isfinite(every) and step % max(1, int(every)) == 0
        if due or (self._monitor is not None and self._monitor.enabled):
            self._write_metrics(step, due)
        if self._record is not None:
            self._finished_step = self._step_values(traffic)
        if (pause := self._config.fingerprint_interval) and step % pause == 0:
            logger.info(f"step {step} | fingerprint {engine.fingerprint()}")
        self._loss_sum, self._losses = None, 0
        self._last_payload, self._last_bytes_moved = dict(traffic.payload), dict(traffic.bytes_moved)
        self._last_bytes_across = dict(traffic.across_nodes)
        traffic.reset()

    def _step_values(self, traffic: Traffic) -> dict[str, Any]:
        engine, device = self._engine, device_memory(self._engine.device)
        return {
            "step": engine.global_steps,
            "samples": engine.global_samples,
            "skipped": engine.skipped_steps,
            "loss": self._mean_loss(),
            "learning_rate": next(iter(engine.get_lr()), None),
            "gradient_norm": engine.grad_norm(),
            "loss_scale": engine.loss_scale() if engine.fp16_enabled() else None,
            "bytes_moved": dict(traffic.bytes_moved),
            "resident_bytes": resident_bytes(),
            "device_bytes": None if device is None else device.peak_allocated,
        }

    def _write_finished_step(self) -> None:
        """Write a finished step's line to the record of the run, once the timer of its last phase has stopped."""
        values, self._finished_step = self._finished_step, None
        if self._record is None or values is None:
            return
        phases = {name: lap.seconds for name, lap in self._host_timers.take_totals().items()}
        now = time.monotonic()
        self._record.write("step", **values, seconds=now - self._step_ended, phases=phases)
        self._step_ended = now

    def _mean_loss(self) -> float:
        """Return the mean loss of the step's micro-batches on this rank; NaN if no loss was recorded."""
        return (self._loss_sum / self._losses).item() if self._loss_sum is not None else math.nan

    def _write_metrics(self, step: int, log_line: bool) -> None:
        engine = self._engine
        loss = self._mean_loss()
        rates, norm = engine.get_lr(), engine.grad_norm()
        if self._monitor is not None and self._monitor.enabled:
            samples = engine.global_samples
            events = [
                ("Train/Samples/train_loss", loss, samples),
                ("Train/Samples/lr", rates[0] if rates else 0.0, samples),
                ("Train/Samples/grad_norm", norm if norm is not None else math.nan, samples),
            ]
            if engine.fp16_enabled():
                events.append(("Train/Samples/loss_scale", engine.loss_scale(), samples))
            self._monitor.write_events(events)
        if log_line:
            logger.info(
                f"step {step} | loss {loss:.4f} | lr {', '.join(f'{r:.3g}' for r in rates)} | grad norm {norm:.4g} | "
                f"skipped {engine.skipped_steps}{self._rate(step)}"
            )
            if self._config.wall_clock_breakdown:
                logger.info(f"time | {self._timers.summary(max(1, int(self._config.steps_per_print or 1)))}")
            if self._config.memory_breakdown:
                see_memory_usage(f"step {step}", engine.device)

    def _rate(self, step: int) -> str:
        rate = self._profiler.rate(step) if self._profiler is not None else ""
        return f" | {rate}" if rate else ""

    @property
    def flop_profile(self) -> ModelProfile | None:
        """FLOPs of a micro-batch on rank 0, once `flops_profiler` has counted a step; else None."""
        return self._profiler.profile if self._profiler is not None else None

    def report(self, model: ShardedModel) -> dict[str, Any]:
        """Return the report of `Engine.report`: `memory_report`, and the traffic of the last step.

        Further keys: `payload`, parameter elements that entered collectives, by operation; `payload_elements`, their
        sum, in which an all-reduce counts twice; `bytes_moved` and `bytes_across_nodes`, bytes received by operation;
        `flops`, the profile of a micro-batch as plain data, or None.
        """
        found = memory_report(model)
        found["payload"] = dict(self._last_payload)
        found["payload_elements"] = sum(self._last_payload.values())
        found["bytes_moved"] = dict(self._last_bytes_moved)
        found["bytes_across_nodes"] = dict(self._last_bytes_across)
        found["flops"] = self.flop_profile.as_data() if self.flop_profile is not None else None
        lines = [f"{slot:>12}: {size / 2**20:10.2f} MiB on {tier}" for (slot, tier), size in found["slots"].items()]
        gathered = found["gathered_elements"]
        logger.info("on this rank:\n" + "\n".join(lines) + f"\n unsharded now: {gathered} elements")
        return found

    def close(self) -> None:
        """Close the monitors and the record, and stop counting."""
        if self._record is not None:
            self._record.close()
        if self._profiler is not None:
            self._profiler.close()
        if self._monitor is not None:
            self._monitor.close()


def _count_parameters(model: ShardedModel) -> tuple[int, int]:
    """Return the number of elements of the whole model, and the number of trained ones. Collective over a pipeline."""
    mesh, counts = model.mesh, []
    for units in (model.units, [slot.unit for slot in model.slots]):
        counts.append(0)
        for placement in (one for unit in units for one in unit.placements):
            if placement.shared_stages and placement.shared_stages[0] != mesh.pp.index:
                continue  # a parameter that stages share is counted on the first of them
            is_elsewhere_too = placement.is_expert and "ep" not in placement.sharded_axes
            counts[-1] += math.prod(placement.global_shape) * (mesh.ep.size if is_elsewhere_too else 1)
    if mesh.pp.size > 1:
        counts = mesh.pp.all_reduce(torch.tensor(counts, device=model.device)).tolist()
    return counts[0], counts[1]


def _record_path(config: Config) -> Path:
    section = config.jsonl_monitor
    return Path(section.output_path or "jsonl_monitor").expanduser() / section.job_name / RECORD_FILE


def memory_report(model: ShardedModel) -> dict[str, Any]:
    """Return the bytes that this rank keeps between steps.

    Returns:
        `stage`; `transport`: name of the transport; `disk`: `IoRates` of the NVMe tier since the engine was built, all
            zero without this tier; `slots`: bytes by (slot, tier). Slots are `param`, `secondary` (second copy of
            hpZ), `grad`, `master`, the optimizer's states (`exp_avg`, ...), including per-rank states
            (`worker_error`, `loco_error`), and with delayed updates `grad in update` and `next param`; `units`: names,
            elements, and bytes by slot of each unit; `transit`: bytes of the reduction buffers; `gathered` and
            `gathered_elements`: first parameter of each unit that is unsharded now and could be resharded, and the
            elements of these units;
            `padding_elements`; `delayed_update`: `seconds` is the duration of the last finished update in the
            background, `waited` the part of it that a step waited for; None without delayed updates.
    """
    model.wait_for_update()
    slots: dict[tuple[str, str], int] = {}
    units: list[dict[str, Any]] = []
    by_unit: dict[int, dict[str, int]] = {unit.index: {} for unit in model.units}

    def count(unit: Unit, slot: str, tier: Tier, size: int) -> None:
        slots[slot, tier.value] = slots.get((slot, tier.value), 0) + size
        by_unit[unit.index][slot] = by_unit[unit.index].get(slot, 0) + size

    for unit in model.units:
        if unit.shard_slot is not None:
            count(unit, "param", unit.shard_slot.tier, unit.shard_slot.nbytes)
        else:
            at_rest = unit.local_shard if unit.reshards else unit.full
            count(unit, "param", Tier.DEVICE, at_rest.numel() * at_rest.element_size())
        if unit.secondary_shard is not None:
            count(unit, "secondary", Tier.DEVICE, unit.secondary_shard.numel() * unit.secondary_shard.element_size())
        if model.masters.is_separate(unit):
            size = sum(chunk.numel * chunk.dtype.itemsize for chunk in model.masters.chunks_of(unit))
            count(unit, "master", unit.state_tier, size)
    itemsize = model.settings.accumulation_dtype.itemsize
    for slot in model.slots:
        is_sharded = model.policy.grad and (slot.shard is not None or slot.storage is not None)
        tier = slot.storage.tier if slot.storage is not None else Tier.DEVICE
        count(slot.unit, "grad", tier, (slot.numel if is_sharded else slot.unit.layout.padded) * itemsize)
        if slot.spare_storage is not None:
            count(slot.unit, "grad in update", slot.spare_storage.tier, slot.spare_storage.nbytes)
    for chunk, key, size in model.masters.state_offload.inventory(model.masters.chunks):
        count(chunk.unit, key, chunk.tier, size)
    for state in rank_states(model, reduced_only=True):
        if not isinstance(state, RankNumber):
            count(state.unit, state.key, state.tier, state.nbytes)
    for chunk in model.masters.chunks if model.delayed_update is not None else ():
        if chunk.lowered_params is not None:
            count(chunk.unit, "next param", Tier.HOST, chunk.lowered_params.nbytes)
    for unit in model.units:
        units.append({"names": unit.names, "elements": unit.numel, "released": unit.reshards, **by_unit[unit.index]})
    gathered = [u for u in model.units if u.reshards and u.shard_state is not ShardState.SHARDED]
    return {
        "stage": model.policy.stage,
        "transport": model.transport.name,
        "disk": model.tiers.disk.io_rates() if model.tiers.disk is not None else IoRates(),
        "slots": slots,
        "units": units,
        "transit": sum(
            n.numel * n.dtype.itemsize for dp_group in model.dp_groups for n in model.reducer.buffer_requests(dp_group)
        )
        if model.policy.grad
        else 0,
        "gathered": [unit.names[0] for unit in gathered],
        "gathered_elements": sum(unit.numel for unit in gathered),
        "delayed_update": {"seconds": model.delayed_update.seconds, "waited": model.delayed_update.waited}
        if model.delayed_update
        else None,
        "padding_elements": sum(unit.layout.padded - unit.numel for unit in model.units),
    }


def startup_lines(model: ShardedModel, config: Config, world: int) -> list[str]:
    """Return the log lines that describe a run before its first step."""
    total = sum(unit.numel for unit in model.units)
    trained = sum(slot.unit.numel for slot in model.slots)
    # The table describes floating-point parameters, not quantized ones.
    first = next((unit.dtype for unit in model.units if is_castable(unit.dtype)), torch.float32)
    table = config.dtype_table(dtype_name(first))
    released = sum(1 for unit in model.units if unit.reshards)
    return [
        f"stage {model.policy.stage} on {plural(world, 'rank')}, {plural(total, 'parameter')} "
        f"({trained:,} trained) in {plural(len(model.units), 'unit')}, {released} of them resharded between uses",
        f"transport {model.transport.name}: {model.dp_groups[0].transport_reason}",
        f"dtypes: {table}",
        *_tier_lines(model),
        *_compression_lines(model),
    ]


def _compression_lines(model: ShardedModel) -> list[str]:
    """Return a log line on the steps before the first compressed one, if the optimizer has such steps.

    A run may end before: its length is often unknown, and the default of `freeze_step` is 100,000 steps.
    """
    optimizer = model.update.optimizer if model.update is not None else None
    name = type(optimizer).__name__
    if optimizer is None or name not in COMPRESSED_OPTIMIZERS:
        return []
    group = optimizer.param_groups[0]
    counts = [(key, group[key]) for key in ("freeze_step", "start_step") if group.get(key)]
    return [
        f"{name} averages uncompressed gradients in its first {plural(steps, 'step')} (optimizer.params.{key})"
        for key, steps in counts
    ]


def _tier_lines(model: ShardedModel) -> list[str]:
    """Return a log line on tiers, if the configuration requests another tier than the device."""
    requested, tiers = model.settings.tiers, model.tiers
    if requested.param is Tier.DEVICE and requested.state is Tier.DEVICE:
        return []
    if requested.of_units:  # `placement_table` has listed them
        return [f"disk: {tiers.disk.description()}"] if tiers.disk is not None else []
    line = f"tiers: parameters {requested.param.value}, master weights and optimizer states {requested.state.value}"
    if tiers.state is not requested.state or tiers.param is not requested.param:
        line += "; host memory is the device's own on this machine, so offloading to it needs no copy"
    if tiers.disk is not None:
        line += f"; disk: {tiers.disk.description()}"
    return [line]
