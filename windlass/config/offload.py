"""Homes away from the device: offloaded parameters and optimizer states, ZenFlow, and NVMe I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from windlass.config.section import NUMBER, Count, Fraction, Int, Positive, Section
from windlass.config.verdict import accepted, refused

Device = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """Where parameters live between uses."""

    refusal = 'not yet built: parameters away from the device; write "none"'
    switch = "device"

    device: Device = refused("none", "")
    nvme_path: str | None = refused(None, "")
    buffer_count: Count = refused(5, "")
    buffer_size: Count = refused(100_000_000, "")
    max_in_cpu: Count = refused(1_000_000_000, "")
    pin_memory: bool = refused(True, "")


class OffloadOptimizer(Section):
    """Where master weights and optimizer states live, and hence where the step runs."""

    refusal = 'not yet built: optimizer states away from the device; write "none"'
    switch = "device"

    device: Device = refused("none", "")
    nvme_path: str | None = refused(None, "")
    buffer_count: Count = refused(4, "")
    pin_memory: bool = refused(True, "")
    pipeline_read: bool = refused(False, "")
    pipeline_write: bool = refused(False, "")
    fast_init: bool = refused(False, "")
    ratio: Fraction = refused(1.0, "")
    super_offload: bool = refused(False, "")
    cpuadam_cores_perc: Fraction = refused(0.8, "")


class ZenFlow(Section):
    """Offload that updates important gradients at once and the rest later; turned on by its presence."""

    refusal = "not yet built: ZenFlow; delete the section"

    topk_ratio: Annotated[float, Field(gt=0, lt=1), NUMBER] = refused(0.1, "")
    select_strategy: Literal["auto", "step", "epoch"] = refused("auto", "")
    select_interval: Int | Literal["auto"] = refused("auto", "")
    update_interval: Positive | Literal["auto"] = refused("auto", "")
    overlap_step: bool = refused(False, "")
    offload: bool = refused(False, "")
    auto_ratio: Fraction = refused(0.99, "")
    full_warm_up_rounds: Count = refused(0, "")
    pt_reserved_cores_perc: Fraction = refused(0.5, "")
    steps_per_epoch: Int | None = refused(None, "")

    def asked_for(self) -> str | None:
        return ""


class Aio(Section):
    """Tuning of asynchronous file I/O."""

    block_size: Positive = accepted(1_048_576, "read only by an NVMe home, which is itself refused until built")
    queue_depth: Positive = accepted(8, "read only by an NVMe home, which is itself refused until built")
    intra_op_parallelism: Positive = accepted(1, "read only by an NVMe home, which is itself refused until built")
    thread_count: Positive = accepted(1, "an old spelling that nothing reads; intra_op_parallelism replaced it")
    single_submit: bool = accepted(False, "read only by an NVMe home, which is itself refused until built")
    overlap_events: bool = accepted(True, "read only by an NVMe home, which is itself refused until built")
    use_gds: bool = refused(False, "not yet built: GPUDirect Storage; write false")


def is_away(section: Any) -> bool:
    """Whether an offload section names a home other than the device."""
    return section is not None and section.device != "none"
