"""Fake remote memory for activations.

Every tensor is accepted. The source of a copy may be overwritten once the copy is made.
"""

from __future__ import annotations

import torch

from windlass.parallel.activation_store import ActivationTier


class Arrival:
    """Copy from the remote memory. Its `value` is valid only after `wait`."""

    def __init__(self, place: FarPlace, stored: torch.Tensor) -> None:
        self._place, self._stored = place, stored
        self.value = torch.full_like(stored, -77)
        place.fetched.append(stored.numel())

    def poll(self) -> bool:
        return False

    def wait(self) -> None:
        self.value.copy_(self._stored)


class Far:
    """Copy to the remote memory: made at once, or with `late` by the first `wait` or `fetch`."""

    def __init__(self, place: FarPlace, flat: torch.Tensor) -> None:
        self._place, self._source, self._stored = place, flat, None
        if not place.late:
            self.wait()

    @property
    def is_source_free(self) -> bool:
        return self._source is None

    def poll(self) -> bool:
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            self._stored, self._source = self._source.clone(), None

    def fetch(self) -> Arrival:
        self.wait()
        assert self._stored is not None
        return Arrival(self._place, self._stored)


class FarPlace:
    """Fake remote memory. With `late`, copies to it are in flight until a caller waits for them."""

    tier: ActivationTier = "cpu"
    is_collective = False

    def __init__(self, *, late: bool = False, under_way: int = 2) -> None:
        self.late, self.max_in_flight = late, under_way
        self.put_there: list[int] = []  # number of elements of each tensor, in the order of the calls to `put`
        self.fetched: list[int] = []

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        return

    def accepts(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> Far:
        self.put_there.append(flat.numel())
        return Far(self, flat)
