"""Tiled computations under the names and with the arguments of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.parallel.sequence.tiled_function import Tiling, run_tiled

_MAX_DEPTH = 5  # longest chain of references from a function to a parameter (arguments, containers, modules)


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Compute `fn` on at most `shards` parts of a sequence, one at a time, and recompute them in the backward.

    Args:
        fn: called with the keywords of `kwargs_to_shard` and `kwargs_to_pass`.
        seqlen: number of tokens, the size of dimension 1 of the tensors to shard.
        kwargs_to_shard: tensors `[samples, tokens, ...]`; each call gets a part of the tokens.
        kwargs_to_pass: arguments that each call gets unchanged.
        grad_requiring_tensor_key: the key of `kwargs_to_shard` whose tensor gets a gradient.
        compute_params: parameters that `fn` uses; parameters that are not listed get no gradients. None: those in
            `kwargs_to_pass`, and those that `fn` refers to, also in modules, containers and enclosing scopes.
        output_unshard_dimension: dimension along which the outputs are concatenated; 0: each output is a scalar, and
            the scalars are stacked.
        output_reduction: reduction of the concatenated outputs: "mean", "sum" or None.

    Raises:
        ConfigError: the key or the reduction is unknown.
    """
    if output_reduction not in (None, "mean", "sum"):
        raise ConfigError(f'output_reduction = {output_reduction!r} is unknown; write "mean", "sum" or None')
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ConfigError(
            f"grad_requiring_tensor_key = {grad_requiring_tensor_key!r} is unknown; write one of "
            f"{sorted(kwargs_to_shard)}"
        )
    names = list(kwargs_to_shard)
    numbers = output_unshard_dimension == 0

    def of_part(*parts: torch.Tensor) -> torch.Tensor:
        output = fn(**dict(zip(names, parts, strict=True)), **kwargs_to_pass)
        return output.unsqueeze(0) if numbers else output

    tensors = [
        tensor if name == grad_requiring_tensor_key else tensor.detach() for name, tensor in kwargs_to_shard.items()
    ]
    tiling = Tiling(of_part, -(-seqlen // shards), dim=1, out_dim=output_unshard_dimension, preserve_rng_state=True)
    output = run_tiled(tiling, tensors, _trained_parameters(compute_params, fn, kwargs_to_pass))
    return output if output_reduction is None else getattr(output, output_reduction)()


class SequenceTiledCompute:
    """`sequence_tiled_compute` in the form of an autograd function: it is called as `apply(...)`."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Call `sequence_tiled_compute`; `args` are the values of `keys_to_shard`, then those of `keys_to_pass`."""
        sharded, passed = args[: len(keys_to_shard)], args[len(keys_to_shard) :]
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, sharded, strict=True)),
            dict(zip(keys_to_pass, passed, strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """Tiled MLP in the form of an autograd function: it is called as `apply(...)`."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor:
        """Compute `fn(self, part of x)` and concatenate the parts along the tokens of `x`, `[..., tokens, features]`.

        Args:
            compute_params: parameters that `fn` uses; None: those that `self` and `fn` refer to.
        """
        along = x.dim() - 2
        tiling = Tiling(
            partial(fn, self), -(-x.shape[along] // shards), dim=along, out_dim=along, preserve_rng_state=True
        )
        return run_tiled(tiling, [x], _trained_parameters(compute_params, fn, self))


class TiledFusedLogitsLoss:
    """Tiled loss in the form of an autograd function. The logits of all tokens never exist at once."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """Return the sum or mean over parts of `fn(self, part of x, part of y)`, or with a part of `mask` as well.

        Args:
            x: hidden states `[samples, tokens, features]`.
            y: labels `[samples, tokens]`.
            mask: `[samples, tokens, ...]` or None.
            compute_params: parameters that `fn` uses; None: those that `self` and `fn` refer to.

        Raises:
            ConfigError: the reduction is unknown, or the samples or tokens of the tensors differ.
        """
        if output_reduction not in ("mean", "sum"):
            raise ConfigError(f'output_reduction = {output_reduction!r} is unknown; write "mean" or "sum"')
        given = [x, y] if mask is None else [x, y, mask]
        shapes = [list(tensor.shape) for tensor in given]
        if any(tensor.shape[:2] != x.shape[:2] or tensor.dim() < 2 for tensor in given):
            raise ConfigError(f"x, y and mask have the shapes {shapes}; give all the same samples and tokens")
        flat = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in given]
        size = -(-flat[0].shape[0] // shards)

        def of_part(*parts: torch.Tensor) -> torch.Tensor:
            return fn(self, *parts)

        tiling = Tiling(of_part, size, sums_outputs=True, preserve_rng_state=True)
        total = run_tiled(tiling, flat, _trained_parameters(compute_params, fn, self))
        return total if output_reduction == "sum" else total / -(-flat[0].shape[0] // size)


def _trained_parameters(stated: Sequence[torch.Tensor] | None, *holders: Any) -> list[torch.Tensor]:
    """Return the parameters that get gradients: the stated ones, or those that `holders` refer to."""
    if stated is None:
        found: dict[int, torch.Tensor] = {}
        _find_leaves(holders, found, set(), _MAX_DEPTH)
        stated = list(found.values())
    return [parameter for parameter in stated if parameter.requires_grad]


def _find_leaves(value: Any, found: dict[int, torch.Tensor], seen: set[int], depth: int) -> None:
    """Add to `found` the leaf tensors that `value` refers to: through modules, containers, closures and attributes."""
    if not depth or id(value) in seen or isinstance(value, (str, bytes, int, float, type, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.is_leaf:
            found[id(value)] = value
        return
    if isinstance(value, nn.Module):
        more: Any = list(value.parameters())
    elif isinstance(value, Mapping):
        more = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        more = value
    elif isinstance(value, partial):
        more = (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        more = (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        names = getclosurevars(value)
        more = (names.nonlocals, names.globals, value.__defaults__, value.__kwdefaults__)
    else:
        more = getattr(value, "__dict__", ())
        more = more.values() if isinstance(more, Mapping) else ()
    for one in list(more or ()):
        _find_leaves(one, found, seen, depth - 1)
