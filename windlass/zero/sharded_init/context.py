"""Context `Init`, in which the parameters of a model are sharded while the model is constructed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from windlass.base.compute_device import local_device
from windlass.base.dtypes import is_castable, parse_dtype
from windlass.base.errors import ConfigError, ModelError
from windlass.base.malloc_thresholds import restore_kept_memory, return_freed_memory
from windlass.comm.bootstrap import init_distributed
from windlass.comm.rank_group import RankGroup
from windlass.compress.weight_quantization import initial_format, pack_fitting, pack_linear_children
from windlass.config import Config, load_config
from windlass.zero.core.sharded_parameter import mark_sharded, mark_unsharded
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.deferred import DeferredTensor
from windlass.zero.sharded_init.from_pretrained_patch import MODULE, FromPretrainedPatch
from windlass.zero.sharded_init.init_registry import InitRegistry
from windlass.zero.sharded_init.init_tier import init_tier
from windlass.zero.sharded_init.initial_shard import ShardedInit

_lock = threading.Lock()
_active: Init | None = None


class Init:
    """Context that shards the parameters of a model while the model is constructed.

    Collective: all ranks construct the same model. Inside the context, access to a parameter unshards it, so that
    initialisers of any kind work. After the context the parameters are sharded: pass the model to `initialize`, or
    gather them with `GatheredParameters` or `full_param`.

    The values come from rank 0. They are bit-identical to those of a plain construction with rank 0's seed. Code that
    only some ranks run on parameters must be inside a `GatheredParameters` that all ranks enter. Buffers are not
    sharded. A nested `Init` does nothing: the outermost one shards the parameters.

    Args:
        module: Module that exists already. It is sharded at once, without a `with` statement.
        data_parallel_group: Process group that contains all ranks. Default: the default group.
        remote_device: Tier of the shards until `initialize`. "none": the device of this rank; "cpu": host memory;
            "nvme": a file in `offload_param.nvme_path`. None: `offload_param.device` of the configuration, or "cpu" if
            the configuration has `offload`.
        pin_memory: Pin shards in host memory, if there is an accelerator.
        config_dict_or_path, config: Configuration that `initialize` will get. `offload_param` is used, and
            `weight_quantization.quantized_initialization`; see [Note: packed from the start].
        enabled: If False, the context does nothing.
        dtype: Dtype to which floating-point parameters are cast at the end of the context, like `model.to(dtype)`.
            None: they keep the dtype that the model gave them. With bf16 or fp16 training, the master weights then
            start from the values in that dtype.
        mem_efficient_linear, tensor_overrides: Accepted and ignored.
        zero_quantized_weights, zero_quantized_nontrainable_weights: If True, the key of this name in
            `zero_optimization` of the configuration must be true. All-gathers during the construction are exact.
        mpu, zero_param_parallel_group, sequence_data_parallel_group, param_swapper: Not implemented. Values other than
            the default are refused.

    Raises:
        ConfigError: an argument is invalid or not implemented.
        ModelError: another thread is inside an `Init`.
    """

    shards_nested = False  # True: the end of a nested context shards the parameters that exist at that time
    shards_alone = False  # True: shard with one rank too; its shard is then the full parameter
    provides_stubs = False  # True: `state_dict()` returns a `StateDictStub` for each parameter; False: it raises

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | str | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        unbuilt = {
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        self.enabled = enabled
        self._outer = False
        if not enabled:
            return
        for name, value in unbuilt.items():
            if value:
                raise ConfigError(f"zero.Init({name}={value!r}) is not supported; leave it out")
        given = config_dict_or_path if config_dict_or_path is not None else config
        known = load_config(given) if given is not None and not isinstance(given, Config) else given
        quantized = {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        for name, value in quantized.items():
            if value and not (known is not None and getattr(known.zero_optimization, name)):
                raise ConfigError(
                    f"zero.Init({name}=True), but the configuration does not set zero_optimization.{name}, by which "
                    "the engine quantizes its gathers; set it in the configuration of Init and of initialize"
                )
        init_distributed()
        self.group = _group(data_parallel_group)
        self._dtype = parse_dtype(dtype) if isinstance(dtype, str) else dtype
        self._store_shard, self._leaves = init_tier(remote_device, pin_memory, known)
        self._site: InitRegistry | None = None
        self._thread = 0
        self._modules: dict[int, ReferenceType[nn.Module]] = {}
        self._handles: list[RemovableHandle] = []
        self._replacement = FromPretrainedPatch(computes=self.group.index == 0)
        loads_later = _is_built_by_transformers()
        self._weight_format = None if known is None or loads_later else initial_format(known.weight_quantization)
        if module is not None:
            with self:
                (_active or self)._module_registered(module, "", module)

    def __enter__(self) -> Init:
        global _active
        if not self.enabled:
            return self
        with _lock:
            if _active is not None and _active._thread != threading.get_ident():
                raise ModelError("another thread is inside zero.Init; build one model at a time")
            self._outer = _active is None
            if not self._outer:
                return self
            _active, self._thread = self, threading.get_ident()
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        if not self._outer:
            if kind is None and _active is not None and self.shards_nested:
                _active._shard_now()
            return
        try:
            if kind is None:
                self.shard_parameters()
        finally:
            self._end()

    def _begin(self) -> None:
        return_freed_memory()
        if self.group.size > 1 or self._leaves or self.shards_alone:
            self._site = InitRegistry(self.group, self._store_shard, local_device(), self.provides_stubs)
            initial_shard.set_builder(self._unshard)
        self._replacement.install()
        parameter_hook: Any = self._parameter_registered  # Any: torch annotates these hooks as returning None
        buffer_hook: Any = self._buffer_registered
        self._handles = [
            torch_modules.register_module_parameter_registration_hook(parameter_hook),
            torch_modules.register_module_buffer_registration_hook(buffer_hook),
            torch_modules.register_module_module_registration_hook(self._module_registered),
        ]

    def _shard_now(self) -> list[nn.Module]:
        """Shard all unsharded parameters, also those that no hook registered. Return their modules. Collective."""
        modules = [module for reference in self._modules.values() if (module := reference()) is not None]
        if self._site is not None:
            for module in modules:
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        self._site.register(parameter, _label(module, name))
            self._site.close()
        return modules

    def shard_parameters(self) -> None:
        """Shard and cast all parameters of the modules constructed in the context so far. Collective.

        At its end, the context calls this method itself.
        """
        self._pack_remaining()
        modules = self._shard_now()
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        if self._dtype is not None:
            for parameter in {id(p): p for p in parameters}.values():
                _cast(parameter, self._dtype)

    def _end(self) -> None:
        global _active
        for handle in self._handles:
            handle.remove()
        self._replacement.undo()
        initial_shard.set_builder(None)
        restore_kept_memory()
        self._handles, self._modules, self._site = [], {}, None
        with _lock:
            _active, self._outer = None, False

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    def _unshard(self, parameter: nn.Parameter, init_shard: ShardedInit, together: Sequence[torch.Tensor]) -> bool:
        return self._here() and self._site is not None and self._site.unshard(parameter, init_shard, together)

    def _see(self, module: nn.Module) -> None:
        known = self._modules.get(id(module))
        if known is None or known() is None:
            self._modules[id(module)] = ref(module)

    def _parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not self._here():
            return None
        self._replacement.install()  # transformers may have been imported inside the context
        self._see(module)
        label = _label(module, name)
        if isinstance(parameter, DeferredTensor):
            return self._deliver(parameter, label)
        if self._site is not None:
            self._site.register(parameter, label)
        return None

    def _buffer_registered(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if not self._here() or not isinstance(buffer, DeferredTensor):
            return None
        full = buffer.full_value(self.group)
        full.__dict__.update(_marks(buffer))
        return full

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Register the parameters inside `child`, and pack its linear layers; see [Note: packed from the start].

        No parameter hook was called for the parameters if `child` was constructed outside the context, or copied.
        """
        if not self._here() or child is None:
            return
        if self._weight_format is not None and module is not child:
            self._see(module)
            pack_linear_children(child, self._weight_format)
        for inner in child.modules():
            self._see(inner)
            for own, parameter in inner._parameters.items():
                if parameter is not None and self._site is not None:
                    self._site.register(parameter, _label(inner, own))

    def _pack_remaining(self) -> None:
        """Pack the linear layers and embeddings that are not packed yet. Collective."""
        if self._weight_format is None:
            return
        form, self._weight_format = self._weight_format, None
        modules = [module for reference in self._modules.values() if (module := reference()) is not None]
        inner = {id(child) for module in modules for child in module.children()}
        for module in modules:
            if id(module) not in inner:
                pack_fitting(module, form)

    def _deliver(self, promise: DeferredTensor, label: str) -> nn.Parameter:
        """Return a parameter with the values of a deferred tensor, or this rank's shard of them if the context shards.

        Collective if only rank 0 has the values.
        """
        if self._site is None:
            created = nn.Parameter(promise.full_value(self.group), requires_grad=promise.requires_grad)
        else:
            nothing = torch.empty((), dtype=promise.dtype, device="cpu").expand(promise.shape)
            created = nn.Parameter(nothing, requires_grad=promise.requires_grad)
            self._site.assign(created, label, promise.shard(self.group), nothing)
        created.__dict__.update(_marks(promise))
        return created


def _is_built_by_transformers() -> bool:
    """Return True inside `from_pretrained` of transformers, which loads plain weights after the context ends."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "from_pretrained" and frame.f_globals.get("__name__") == MODULE:
            return True
    return False


def active_init() -> Init | None:
    """Return the outermost context that this thread is in; None outside."""
    return _active if _active is not None and _active._here() else None


def _group(given: Any) -> RankGroup:
    process_group = given if given is not None else dist.group.WORLD
    assert process_group is not None
    group = RankGroup.of(process_group)
    if group.size != dist.get_world_size():
        raise ConfigError(
            f"data_parallel_group has {group.size} of {dist.get_world_size()} ranks, but zero.Init shards parameters "
            "over all ranks; leave it out"
        )
    return group


def _label(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"


def _marks(promise: DeferredTensor) -> dict[str, Any]:
    """Return the attributes that a loader set on the deferred tensor."""
    own = ("source", "computed", "computes", "_is_param")
    return {name: value for name, value in vars(promise).items() if name not in own}


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if not is_castable(parameter.dtype) or parameter.device.type == "meta":
        return
    init_shard = initial_shard.find(parameter)
    if init_shard is None:
        parameter.data = parameter.data.to(dtype)
        return
    init_shard.cast(dtype)
    mark_unsharded(parameter)
    parameter.data = init_shard.placeholder()
    mark_sharded(parameter, init_shard)
