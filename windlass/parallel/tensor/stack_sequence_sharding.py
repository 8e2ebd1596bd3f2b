"""Sequence sharding of the hidden states between layers.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from windlass.base.backward_callbacks import current_backward_id
from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import (
    all_gather,
    copy_to_parallel_region,
    gather_from_parallel_region,
    scatter_to_parallel_region,
)
from windlass.parallel.hidden_states import get_hidden_states, replace_hidden_states
from windlass.parallel.placement import compute_shard_range, get_placement, has_placement
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.input_hooks import ChainInputHook
from windlass.parallel.tensor.local_rng import LocalRng, compute_shared_seed, get_default_generator

_RESIDUAL = "residual"
_SAMPLES = 64  # values of an argument that the ranks compare


class StackSequenceSharding:
    """Sequence sharding of one stack of layers.

    [Note: lengths in a recomputation] The first layer receives full sequences. The other layers receive only a part,
    which does not determine the full length: in a forward, they use the sizes that the first layer recorded. A
    recomputation in the backward may belong to an earlier forward of another length, so the ranks all-gather their
    lengths, unless every length so far divided evenly. In a pipeline the first layer may run on other ranks; then the
    ranks always all-gather their lengths.

    Attributes:
        axis: mesh axis over which the sequence is sharded.
        modules_with_partial_gradients: names of modules in the layers that each rank applies to its part only.
    """

    def __init__(self, axis: MeshAxis, modules_with_partial_gradients: Collection[str] = ()) -> None:
        self.axis, self.modules_with_partial_gradients = axis, modules_with_partial_gradients
        self._rank_sizes: list[int] = []  # tokens of each rank in the current forward
        self._num_samples = 0  # samples in the current forward
        # flags: the first layer ran on this rank; its sequence length is not a multiple of the number of ranks
        self._has_first_layer, self._is_uneven = (False, False)
        self._layer_arguments: list[weakref.ref[torch.Tensor]] = []  # last layer's arguments except hidden states
        # results of that layer's modules for these arguments, and the names of the modules
        self._results_of_arguments: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def shard_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of hidden states `[batch, sequence, features]` that are equal on all ranks."""
        length = hidden.shape[1]
        spans = [compute_shard_range(length, self.axis.size, rank) for rank in range(self.axis.size)]
        self._rank_sizes = [stop - start for start, stop in spans]
        self._num_samples, self._has_first_layer = hidden.shape[0], True
        self._is_uneven |= length % self.axis.size > 0
        return self.local_shard(hidden, self._rank_sizes)

    def begin_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments of a layer that begins."""
        hidden = get_hidden_states(args, kwargs)
        others = (*args, *kwargs.values())
        self._layer_arguments = [
            weakref.ref(one) for one in others if isinstance(one, torch.Tensor) and one is not hidden
        ]
        self._results_of_arguments.clear()

    def record_result(self, name: str, inputs: torch.Tensor, output: torch.Tensor) -> None:
        """Record the output of the module `name` in the current layer if its input is an argument of the layer besides
        the hidden states.
        """
        if any(ref() is inputs for ref in self._layer_arguments):
            self._results_of_arguments.append((weakref.ref(output), name))

    def module_for_argument(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the module that computed a tensor from an argument of the layer; None: no module."""
        return next((name for ref, name in self._results_of_arguments if ref() is tensor), None)

    def is_layer_argument(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is an argument of the current layer other than its hidden states, shares memory with
        such an argument, or was computed from one by a module of the layer.
        """
        memory = tensor.untyped_storage().data_ptr()
        kept = [one for ref in self._layer_arguments if (one := ref()) is not None and one.layout is torch.strided]
        known = any(one is tensor or 0 != memory == one.untyped_storage().data_ptr() for one in kept)  # 0: no elements
        return known or self.module_for_argument(tensor) is not None

    def rank_sizes(self, part: torch.Tensor) -> list[int]:
        """Return the number of rows of each rank along dim -2, for a tensor shaped like `part`: `[batch, part of the
        sequence, ...]`, or with batch and sequence in one dimension. Collective if the ranks all-gather their lengths.
        """
        own, ranks = part.shape[-2], self.axis.size
        if not self._has_first_layer or (self._is_uneven and current_backward_id() != -1):
            return self.gather_lengths(part)
        if not self._is_uneven:
            return [own] * ranks
        return self._rank_sizes if part.dim() > 2 else [size * self._num_samples for size in self._rank_sizes]

    def gather_lengths(self, part: torch.Tensor) -> list[int]:
        """All-gather the sizes of the ranks' tensors along dim -2."""
        found: list[int] = self.axis.all_gather(torch.tensor([part.shape[-2]], device=part.device)).tolist()
        return found

    def gather(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """All-gather the parts `[batch, part of the sequence, ...]`. The result is equal on every rank."""
        return as_contiguous_non_view(gather_from_parallel_region(part, self.axis, 1, sizes))

    def local_shard(self, full: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Return this rank's part of a replicated `[batch, sequence, ...]` or `[batch x sequence, features]`."""
        if full.dim() < 3:
            return self.local_shard(full.unflatten(0, (-1, sum(sizes))), sizes).flatten(0, 1)
        return as_contiguous_non_view(scatter_to_parallel_region(full, self.axis, 1, sizes))


class PartArguments:
    """Arguments of a module that are parts of the sequence as its hidden states are, e.g. keys and values with a norm
    of their own.

    Arguments that the layer around the module received, such as the states of an encoder, are full on every rank, and
    so are tensors that the layer computed from them. Their length may be that of a part by chance. A recomputation in
    the backward repeats the decision of the last forward.
    """

    def __init__(self, sequence_sharding: StackSequenceSharding) -> None:
        self._sequence_sharding = sequence_sharding
        self._parts: set[str] = set()  # names of arguments that were parts in the last forward

    def includes(self, name: str, value: torch.Tensor, hidden: torch.Tensor, sizes: list[int]) -> bool:
        """Return True if the argument `name` is a part of the same sequence as `hidden`, of which each rank has `sizes`
        tokens. All ranks return the same. Collective in a forward.
        """
        if current_backward_id() == -1:
            self._parts.discard(name)
            if not self._sequence_sharding.is_layer_argument(value) and self._is_part(value, hidden, sizes):
                self._parts.add(name)
        return name in self._parts

    def _is_part(self, value: torch.Tensor, hidden: torch.Tensor, sizes: list[int]) -> bool:
        fits, is_even = value.shape[:-1] == hidden.shape[:-1], len(set(sizes)) == 1
        if is_even and not (fits and value.numel()):
            return False
        # If the ranks have different numbers of tokens, an argument is a part if its length fits on every rank. If the
        # numbers are equal, a replicated argument may have this length too, so the ranks compare values: parts differ.
        sample = torch.full((_SAMPLES + 1,), float(fits), device=value.device)
        if value.numel():  # the part of a rank may be empty
            sample[1:] = sample_elements(value)
        found = self._sequence_sharding.axis.all_gather(sample).unflatten(0, (-1, _SAMPLES + 1))
        if not is_even:
            return bool(found[:, 0].all())
        # Replicated values may be rounded differently on each rank.
        return not torch.allclose(found, found[:1].expand_as(found), rtol=1e-2, atol=1e-6, equal_nan=True)


def sample_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return `_SAMPLES` elements at equal distances, from the first to the last, of a tensor that has elements."""
    # compute with integers: a float32 does not hold every index above 2^24
    at = torch.arange(_SAMPLES, device=tensor.device) * (tensor.numel() - 1) // (_SAMPLES - 1)
    return tensor.detach().take(at)


class _FullGradient(torch.autograd.Function):
    """Identity of a leaf. The backward checks its gradient."""

    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, name: str, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis, ctx.name = axis, name
        ctx.is_partial = isinstance(tensor, nn.Parameter) and _has_partial_gradient(tensor, axis)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.is_partial:
            _check_full_gradient(ctx.axis, ctx.name, None, gradients[0])
        return None, None, gradients[0]


def _check_full_gradient(axis: MeshAxis, name: str, sources: Sequence[Any] | None, gradient: torch.Tensor) -> None:
    """Check that the ranks have the same gradient of an argument of a layer. Collective.

    Args:
        sources: nodes of autograd from which the argument was computed; None: it is a leaf.

    Raises:
        ModelError: the gradients differ, and a parameter would be trained with them. Raised on all ranks.
    """
    found = axis.all_gather(sample_elements(gradient).float()).unflatten(0, (-1, _SAMPLES))
    # Equal gradients may be rounded differently on each rank. The comparison is False for NaN.
    if not float((found - found[:1]).abs().max()) > 1e-2 * float(found.abs().max()):
        return
    if sources is None or any(not _has_partial_gradient(one, axis) for one in _trained_parameters(sources)):
        raise ModelError(
            f"tp_sequence_norms shards the sequence between the layers, and a layer combines its argument {name} with "
            "its part of the tokens or heads, so that each rank has only a part of the argument's gradient; leave out "
            'tp_sequence_norms, or write "partial" in parallel.tensor_table for the modules that compute the argument'
        )


def _has_partial_gradient(parameter: nn.Parameter, axis: MeshAxis) -> bool:
    return has_placement(parameter) and axis.name in get_placement(parameter).partial_axes


def _trained_parameters(nodes: Sequence[Any]) -> list[nn.Parameter]:
    """Return the parameters to which the backward from these nodes leads."""
    found, seen, waiting = [], set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found.append(leaf)
        waiting += [one for one, _ in node.next_functions if one is not None]
    return found


class StackInputHook:
    """Pre-forward hook of a layer in the stack: switch to rank-specific random numbers in training. The first layer's
    hook shards the hidden states.

    The other arguments of the layers are full on every rank. Attention makes their gradients full, too. But a layer may
    combine an argument with its part of the tokens (a gate of all tokens, an embedding of the time step); the ranks
    then have only parts of the gradient. So the ranks compare the gradients of the first layer's arguments: by a hook,
    since the layer may change an argument in place; a leaf passes through `_FullGradient`, since its hooks would stay.
    """

    def __init__(self, sequence_sharding: StackSequenceSharding, is_first: bool, local_rng: LocalRng | None) -> None:
        self._sequence_sharding, self._is_first, self._local_rng = sequence_sharding, is_first, local_rng

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = get_hidden_states(args, kwargs)
        if self._local_rng is not None and module.training:
            self._local_rng.begin(hidden.device)
        if self._is_first:
            args, kwargs = self._with_checked_gradients(args, kwargs, hidden)
            args, kwargs = replace_hidden_states(args, kwargs, self._sequence_sharding.shard_input(hidden))
        self._sequence_sharding.begin_layer(args, kwargs)
        return args, kwargs

    def _with_checked_gradients(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with a check of the gradients of those that require one, beside `hidden`."""
        checked: dict[int, torch.Tensor] = {}
        axis = self._sequence_sharding.axis

        def check(name: str, value: Any) -> Any:
            if value is hidden or not isinstance(value, torch.Tensor) or not value.numel():
                return value
            if not value.requires_grad or not torch.is_grad_enabled():
                return value
            if id(value) not in checked:
                checked[id(value)] = value
                if value.grad_fn is None:
                    checked[id(value)] = _FullGradient.apply(axis, name, value)
                elif current_backward_id() == -1:  # else a recomputation, and the forward has registered the hook
                    # refer to the node's inputs, because a hook that holds its own node would never be freed
                    sources = [one for one, _ in value.grad_fn.next_functions if one is not None]
                    value.register_hook(partial(_check_full_gradient, axis, name, sources))
            return checked[id(value)]

        return (
            tuple(check(f"{number} (counted from 0)", one) for number, one in enumerate(args)),
            {name: check(repr(name), one) for name, one in kwargs.items()},
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

    Other parts of the sequence (`PartArguments`) are all-gathered too. Other hidden states, of an encoder, are full on
    every rank. They pass through `copy_to_parallel_region`, because the heads of each rank compute only a part of their
    gradient. An argument `residual` is a part of the sequence that is added to the output (BLOOM).

    Args:
        name: name of the attention module.
        input_widths: numbers of input features of the column-parallel layers.
    """

    def __init__(
        self,
        name: str,
        input_hook: ChainInputHook,
        sequence_sharding: StackSequenceSharding,
        input_widths: Collection[int],
    ) -> None:
        self._name, self._input_hook, self._sequence_sharding = name, input_hook, sequence_sharding
        self._input_widths = input_widths
        self._part_arguments = PartArguments(sequence_sharding)
        self._names: list[str] | None = None  # names of the parameters of the forward

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, axis = get_hidden_states(args, kwargs), self._input_hook.axis
        sizes = self._sequence_sharding.rank_sizes(hidden)
        entered: dict[int, torch.Tensor] = {id(hidden): self._input_hook(hidden, sizes)}

        def enter(name: str, value: Any) -> Any:
            if value is not hidden and (
                not isinstance(value, torch.Tensor)
                or not value.is_floating_point()
                or value.dim() != 3
                or value.shape[-1] not in self._input_widths
            ):
                return value
            if name == _RESIDUAL:
                return value
            if id(value) not in entered:
                self._check_gradient(value)
                if self._part_arguments.includes(name, value, hidden, sizes):
                    entered[id(value)] = as_contiguous_non_view(all_gather(value, axis, -2, sizes))
                else:
                    entered[id(value)] = copy_to_parallel_region(value, axis) if value.requires_grad else value
            return entered[id(value)]

        if self._names is None:
            self._names = list(inspect.signature(module.forward).parameters)
        names = self._names + [""] * (len(args) - len(self._names))  # *args
        return (
            tuple(enter(name, one) for name, one in zip(names, args, strict=False)),
            {name: enter(name, one) for name, one in kwargs.items()},
        )

    def _check_gradient(self, value: torch.Tensor) -> None:
        """Raise a ModelError if a module whose gradients are summed over the ranks computed full keys and values."""
        norm = self._sequence_sharding.module_for_argument(value)
        if norm in self._sequence_sharding.modules_with_partial_gradients and value.requires_grad:
            raise ModelError(
                f"tp_sequence_norms sums the gradients that the ranks compute in {norm} for their parts of the "
                f"sequence, and it was applied to the keys and values of {self._name}, which are full on every rank; "
                "apply it before the layers or inside the attention module, or leave out tp_sequence_norms"
            )


class ArgumentResultHook:
    """Forward hook of a module in a layer: record its output if its input is an argument of the layer other than the
    hidden states (`StackSequenceSharding.record_result`).
    """

    def __init__(self, name: str, sequence_sharding: StackSequenceSharding) -> None:
        self._name, self._sequence_sharding = name, sequence_sharding

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            self._sequence_sharding.record_result(self._name, args[0], output)


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


class SizeErrorNote:
    """Hooks that add a note to an error between the layers of a stack, where the forward of the model has only a part
    of the sequence: a residual connection around the first layer does not fit there.

    Args:
        model: model whose forward calls the layers.
        layers: layers of the stack by name, in order.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self._first, self._last = list(layers)[0], list(layers)[-1]
        self._last_layer = layers[self._last]
        self._is_between = False
        for layer in layers.values():
            layer.register_forward_pre_hook(self._enter, prepend=True)
            layer.register_forward_hook(self._leave, always_call=True)
        model.register_forward_hook(self._end, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._is_between = False

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_between = output is not None and module is not self._last_layer  # None: the layer itself raised

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exc_info()[1] if self._is_between else None
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                f"windlass: tp_sequence_norms shards the sequence from the first layer, {self._first}, to the last "
                f"one, {self._last}, and gathers it after that; between them only what a layer returns has the right "
                "length. Write residual connections and norms inside the layers, or leave out tp_sequence_norms"
            )
        self._is_between = False


class FullSequenceHook:
    """Hooks around a module that needs full sequences and computes the same on all ranks: all-gather its input and
    other parts of the sequence (`PartArguments`), and return only this rank's part of its output. In training, its
    random numbers are equal on all ranks.

    Args:
        salt: a number unique to the module if it may draw random numbers, else None.
    """

    def __init__(self, sequence_sharding: StackSequenceSharding, salt: int | None) -> None:
        self._sequence_sharding, self._salt = sequence_sharding, salt
        self._part_arguments = PartArguments(sequence_sharding)
        self._rank_sizes: list[int] = []
        self._saved_rng_state: tuple[torch.Generator, torch.Tensor] | None = None

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part = get_hidden_states(args, kwargs)
        if self._sequence_sharding.is_layer_argument(part):
            # Full on every rank, or a part that an earlier layer returned. Each rank's copy of a full tensor counts as
            # its part, so that the gradients of the ranks add up.
            self._rank_sizes = self._sequence_sharding.gather_lengths(part)
        else:
            self._rank_sizes = self._sequence_sharding.rank_sizes(part)
        self._saved_rng_state = None
        if self._salt is not None and module.training:
            generator = get_default_generator(part.device)
            self._saved_rng_state = generator, generator.get_state()
            generator.manual_seed(compute_shared_seed(self._sequence_sharding.axis, part.device, self._salt))
        gathered = {id(part): self._sequence_sharding.gather(part, self._rank_sizes)}
        return (
            tuple(self._gather(str(number), one, part, gathered) for number, one in enumerate(args)),
            {name: self._gather(name, one, part, gathered) for name, one in kwargs.items()},
        )

    def _gather(self, name: str, value: Any, part: torch.Tensor, gathered: dict[int, torch.Tensor]) -> Any:
        """Return an argument, all-gathered if it is a part of the sequence, each tensor once."""
        if id(value) in gathered:
            return gathered[id(value)]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() != 3:
            return value
        if value.shape[-1] != part.shape[-1]:
            return value
        if not self._part_arguments.includes(name, value, part, self._rank_sizes):
            return value
        gathered[id(value)] = self._sequence_sharding.gather(value, self._rank_sizes)
        return gathered[id(value)]

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
