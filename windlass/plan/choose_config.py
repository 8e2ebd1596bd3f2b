"""Ladder of configurations, from the fastest to the smallest: the first one that fits is chosen.

[Note: order of the ladder] With one micro-batch a step, stages 0 to 2 send the same bytes, and stage 3 half as much
again; activation checkpointing computes each layer's forward twice; with offloaded states, gradients and new parameters
cross the link to the host once a step; offloaded parameters cross the link twice; NVMe is slower than the link. So the
ladder raises the stage, then checkpoints activations, then offloads states, then parameters, then moves states and
parameters to NVMe. The order follows the tutorials of ZeRO, not measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.config import Config, validate_config
from windlass.config.config_overrides import override_keys, value_at_path
from windlass.parallel.model_checkpointing import can_checkpoint, disable_checkpointing, enable_checkpointing
from windlass.plan.memory_plan import MemoryPlan
from windlass.plan.plan_run import RunShape, TraceCache, plan_memory
from windlass.plan.rank_limits import RankLimits, missing_bytes

STATES, PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


@dataclass(frozen=True)
class Rung:
    """Rung of the ladder: a ZeRO stage, activation checkpointing, and the tiers of states and parameters.

    Attributes:
        stage: ZeRO stage.
        checkpointing: Activations are checkpointed.
        states, parameters: Tier of optimizer states and of parameters: `none`, `cpu` or `nvme`, as in
            `offload_*.device`.
    """

    stage: int
    checkpointing: bool
    states: str = "none"
    parameters: str = "none"

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.checkpointing:
            parts.append("checkpointing")
        parts += [f"{what} on {tier}" for what, tier in self._offloaded()]
        return ", ".join(parts)

    def _offloaded(self) -> Iterator[tuple[str, str]]:
        for what, tier in (("states", self.states), ("parameters", self.parameters)):
            if tier != "none":
                yield what, tier

    def apply(self, raw: dict[str, Any], nvme_path: str | list[str] | None) -> dict[str, Any]:
        """Return the configuration `raw` with the stage, tiers and activation checkpointing of this rung."""
        values: dict[str, Any] = {
            "offload": None,  # the rung sets all tiers
            "zero_optimization.stage": self.stage,
            "activation_checkpointing.enabled": self.checkpointing or None,
        }
        for path, tier in ((STATES, self.states), (PARAMETERS, self.parameters)):
            before = _section_at(raw, path)
            values[path] = None
            if tier != "none":
                kept = {name: value for name, value in before.items() if name not in ("device", "nvme_path")}
                values[path] = {**kept, "device": tier}
                if tier == "nvme":
                    values[path]["nvme_path"] = before.get("nvme_path") or nvme_path
        return override_keys(raw, values)


@dataclass(frozen=True)
class TriedRung:
    """Rung with its predicted memory.

    Attributes:
        missing: Bytes beyond the limit, by place (`device`, `host`, `disk`); empty: the rung fits.
        config: Configuration of the rung.
    """

    rung: Rung
    plan: MemoryPlan
    missing: dict[str, int]
    config: dict[str, Any]

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class RefusedRung:
    """Rung that `initialize` refuses, so that its memory is not planned.

    Attributes:
        problem: First problem of the rung's configuration.
    """

    rung: Rung
    problem: str


@dataclass(frozen=True)
class Choice:
    """Result of `choose_config`.

    Attributes:
        walked: Rungs in the order of the ladder, up to the chosen one.
        chosen: First rung that fits; None: no rung fits.
        nearest: Rung that lacks the fewest bytes.
    """

    walked: list[TriedRung | RefusedRung]
    chosen: TriedRung | None
    nearest: TriedRung

    @property
    def tried(self) -> list[TriedRung]:
        """Rungs whose memory was planned, which excludes those that `initialize` refuses."""
        return [one for one in self.walked if isinstance(one, TriedRung)]

    @property
    def refused(self) -> list[RefusedRung]:
        """Rungs that `initialize` refuses."""
        return [one for one in self.walked if isinstance(one, RefusedRung)]


def ladder(*, has_own_memory: bool, can_checkpoint: bool, nvme: bool) -> list[Rung]:
    """Return the rungs from the fastest to the smallest, see [Note: order of the ladder].

    Args:
        has_own_memory: The device has memory separate from the host's; else offloading to the host moves nothing.
        can_checkpoint: The model can checkpoint its activations.
        nvme: There is a path for NVMe offload.
    """
    rungs = [Rung(stage, False) for stage in range(4)]
    least = can_checkpoint
    if can_checkpoint:
        rungs += [Rung(stage, True) for stage in range(4)]
    if has_own_memory:
        rungs += [Rung(2, least, "cpu"), Rung(3, least, "cpu"), Rung(3, least, "cpu", "cpu")]
    if nvme:
        rungs += [Rung(3, least, "nvme", "cpu" if has_own_memory else "none"), Rung(3, least, "nvme", "nvme")]
    return rungs


def choose_config(
    model: nn.Module,
    raw: dict[str, Any],
    run: RunShape,
    limits: RankLimits,
    *,
    nvme_path: str | list[str] | None = None,
    on_tried: Callable[[TriedRung], None] = lambda tried: None,
) -> Choice:
    """Walk the ladder and stop at the first configuration that fits. Configurations that `initialize` refuses are
    skipped.

    Args:
        model: The model, possibly on the meta device; its checkpointing is switched as the rungs need.
        raw: The user's configuration. Its stage, `offload`, the tiers of the offload sections, and
            `activation_checkpointing.enabled` are replaced; all other keys stay.
        nvme_path: Folder of NVMe offload, or several; None: NVMe is left out, unless `raw` names a folder.
        on_tried: Function that is called with each rung once its memory is planned.

    Raises:
        ConfigError: every rung is refused, or the batch or the axes do not fit the ranks.
        ModelError: the model cannot be traced.
    """
    nvme_path = nvme_path or _named_path(raw)
    rungs = ladder(
        has_own_memory=run.target.has_own_memory,
        can_checkpoint=can_checkpoint(model),
        nvme=nvme_path is not None,
    )
    traces: TraceCache = {}
    walked: list[TriedRung | RefusedRung] = []
    tried: list[TriedRung] = []
    for rung in rungs:
        one = _try(model, rung, raw, run, limits, nvme_path, traces)
        walked.append(one)
        if isinstance(one, RefusedRung):
            continue
        on_tried(one)
        tried.append(one)
        if one.fits:
            break
    if not tried:
        problems = "; ".join(dict.fromkeys(one.problem for one in walked if isinstance(one, RefusedRung)))
        raise ConfigError(f"this configuration is refused at every stage and on every tier: {problems}")
    chosen = tried[-1] if tried[-1].fits else None
    return Choice(walked, chosen, min(tried, key=lambda one: sum(one.missing.values())))


def load_supported(raw: dict[str, Any]) -> tuple[Config, str]:
    """Return the configuration, and the first reason for which `initialize` refuses it; empty if it is accepted."""
    found = validate_config(raw)
    reasons = [*found.problems, *found.config.refusals()]
    return found.config, str(reasons[0]) if reasons else ""


def _try(
    model: nn.Module,
    rung: Rung,
    raw: dict[str, Any],
    run: RunShape,
    limits: RankLimits,
    nvme_path: str | list[str] | None,
    traces: TraceCache,
) -> TriedRung | RefusedRung:
    changed = rung.apply(raw, nvme_path)
    config, problem = load_supported(changed)
    if problem:
        return RefusedRung(rung, problem)
    if can_checkpoint(model):
        (enable_checkpointing if rung.checkpointing else disable_checkpointing)(model)
    plan = plan_memory(model, config, run, traces=traces, variant=rung.checkpointing)
    return TriedRung(rung, plan, missing_bytes(plan, limits), changed)


def _named_path(raw: dict[str, Any]) -> str | list[str] | None:
    """Return the folder or the list of folders that `raw` names for NVMe offload; None: there is none."""
    for key in (STATES, PARAMETERS):
        path = _section_at(raw, key).get("nvme_path")
        if path and path != "auto":
            return path if isinstance(path, list) else str(path)
    return None


def _section_at(raw: dict[str, Any], path: str) -> Mapping[str, Any]:
    found = value_at_path(raw, path)
    return found if isinstance(found, Mapping) else {}  # absent, null, "auto", or an old spelling of the section
