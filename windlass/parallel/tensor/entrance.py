"""Where what is the same on all ranks goes into layers that are cut."""

from __future__ import annotations

import torch

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import enter, gather
from windlass.parallel.tensor.draws import Draws
from windlass.parallel.tensor.owned import owned


class Entrance:
    """The common beginning of a chain's columns.

    Queries, keys and values are made of the same hidden states. If each of their layers let gradients in by itself,
    three all-reduces would follow in backward; so the first one that is called enters, and the others take what it
    entered, as long as they are given the same tensor.

    Attributes:
        sizes: tokens of each rank along the dim -2 of what was gathered last, where activations are cut along the
            sequence.
        draws: the chain's own random numbers, or None where nothing draws.
    """

    def __init__(self, axis: Axis, draws: Draws | None = None) -> None:
        self.axis, self.draws = axis, draws
        self.sizes: list[int] | None = None
        self._seen: tuple[torch.Tensor, int, bool] | None = None
        self._entered: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        """Enter, or what was entered before of the same tensor.

        Args:
            sizes: of each rank's part along the dim -2, if `tensor` is only this rank's: parts are gathered.
        """
        if self._knows(tensor) and self._entered is not None:
            return self._entered
        entered = enter(tensor, self.axis) if sizes is None else owned(gather(tensor, self.axis, -2, sizes))
        self.sizes = sizes
        self._seen = tensor, _version(tensor), torch.is_grad_enabled()
        self._entered = entered
        return entered

    def leave(self) -> None:
        """The chain ends: forget what was entered, which may be large."""
        self._seen = self._entered = None
        if self.draws is not None:
            self.draws.end()

    def _knows(self, tensor: torch.Tensor) -> bool:
        if self._seen is None:
            return False
        seen, version, grad = self._seen
        return seen is tensor and version == _version(tensor) and grad == torch.is_grad_enabled()


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place; under `torch.inference_mode` nobody counts."""
    return 0 if tensor.is_inference() else tensor._version
