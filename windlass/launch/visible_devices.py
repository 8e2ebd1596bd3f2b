"""Devices available to this process: by CUDA_VISIBLE_DEVICES, by Slurm, or all devices of the machine."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping, Sequence

from windlass.base.bounded_input import parse_int
from windlass.base.text import one_line
from windlass.launch.launch_errors import LaunchError

_MAX_NUMBER = 65_536
"""Upper bound on core numbers and local ranks in a list."""

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SLURM_VARIABLES = ("GPU_DEVICE_ORDINAL", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidia-caps/*", "/dev/kfd", "/dev/dxg")


def available_devices(environ: Mapping[str, str], count: int) -> list[str]:
    """Return the devices that ranks may use, as names for CUDA_VISIBLE_DEVICES.

    Args:
        environ: environment of the ranks. CUDA_VISIBLE_DEVICES has priority over Slurm's own variables. Slurm
            numbers all devices of the machine; if only the job's own devices are visible, they are numbered from 0.
        count: number of devices visible to a process with this environment, without devices that CUDA_VISIBLE_DEVICES
            hides; 0 on a machine without GPUs, where the result is always empty.
    """
    if count == 0:
        return []
    if VISIBLE_DEVICES_VARIABLE in environ:
        names = [name.strip() for name in environ[VISIBLE_DEVICES_VARIABLE].split(",")]
        ends = next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))
        return names[: min(ends, count)]  # as the driver reads it: the first invalid entry ends the list
    for variable in _SLURM_VARIABLES:
        if environ.get(variable):
            numbers = parse_numbers(environ[variable], variable)
            return [str(number) for number in (numbers if len(numbers) < count else range(len(numbers)))][:count]
    return [str(number) for number in range(count)]


def slurm_device_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES from Slurm's own variables if it is not set, so that ranks use no other devices."""
    if VISIBLE_DEVICES_VARIABLE in environ or not any(environ.get(variable) for variable in _SLURM_VARIABLES):
        return {}
    given = available_devices(environ, count_devices())
    return {VISIBLE_DEVICES_VARIABLE: ",".join(given)} if given else {}


def count_devices() -> int:
    """Return the number of GPUs visible to this process. torch is imported only if the machine has GPU device files."""
    if "torch" not in sys.modules and not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def select_devices(slots: Sequence[int | str], available: Sequence[str], host: str) -> list[str] | None:
    """Return the device of each slot: a number is an index into the available devices, a name is one of them.

    Returns:
        None if there are no GPUs; ranks are then CPU processes.

    Raises:
        LaunchError: no device is available for a slot.
    """
    if not available:
        return None
    found = []
    for slot in slots:
        if isinstance(slot, str) and slot in available:
            found.append(slot)
        elif isinstance(slot, int) and 0 <= slot < len(available):
            found.append(available[slot])
        else:
            raise LaunchError(
                f"device {slot} is requested on {host}, which has {','.join(available)} ({len(available)} in all); "
                f"request fewer, or set {VISIBLE_DEVICES_VARIABLE}"
            )
    return found


def parse_numbers(text: str, source: str) -> list[int]:
    """Parse `1,3-5,7` as [1, 3, 4, 5, 7].

    Raises:
        LaunchError: the text contains anything but numbers and ranges below 65,536.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin, end = parse_int(first), parse_int(last or first)
        if begin is None or end is None or begin < 0 or (dash and not last) or not begin <= end < _MAX_NUMBER:
            raise LaunchError(
                f"{source} is {one_line(text, 200)!r}, and {one_line(part, 60)!r} is neither a number nor a range "
                f"below {_MAX_NUMBER:,}; write 1,3-5,7"
            )
        found.extend(range(begin, end + 1))
    return found
