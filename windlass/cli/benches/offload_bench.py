"""Experiment of `windlass bench offload`: one model with parameters and optimizer states on different
tiers, compared with DeepSpeed.

Configurations are timed alternately; the memory of each is measured in a run of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from windlass.cli.benches import deepspeed_baseline
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.training_bench import (
    LOSS_TOLERANCE,
    BenchSizes,
    ConfigMeasurement,
    measure_configs,
    plain_config,
    report_bench,
)

COMPUTE_ONLY = "compute alone"
HOST_TARGET_RATIO = 1.35
"""Bound on the step time of stage 3 with parameters and optimizer states on the host, divided by the time of the
compute alone."""
ON_DISK, DISK_TARGET_RATIO = "all on disk", 1.2
"""Text that labels the rows with parameters and optimizer states on disk, and the bound on their step time, divided by
the larger of two times: the compute alone, or the transfer of the step's bytes at the disk's rate."""
_PROBE_BYTES = 512 << 20
_OFFLOAD_DEVICES: dict[str, tuple[str, str]] = {
    "none": ("none", "none"),
    "optimizer on host": ("cpu", "none"),
    "optimizer on disk": ("nvme", "none"),
    "all on host": ("cpu", "cpu"),
    "all on disk": ("nvme", "nvme"),
}
_DEEPSPEED_ROWS = (
    (1, "optimizer on host", deepspeed_baseline.CPU_OPTIMIZER_BUILDER),
    (2, "optimizer on host", deepspeed_baseline.CPU_OPTIMIZER_BUILDER),
    (3, "optimizer on host", deepspeed_baseline.CPU_OPTIMIZER_BUILDER),
    (3, "all on host", deepspeed_baseline.CPU_OPTIMIZER_BUILDER),
    (3, "optimizer on disk", deepspeed_baseline.ASYNC_IO_BUILDER),
    (3, "all on disk", deepspeed_baseline.ASYNC_IO_BUILDER),
)


def run_offload_bench(
    nproc: int, sizes: BenchSizes, bf16: bool, device_bytes: str, folder: Path | None, rivals: bool, out: Path
) -> bool:
    """Compare tiers at stages 1, 2 and 3.

    Args:
        device_bytes: memory of the device that is emulated if there is no GPU, shared by all configurations; "0": no
            device is emulated.
        folder: folder on the disk to use; a temporary folder by default.
        rivals: measure DeepSpeed too, if it is installed.

    Returns:
        True if the losses of all configurations equal those of stage 1 without offload, within a bound.
    """
    import torch

    cuda = torch.cuda.is_available()
    emulated = not cuda and device_bytes != "0"
    env = {"WINDLASS_EMULATE_DEVICE": device_bytes} if emulated else {}
    with TemporaryDirectory(prefix="windlass-offload-", dir=folder) as place:
        ours = dict(_windlass_configs(sizes, bf16, place, pins=(True, False) if cuda else (True,)))
        # the engine "none" trains in float32, which is not comparable with bf16
        floor = {} if bf16 else {COMPUTE_ONLY: {"engine": "none"}}
        theirs, notes = (
            _deepspeed_configs(sizes, bf16, place) if rivals else ({}, ["DeepSpeed: left out by --no-rivals"])
        )
        rows, failed = measure_configs(
            {**floor, **ours}, sizes, nproc, env | deepspeed_baseline.build_tool_environment(), optional_configs=theirs
        )
        rates = measure_disk_rates(place)
    notes += [f"{label}: absent, it failed with the error printed above" for label in failed]
    notes += [_describe_device(cuda, device_bytes)]
    conclusions, same = _compare_losses_and_times(rows, LOSS_TOLERANCE if not bf16 else 1e-2)
    conclusions += _compare_with_disk(rows, nproc, *rates)
    report_bench("offload", rows, conclusions + notes, nproc, sizes, out)
    return same


def measure_disk_rates(folder: str) -> tuple[float, float]:
    """Return bytes per second of a large read and a large write by direct I/O in `folder`, best of three."""
    from windlass.storage.disk_tier import DiskTier

    reads: list[float] = []
    writes: list[float] = []
    with DiskTier([folder]) as tier:
        extent, full = tier.allocate(_PROBE_BYTES, "a probe of the disk"), tier.allocate_buffer(_PROBE_BYTES)
        full.fill_(1)
        for _ in range(4):  # the first round allocates the file's blocks and is not counted
            for seconds, move in ((writes, tier.write), (reads, tier.read)):
                start = time.perf_counter()
                move(extent, 0, full).wait()
                seconds.append(time.perf_counter() - start)
    return _PROBE_BYTES / min(reads[1:]), _PROBE_BYTES / min(writes[1:])


def _compare_with_disk(rows: dict[str, ConfigMeasurement], nproc: int, read: float, write: float) -> list[str]:
    """Describe how steps with parameters and states on disk compare with their lower bound."""
    if COMPUTE_ONLY not in rows:
        return []
    compute, lines = statistics.median(rows[COMPUTE_ONLY].seconds), []
    for label, row in rows.items():
        if not row.copied_bytes.get("to_disk") or ON_DISK not in label:
            continue
        moved = nproc * (row.copied_bytes["from_disk"] / read + row.copied_bytes["to_disk"] / write)
        ratio = statistics.median(row.seconds) / max(compute, moved)
        floor = f"compute ({compute * 1e3:.0f} ms) and its bytes on disk ({moved * 1e3:.0f} ms at the disk's rate)"
        kept = "held" if ratio <= DISK_TARGET_RATIO else "MISSED"
        lines.append(f"{label}: {ratio:.2f} x the longer of {floor} (target: at most {DISK_TARGET_RATIO}: {kept})")
    if lines:
        lines.append(
            f"the disk reads {read / 1e9:.1f} and writes {write / 1e9:.1f} GB/s by direct I/O, in one large transfer"
        )
    return lines


def _describe_device(cuda: bool, device_bytes: str) -> str:
    if cuda:
        return "the device is a GPU; pinned: host memory is page-locked"
    if device_bytes == "0":
        return "no device is emulated: device memory is host memory, and nothing is copied between them"
    return (
        f"the device is emulated ({device_bytes}): windlass' rows include copies to and from it; DeepSpeed cannot "
        "use this device, so its rows include none. Pinned memory has no effect without CUDA: one row for both"
    )


def _compare_losses_and_times(rows: dict[str, ConfigMeasurement], bound: float) -> tuple[list[str], bool]:
    """Return sentences about losses and step times, and True if all are within `bound` of the first loss."""
    against = next(iter(rows))
    floor = statistics.median(rows[against].seconds)
    engines = {label: row for label, row in rows.items() if label != COMPUTE_ONLY}
    reference = next(iter(engines.values())).losses
    apart = {
        label: max(abs(a - b) for a, b in zip(row.losses, reference, strict=True)) for label, row in engines.items()
    }
    # `not <=` also catches NaN
    far = [f"{label} differs by {off:.1e}" for label, off in apart.items() if not off <= bound]
    summary = "NOT equal: " + "; ".join(far) if far else f"equal; the largest difference is {max(apart.values()):.1e}"
    conclusions = [f"losses: {summary} (bound {bound:.0e})"]
    for label, row in engines.items():
        if label == against:
            continue
        ratio = statistics.median(row.seconds) / floor
        promise = ""
        if against == COMPUTE_ONLY and label.startswith("stage 3, all on host"):
            promise = f" (target: at most {HOST_TARGET_RATIO}: {'held' if ratio <= HOST_TARGET_RATIO else 'MISSED'})"
        conclusions.append(f"{label}: {ratio:.2f} x {against}{promise}")
    return conclusions, not far


def _windlass_configs(
    sizes: BenchSizes, bf16: bool, folder: str, pins: tuple[bool, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for stage in (1, 2, 3):
        for name, (_, param) in _OFFLOAD_DEVICES.items():
            if param != "none" and stage < 3:
                continue
            for pin in pins if name != "none" else pins[:1]:
                label = f"stage {stage}, {name}"
                if len(pins) > 1 and name != "none":
                    label += ", pinned" if pin else ", not pinned"
                yield label, _config(sizes, stage, name, bf16, folder, pin)


def _deepspeed_configs(sizes: BenchSizes, bf16: bool, folder: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the configurations that DeepSpeed can run here, and for each other one a note with the reason."""
    bench_console().print("loading DeepSpeed's operators; the first run builds them", style="dim")
    reasons = deepspeed_baseline.unavailable_operators(
        deepspeed_baseline.CPU_OPTIMIZER_BUILDER, deepspeed_baseline.ASYNC_IO_BUILDER
    )
    found, notes = {}, []
    for stage, name, operator in _DEEPSPEED_ROWS:
        label = f"DeepSpeed, stage {stage}, {name}"
        if reasons[operator]:
            notes.append(f"{label}: absent ({operator}: {reasons[operator]})")
        else:
            found[label] = deepspeed_baseline.deepspeed_engine_config(
                _config(sizes, stage, name, bf16, folder, pin=False)
            )
    return found, notes


def _config(sizes: BenchSizes, stage: int, name: str, bf16: bool, folder: str, pin: bool) -> dict[str, Any]:
    config = plain_config(sizes, stage=stage)
    for section, device in zip(("offload_optimizer", "offload_param"), _OFFLOAD_DEVICES[name], strict=True):
        if device != "none":
            where = {"nvme_path": folder} if device == "nvme" else {}
            config["zero_optimization"][section] = {"device": device, "pin_memory": pin, **where}
    if bf16:
        config["bf16"] = {"enabled": True}
    return config
