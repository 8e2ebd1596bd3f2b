"""Input hook that several sharded layers share: it copies or all-gathers their common input once."""

from __future__ import annotations

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import all_gather, copy_to_parallel_region
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.local_rng import LocalRng


class ChainInputHook:
    """Hook that provides the common input of a chain's column layers (`DependencyChain`).

    Queries, keys and values are computed from the same hidden states. A separate `copy_to_parallel_region` in each
    layer would cost three all-reduces in backward. The first layer called therefore applies it, and the other layers
    reuse the result if they receive the same tensor.

    Attributes:
        gathered_sizes: numbers of tokens of the ranks along dim -2 in the last all-gather, if activations are sharded
            along the sequence.
        local_rng: random generator of the chain, or None if the model has no dropout.
    """

    def __init__(self, axis: MeshAxis, local_rng: LocalRng | None = None) -> None:
        self.axis, self.local_rng = axis, local_rng
        self.gathered_sizes: list[int] | None = None
        self._last_input: tuple[torch.Tensor, int, bool] | None = None
        self._cached_output: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        """Copy the tensor to the parallel region, or return the cached result for the same tensor.

        Args:
            sizes: sizes of the ranks' parts along dim -2, if `tensor` is only this rank's part: the parts are
                all-gathered.
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
        """End the chain: release the cached tensors, which may be large."""
        self._last_input = self._cached_output = None
        if self.local_rng is not None:
            self.local_rng.end()

    def _is_cached(self, tensor: torch.Tensor) -> bool:
        if self._last_input is None:
            return False
        seen, version, grad = self._last_input
        return seen is tensor and version == _tensor_version(tensor) and grad == torch.is_grad_enabled()


def _tensor_version(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version
