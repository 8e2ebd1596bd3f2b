"""Named states of the random number generator, for layers whose ranks draw different numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from windlass.base.errors import ModelError


class RngTracker:
    """Generators by name, beside the one that everybody uses.

    A tensor-parallel layer drops different elements on each rank, while what is replicated must drop the same: the
    first draws inside `with tracker.fork():`, the second outside. States are those of the current CUDA device, or of
    the CPU where there is none.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all names."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The state under each name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take these states instead of all there are."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a generator from a seed.

        Raises:
            ModelError: the name or the seed is there already; equal seeds draw equal numbers.
        """
        if name in self._states or seed in self._seeds:
            known = f"name {name!r}" if name in self._states else f"seed {seed}"
            raise ModelError(f"a random generator with {known} is there already; take another, or reset() first")
        before = _get_rng_state()
        torch.manual_seed(seed) if not torch.cuda.is_available() else torch.cuda.manual_seed(seed)
        self._states[name] = _get_rng_state()
        self._seeds.add(seed)
        _set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the generator `name` inside.

        Raises:
            ModelError: there is no such name.
        """
        if name not in self._states:
            raise ModelError(
                f"no random generator is called {name!r}; there are {sorted(self._states)}; add() it first"
            )
        before = _get_rng_state()
        _set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_rng_state()
            _set_rng_state(before)

    @contextmanager
    def restored_states(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Go back to these states inside, and on from where it was after."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


rng_tracker = RngTracker()
"""The one that `windlass.checkpointing.checkpoint` winds back for a recomputation."""


def _get_rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
