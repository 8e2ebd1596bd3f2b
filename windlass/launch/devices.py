"""The devices that this process was given: by CUDA_VISIBLE_DEVICES, by Slurm, or all that the machine has."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping, Sequence

from windlass.base.limits import whole_number
from windlass.base.text import one_line
from windlass.launch.errors import LaunchError

_MOST_NUMBERED = 65_536
"""Cores or local ranks that a list may name."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_SLURM = ("GPU_DEVICE_ORDINAL", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidia-caps/*", "/dev/kfd", "/dev/dxg")


def devices_given(environ: Mapping[str, str], count: int) -> list[str]:
    """The devices that ranks may use, by the names that CUDA_VISIBLE_DEVICES takes.

    Args:
        environ: CUDA_VISIBLE_DEVICES goes first. Slurm's own variables count where that is not set: its numbers are
            those of the machine, unless Slurm shows the job no other devices, which are then numbered anew.
        count: how many devices a process of this environment sees (those that CUDA_VISIBLE_DEVICES hides left out);
            0 on a machine without GPUs, where no variable gives any.
    """
    if count == 0:
        return []
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        ends = next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))
        return names[: min(ends, count)]  # as the driver reads it: the first that is none ends the list
    for variable in _OF_SLURM:
        if environ.get(variable):
            numbers = parse_numbers(environ[variable], variable)
            return [str(number) for number in (numbers if len(numbers) < count else range(len(numbers)))][:count]
    return [str(number) for number in range(count)]


def devices_of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set where Slurm gives devices by its own variables alone, so that ranks see no others."""
    if VISIBLE in environ or not any(environ.get(variable) for variable in _OF_SLURM):
        return {}
    given = devices_given(environ, count_devices())
    return {VISIBLE: ",".join(given)} if given else {}


def count_devices() -> int:
    """How many GPUs this process sees; torch is asked only where the machine has any."""
    if "torch" not in sys.modules and not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def chosen(slots: Sequence[int | str], given: Sequence[str], where: str) -> list[str] | None:
    """The devices of these slots: a number counts through the devices given, a name is one of them.

    Returns:
        None where there are no GPUs: ranks are then CPU processes.

    Raises:
        LaunchError: a slot for which no device is given.
    """
    if not given:
        return None
    found = []
    for slot in slots:
        if isinstance(slot, str) and slot in given:
            found.append(slot)
        elif isinstance(slot, int) and 0 <= slot < len(given):
            found.append(given[slot])
        else:
            raise LaunchError(
                f"device {slot} is asked for on {where}, which gives {','.join(given)} ({len(given)} in all); "
                f"ask for fewer, or set {VISIBLE}"
            )
    return found


def parse_numbers(text: str, source: str) -> list[int]:
    """`1,3-5,7` as [1, 3, 4, 5, 7].

    Raises:
        LaunchError: something else than numbers and ranges.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin, end = whole_number(first), whole_number(last or first)
        if begin is None or end is None or begin < 0 or (dash and not last) or not begin <= end < _MOST_NUMBERED:
            raise LaunchError(
                f"{source} is {one_line(text, 200)!r}, and {one_line(part, 60)!r} is neither a number nor a range "
                f"below {_MOST_NUMBERED:,}; write 1,3-5,7"
            )
        found.extend(range(begin, end + 1))
    return found
