"""`windlass bench offload`: one model with its slots at different homes; time in turns, memory each alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from windlass.cli.benches.training import EQUAL_LOSS, Row, Sizes, measured, plain_config, tell

COMPUTE = "compute alone"
_HOMES: dict[str, tuple[str, str]] = {
    "none": ("none", "none"),
    "optimizer on host": ("cpu", "none"),
    "optimizer on disk": ("nvme", "none"),
    "all on host": ("cpu", "cpu"),
    "all on disk": ("nvme", "nvme"),
}


def offload(nproc: int, sizes: Sizes, bf16: bool, device_bytes: str, folder: Path | None, out: Path) -> bool:
    """Compare homes at stages 1, 2 and 3, on an emulated device where there is no other.

    Args:
        device_bytes: of the emulated device's memory, for all configurations together.
        folder: on the disk to use; a temporary one by default.

    Returns:
        Whether all had the losses of the stage without offload.
    """
    with TemporaryDirectory(prefix="windlass-offload-", dir=folder) as place:
        configs = _configs(sizes, bf16, place)
        if not bf16:  # its ranks train float32, which is another amount of work
            configs = {COMPUTE: {"engine": "none"}, **configs}
        rows = measured(configs, sizes, nproc, env={"WINDLASS_EMULATE_DEVICE": device_bytes})
    against = next(iter(rows))
    floor = statistics.median(rows[against].seconds)
    ours = {label: row for label, row in rows.items() if label != COMPUTE}
    reference = next(iter(ours.values())).losses
    apart = max(abs(a - b) for row in ours.values() for a, b in zip(row.losses, reference, strict=True))
    bound = 1e-2 if bf16 else EQUAL_LOSS
    verdicts = [f"losses: {'equal' if apart <= bound else 'NOT equal'}; the furthest two are {apart:.1e} apart"]
    verdicts += [f"{label}: {_over(row, floor):.2f} x {against}" for label, row in ours.items() if label != against]
    tell("offload", rows, verdicts, nproc, sizes, out)
    return apart <= bound


def _configs(sizes: Sizes, bf16: bool, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for stage in (1, 2, 3):
        for name, (state, param) in _HOMES.items():
            if param != "none" and stage < 3:
                continue
            config = plain_config(sizes, stage=stage)
            zero = config["zero_optimization"]
            for section, home in (("offload_optimizer", state), ("offload_param", param)):
                if home != "none":
                    zero[section] = {"device": home} | ({"nvme_path": folder} if home == "nvme" else {})
            if bf16:
                config["bf16"] = {"enabled": True}
            found[f"stage {stage}, {name}"] = config
    return found


def _over(row: Row, floor: float) -> float:
    return statistics.median(row.seconds) / floor
