"""Validation of checkpoint values against the values they replace, before anything is overwritten."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.torch_state_dicts import UNRESTORED_KEYS
from windlass.engine.optimizer_groups import GroupMatch, GroupMetadata
from windlass.optim.cpu_lamb import CPULamb
from windlass.optim.elementwise_optimizers import SCALAR_STATES, get_step_class, is_elementwise, probe_state
from windlass.optim.lamb import Lamb
from windlass.optim.muon import Muon

_LARGEST = 1 << 63
_STATE_OPTIONS = ("amsgrad", "centered", "momentum")  # hyper-parameters that decide which states a step needs
_WHOLE_WITH_KNOWN_STATES = (CPULamb, Lamb, Muon, torch.optim.Muon)


def require_compatible(saved: Any, current: Any, where: str) -> None:
    """Check that a saved value can replace the current one: both are numbers, both texts, both lists, both mappings, or
    both tensors of one shape.

    Raises:
        CheckpointError: the kinds or shapes differ, or a saved number is NaN, or is infinite where an integer is
            needed.
    """
    if saved is current or current is None:
        return
    if isinstance(current, torch.Tensor):
        fits = isinstance(saved, torch.Tensor) and saved.shape == current.shape
        fits = fits or (current.numel() == 1 and _is_number(saved))
    elif isinstance(current, bool):
        fits = isinstance(saved, bool)
    elif isinstance(current, (int, float)):
        one = isinstance(saved, torch.Tensor) and saved.numel() == 1
        fits = one or (_is_number(saved) and (math.isfinite(saved) or isinstance(current, float) and saved == saved))
    elif isinstance(current, (list, tuple)):
        fits = isinstance(saved, (list, tuple))
        for number, item in enumerate(saved if fits and current else ()):
            like = current[number if number < len(current) else 0]  # items may be of several kinds
            require_compatible(item, like, f"{where}[{number}]")
    elif isinstance(current, Mapping):
        fits = isinstance(saved, Mapping)
        for key in saved if fits else ():
            if key in current:
                require_compatible(saved[key], current[key], f"{where}[{key!r}]")
    else:
        fits = not isinstance(current, str) or saved is None or isinstance(saved, str)
    if not fits:
        raise CheckpointError(
            f"{where} is {saved!r:.100} in the checkpoint, which cannot replace {current!r:.100}; nothing was loaded. "
            "Load another checkpoint"
        )


def check_saved_groups(optimizer: torch.optim.Optimizer, match: GroupMatch, saved: GroupMetadata) -> None:
    """Check the hyper-parameters that `load_hyperparameters` will load.

    Raises:
        CheckpointError: a saved value has another type than the current one.
    """
    for number, (group, source) in enumerate(zip(optimizer.param_groups, match.source, strict=True)):
        values = {} if source is None else saved[source]["values"]
        if "params" in values:
            raise CheckpointError("the hyper-parameters of the checkpoint have the key 'params'; load another one")
        for key, value in values.items():
            if key in group and key not in UNRESTORED_KEYS:
                require_compatible(value, group[key], f"the hyper-parameter {key!r} of optimizer group {number}")


def find_unfit_states(
    optimizer: torch.optim.Optimizer,
    match: GroupMatch,
    current: GroupMetadata,
    saved: GroupMetadata,
    states: Mapping[str, Mapping[str, str]],
) -> dict[str, str]:
    """Find parameters whose saved states lack a state that a step needs, because another optimizer saved them.

    Only optimizer classes whose states can be determined before a step are checked.

    Args:
        current: `group_metadata` of the optimizer.
        saved: `group_metadata` in the checkpoint.
        states: names and kinds of the saved states, by parameter.

    Returns:
        `{name of the parameter: description of the missing states}`.
    """
    found: dict[str, str] = {}
    if not (is_elementwise(optimizer) or get_step_class(optimizer) in _WHOLE_WITH_KNOWN_STATES):
        return found
    for number, (group, source) in enumerate(zip(optimizer.param_groups, match.source, strict=True)):
        loaded = {} if source is None else saved[source]["values"]
        options = {**group, **{key: loaded[key] for key in _STATE_OPTIONS if key in loaded and key in group}}
        needed: dict[int, set[str]] = {}  # names of the states that a step needs, by the dimensions of a parameter
        for name, parameter in zip(current[number]["parameters"], group["params"], strict=True):
            if not (given := states.get(name)):
                continue
            dims = 1 if is_elementwise(optimizer) else parameter.dim()
            if dims not in needed:
                probed = probe_state(optimizer, {**options, "lr": float(group["lr"])}, torch.zeros((2,) * dims))
                needed[dims] = set(probed) - SCALAR_STATES - {f"{key}_scale" for key in probed}
            if missing := needed[dims] - set(given):
                found[name] = (
                    f"the checkpoint has the states {', '.join(sorted(given))} of {name!r}, and "
                    f"{type(optimizer).__name__} needs {', '.join(sorted(missing))}"
                )
    return found


def check_scalar_states(values: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the optimizer's step counts that are plain numbers. Raises CheckpointError if one is not a valid count."""
    for name, found in values.items():
        for key, value in found.items():
            if key in SCALAR_STATES and isinstance(value, (bool, int, float)):
                require_compatible(value, 0, f"the state {key!r} of {name!r}")
                if key == "step" and not 0 <= value < _LARGEST:
                    raise CheckpointError(
                        f"the state 'step' of {name!r} is {value!r:.60} in the checkpoint, which is not a step count; "
                        "load another checkpoint, or load with load_optimizer_states=False"
                    )
            elif key in SCALAR_STATES and not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"the state {key!r} of {name!r} is {value!r:.60} in the checkpoint, which is not a number; load "
                    "another checkpoint, or load with load_optimizer_states=False"
                )


def check_counts(counts: Mapping[str, torch.Tensor]) -> None:
    """Check the optimizer's step counts that are tensors of shape `[]`, by their names in the checkpoint.

    Raises:
        CheckpointError: a count is not finite or out of range. Every later step would use it.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in counts.items():
        if name.rpartition("/")[2] in SCALAR_STATES:
            by_device.setdefault(value.device, {})[name] = value
    for found in by_device.values():
        # read all counts from the device at once: a model may have a count per parameter
        numbers = torch.stack([value.detach().double() for value in found.values()]).tolist()
        for name, number in zip(found, numbers, strict=True):
            if not math.isfinite(number) or (name.endswith("/step") and not 0 <= number < _LARGEST):
                raise CheckpointError(
                    f"the state {name!r} is {number!r:.60} in the checkpoint, which is not a step count; nothing "
                    "was loaded. Load another checkpoint, or load with load_optimizer_states=False"
                )


def check_lr_scheduler_state(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Check the state of the learning rate scheduler. Raises CheckpointError if it cannot be loaded."""
    if schedule is None or not hasattr(schedule, "state_dict"):
        return
    now = schedule.state_dict()
    for key, value in saved.items():
        if key in now:
            require_compatible(value, now[key], f"{key!r} of the schedule")
        elif not isinstance(key, str) or callable(getattr(type(schedule), key, None)):
            raise CheckpointError(
                f"the schedule of the checkpoint has {key!r:.60}, which is not part of its state; load another "
                "checkpoint"
            )
    if "last_batch_iteration" in now and "last_batch_iteration" not in saved:
        raise CheckpointError(
            "the schedule of the checkpoint has no 'last_batch_iteration'; it is of another class. Build the same "
            "schedule, or load with load_lr_scheduler_states=False"
        )


def check_saved_position(loader: Any, saved: Mapping[str, Any] | None) -> None:
    """Check the data position of a loader. Raises CheckpointError if it is invalid."""
    if saved is None or not hasattr(loader, "state_dict"):
        return
    for key, value in loader.state_dict().items():
        if key not in saved:
            raise CheckpointError(f"the data position of the checkpoint has no {key!r}; load another checkpoint")
        require_compatible(saved[key], value, f"{key!r} of the data position")
        if isinstance(value, int) and not 0 <= saved[key] < _LARGEST:
            raise CheckpointError(
                f"{key!r} of the data position is {saved[key]!r:.60} in the checkpoint, which is not a count; load "
                "another checkpoint, or load with load_data_position=False"
            )


def check_rng_state(state: Any) -> None:
    """Set the random states in temporary generators. Raises CheckpointError if that fails."""
    try:
        torch.Generator().set_state(state["torch"])
        version, numbers, gauss = state["python"]
        random.Random().setstate((version, tuple(numbers), gauss))
        for name, one in state.get("named", {}).items():
            if not isinstance(name, str) or not isinstance(one, torch.Tensor):
                raise TypeError("a named generator without a state")
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            kind, words, place, has_gauss, cached = state["numpy"]
            given = (kind, words.numpy().astype("uint32"), place, has_gauss, cached)
            numpy.random.RandomState().set_state(given)
        if "cuda" in state and not isinstance(state["cuda"], torch.Tensor):
            raise TypeError("the device's generator has no state")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the random states of the checkpoint cannot be set ({type(error).__name__}: {error!s:.200}); load another "
            "checkpoint"
        ) from error


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -_LARGEST < value < _LARGEST
        or (isinstance(value, float))
    )
