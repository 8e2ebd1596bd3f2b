"""Placeholder for a sharded parameter. An access to its values gathers them or raises.

[Note: parameters used elsewhere] A sharded parameter keeps its shape, dtype and place in its module, but its class is
`ShardedParameter` and its data are one NaN expanded with zero strides. Every torch function that gets it as an argument
passes through `__torch_function__`. If the function reads values, the parameter's gather handler must gather them.
Inside a forward, the unit is gathered and stays unsharded until the end of the running block, so a head that computes
with `self.embed.weight` works. A parameter constructed under `zero.Init` is gathered while its model is being built.
Every other access to the values raises an error that names the ways to read the parameter. Code that bypasses torch
functions (e.g. C++ that received the data) reads NaN. torch itself rejects in-place writes to the overlapping memory.

[Note: version of freed values] Autograd saves aliases of a parameter's values, which are freed while its unit is
sharded. A backward whose start no hook detects (e.g. the block stored an output in a closure) would read freed memory:
zeros, garbage, or a crash. So the version counter of a parameter is raised by `FREED` when its values are freed, and
lowered when they are gathered again, and torch refuses to read an alias in between. `version_of` does not count
`FREED`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from windlass.base.errors import ShardedParameterError
from windlass.base.functional_transforms import outside_transforms


class GatherHandler(Protocol):
    """Owner of the values of sharded parameters, e.g. their unit."""

    def gather_parameter(self, parameter: nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """Gather `parameter` if that is possible now, and return True on success.

        Do not reshard any of `together`, which are all tensors of the call that accesses `parameter`.
        """
        ...

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of `parameter` for error messages."""
        ...


# Original accessors, without hooks. See [Note: gradients that a script sees] for the hooks on `.grad` and `.data`.
_grad: Any = torch.Tensor.grad
_data: Any = torch.Tensor.data
raw_grad: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
put_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
raw_data: Callable[[torch.Tensor], torch.Tensor] = _data.__get__
put_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__

FREED = 1 << 30
"""Number added to the version counter of a parameter while its values are freed."""

_NEW_PARAMETER = nn.Parameter.__new__.__code__
_STATE_DICT = nn.Module._save_to_state_dict.__code__
# Handler and original class of each parameter, by its id, while it is sharded.
_sharded: dict[int, tuple[ReferenceType[GatherHandler], type[nn.Parameter]]] = {}
_nan: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

# Attributes and methods that do not read values, by the name of the getter or method.
METADATA_CALLS = frozenset(
    """
    shape size numel nelement dim ndim ndimension stride dtype device layout is_leaf requires_grad requires_grad_ grad
    grad_fn grad_dtype is_floating_point is_complex is_sparse is_quantized is_meta is_cuda is_cpu is_mps is_nested
    is_xla
    element_size itemsize nbytes names name _version __hash__ register_hook register_post_accumulate_grad_hook
    _backward_hooks _post_accumulate_grad_hooks is_contiguous __len__ is_inference type is_shared retains_grad output_nr
    _is_view is_conj is_neg get_device is_signed _has_symbolic_sizes_strides is_tensor _has_compatible_shallow_copy_type
    backward
    """.split()  # noqa: SIM905
)


def reads_only_metadata(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call reads only metadata of a tensor, not its values. `type(dtype)` is a cast, not metadata."""
    return name in METADATA_CALLS and not (name == "type" and len(args) + len(kwargs) > 1)


_SHAPE_CALLS = frozenset({"shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "stride", "nbytes"})


@dataclass(frozen=True)
class ShardedParameterCallbacks:
    """Callables of the DeepSpeed compatibility layer for stubs in a `state_dict()`, and for shapes in strict mode.

    Attributes:
        allows_stub: Returns True if a `StateDictStub` may represent a sharded parameter in `state_dict()`.
        read_full_value: Gathers and returns the full value of a parameter. Collective over all ranks.
        shape_substitute: Called with a sharded parameter and the frame that reads its shape. Returns a tensor whose
            shape the frame receives instead; None: the frame receives the parameter's shape.
    """

    allows_stub: Callable[[nn.Parameter], bool]
    read_full_value: Callable[[nn.Parameter], torch.Tensor]
    shape_substitute: Callable[[nn.Parameter, FrameType], torch.Tensor | None]


_callbacks: ShardedParameterCallbacks | None = None


def install_callbacks(callbacks: ShardedParameterCallbacks) -> None:
    """Use `callbacks` for all sharded parameters of this process. Without callbacks, `state_dict()` has no stubs."""
    global _callbacks
    _callbacks = callbacks


_CAST_TO = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}

# Calls that create another tensor of the same shape or dtype, and read no values.
FACTORY_CALLS = frozenset(
    """
    new_empty new_zeros new_ones new_full new_tensor
    empty_like zeros_like ones_like full_like rand_like randn_like
    """.split()  # noqa: SIM905
)

# In-place calls that overwrite every element and read none.
_OVERWRITES = frozenset(
    """
    normal_ uniform_ fill_ zero_ copy_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ constant_ ones_
    zeros_ eye_ dirac_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ sparse_
    """.split()  # noqa: SIM905
)


def call_name(function: Callable[..., Any]) -> str:
    """Return the name of a torch function: the attribute's name for a getter, `set name` for a setter or deleter.

    Setters and deleters of `grad` and `requires_grad` are named like the getters, because they access no values.
    """
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        accessor = getattr(function, "__self__", None)
        own = getattr(accessor, "__name__", "")
        return own if name == "__get__" or own in ("grad", "requires_grad") else f"set {own}"
    return name


class ShardedParameter(nn.Parameter):
    """Parameter whose full values are not available on this rank, because it is sharded."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = call_name(function)
        # E.g. `module.to(device)` leaves sharded parameters unchanged: the configuration sets the tier of the shards.
        if args and isinstance(args[0], ShardedParameter) and _is_no_op(name, args, kwargs or {}):
            return args[0]
        if _callbacks is not None and name in _SHAPE_CALLS:
            substitute = _callbacks.shape_substitute(args[0], sys._getframe(1))
            if substitute is not None:
                return function(substitute, *args[1:], **(kwargs or {}))
        # `state_dict()` often needs only names and shapes: return a stub instead of gathering every parameter.
        saves = name == "detach" and sys._getframe(1).f_code is _STATE_DICT
        if saves and _callbacks is not None and _callbacks.allows_stub(args[0]):
            return StateDictStub.of(args[0])
        if name in FACTORY_CALLS and args and isinstance(args[0], ShardedParameter):
            return _create_like(function, args, kwargs or {})
        if not reads_only_metadata(name, args, kwargs or {}):
            tensors = _tensors_in((args, kwargs))
            for parameter in tensors:
                if isinstance(parameter, ShardedParameter) and not _try_gather(parameter, tensors):
                    # An initializer may overwrite a cast copy without reading it, so the error can wait until the copy
                    # is read.
                    if args and parameter is args[0]:
                        dtype = _dtype_of_copy(name, args, kwargs or {})
                        if dtype is not None:
                            return ShardedParameterCopy.of(parameter, dtype)
                    raise _error(parameter, name)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if name == "detach" and sys._getframe(1).f_code is _NEW_PARAMETER:
            # `nn.Parameter(sharded)` detaches its argument and requires that the result has the argument's current
            # class.
            return torch.Tensor._make_subclass(type(args[0]), result, False)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Sharded parameter of shape {tuple(self.shape)}, {self.dtype}: its values are sharded over ranks"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if not _try_gather(self, [self]):
            raise _error(self, "deepcopy")
        copied: nn.Parameter = copy.deepcopy(self, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _error(self, "pickle")


def _is_no_op(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call only moves a sharded parameter, casts it to its current dtype, or sets its data to itself.

    These calls (e.g. `module.cpu()` and `module.to(device)`) have no effect, because the configuration sets the tier of
    the shards.
    """
    if name == "set data":
        return args[1] is args[0]
    if name in _CAST_TO:
        return bool(_CAST_TO[name] == args[0].dtype)
    if name not in ("cpu", "cuda", "to", "type"):
        return False
    given = (*args[1:], *kwargs.values())
    if name == "type" and not (given and all(isinstance(value, torch.dtype) for value in given)):
        return False  # `type()` returns a name; legacy types such as torch.cuda.FloatTensor name a device too
    # The arguments of `to` end with `non_blocking, copy`, so a second bool is `copy`.
    copies = kwargs.get("copy", False) or sum(isinstance(value, bool) for value in args[1:]) > 1
    requested = [value for value in given if isinstance(value, (torch.dtype, torch.Tensor))]
    return not copies and all(getattr(value, "dtype", value) == args[0].dtype for value in requested)


def _cast_to(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype to which a call casts its first argument; None if the call is not a cast."""
    if name not in ("to", "type"):
        return _CAST_TO.get(name)
    requested = (value for value in (*args[1:], *kwargs.values()) if isinstance(value, (torch.dtype, torch.Tensor)))
    return next((value if isinstance(value, torch.dtype) else value.dtype for value in requested), None)


def _dtype_of_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of a call's result if a `ShardedParameterCopy` may represent this result; else None."""
    if name == "_weight_norm":
        dtype: torch.dtype = args[0].dtype
        return dtype
    cast = _cast_to(name, args, kwargs)
    return cast if cast != args[0].dtype else None


def _create_like(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of `FACTORY_CALLS` for a tensor without values."""
    with torch._C.DisableTorchFunctionSubclass():
        # A zero-stride tensor has the shape, dtype and device that the factory copies, with the memory of one element.
        like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
        return function(like, *args[1:], **kwargs)


class _StandIn(torch.Tensor):
    """Stand-in for the values of a sharded parameter. Metadata calls return results; all other calls go to `_use`."""

    _parameter: nn.Parameter
    _comes_from = ""  # call that errors of pickle and deepcopy name; empty: "pickle" or "deepcopy"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = call_name(function), kwargs or {}
        if reads_only_metadata(name, args, given):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **given)
        return cls._use(name, function, args, given)

    @classmethod
    def _use(cls, name: str, function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _error(self._parameter, self._comes_from or "pickle")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _error(self._parameter, self._comes_from or "deepcopy")


class ShardedParameterCopy(_StandIn):
    """Placeholder for the result of a cast or of `weight_norm` on a sharded parameter that cannot be gathered.

    It has a shape and a dtype, but no values. An initializer that overwrites all values makes it an ordinary tensor; a
    call that reads values raises ShardedParameterError. It exists for initializers whose results are dropped:
    `init.normal_(weight.float())` in transformers 5.8, and `init.normal_(conv.weight)` of a convolution with
    weight_norm.
    """

    @classmethod
    def of(cls, parameter: nn.Parameter, dtype: torch.dtype) -> ShardedParameterCopy:
        """Return a copy of a sharded parameter, without values."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = torch.Tensor._make_subclass(cls, nan_placeholder(parameter, dtype), False)
        copied._parameter = parameter
        return copied

    @classmethod
    def _use(cls, name: str, function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if name in FACTORY_CALLS:
            return _create_like(function, args, given)
        # Some callers of torch.nn.init pass the tensor by name.
        written = (args[0] if args else given.get("tensor")) if name in _OVERWRITES else None
        for copied in _tensors_in((args, given)):
            if isinstance(copied, ShardedParameterCopy) and copied is not written:
                raise _error(copied._parameter, name)
        if isinstance(written, ShardedParameterCopy):
            written._become_ordinary()
        return function(*args, **given)

    def _become_ordinary(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.data = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        del self._parameter
        self.__class__ = torch.Tensor  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return (
            f"Copy of a sharded parameter, of shape {tuple(self.shape)}, {self.dtype}: its values are not on this rank"
        )


class StateDictStub(_StandIn):
    """Stub of a sharded parameter in a `state_dict()`, with shape and dtype.

    Callers often need only the names: transformers calls `state_dict()` while it loads, and peft on one rank while it
    saves. A call that reads values runs on the full value (`ShardedParameterCallbacks.read_full_value`, collective). An
    in-place change raises `ShardedParameterError`.
    """

    _comes_from = "state_dict"

    @property
    def parameter(self) -> nn.Parameter:
        """Parameter that the stub represents."""
        return self._parameter

    @classmethod
    def of(cls, parameter: ShardedParameter) -> StateDictStub:
        """Return a new stub of a sharded parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            stub = torch.Tensor._make_subclass(cls, raw_data(parameter), False)
        stub._parameter = parameter
        return stub

    @classmethod
    def _use(cls, name: str, function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        args, given = tree_map_only(StateDictStub, lambda stub: stub._full_value(name), (args, given))
        return function(*args, **given)

    def _full_value(self, what: str) -> torch.Tensor:
        changes = what.startswith("set ") or (what.endswith("_") and not what.endswith("__"))
        if changes or _callbacks is None or what == "__setitem__":
            raise _error(self._parameter, "state_dict")
        if not isinstance(self._parameter, ShardedParameter):
            return self._parameter.detach()
        return _callbacks.read_full_value(self._parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Stub of shape {tuple(self.shape)}, {self.dtype}: its values are sharded over ranks"


def version_of(parameter: nn.Parameter) -> int:
    """Return the version of a parameter's values without `FREED`. In-place changes increment it."""
    return parameter._version & (FREED - 1)


def mark_freed(parameters: Sequence[nn.Parameter]) -> None:
    """Make autograd refuse to read aliases of these parameters' values. The parameters must not be marked yet."""
    _shift_versions(parameters, FREED)


def unmark_freed(parameters: Sequence[nn.Parameter]) -> None:
    """Let autograd read aliases of these parameters' values again. The parameters must be marked."""
    _shift_versions(parameters, -FREED)


def note_freed_values(error: BaseException) -> None:
    """Add the cause to autograd's error about a backward that needs freed values; leave other errors unchanged."""
    version = (
        re.search(r"is at version (\d+); expected version", str(error)) if isinstance(error, RuntimeError) else None
    )
    if version is not None and int(version[1]) >= FREED:
        error.add_note(
            "a backward needed parameters of a block that were freed after its forward (stage 3): the block stored a "
            "tensor where windlass does not look for it, in a closure or an object of its own class, and the backward "
            "reached that tensor before the block's outputs. Return that tensor from the block, put it into a list or "
            "dict of its inputs, keep it as an attribute of a module, or use a stage below 3"
        )


def _shift_versions(parameters: Sequence[nn.Parameter], by: int) -> None:
    versions = tuple(parameter._version + by for parameter in parameters)
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), versions)


def mark_sharded(parameter: nn.Parameter, handler: GatherHandler) -> None:
    """Remove the values of `parameter` and make it a `ShardedParameter`. Do nothing if it is one already."""
    if isinstance(parameter, ShardedParameter):
        return
    # A weak reference, because a strong one in this global dict would keep the handler (the unit) alive.
    _sharded[id(parameter)] = ref(handler), type(parameter)
    put_data(parameter, nan_placeholder(parameter))
    # Change the class in place: modules and optimizers keep references to the parameter object.
    parameter.__class__ = ShardedParameter


def nan_placeholder(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a zero-stride tensor of a parameter's shape and device: every element is one shared NaN.

    Args:
        dtype: Dtype of the tensor; None: the parameter's. Integers have no NaN: all bits of an element are 1 (-1, or
            the maximum).
    """
    dtype = dtype or parameter.dtype
    key = (dtype, parameter.device)
    if key not in _nan:
        if dtype.is_floating_point or dtype.is_complex:
            _nan[key] = torch.full((), float("nan"), dtype=dtype, device=parameter.device)
        else:
            _nan[key] = torch.full((dtype.itemsize,), 255, dtype=torch.uint8, device=parameter.device).view(dtype)[0]
    return _nan[key].expand(parameter.shape)


def mark_unsharded(parameter: nn.Parameter) -> None:
    """Restore the class of `parameter`. The caller sets its data."""
    _, parameter.__class__ = _sharded.pop(id(parameter))


def forget_sharded(identity: int) -> None:
    """Delete the entry of a garbage-collected sharded parameter, given its id."""
    _sharded.pop(identity, None)


def handler_of(parameter: nn.Parameter) -> GatherHandler | None:
    """Return the gather handler of a sharded parameter; None for other tensors, or if the handler no longer exists."""
    entry = _sharded.get(id(parameter)) if isinstance(parameter, ShardedParameter) else None
    return entry[0]() if entry is not None else None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            tensors += _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            tensors += _tensors_in(item)
    return tensors


def _try_gather(parameter: ShardedParameter, together: Sequence[torch.Tensor]) -> bool:
    """Gather the parameter through its handler. Return True on success."""
    keeper = handler_of(parameter)
    if keeper is None:
        return False
    with outside_transforms():
        return keeper.gather_parameter(parameter, together)


def _error(parameter: nn.Parameter, what: str) -> ShardedParameterError:
    keeper = handler_of(parameter)
    name = keeper.name_of(parameter) if keeper is not None else "?"
    return ShardedParameterError(
        f"{what!r} on parameter {name!r}: its values are sharded over ranks (stage 3 outside of a forward, or built "
        "under windlass.zero.Init); read or "
        "change it inside `with windlass.zero.GatheredParameters([parameter], modifier_rank=None or a rank):`, or read "
        "it with windlass.zero.full_param(parameter)"
    )
