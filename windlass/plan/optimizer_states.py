"""Names and bytes of the states of a configuration's optimizer, computed without the model's parameters."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn

from windlass.config import Config
from windlass.optim.elementwise_optimizers import measure_state_bytes, probe_state
from windlass.optim.optimizer_factory import build_optimizer
from windlass.optim.update_registry import find_registered_update
from windlass.zero.update.update_class import update_class

ASSUMED_STATE_BYTES = 8  # bytes for each element if the states are unknown: two float32 moments
_FIRST_SIZE = 8  # a probe's dimensions have sizes from 8 on, all different, so that a size identifies its dimension


class _BaseShape:
    """Base shape of muP for a probe: no dimension scales with the width, and states do not depend on it."""

    def ninf(self) -> int:
        """Return the number of scaling dimensions."""
        return 0


class OptimizerStates:
    """Bytes of the states that a configuration's optimizer has for a parameter or a number of elements.

    Args:
        dtype: Dtype of the states.
        shards_states: States are sharded over the data-parallel ranks.

    Attributes:
        name: Class of the optimizer; empty if the configuration has none.
        options: Hyper-parameters of the optimizer.
        orthogonalizes: The optimizer distinguishes hidden matrices from other parameters, as Muon does.
        steps_whole: The optimizer steps whole parameters, and a state may have another shape than its parameter.
        separates_masters: Parameters never serve as master weights.
        reduces_itself: The optimizer takes the local gradients of each rank, in some or all of its steps.
        rank_keys: Names of the per-rank states, which are in float32 and not sharded with the other states.
        bytes_per_element: Bytes of the sharded states of an element; for an optimizer that steps whole parameters, the
            bytes that the engine assumes when it chooses tiers.
        are_assumed: The states are unknown, and `bytes_per_element` is an assumption.
    """

    def __init__(self, config: Config, dtype: torch.dtype, *, shards_states: bool) -> None:
        self._dtype = dtype
        self.name, self.rank_keys, self.options = "", tuple[str, ...](), dict[str, Any]()
        self.bytes_per_element, self.are_assumed = ASSUMED_STATE_BYTES, True
        self.orthogonalizes = self.steps_whole = self.separates_masters = self.reduces_itself = False
        if config.optimizer is None:
            return
        matrix = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
        setattr(matrix, "infshape", _BaseShape())  # noqa: B010
        self._optimizer = build_optimizer(config.optimizer.type, dict(config.optimizer.params), [matrix])
        self.options = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        self._kind = update_class(self._optimizer, shards_states)
        self.name, self.are_assumed = (
            type(self._optimizer).__name__,
            find_registered_update(self._optimizer) is not None,
        )
        self.orthogonalizes = "use_muon" in self._optimizer.param_groups[0]
        self.separates_masters = self._kind.separates_masters(shards_states)
        self.reduces_itself = self._kind.reduces_itself
        self.rank_keys = self._kind.rank_state_keys(self._optimizer, shards_states)
        self._keys = self._kind.element_state_keys()
        self.steps_whole = self._kind.needs_whole_parameters and not self.are_assumed
        if self._keys is not None:
            self.bytes_per_element = len(self._keys) * dtype.itemsize
        elif not self._kind.steps_whole_units:
            self.bytes_per_element = measure_state_bytes(self._optimizer, dtype)

    def of_piece(self, numel: int) -> list[int]:
        """Return the bytes of each state of `numel` elements of a parameter."""
        wide, narrow = divmod(self.bytes_per_element, self._dtype.itemsize)  # narrow: bytes of 8-bit states
        return [numel * self._dtype.itemsize] * wide + ([numel * narrow] if narrow else [])

    def of_parameter(self, shape: torch.Size, *, hidden: bool) -> list[int]:
        """Return the bytes of each state of a parameter, for an optimizer that steps whole parameters.

        Args:
            hidden: The parameter is a hidden matrix, which Muon orthogonalizes.
        """
        if self._keys is not None:
            return [shape.numel() * self._dtype.itemsize] * len(self._keys)
        shape = shape or torch.Size([1])
        sizes = {_FIRST_SIZE + index: size for index, size in enumerate(shape)}
        return [
            math.prod(sizes.get(size, size) for size in state) * itemsize
            for state, itemsize in self._probed(len(shape), hidden=hidden)
        ]

    @cache  # noqa: B019 - a plan's states live as long as the plan
    def _probed(self, dims: int, *, hidden: bool) -> list[tuple[torch.Size, int]]:
        """Return the shape and the bytes per element of each state of a parameter of `dims` dimensions."""
        group: dict[str, Any] = self._optimizer.param_groups[0]
        if self.orthogonalizes:
            group = {**group, "use_muon": hidden}
        values = torch.zeros(tuple(range(_FIRST_SIZE, _FIRST_SIZE + dims)), dtype=self._dtype)
        states = probe_state(self._optimizer, group, values).values()
        return [(one.shape, one.element_size()) for one in states if isinstance(one, torch.Tensor) and one.dim()]
