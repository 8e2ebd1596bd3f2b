"""Sequence sharding of the hidden states between layers.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from windlass.base.backward_callbacks import current_backward_id
from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    scatter_to_parallel_region,
)
from windlass.parallel.hidden_states import get_hidden_states, replace_hidden_states
from windlass.parallel.placement import compute_shard_range
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.input_hooks import ChainInputHook
from windlass.parallel.tensor.local_rng import LocalRng, compute_shared_seed, get_default_generator

_RESIDUAL = "residual"


class StackSequenceSharding:
    """Sequence sharding of one stack of layers.

    [Note: lengths in a recomputation] The first layer receives full sequences. The other layers receive only a part,
    which does not determine the full length: in a forward, they use the sizes that the first layer recorded. A
    recomputation in the backward may belong to an earlier forward of another length, so the ranks all-gather their
    lengths, unless every length so far divided evenly. In a pipeline the first layer may run on other ranks; then the
    ranks always all-gather their lengths.
    """

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis
        self._rank_sizes: list[int] = []  # tokens of each rank in the current forward
        self._num_samples = 0  # samples in the current forward
        # flags: the first layer ran on this rank; it received a length that does not divide evenly
        self._has_first_layer, self._is_uneven = (False, False)

    def shard_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of hidden states `[batch, sequence, features]` that are equal on all ranks."""
        length = hidden.shape[1]
        spans = [compute_shard_range(length, self.axis.size, rank) for rank in range(self.axis.size)]
        self._rank_sizes = [stop - start for start, stop in spans]
        self._num_samples, self._has_first_layer = hidden.shape[0], True
        self._is_uneven |= length % self.axis.size > 0
        return self.local_shard(hidden, self._rank_sizes)

    def rank_sizes(self, part: torch.Tensor) -> list[int]:
        """Return the number of rows of each rank along dim -2, for a tensor shaped like `part`: `[batch, part of the
        sequence, ...]`, or with batch and sequence in one dimension. Collective if the ranks all-gather their lengths.
        """
        own, ranks = part.shape[-2], self.axis.size
        if not self._has_first_layer or (self._is_uneven and current_backward_id() != -1):
            found: list[int] = self.axis.all_gather(torch.tensor([own], device=part.device)).tolist()
            return found
        if not self._is_uneven:
            return [own] * ranks
        return self._rank_sizes if part.dim() > 2 else [size * self._num_samples for size in self._rank_sizes]

    def gather(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """All-gather the parts `[batch, part of the sequence, ...]`. The result is equal on every rank."""
        return as_contiguous_non_view(gather_from_parallel_region(part, self.axis, 1, sizes))

    def local_shard(self, full: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Return this rank's part of a replicated `[batch, sequence, ...]` or `[batch x sequence, features]`."""
        if full.dim() < 3:
            return self.local_shard(full.unflatten(0, (-1, sum(sizes))), sizes).flatten(0, 1)
        return as_contiguous_non_view(scatter_to_parallel_region(full, self.axis, 1, sizes))


class StackInputHook:
    """Pre-forward hook of a layer in the stack: switch to rank-specific random numbers in training. The first layer's
    hook shards the hidden states.
    """

    def __init__(self, sequence_sharding: StackSequenceSharding, is_first: bool, local_rng: LocalRng | None) -> None:
        self._sequence_sharding, self._is_first, self._local_rng = sequence_sharding, is_first, local_rng

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = get_hidden_states(args, kwargs)
        if self._local_rng is not None and module.training:
            self._local_rng.begin(hidden.device)
        return (
            replace_hidden_states(args, kwargs, self._sequence_sharding.shard_input(hidden))
            if self._is_first
            else (args, kwargs)
        )


class StackOutputHook:
    """Forward hook of the last layer of the stack: all-gather the hidden states."""

    def __init__(self, sequence_sharding: StackSequenceSharding) -> None:
        self._sequence_sharding = sequence_sharding

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return map_first_output(
            output, lambda part: self._sequence_sharding.gather(part, self._sequence_sharding.rank_sizes(part))
        )


class AttentionGatherHook:
    """Pre-forward hook of attention: all-gather the hidden states once for all of its column-parallel layers.

    Other hidden states, of an encoder, are full on every rank. They pass through `copy_to_parallel_region`, because the
    heads of each rank compute only a part of their gradient. An argument `residual` is a part of the sequence that is
    added to the output (BLOOM).

    Args:
        input_widths: numbers of input features of the column-parallel layers.
    """

    def __init__(
        self, input_hook: ChainInputHook, sequence_sharding: StackSequenceSharding, input_widths: Collection[int]
    ) -> None:
        self._input_hook, self._sequence_sharding, self._input_widths = input_hook, sequence_sharding, input_widths
        self._names: list[str] | None = None  # names of the parameters of the forward

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = get_hidden_states(args, kwargs)
        gathered = self._input_hook(hidden, self._sequence_sharding.rank_sizes(hidden))
        entered: dict[int, torch.Tensor] = {id(hidden): gathered}

        def enter(name: str, value: Any) -> Any:
            if value is not hidden and (
                not isinstance(value, torch.Tensor)
                or not value.requires_grad
                or value.dim() != 3
                or value.shape[-1] not in self._input_widths
            ):
                return value
            if name == _RESIDUAL:
                return value
            if id(value) not in entered:
                entered[id(value)] = copy_to_parallel_region(value, self._input_hook.axis)
            return entered[id(value)]

        if self._names is None:
            self._names = list(inspect.signature(module.forward).parameters)
        names = self._names + [""] * (len(args) - len(self._names))  # *args
        return (
            tuple(enter(name, one) for name, one in zip(names, args, strict=False)),
            {name: enter(name, one) for name, one in kwargs.items()},
        )


class WholeCallHooks:
    """Hooks of a layer that is an `nn.Sequential`: refuse calls of its modules one by one, which skip the hooks of the
    layer.

    Args:
        name: name of the layer.
    """

    def __init__(self, layer: nn.Sequential, name: str) -> None:
        self._name, self._depth = name, 0
        layer.register_forward_pre_hook(self._begin, prepend=True)
        layer.register_forward_hook(self._end, always_call=True)
        for child in layer.children():
            child.register_forward_pre_hook(self._check, prepend=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def _check(self, module: nn.Module, args: Any) -> None:
        if not self._depth:
            raise ModelError(
                f"tp_sequence_norms shards the sequence around {self._name}, whose modules are called one by one; call "
                f"{self._name} itself, or leave out tp_sequence_norms"
            )


class FullSequenceHook:
    """Hooks around a module that needs full sequences and computes the same on all ranks: all-gather its input, and
    return only this rank's part of its output. In training, its random numbers are equal on all ranks.

    Args:
        salt: a number unique to the module if it may draw random numbers, else None.
    """

    def __init__(self, sequence_sharding: StackSequenceSharding, salt: int | None) -> None:
        self._sequence_sharding, self._salt = sequence_sharding, salt
        self._rank_sizes: list[int] = []
        self._saved_rng_state: tuple[torch.Generator, torch.Tensor] | None = None

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part = get_hidden_states(args, kwargs)
        self._rank_sizes = self._sequence_sharding.rank_sizes(part)
        self._saved_rng_state = None
        if self._salt is not None and module.training:
            generator = get_default_generator(part.device)
            self._saved_rng_state = generator, generator.get_state()
            generator.manual_seed(compute_shared_seed(self._sequence_sharding.axis, part.device, self._salt))
        return replace_hidden_states(args, kwargs, self._sequence_sharding.gather(part, self._rank_sizes))

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._saved_rng_state is not None:
            self._saved_rng_state[0].set_state(self._saved_rng_state[1])
            self._saved_rng_state = None
        return map_first_output(output, lambda whole: self._sequence_sharding.local_shard(whole, self._rank_sizes))


class LocalRngEndHook:
    """Forward hook that restores the shared random numbers. Register it with `always_call`, for exceptions."""

    def __init__(self, local_rng: LocalRng) -> None:
        self._local_rng = local_rng

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._local_rng.end()


def map_first_output(output: Any, function: Any) -> Any:
    """Apply `function` to a module's output tensor, or to the first element of an output tuple."""
    if isinstance(output, torch.Tensor):
        return function(output)
    return type(output)((function(output[0]), *output[1:]))
