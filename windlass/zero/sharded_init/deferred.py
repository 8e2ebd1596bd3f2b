"""Tensors whose values are read from a file or received from rank 0 only when the tensors become parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from windlass.comm.rank_group import RankGroup
from windlass.zero.core.sharded_parameter import call_name, reads_only_metadata
from windlass.zero.sharded_init.initial_shard import flat_of, gather, scatter, span


class DeferredSource(Protocol):
    """Source of a deferred tensor's values."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)`, flat, in the dtype of the source."""
        ...


class DeferredTensor(torch.Tensor):
    """Tensor with shape and dtype on the meta device, and the source of its values.

    Operations that do not need values (`[...]`, `detach`, `to`) return another deferred tensor of the same source.
    Other operations are computed with the full values on rank 0, and on the meta device on the other ranks. Their
    result is a deferred tensor with values on rank 0. So a conversion that merges or splits tensors of a file reads
    them once, and not once per rank.

    Attributes:
        source: Source that every rank can read spans from. None: only rank 0 has the values.
        computed: The full tensor on rank 0 if there is no source; else None.
        computes: True on rank 0, which computes with full values.
    """

    source: DeferredSource | None
    computed: torch.Tensor | None
    computes: bool

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = call_name(function), kwargs or {}
        first = args[0] if args and isinstance(args[0], DeferredTensor) else None
        if reads_only_metadata(name, args, given) or name == "__setattr__":
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **given)
        if first is not None and (name == "detach" or (name == "__getitem__" and args[1] is Ellipsis)):
            return _again(first, first.dtype)
        if first is not None and name == "to" and len(args) == 1 and given.keys() <= {"dtype", "device", "copy"}:
            return _again(first, given.get("dtype") or first.dtype)
        computes = next((t.computes for t in _found((args, given))), False)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*_real(args), **_real(given))
        return _promised(result, computes)

    def full_value(self, group: RankGroup) -> torch.Tensor:
        """Return the full tensor on every rank. Collective if there is no source."""
        if self.source is not None:
            return self.source.read(0, self.numel()).to(self.dtype).view(self.shape)
        if group.size == 1:
            assert self.computed is not None
            return self.computed
        return gather(group, self.shard(group), self.numel()).view(self.shape)

    def shard(self, group: RankGroup) -> torch.Tensor:
        """Return this rank's shard, flat. Collective if there is no source."""
        if self.source is not None:
            return self.source.read(*span(self.numel(), group.index, group.size)).to(self.dtype)
        flat = flat_of(self.computed.contiguous()) if self.computed is not None else None
        return scatter(group, 0, [(flat, self.numel(), self.dtype)], torch.device("cpu"))[0]


def deferred_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, source: DeferredSource | None, *, computes: bool
) -> DeferredTensor:
    """Return a deferred tensor of the given shape and dtype.

    Args:
        source: Source of its values. None: the caller sets `computed` on rank 0.
        computes: True on rank 0, which computes with full values.
    """
    deferred: DeferredTensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(DeferredTensor)
    deferred.source, deferred.computed, deferred.computes = source, None, computes
    return deferred


@dataclass(frozen=True)
class _CastSource:
    """Source that reads another source and casts its values to `dtype`."""

    source: DeferredSource
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.source.read(start, stop).to(self.dtype)


def _again(tensor: DeferredTensor, dtype: torch.dtype) -> DeferredTensor:
    source = tensor.source
    if source is not None and dtype != tensor.dtype:
        source = _CastSource(source, tensor.dtype)  # a later cast to a wider dtype must not undo the rounding
    deferred = deferred_tensor(tuple(tensor.shape), dtype, source, computes=tensor.computes)
    if tensor.computed is not None:
        deferred.computed = tensor.computed.to(dtype)
    return deferred


def _found(value: Any) -> list[DeferredTensor]:
    if isinstance(value, DeferredTensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _found(item)] if isinstance(value, (list, tuple)) else []


def _real(value: Any) -> Any:
    """Replace the deferred tensors in `value` by full tensors if this rank computes, else by meta tensors."""
    if isinstance(value, DeferredTensor):
        if not value.computes:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if value.computed is not None:
            return value.computed
        assert value.source is not None
        return value.source.read(0, value.numel()).to(value.dtype).view(value.shape)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_real(item) for item in value])
    return value


def _promised(value: Any, computes: bool) -> Any:
    if isinstance(value, torch.Tensor):
        deferred = deferred_tensor(tuple(value.shape), value.dtype, None, computes=computes)
        deferred.computed = value if computes else None
        return deferred
    if isinstance(value, (list, tuple)):
        return type(value)([_promised(item, computes) for item in value])
    return value
