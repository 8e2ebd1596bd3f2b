"""Writer of pickles for `torch.load` without the pickle module: plain data, tensors, and objects by class name."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from windlass.base.errors import CheckpointError

_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}

# [Note: written pickles] A pickler imports each class that it names, so a file that names a class of DeepSpeed
# could be written only where DeepSpeed is installed. And it would write any object it is given. This writer emits
# opcodes for the few kinds of values below, and names only classes of torch, `OrderedDict`, and the classes that the
# caller passes as `PickledObject`.


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """Contiguous tensor to be written to a file. If one object occurs twice in a value, the file stores it once.

    Attributes:
        parts: called when the file is written; returns the tensor's elements as consecutive flat tensors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[torch.Tensor]]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class PickledObject:
    """Object of a class given by name.

    The reader calls the class with `arguments` (without arguments, only its `__new__`), then sets the attributes.
    """

    module: str
    name: str
    arguments: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


def plan_tensor(tensor: torch.Tensor) -> PlannedTensor:
    """Return a planned tensor for a tensor in memory."""
    return PlannedTensor(tensor.dtype, tuple(tensor.shape), lambda: [tensor.detach().reshape(-1)])


def write_pickle(value: Any) -> tuple[bytes, list[PlannedTensor]]:
    """Return the pickle of `value`, and its tensors. The tensor at index `n` has the storage `n`.

    Args:
        value: None, bool, int, float, str, dtypes, sizes, tensors, `PlannedTensor`, `PickledObject`, and lists, tuples
            and dictionaries of them.

    Raises:
        CheckpointError: `value` contains another kind of value, a tensor of an unsupported dtype, or an integer of more
            than 255 bytes.
    """
    writer = _PickleWriter()
    writer.put(value)
    return b"\x80\x02" + b"".join(writer.out) + b".", writer.tensors


class _PickleWriter:
    """Writer of opcodes of pickle protocol 2.

    Only tensors are memoized, so that a tensor used twice is one object to readers.
    """

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.tensors: list[PlannedTensor] = []
        self._numbers: dict[int, int] = {}  # index in `tensors`, by id of the tensor
        self._kept: list[torch.Tensor] = []

    def put(self, value: Any) -> None:
        """Write one value."""
        if value is None:
            self.out.append(b"N")
        elif isinstance(value, bool):
            self.out.append(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            self._integer(int(value))
        elif isinstance(value, float):
            self.out.append(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            raw = str(value).encode("utf-8", "surrogatepass")
            self.out.append(b"X" + struct.pack("<I", len(raw)) + raw)
        elif isinstance(value, PlannedTensor):
            self._tensor(value, id(value))
        elif isinstance(value, torch.Tensor):
            self._kept.append(value)  # keeps the tensor alive, so that its id is not reused
            self._tensor(plan_tensor(value), id(value))
        elif isinstance(value, torch.dtype):
            self._global("torch", str(value).removeprefix("torch."))
        elif isinstance(value, PickledObject):
            self._object(value)
        elif isinstance(value, torch.Size):
            self._call("torch", "Size", (tuple(value),))
        elif isinstance(value, OrderedDict):
            self._call("collections", "OrderedDict", ())
            self._items(value)
        elif isinstance(value, Mapping):
            self.out.append(b"}")
            self._items(value)
        elif isinstance(value, list):
            self.out += b"]", b"("
            self._all(value)
            self.out.append(b"e")
        elif isinstance(value, tuple):
            self.out.append(b"(")
            self._all(value)
            self.out.append(b"t")
        else:
            raise CheckpointError(
                f"a {type(value).__module__}.{type(value).__qualname__} cannot be written to a .pt file: only plain "
                "data and tensors are"
            )

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.put(value)

    def _items(self, value: Mapping[Any, Any]) -> None:
        self.out.append(b"(")
        for key, item in value.items():
            self.put(key)
            self.put(item)
        self.out.append(b"u")

    def _integer(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self.out.append(b"J" + struct.pack("<i", value))
            return
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise CheckpointError(f"an integer of {len(raw)} bytes cannot be written to a .pt file; give it as text")
        self.out.append(b"\x8a" + bytes([len(raw)]) + raw)

    def _global(self, module: str, name: str) -> None:
        self.out.append(f"c{module}\n{name}\n".encode())

    def _call(self, module: str, name: str, given: tuple[Any, ...]) -> None:
        self._global(module, name)
        self.put(given)
        self.out.append(b"R")

    def _object(self, value: PickledObject) -> None:
        self._global(value.module, value.name)
        self.put(value.arguments)
        self.out.append(b"R" if value.arguments else b"\x81")  # NEWOBJ calls only `__new__`
        if value.attributes:
            self.put(dict(value.attributes))
            self.out.append(b"b")

    def _tensor(self, tensor: PlannedTensor, identity: int) -> None:
        if tensor.dtype not in _STORAGES:
            raise CheckpointError(f"a .pt file cannot hold tensors of dtype {tensor.dtype}; cast it, or leave it out")
        if identity in self._numbers:
            self.out.append(b"j" + struct.pack("<I", self._numbers[identity]))
            return
        self._numbers[identity] = len(self.tensors)
        self.tensors.append(tensor)
        strides = torch.empty(tensor.shape, device="meta").stride()
        self._global("torch._utils", "_rebuild_tensor_v2")
        self.out += b"(", b"("
        self.put("storage")
        self._global("torch", _STORAGES[tensor.dtype])
        self._all((str(self._numbers[identity]), "cpu", tensor.numel))
        self.out += b"t", b"Q"
        self._all((0, tuple(tensor.shape), tuple(strides), False, OrderedDict()))
        self.out += b"t", b"R", b"r" + struct.pack("<I", self._numbers[identity])
