"""Homes away from the device: offloaded parameters and optimizer states, ZenFlow, and NVMe I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from windlass.config.config_section import NUMBER, ConfigSection, Count, Fraction, Int, Names, Positive
from windlass.config.key_status import accepted, honoured, refused

Paths = Names
Device = Literal["none", "cpu", "nvme"]


class OffloadParam(ConfigSection):
    """Where parameters live between uses, at stage 3."""

    enable_key = "device"

    device: Device = honoured("none")
    """none: on the device; cpu: in host memory; nvme: in files."""
    nvme_path: Paths | None = honoured(None)
    """A folder on a disk, or several that are striped."""
    pin_memory: bool = honoured(True)
    """Page-lock host memory, where there is a GPU to copy to."""

    buffer_count: Count = honoured(5)
    """nvme: times buffer_size, the elements of a rank's parameters that are read from disk ahead of their use."""
    buffer_size: Count = honoured(100_000_000)
    """Elements; see buffer_count."""
    max_in_cpu: Count = accepted(1_000_000_000, "a unit on disk passes through host memory only while it moves")


class OffloadOptimizer(ConfigSection):
    """Where master weights and optimizer states live, and hence where the step runs."""

    enable_key = "device"

    device: Device = honoured("none")
    """none: on the device; cpu: in host memory; nvme: in files, and the step runs in host memory."""
    nvme_path: Paths | None = honoured(None)
    """A folder on a disk, or several that are striped."""
    pin_memory: bool = honoured(True)
    """Page-lock host memory, where there is a GPU to copy to."""
    ratio: Fraction = honoured(1.0)
    """The share of elements whose states leave the device, whole units, the first in model order."""
    gradient_device: Literal["cpu", "nvme"] = honoured("cpu", windlass_only=True)
    """Where reduced gradients wait for the step: nvme saves 4 bytes an element of host memory and moves 8 more."""
    delayed_update: bool = honoured(False, windlass_only=True)
    """The step runs while the next forward and backward do, which so compute with parameters that lack it."""
    delayed_update_start: Count = honoured(0, windlass_only=True)
    """So many steps are taken at once before updates are delayed."""

    buffer_count: Count = honoured(4)
    """nvme: parts of sub_group_size elements under way at once; left out, what a quarter of the free memory holds."""
    pipeline_read: bool = accepted(False, "the next parts are always read while one is updated, and before")
    pipeline_write: bool = accepted(False, "the parts before are always written while one is updated, and after")
    fast_init: bool = accepted(False, "states are made by the first step, so there is nothing to initialise")
    super_offload: bool = accepted(
        False,
        "it steps before the norm is known and takes back what clipping changes, so its results are those of "
        "offload_optimizer; here the host's step (28 of 257 ms in bench/results/delayed_update.json) waits for the "
        "norm, and delayed_update hides it",
    )
    cpuadam_cores_perc: Fraction = accepted(0.8, "read only with super_offload")


class ZenFlowConfig(ConfigSection):
    """Offload that updates important gradients at once and the rest later; turned on by its presence."""

    refusal = (
        "it makes most of each update several steps late to hide the host's step, and updates that were one step late "
        "cost 0.18 to 0.31 bits a byte where that step is 28 of 257 ms (bench/results/delayed_update.json); delete the "
        "section, or write offload_optimizer.delayed_update true"
    )

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

    def requested_key(self) -> str | None:
        return ""


class AioConfig(ConfigSection):
    """Tuning of asynchronous file I/O."""

    block_size: Positive = honoured(1_048_576)
    """Bytes of one request to the disk."""
    queue_depth: Positive = honoured(32)
    """Requests under way at once."""
    intra_op_parallelism: Positive = honoured(1)
    """Threads, where requests go through threads."""
    thread_count: Positive = accepted(1, "an old spelling that nothing reads; intra_op_parallelism replaced it")
    single_submit: bool = accepted(False, "requests are handed over as the queue has room")
    overlap_events: bool = accepted(True, "requests are handed over while others complete")
    use_gds: bool = refused(False, "not yet built: GPUDirect Storage; write false")


def is_offloaded(section: Any) -> bool:
    """Whether an offload section names a home other than the device."""
    return section is not None and section.device != "none"
