"""Sections for offload: parameters and optimizer states on other tiers, ZenFlow, and NVMe I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import ConfigError
from windlass.config.config_section import NUMBER, ConfigSection, Count, Fraction, Int, Paths, Positive
from windlass.config.key_status import accepted, honoured, refused

Device = Literal["none", "cpu", "nvme"]


def _to_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value, "it")
    except ConfigError as error:
        raise PydanticCustomError("number_of_bytes", "input should be a number of bytes, such as 12GB") from error


ByteCount = Annotated[
    int,
    Field(gt=0),
    NUMBER,
    BeforeValidator(_to_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string"}]}),
]
"""Number of bytes: `12884901888`, `"12GB"` or `"512MiB"`."""


class OffloadParam(ConfigSection):
    """Tier of the sharded parameters at stage 3."""

    enable_key = "device"

    device: Device = honoured("none")
    """none: on the device; cpu: in host memory; nvme: in files."""
    nvme_path: Paths | None = honoured(None)
    """Folder on a disk, or several folders over which data is striped."""
    pin_memory: bool = honoured(True)
    """Page-lock (pin) host memory, if there is a GPU."""

    buffer_count: Count = honoured(5)
    """nvme: buffer_count x buffer_size elements of a rank's parameters are prefetched from disk."""
    buffer_size: Count = honoured(100_000_000)
    """Number of elements; see buffer_count."""
    max_in_cpu: Count = accepted(1_000_000_000, "a unit on disk is in host memory only during its transfer")


class OffloadOptimizer(ConfigSection):
    """Tier of master weights and optimizer states. The optimizer step runs on the host, unless the tier is the
    device."""

    enable_key = "device"

    device: Device = honoured("none")
    """none: on the device; cpu: in host memory; nvme: in files, with the step in host memory. At stage 0 states stay on
    the device."""
    nvme_path: Paths | None = honoured(None)
    """Folder on a disk, or several folders over which data is striped."""
    pin_memory: bool = honoured(True)
    """Page-lock (pin) host memory, if there is a GPU."""
    ratio: Fraction = honoured(1.0)
    """Fraction of the parameter elements whose states are offloaded, counted from the start of the model and rounded up
    to complete units."""
    gradient_device: Literal["cpu", "nvme"] = honoured("cpu", windlass_only=True)
    """Tier of reduced gradients until the step: nvme saves 4 bytes of host memory per element and transfers 8 bytes
    more per element."""
    delayed_update: bool = honoured(False, windlass_only=True)
    """Run the step during the next forward and backward, which therefore compute with parameters one update old."""
    delayed_update_start: Count = honoured(0, windlass_only=True)
    """Number of steps at the start of training whose updates are not delayed."""

    buffer_count: Count = honoured(4)
    """nvme: number of chunks of sub_group_size elements in flight; when absent, as many as fit into a quarter of the
    free memory."""
    pipeline_read: bool = accepted(False, "the next chunks are always read before and during the update of one")
    pipeline_write: bool = accepted(False, "the previous chunks are always written during and after the update of one")
    fast_init: bool = accepted(False, "states are created by the first step, so there is nothing to initialise")
    super_offload: bool = accepted(
        False,
        "it updates before the norm is known and then corrects the update for clipping, so its results are those of "
        "offload_optimizer; here the host's step (28 of 257 ms in bench/results/delayed_update.json) waits for the "
        "norm, and delayed_update overlaps it",
    )
    cpuadam_cores_perc: Fraction = accepted(0.8, "read only with super_offload")


class AutoOffload(ConfigSection):
    """Choice, at start-up, of tiers for the parameters, gradients and optimizer states of each unit (parameters that
    are unsharded together). The section's presence enables it; `"offload": "auto"` is the section with its defaults."""

    nvme_path: Paths | None = honoured(None, windlass_only=True)
    """Folder on a disk, or several folders over which data is striped; absent: nothing is moved to NVMe."""
    device_memory: ByteCount | None = honoured(None, windlass_only=True)
    """Bytes of a rank's device memory for parameters, gradients, states and their buffers; absent: 70 % of the free
    memory, so that 30 % remain for activations. On a CPU, whose memory is the host's, host_memory applies."""
    host_memory: ByteCount | None = honoured(None, windlass_only=True)
    """Bytes of a rank's host memory; absent: 80 % of its part of the free memory."""
    disk_space: ByteCount | None = honoured(None, windlass_only=True)
    """Bytes of a rank on NVMe; absent: its part of the free space."""
    pin_memory: bool = honoured(True, windlass_only=True)
    """Page-lock (pin) host memory, if there is a GPU."""
    buffer_count: Count = honoured(5, windlass_only=True)
    """nvme: buffer_count x buffer_size elements of a rank's parameters are prefetched from disk."""
    buffer_size: Count = honoured(100_000_000, windlass_only=True)
    """Number of elements; see buffer_count."""


class ZenFlowConfig(ConfigSection):
    """Offload that applies important gradients at once and the rest later. The section's presence enables it."""

    refusal = (
        "it delays most of each update by several steps to overlap the host's step; a delay of one step cost 0.18 to "
        "0.31 bits per byte where that step is 28 of 257 ms (bench/results/delayed_update.json); delete the section, "
        "or write offload_optimizer.delayed_update true"
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
    """Bytes of one I/O request."""
    queue_depth: Positive = honoured(32)
    """Number of requests in flight."""
    intra_op_parallelism: Positive = honoured(1)
    """Number of I/O threads, if the I/O engine uses threads."""
    thread_count: Positive = accepted(1, "an old spelling that nothing reads; intra_op_parallelism replaced it")
    single_submit: bool = accepted(False, "requests are submitted as the queue has room")
    overlap_events: bool = accepted(True, "requests are submitted while others complete")
    use_gds: bool = refused(False, "not yet built: GPUDirect Storage; write false")


def is_offloaded(section: Any) -> bool:
    """Return True if an offload section sets a tier other than the device."""
    return section is not None and section.device != "none"


def idle_offload_warning(section: OffloadOptimizer | None, stage: int) -> str:
    """Return a warning if optimizer states stay on the device although a section offloads them; else empty."""
    if stage or section is None or section.device == "none":
        return ""
    return (
        f'zero_optimization.offload_optimizer.device is "{section.device}" at stage 0, where every rank keeps whole '
        'optimizer states on its device: nothing is offloaded; write stage 1, 2 or 3, or "device": "none"'
    )
