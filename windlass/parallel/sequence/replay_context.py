"""Autocast and RNG state of a forward, to recompute it in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ReplayContext:
    """Snapshot of the autocast state and, with `preserve_rng_state`, of the RNG states at its construction."""

    def __init__(self, device: torch.device, *, preserve_rng_state: bool) -> None:
        self._device = device
        self._autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)
        self._rng_states = _get_rng_states(device) if preserve_rng_state else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Restore autocast, with its cache of casts disabled.

        A cached cast of a forward without a graph would disconnect the graph of the next use of the same weight.
        """
        with torch.autocast(self._device.type, enabled=self._autocast, dtype=self._dtype, cache_enabled=False):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Restore autocast and the RNG states; at the end, set the RNG states back to those before the block."""
        before = None
        if self._rng_states is not None:
            before = _get_rng_states(self._device)
            _set_rng_states(self._device, self._rng_states)
        try:
            with self.autocast():
                yield
        finally:
            if before is not None:
                _set_rng_states(self._device, before)


def _get_rng_states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_rng_states(device: torch.device, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
