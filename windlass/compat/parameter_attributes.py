"""Attributes of parameters that DeepSpeed's clients read: `ds_id`, `ds_shape`, `ds_status`, `all_gather`, ...

[Note: computed attributes] Nothing is stored on parameters, because stored attributes would break pickling and would be
copied with them. Instead, `install_parameter_attributes` gives `nn.Parameter` a `__getattr__`, which Python calls only
for missing attributes. This method returns values only for parameters of an engine, of `zero.Init` or of experts.
Stage-3 parameters keep their full shape in windlass, sharded or not; see [Note: strict mode].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from windlass import zero
from windlass.compat.not_built import NotBuiltError
from windlass.compat.parameter_shard import padded_numel, padded_shard, read_full_value, shard_group
from windlass.compat.strict_mode import is_strict
from windlass.compat.zero_param_status import ZeroParamStatus, ZeroParamType
from windlass.zero.access.gathered_parameters import GatheredParameters
from windlass.zero.core.sharded_parameter import ShardedParameter, ShardedParameterCallbacks, install_callbacks
from windlass.zero.parameter_registry import find
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.context import active_init
from windlass.zero.sharded_model import ShardedModel

_id_counter = count()
_ids: WeakIdKeyDictionary = WeakIdKeyDictionary()  # ids of parameters of sharded models
# Ids of parameters under zero.Init have a range of their own: an id is assigned at its first read, which may be on one
# rank only, and must not change the ids of later models.
_init_id_counter = count(1 << 32)
_sharded_init_ids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_active_by_owner: WeakKeyDictionary[Any, WeakIdKeyDictionary] = WeakKeyDictionary()
_external_parameters: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()
_expert_group_names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # name of the expert group, by parameter
_used_elsewhere: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that a module returned to another module
_stub_models: WeakSet[Any] = WeakSet()  # sharded models of engines that `deepspeed.initialize` built
_PEFT_COPY = ("peft.utils.other", "update")  # module and function that copy the layers of `modules_to_save`
_gathered_contexts: dict[int, GatheredParameters] = {}  # contexts of `all_gather`, by id of the parameter


def install_parameter_attributes() -> None:
    """Install the attributes on `nn.Parameter`, and those of external parameters on `nn.Module`. Idempotent."""
    if nn.Parameter.__dict__.get("__getattr__") is not _get_attribute:
        nn.Parameter.__getattr__ = _get_attribute  # type: ignore[attr-defined]
        nn.Module.ds_external_parameters = _iterate_external  # type: ignore[attr-defined]
        nn.Module._external_params = _ExternalParameters()  # type: ignore[attr-defined]
        install_callbacks(
            ShardedParameterCallbacks(
                allows_stub=_allows_stub, read_full_value=read_full_value, shape_substitute=_substitute_released
            )
        )


def enable_state_dict_stubs(model: ShardedModel) -> None:
    """Make `state_dict()` return stubs for sharded parameters of `model`. For other models, `state_dict()` raises."""
    _stub_models.add(model)


def number_parameters(model: ShardedModel) -> None:
    """Give each parameter of `model` a `ds_id`, equal on all ranks if they call this for the same models.

    A parameter that has an id keeps it.
    """
    of_units = (parameter for unit in model.units for parameter in unit.parameters)
    for parameter in (*model.model.parameters(), *of_units):  # a script may have removed some from their modules
        if parameter not in _ids:
            _ids[parameter] = next(_id_counter)


def mark_expert(parameter: nn.Parameter, group_name: str) -> None:
    """Mark a parameter as an expert's, with the name of the group over which its layer is spread."""
    install_parameter_attributes()
    _expert_group_names[parameter] = group_name


def is_stage_3_parameter(parameter: nn.Parameter) -> bool:
    """Return True if a parameter is managed by stage 3, whether it is sharded or persistent."""
    place = find(parameter)
    return place.model.policy.stage == 3 if place is not None else initial_shard.find(parameter) is not None


def external_parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of other modules that `module` is registered to use."""
    return _external_parameters.setdefault(module, {})


def _allows_stub(parameter: nn.Parameter) -> bool:
    """Return True if `state_dict()` may return a stub without values, so that one rank alone can read the names.

    Inside a forward, `detach` must return the values instead, so the parameter's unit gathers them.
    """
    place, init_shard = find(parameter), initial_shard.find(parameter)
    if place is None:
        return init_shard is not None and init_shard.allows_stub
    return place.model in _stub_models and not place.unit.gather_parameter(parameter, [parameter])


def _shard_under_construction(parameter: nn.Parameter) -> None:
    """Shard the parameters of the running `zero.Init` if `parameter` is not sharded yet. Collective.

    DeepSpeed shards the parameters of a layer at the end of its constructor, and scripts then read `ds_tensor`.
    """
    init = active_init()
    if init is not None and init.provides_stubs and not is_stage_3_parameter(parameter):
        init.shard_parameters()


def _substitute_released(parameter: nn.Parameter, frame: FrameType) -> torch.Tensor | None:
    """Return an empty tensor, whose shape a script in strict mode reads in place of a sharded parameter's.

    Return None outside strict mode, and while the parameter's own shape is to be read. In either mode, peft's function
    that copies a layer (`modules_to_save`) gets the empty tensor: it gathers only parameters of 0 elements before it
    copies them.
    """
    reader = frame.f_globals.get("__name__", "")
    if (reader, frame.f_code.co_name) != _PEFT_COPY and (
        not is_strict() or reader.partition(".")[0] in ("torch", "windlass")
    ):
        return None
    place, init_shard = find(parameter), initial_shard.find(parameter)
    if place is not None:
        released = place.model in _stub_models and not place.model.runtime.is_running
    else:
        released = init_shard is not None and init_shard.allows_stub and not initial_shard.is_building()
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device) if released else None


def mark_external(caller: nn.Module, module: nn.Module, parameter: nn.Parameter) -> None:
    """Record that `caller` uses a parameter that `module` returned, and delete such a record of `module`."""
    known, passed_on = external_parameters_of(caller), external_parameters_of(module)
    for key in [key for key, other in passed_on.items() if other is parameter]:
        del passed_on[key]
    if is_stage_3_parameter(parameter) and all(other is not parameter for other in known.values()):
        known[f"external_{id(parameter)}"] = parameter
        _used_elsewhere[parameter] = True


class _ExternalParameters:
    """Descriptor of `module._external_params`. A value that a module sets itself takes precedence."""

    def __get__(self, module: nn.Module | None, owner: type[nn.Module]) -> Any:
        return self if module is None else external_parameters_of(module)


def _iterate_external(self: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(external_parameters_of(self).items())


def _get_attribute(self: nn.Parameter, name: str) -> Any:
    answer = _STAGE_3_ATTRIBUTES.get(name)
    if name == "ds_tensor":
        _shard_under_construction(self)
    if answer is not None and is_stage_3_parameter(self):
        return answer(self)
    answer = _HP_ATTRIBUTES.get(name)
    if answer is not None and find(self) is not None:
        return answer(self)
    # Scripts recognize experts by these attributes.
    if name in ("allreduce", "group_name") and self in _expert_group_names:
        return False if name == "allreduce" else _expert_group_names[self]
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


# Attributes at stage 3.


def _ds_id(parameter: nn.Parameter) -> int:
    place = find(parameter)
    if place is None:
        init_shard = initial_shard.find(parameter)
        if init_shard not in _sharded_init_ids:
            _sharded_init_ids[init_shard] = next(_init_id_counter)
        return _sharded_init_ids[init_shard]
    if parameter not in _ids:  # an engine of `windlass.initialize` numbers no parameters
        number_parameters(place.model)
    found: int = _ids[parameter]
    return found


def _ds_status(parameter: nn.Parameter) -> Any:
    return ZeroParamStatus.NOT_AVAILABLE if isinstance(parameter, ShardedParameter) else ZeroParamStatus.AVAILABLE


def _active_modules(parameter: nn.Parameter) -> set[int]:
    holder = _owner_of(parameter)
    found: set[int] = _active_by_owner.setdefault(holder, WeakIdKeyDictionary()).setdefault(parameter, set())
    return found


def _owner_of(parameter: nn.Parameter) -> Any:
    place = find(parameter)
    return place.model if place is not None else initial_shard.find(parameter)


class GatherHandle:
    """Handle of a gather that is already complete.

    Args:
        params: the gathered parameters.
    """

    complete = True

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def wait(self, handle_dependency: bool = True) -> None:
        """Return immediately."""


def _gathered(params: list[nn.Parameter]) -> GatherHandle:
    for one in params:
        if id(one) not in _gathered_contexts:
            _gathered_contexts[id(one)] = GatheredParameters([one]).__enter__()
    return GatherHandle(params)


def _all_gather(parameter: nn.Parameter) -> Callable[..., GatherHandle]:
    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> GatherHandle:
        """Unshard parameters until `partition` is called. Collective."""
        return _gathered([parameter] if param_list is None else list(param_list))

    return all_gather


def _all_gather_coalesced(parameter: nn.Parameter) -> Callable[..., GatherHandle]:
    def all_gather_coalesced(params: Any, safe_mode: bool = False, quantize: bool = False) -> GatherHandle:
        """Unshard parameters until `partition` is called. Collective."""
        return _gathered(list(params))

    return all_gather_coalesced


def _partition(parameter: nn.Parameter) -> Callable[..., None]:
    def partition(
        param_list: Any = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Reshard parameters that `all_gather` unsharded.

        With `has_been_updated`, all ranks get rank 0's values; otherwise changes are discarded. Collective.
        """
        for one in [parameter] if param_list is None else list(param_list):
            context = _gathered_contexts.pop(id(one), None)
            if context is not None:
                # On exit, GatheredParameters broadcasts the values of rank `_rank`; None: it discards changes.
                context._rank = 0 if has_been_updated else None
                context.__exit__(None, None, None)

    return partition


def _summary(parameter: nn.Parameter) -> Callable[..., dict[str, Any]]:
    def ds_summary(slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        """Return a description of the parameter as a dict."""
        return {
            "id": _ds_id(parameter),
            "status": _ds_status(parameter).name,
            "numel": parameter.numel(),
            "ds_numel": parameter.numel(),
            "shape": tuple(parameter.shape),
            "ds_shape": tuple(parameter.shape),
            "requires_grad": parameter.requires_grad,
            "grad_shape": None,
            "persist": _is_persistent(parameter),
            "active_sub_modules": _active_modules(parameter),
            "ds_tensor.shape": (padded_numel(parameter),),
        }

    return ds_summary


def _is_persistent(parameter: nn.Parameter) -> bool:
    place = find(parameter)
    return place is not None and not place.unit.reshards


def _refused_method(what: str) -> Callable[[nn.Parameter], Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(f"parameter.{what}: windlass reduces gradients itself; use windlass.zero.full_grad")

    return lambda parameter: refuse


def _ds_param_type(parameter: nn.Parameter) -> Any:
    return ZeroParamType.NORMAL


_STAGE_3_ATTRIBUTES: dict[str, Callable[[nn.Parameter], Any]] = {
    "ds_id": _ds_id,
    "ds_shape": lambda p: p.shape,
    "ds_numel": lambda p: p.numel(),
    "ds_numel_aligned": lambda p: padded_numel(p) * shard_group(p).size,
    "ds_status": _ds_status,
    "ds_tensor": padded_shard,
    "ds_persist": _is_persistent,
    "ds_param_type": _ds_param_type,
    "ds_process_group": lambda p: shard_group(p).process_group or dist.group.WORLD,
    "ds_active_sub_modules": _active_modules,
    "ds_secondary_tensor": lambda p: None,
    "ds_zero_param_process_group": lambda p: None,
    "ds_zero_partition_rank": lambda p: shard_group(p).index,
    "ds_zero_partition_world_size": lambda p: shard_group(p).size,
    "ds_enable_sanity_checks": lambda p: False,
    "nvme_swapper": lambda p: None,
    "is_external_param": lambda p: p in _used_elsewhere,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
    "partition_numel": lambda p: lambda: padded_numel(p),
    "aligned_size": lambda p: lambda: padded_numel(p) * shard_group(p).size,
    "padding_size": lambda p: lambda: padded_numel(p) * shard_group(p).size - p.numel(),
    "convert_to_zero_parameters": lambda p: lambda param_list: None,
    "ds_summary": _summary,
    "partition_gradients": _refused_method("partition_gradients"),
    "reduce_gradients_at_owner": _refused_method("reduce_gradients_at_owner"),
}


# Attributes at any stage: master weight, optimizer states and gradient of a parameter of an engine.


def _full_hp(parameter: nn.Parameter) -> Callable[..., Any]:
    def get_full_hp_param(self: Any = None, optim_state_key: str | None = None) -> Any:
        """Return the full fp32 weight, or the optimizer state of that key. Collective."""
        if optim_state_key is not None:
            return zero.full_state(parameter, optim_state_key)
        return zero.full_param(parameter).detach()

    return get_full_hp_param


def _set_full_hp(parameter: nn.Parameter) -> Callable[..., None]:
    def set_full_hp_param(value: torch.Tensor, optim_state_key: str | None = None) -> None:
        """Set the full fp32 weight, or the optimizer state of that key. Collective."""
        if optim_state_key is not None:
            zero.set_full_state(parameter, optim_state_key, value)
        else:
            zero.set_full_param(parameter, value)

    return set_full_hp_param


_HP_ATTRIBUTES: dict[str, Callable[[nn.Parameter], Any]] = {
    "get_full_hp_param": _full_hp,
    "set_full_hp_param": _set_full_hp,
    "get_full_hp_grad": lambda p: lambda: zero.full_grad(p),
    "set_full_hp_grad": lambda p: lambda value: zero.set_full_grad(p, value),
}
