"""Recording of a forward as a list of operators, with sizes that are affine functions of the batch.

[Note: recorded steps] The forward of most served models runs the same operators in every step; only sizes differ. The
forward is recorded for a few batch sizes. If the recordings have the same operators, no operator or size depends on the
values of the tokens, and every integer is `a + b * tokens + c * rows`, where `rows` counts the rows of logits, the list
can be replayed for any batch, without the modules. Views are not operators of the list: a tensor is a storage, sizes,
strides and an offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Affine = tuple[int, int, int]
"""Coefficients `(a, b, c)` of `a + b * tokens + c * rows`."""

StorageKey = tuple[str, int]
"""Kind of a storage (`value`, `input` or `constant`) and its number."""


class NotRecordableError(Exception):
    """Error for a forward that cannot be replayed for every batch. The message gives the reason."""


@dataclass(frozen=True)
class TensorRef:
    """Tensor of a recording.

    Attributes:
        size, stride, offset: in elements. Integers in the recording of one forward; `Affine` in a result of `unify`.
    """

    storage: StorageKey
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype


@dataclass
class Operator:
    """One recorded call.

    Attributes:
        name: name of the aten operator, or of a native call such as `linear` or `attention`.
        target: the aten operator; or the state of a native call, e.g. `(panels, bias)`.
        inputs: positional arguments, with `TensorRef`s instead of tensors.
        named: keyword arguments, with `TensorRef`s instead of tensors.
        outputs: results; None for a result that is not a tensor.
        mutates: True if the operator writes into an argument: the first one or `out`.
    """

    name: str
    target: Any
    inputs: list[Any]
    named: dict[str, Any]
    outputs: list[TensorRef | None]
    mutates: bool = False


@dataclass
class Recording:
    """Operators of one forward.

    Attributes:
        constants: tensors that are neither inputs nor recorded results, e.g. weights, by the number of their storage.
        storages: bytes of each value's storage; `Affine` in a result of `unify`.
        result: the logits.
    """

    operators: list[Operator] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    storages: dict[StorageKey, Any] = field(default_factory=dict)
    result: TensorRef | None = None


_active: ContextVar[OperatorRecorder | None] = ContextVar("windlass_step_recorder", default=None)


def get_recorder() -> OperatorRecorder | None:
    """Return the recorder of the running forward; None: the forward is not recorded."""
    return _active.get()


class OperatorRecorder(TorchDispatchMode):
    """Recorder of every operator that runs inside `active`, except views.

    Args:
        inputs: tensors that differ from step to step: first the token ids, then the positions, then any others.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.recording = Recording()
        self._alive: list[torch.Tensor] = []  # keeps tensors alive, so that no two storages have the same address
        self._keys: dict[int, StorageKey] = {}
        self._paused = 0
        for number, tensor in enumerate(inputs):
            self._keys[_address(tensor)] = ("input", number)
            self._alive.append(tensor)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the operators that run inside the `with` block."""
        token = _active.set(self)
        try:
            with self:
                yield
        finally:
            _active.reset(token)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no torch operators inside the `with` block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def add_native(self, name: str, target: Any, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Record a native call."""
        refs = [self.refer(tensor) for tensor in inputs]
        self.recording.operators.append(Operator(name, target, refs, {}, [self._define(output)]))

    def refer(self, tensor: torch.Tensor) -> TensorRef:
        """Return the reference of a tensor. A tensor that is neither an input nor recorded becomes a constant."""
        address = _address(tensor)
        key = self._keys.get(address)
        if key is None:
            key = self._keys[address] = ("constant", len(self.recording.constants))
            self.recording.constants[key[1]] = tensor
            self._alive.append(tensor)
        return _ref(key, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        inputs = [self._convert(value) for value in args]
        named = {name: self._convert(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        mutates = bool(func._schema.is_mutable)
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        if not mutates and tensors and all(_address(tensor) in self._keys for tensor in tensors):
            self._alive += tensors  # a view of a recorded storage needs no operator
            return result
        outputs = [self._define(value) if isinstance(value, torch.Tensor) else None for value in results]
        self.recording.operators.append(Operator(str(func), func, inputs, named, outputs, mutates))
        return result

    def _define(self, tensor: torch.Tensor) -> TensorRef:
        address = _address(tensor)
        key = self._keys.get(address)
        if key is None:
            key = self._keys[address] = ("value", len(self.recording.storages))
            self.recording.storages[key] = tensor.untyped_storage().nbytes()
        self._alive.append(tensor)
        return _ref(key, tensor)

    def _convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.refer(value)
        if isinstance(value, (list, tuple)):
            return [self._convert(item) for item in value]
        return value


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _ref(key: StorageKey, tensor: torch.Tensor) -> TensorRef:
    return TensorRef(key, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)


def refuse_data_dependence(recording: Recording) -> None:
    """Raise NotRecordableError if Python code or sizes depend on the values of token ids or positions, as in MoE."""
    tainted: set[StorageKey] = {("input", 0), ("input", 1)}
    for operator in recording.operators:
        refs = list(references([operator.inputs, operator.named]))
        if operator.name == "attention" or any(ref.storage in tainted for ref in refs):
            tags = getattr(operator.target, "tags", ())
            by_integers = operator.name == "aten.index.Tensor" and all(r.dtype == torch.long for r in refs[1:])
            dependent = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
            if dependent and not by_integers:
                raise NotRecordableError(f"{operator.name} depends on the values of the tokens")
            tainted |= {ref.storage for ref in references(operator.outputs)}
            if operator.mutates and refs:
                tainted.add(refs[0].storage)


def references(value: Any) -> Iterator[TensorRef]:
    """Yield the `TensorRef`s in nested lists, tuples and dicts."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        yield from references(list(value.values()))


def unify(recordings: Sequence[Recording], sizes: Sequence[tuple[int, int]]) -> Recording:
    """Return one recording, with integers that are affine functions of tokens and rows.

    Args:
        recordings: recordings of the same model.
        sizes: tokens and rows of each recording. The second differs from the first only in the tokens, and the third
            from the first only in the rows. The others are checked against these three.

    Raises:
        NotRecordableError: the recordings differ in operators, arguments or constants, or an integer is not affine.
    """
    first = recordings[0]
    if any(len(other.operators) != len(first.operators) for other in recordings):
        raise NotRecordableError("the number of operators depends on the batch")
    operators = []
    for parts in zip(*(recording.operators for recording in recordings), strict=True):
        head = parts[0]
        if any(part.name != head.name for part in parts):
            raise NotRecordableError(f"an operator depends on the batch: {', '.join(p.name for p in parts)}")
        operators.append(
            Operator(
                head.name,
                head.target,
                _unify_values([part.inputs for part in parts], sizes),
                _unify_values([part.named for part in parts], sizes),
                _unify_values([part.outputs for part in parts], sizes),
                head.mutates,
            )
        )
    for number, tensor in first.constants.items():
        others = [recording.constants[number] for recording in recordings[1:]]
        same = all(o.shape == tensor.shape and o.data_ptr() == tensor.data_ptr() for o in others)
        if not same and not all(o.shape == tensor.shape and torch.equal(o, tensor) for o in others):
            raise NotRecordableError("a tensor that the forward makes outside of torch depends on the batch")
    storages = {key: _fit([recording.storages[key] for recording in recordings], sizes) for key in first.storages}
    result: TensorRef = _unify_values([recording.result for recording in recordings], sizes)
    return Recording(operators, first.constants, storages, result)


def _unify_values(values: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> Any:
    head = values[0]
    if any(type(value) is not type(head) for value in values):
        raise NotRecordableError(f"an argument depends on the batch: {values}")
    if isinstance(head, TensorRef):
        if any(value.storage != head.storage or value.dtype != head.dtype for value in values):
            raise NotRecordableError("an operator gets another tensor in another batch")
        if any(len(value.size) != len(head.size) for value in values):
            raise NotRecordableError("the number of dimensions depends on the batch")
        return TensorRef(
            head.storage,
            tuple(_fit(parts, sizes) for parts in zip(*(value.size for value in values), strict=True)),
            tuple(_fit(parts, sizes) for parts in zip(*(value.stride for value in values), strict=True)),
            _fit([value.offset for value in values], sizes),
            head.dtype,
        )
    if isinstance(head, list):
        if any(len(value) != len(head) for value in values):
            raise NotRecordableError("the length of an argument depends on the batch")
        return [_unify_values(parts, sizes) for parts in zip(*values, strict=True)]
    if isinstance(head, dict):
        return {name: _unify_values([value[name] for value in values], sizes) for name in head}
    if isinstance(head, int) and not isinstance(head, bool):
        fitted = _fit(values, sizes)
        return head if fitted[1:] == (0, 0) else AffineInt(fitted)
    if any(value != head for value in values):
        raise NotRecordableError(f"an argument depends on the batch: {values}")
    return head


@dataclass(frozen=True)
class AffineInt:
    """Integer argument that depends on the batch."""

    value: Affine


def _fit(values: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Affine:
    (t0, r0), (t1, _), (_, r2) = sizes[:3]
    slope, rest = divmod(values[1] - values[0], t1 - t0)
    row_slope, row_rest = divmod(values[2] - values[0], r2 - r0)
    fitted = (values[0] - slope * t0 - row_slope * r0, slope, row_slope)
    if rest or row_rest or any(evaluate(fitted, *size) != value for value, size in zip(values, sizes, strict=True)):
        raise NotRecordableError(f"a size is not an affine function of the batch: {list(values)}")
    return fitted


def evaluate(affine: Affine, tokens: int, rows: int) -> int:
    """Return the value of an affine function for a batch."""
    return affine[0] + affine[1] * tokens + affine[2] * rows
