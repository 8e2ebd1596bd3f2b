"""Where what is the same on all ranks goes into layers that are cut."""

from __future__ import annotations

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import all_gather, copy_to_parallel_region
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.local_rng import LocalRng


class ChainInputHook:
    """The common beginning of a chain's columns.

    Queries, keys and values are made of the same hidden states. If each of their layers let gradients in by itself,
    three all-reduces would follow in backward; so the first one that is called enters, and the others take what it
    entered, as long as they are given the same tensor.

    Attributes:
        sizes: tokens of each rank along the dim -2 of what was gathered last, where activations are cut along the
            sequence.
        draws: the chain's own random numbers, or None where nothing draws.
    """

    def __init__(self, axis: MeshAxis, local_rng: LocalRng | None = None) -> None:
        self.axis, self.local_rng = axis, local_rng
        self.gathered_sizes: list[int] | None = None
        self._last_input: tuple[torch.Tensor, int, bool] | None = None
        self._cached_output: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        """Enter, or what was entered before of the same tensor.

        Args:
            sizes: of each rank's part along the dim -2, if `tensor` is only this rank's: parts are gathered.
        """
        if self._is_cached(tensor) and self._cached_output is not None:
            return self._cached_output
        entered = (
            copy_to_parallel_region(tensor, self.axis)
            if sizes is None
            else as_contiguous_non_view(all_gather(tensor, self.axis, -2, sizes))
        )
        self.gathered_sizes = sizes
        self._last_input = tensor, _tensor_version(tensor), torch.is_grad_enabled()
        self._cached_output = entered
        return entered

    def end_chain(self) -> None:
        """The chain ends: forget what was entered, which may be large."""
        self._last_input = self._cached_output = None
        if self.local_rng is not None:
            self.local_rng.end()

    def _is_cached(self, tensor: torch.Tensor) -> bool:
        if self._last_input is None:
            return False
        seen, version, grad = self._last_input
        return seen is tensor and version == _tensor_version(tensor) and grad == torch.is_grad_enabled()


def _tensor_version(tensor: torch.Tensor) -> int:
    """How often it was changed in place; under `torch.inference_mode` nobody counts."""
    return 0 if tensor.is_inference() else tensor._version
