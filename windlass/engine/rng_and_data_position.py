"""Random states and data position of a run, which a checkpoint stores besides tensors and counters."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from windlass.base.errors import CheckpointError, DataError
from windlass.data.resumable_loaders import CyclingLoader, EpochLoader, SequenceLoader
from windlass.parallel.rng_tracker import rng_tracker

_RESUMABLE = (EpochLoader, SequenceLoader, CyclingLoader)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's random generators: torch, Python, numpy if imported, the GPU, `rng_tracker`."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "named": rng_tracker.get_states(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, place, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = [kind, torch.from_numpy(words.astype("int64")), int(place), int(has_gauss), float(cached)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the generators from a result of `rng_state`. Generators that are missing in `state` are unchanged."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "named" in state:
        rng_tracker.set_states(state["named"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, words, place, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), place, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def data_position(loader: Any) -> dict[str, Any] | None:
    """Return the position of a data loader, the same for all ranks; None if the loader cannot be resumed."""
    return (loader.state_dict() or None) if isinstance(loader, _RESUMABLE) else None


def step_start_position(loader: Any) -> dict[str, Any] | None:
    """Return `data_position` of a loader of windlass, for the start of a step.

    None for other loaders, also if a `CyclingLoader` wraps them: their state may be large, and this runs in every step.
    """
    own = loader.loader if isinstance(loader, CyclingLoader) else loader
    return data_position(loader) if isinstance(own, _RESUMABLE) else None


def position_in_step(start: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the data position from which a resumed run repeats a step that has begun.

    This is `start`, or the beginning of the new epoch if the script has begun one since then: from `start`, the first
    loop over the loader in the resumed script would only complete the previous epoch.

    Args:
        start: `step_start_position` at the end of the previous step. None: unknown, so that `now` is returned.
        now: `data_position` during the step.
    """
    if start is None or now is None:
        return now
    has_begun = "epoch" in now and (now["epoch"] != start["epoch"] or now["consumed"] < start["consumed"])
    return {**now, "consumed": 0} if has_begun else start


def check_data_position(loader: Any, state: dict[str, Any] | None) -> None:
    """Raise CheckpointError if the loader cannot resume from a `data_position`."""
    if state is None or not isinstance(loader, _RESUMABLE):
        return
    try:
        loader.check(state)
    except DataError as error:
        raise CheckpointError(f"{error}; or begin at the first sample: load_data_position=False") from error


def set_data_position(loader: Any, state: dict[str, Any] | None) -> str:
    """Resume from a `data_position`, after `check_data_position`.

    Return a description of the position, or an empty text if nothing is resumed.
    """
    if state is None or not isinstance(loader, _RESUMABLE):
        return ""
    loader.load_state_dict(state)
    return ", ".join(f"{key} {state[key]}" for key in ("epoch", "consumed") if key in state)
