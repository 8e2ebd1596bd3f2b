"""Named random generator states, for layers whose ranks draw different random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from windlass.base.errors import ModelError

MODEL_PARALLEL_RNG = "model-parallel-rng"
"""Name of the generator whose numbers differ between the ranks of the model-parallel group."""


class RngTracker:
    """Named generator states in addition to torch's default generator.

    Dropout in a tensor-parallel layer must differ between ranks: run it inside `with tracker.fork():`. Dropout of
    replicated activations must be equal on all ranks: run it outside. States are those of the current CUDA device, or
    of the CPU without CUDA.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Remove all generators."""
        self._states.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the state of each generator."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all generators by these states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a generator with a seed.

        Raises:
            ModelError: the name or the seed is already in use. Equal seeds would give equal numbers.
        """
        state = _generator().manual_seed(int(seed)).get_state()
        seeds = {_initial_seed(other) for other in self._states.values()}
        if name in self._states or _initial_seed(state) in seeds:
            known = f"name {name!r}" if name in self._states else f"seed {seed}"
            raise ModelError(f"a random generator with {known} exists already; use another, or reset() first")
        self._states[name] = state

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Use the generator `name` inside this context.

        Raises:
            ModelError: there is no generator of that name.
        """
        if name not in self._states:
            raise ModelError(f"there is no random generator {name!r}, only {sorted(self._states)}; add() it first")
        before = _get_rng_state()
        set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_rng_state()
            set_rng_state(before)

    @contextmanager
    def restored_states(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Use these states inside this context, and restore the current states at its end."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


rng_tracker = RngTracker()
"""Tracker whose states `windlass.checkpointing.checkpoint` restores for a recomputation."""


def _generator() -> torch.Generator:
    return torch.Generator("cuda" if torch.cuda.is_available() else "cpu")


def _initial_seed(state: torch.Tensor) -> int | None:
    """Return the seed of the generator that had this state; None for the state of another kind of device."""
    try:
        return _generator().set_state(state).initial_seed()
    except (RuntimeError, TypeError):
        return None


def _get_rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Set the state of the current CUDA device's generator, or of the CPU's without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
