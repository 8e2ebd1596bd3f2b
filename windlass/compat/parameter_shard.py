"""Attribute `ds_tensor` of a parameter: this rank's part, if the parameter is divided over ranks as in DeepSpeed.

[Note: padded parts] DeepSpeed divides every parameter separately: of `n` elements on `r` ranks, rank `i` has
`ceil(n / r)` elements from `i * ceil(n / r)` on, and zeros follow the last element. windlass divides units of several
parameters, so other ranks may hold the values of this part. A `PaddedShard` therefore holds no values. Its shape, dtype
and device are read without communication. Reading its values gathers the parameter, and writing them exchanges the
parts of all ranks and sets the parameter and its master weights. Both are collective: all ranks make the same access to
the same parameter. A rank that makes another call raises (see `CollectiveScheduler.sync`). Until `initialize`,
parameters constructed under `zero.Init` are divided as in DeepSpeed, so each rank reads and writes its parts without
communication (parameters that are not in row-major order: reads gather, writes raise).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from windlass import zero
from windlass.base.errors import ModelError, ShardedParameterError
from windlass.comm.rank_group import RankGroup
from windlass.compat.not_built import NotBuiltError
from windlass.zero.access.shard_values import is_expert_only, set_part_param
from windlass.zero.core.collective_scheduler import SyncPoint
from windlass.zero.core.sharded_parameter import FACTORY_CALLS, call_name, reads_only_metadata
from windlass.zero.parameter_registry import find, require
from windlass.zero.sharded_init import initial_shard

_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "narrow", "select"})
_STRIDE_CALLS = frozenset({"is_contiguous", "stride"})
_IN_PLACE_OPERATORS = frozenset({f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")})
_MEMORY_CALLS = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "set_", "resize_", "resize_as_", "share_memory_"}
)


class PaddedShard(torch.Tensor):
    """This rank's part of a parameter, without values. See [Note: padded parts].

    Operations return plain tensors, except views such as `view(-1)` and `[2:5]`, through which the part can be written.

    Attributes:
        ds_numel: number of elements, with padding.
    """

    ds_numel: int
    _parameter: nn.Parameter
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    _layout: torch.Tensor  # meta tensor with the shape and strides of the values

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        layout: torch.Tensor,
        views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
    ) -> PaddedShard:
        """Return this rank's part of `parameter` after the given views, with the shape and strides of `layout`."""
        nothing = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(layout.shape)
        with torch._C.DisableTorchFunctionSubclass():
            shard = torch.Tensor._make_subclass(cls, nothing, False)
        shard._parameter, shard._views, shard._layout, shard.ds_numel = parameter, views, layout, layout.numel()
        return shard

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = call_name(function), kwargs or {}
        if name in ("data", "detach"):
            return args[0]
        if name in _STRIDE_CALLS:
            return function(args[0]._layout, *args[1:], **given)
        if reads_only_metadata(name, args, given):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **given)
        own = args[0] if args and isinstance(args[0], PaddedShard) else None
        if own is not None and name in FACTORY_CALLS:
            return function(torch.empty((), dtype=own.dtype, device=own.device).expand(own.shape), *args[1:], **given)
        if own is not None and (name in _VIEWS or (name == "__getitem__" and _is_basic_index(args[1]))):
            return own._viewed(function, args[1:], given)
        if name in _MEMORY_CALLS or isinstance(given.get("out"), PaddedShard):
            raise NotBuiltError(f"{name} of parameter.ds_tensor: it has no memory of its own; use ds_tensor.clone()")
        if name == "set data":
            assert own is not None
            args[0]._write(args[1])
            return None
        if _changes_its_argument(name):
            changed = [one for one in _listed(args[0]) if isinstance(one, PaddedShard)]
            if changed:
                return cls._change(changed, function, args, given)
        with torch.no_grad():
            values, given = tree_map_only(PaddedShard, lambda shard: shard._read(), (args, given))
        result = function(*values, **given)
        if own is not None and isinstance(result, torch.Tensor) and _are_views(result, values[0]):
            raise NotBuiltError(f"{name} of parameter.ds_tensor cannot return a view; use view, indexing or clone()")
        return result

    @classmethod
    def _change(
        cls, changed: list[PaddedShard], function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]
    ) -> Any:
        """Call an in-place function on the values, and write the changed values to the parameters."""
        with torch.no_grad():
            parts = {id(shard): _read_part(shard._parameter) for shard in changed}
            seen = {id(shard): shard._through_views(parts[id(shard)]) for shard in changed}
            values, given = tree_map_only(
                PaddedShard,
                lambda shard: seen[id(shard)] if id(shard) in seen else shard._read(),
                (args, given),
            )
            function(*values, **given)
            for shard in changed:
                _write_part(shard._parameter, parts[id(shard)])
        return args[0]

    def _viewed(self, function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> PaddedShard:
        layout = function(self._layout, *args, **given)
        return PaddedShard.of(self._parameter, layout, (*self._views, lambda values: function(values, *args, **given)))

    def _through_views(self, part: torch.Tensor) -> torch.Tensor:
        for view in self._views:
            part = view(part)
        return part

    def _read(self) -> torch.Tensor:
        return self._through_views(_read_part(self._parameter))

    def _write(self, values: torch.Tensor) -> None:
        with torch.no_grad():
            values = values._read() if isinstance(values, PaddedShard) else values
            if self._views:
                part = _read_part(self._parameter)
                self._through_views(part).copy_(values)
                values = part
            _write_part(self._parameter, values)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Part of a parameter over ranks, of shape {tuple(self.shape)}, {self.dtype}; clone() gathers its values"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._read().clone()


def padded_shard(parameter: nn.Parameter) -> PaddedShard:
    """Return this rank's part of a stage-3 parameter."""
    return PaddedShard.of(parameter, torch.empty(padded_numel(parameter), dtype=parameter.dtype, device="meta"))


def padded_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements of each rank's part, with padding."""
    return -(-parameter.numel() // int(shard_group(parameter).size))


def shard_group(parameter: nn.Parameter) -> RankGroup:
    """Return the ranks over which a parameter is sharded."""
    place = find(parameter)
    if place is not None:
        return place.unit.dp_group.group
    init_shard = initial_shard.find(parameter)
    assert init_shard is not None
    return init_shard.group


def padded_part_of(full: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return this rank's part `[ceil(n / ranks)]` of a full tensor of `n` elements, as a new tensor."""
    size = -(-full.numel() // group.size)
    start, stop = initial_shard.span(full.numel(), group.index, group.size)
    return _padded(full.detach().reshape(-1)[start:stop], size)


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    part = values.new_zeros(size)
    part[: values.numel()] = values
    return part


def read_full_value(parameter: nn.Parameter) -> torch.Tensor:
    """Gather the full value of a parameter in its dtype. Collective."""
    _require_same_parameter(parameter)
    return zero.full_param(parameter).detach().to(parameter.dtype)


def _read_part(parameter: nn.Parameter) -> torch.Tensor:
    """Return a new tensor with the values of this rank's part.

    Collective, except before `initialize` for a parameter in row-major order.
    """
    init_shard = initial_shard.find(parameter)
    if init_shard is not None and init_shard.row_major:
        return _padded(init_shard.shard, padded_numel(parameter))
    if init_shard is None:
        _sync(parameter, SyncPoint.STATE_READ)
    return padded_part_of(read_full_value(parameter), shard_group(parameter))


def _write_part(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set this rank's part; padding is ignored. Collective after `initialize`.

    Raises:
        ModelError: the number of elements differs.
        NotBuiltError: before `initialize`, the parameter is not in row-major order.
    """
    size, group, init_shard = padded_numel(parameter), shard_group(parameter), initial_shard.find(parameter)
    if values.numel() != size:
        raise ModelError(
            f"parameter.ds_tensor.data: the value has {values.numel()} elements, this rank's part of the parameter of "
            f"shape {tuple(parameter.shape)} has {size} (ds_numel, with padding); assign a tensor of that size"
        )
    start, stop = initial_shard.span(parameter.numel(), group.index, group.size)
    own = values.detach().reshape(-1)[: stop - start].to(parameter.dtype)
    if init_shard is not None:
        if not init_shard.row_major:
            raise NotBuiltError(
                "parameter.ds_tensor.data before `initialize`: the parameter is not in row-major order; assign it "
                "afterwards"
            )
        init_shard.shard = own.to(init_shard.shard.device, copy=True)
        return
    _sync(parameter, SyncPoint.STATE_CHANGE)
    _require_same_parameter(parameter)
    device = require(parameter).model.device
    full = initial_shard.gather(group, own.to(device).contiguous(), parameter.numel())
    set_part_param(parameter, full.view(parameter.shape))


def _sync(parameter: nn.Parameter, point: SyncPoint) -> None:
    """Wait until all ranks make this call. A rank that makes another collective call raises. Collective."""
    place = require(parameter)
    place.model.scheduler.sync(point, experts_only=is_expert_only(place))


def _require_same_parameter(parameter: nn.Parameter) -> None:
    """Raise unless all ranks access the same parameter; accessing different ones would mix their shards. Collective.

    The accesses can differ because transformers iterates over sets of names, whose order differs between processes.

    Raises:
        ShardedParameterError: ranks access different parameters. Raised on all of them.
    """
    place, init_shard = find(parameter), initial_shard.find(parameter)
    if init_shard is not None:
        group, name = init_shard.group, f"{init_shard.label} (number {init_shard.number})"
    elif place is not None:
        group, name = place.unit.dp_group.group, place.name
    else:
        return
    names: list[Any] = [name] * group.size
    if group.size > 1:
        dist.all_gather_object(names, name, group=group.cpu_group)
    if len(set(names)) > 1:
        read = ", ".join(f"rank {rank}: {one!r}" for rank, one in zip(group.ranks, names, strict=True))
        raise ShardedParameterError(
            f"ranks access different parameters through a state_dict() or ds_tensor at stage 3, where all must access "
            f"the same one ({read}); save with engine.save_16bit_model, or read inside "
            "`with GatheredParameters(parameters):`"
        )


def _are_views(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other and one._base is not None and one._base is (other if other._base is None else other._base)


def _changes_its_argument(name: str) -> bool:
    return (
        name in _IN_PLACE_OPERATORS or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    ) and name != "requires_grad_"


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _is_basic_index(index: Any) -> bool:
    """Return True if indexing with `index` returns a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or (type(part) is int) or isinstance(part, slice) for part in parts)
