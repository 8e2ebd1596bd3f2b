"""Fusion of recorded operators into the native kernels of inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from windlass.inference.step_recording import Affine, AffineInt, Operator, Recording, StorageKey, TensorRef, references
from windlass.kernels.packed_gemm import pack_weight

_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_SMALL_MATRIX = 1 << 22  # elements
_ACTIVATIONS = {"aten.silu.default": "silu", "aten.gelu.default": "gelu_tanh"}


@dataclass(frozen=True)
class NormCall:
    """RMS norm of rows of `features` elements, multiplied by `weight`. The rows are contiguous, or heads of tokens."""

    features: int
    epsilon: float
    weight: torch.Tensor


@dataclass(frozen=True)
class HeadLayout:
    """Memory of the heads of tokens, which are `token_stride` elements apart."""

    heads: int
    head_dim: int
    token_stride: int

    @property
    def is_dense(self) -> bool:
        """True if there is nothing between the heads of two tokens."""
        return self.token_stride == self.heads * self.head_dim


@dataclass(frozen=True)
class RotaryCall:
    """In-place rotary embedding of a tensor `[tokens, heads, head_dim]` with contiguous heads; `token_stride` is the
    number of elements between two tokens.
    """

    heads: int
    head_dim: int
    token_stride: int


@dataclass(frozen=True)
class GateCall:
    """Gated activation of rows of `2 * features` elements: `activation(first half) * second half`."""

    features: int
    activation: str


def fuse(recording: Recording) -> Recording:
    """Return a recording with the same result and fewer operators.

    Constants are folded; products with small constants are packed; norms, rotations and gates are fused; operators that
    the result does not need are removed.
    """
    recording = _fold_constants(recording)
    recording = _pack_products(_drop_unused(recording))
    for fusion in (_fuse_norms, _fuse_rotations, _fuse_gates):
        recording = _drop_unused(fusion(recording))
    return recording


def has_batch_sizes(value: Any) -> bool:
    """Return True if an integer among the arguments depends on the batch; sizes of tensors are not checked."""
    if isinstance(value, (list, tuple)):
        return any(has_batch_sizes(item) for item in value)
    if isinstance(value, dict):
        return has_batch_sizes(list(value.values()))
    return isinstance(value, AffineInt)


class _Uses:
    """Producers and consumers of each storage."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._producers: dict[StorageKey, list[Operator]] = {}
        self._consumers: dict[StorageKey, list[Operator]] = {}
        for operator in operators:
            for ref in references(operator.outputs):
                self._producers.setdefault(ref.storage, []).append(operator)
            for key in {ref.storage for ref in references([operator.inputs, operator.named])}:
                self._consumers.setdefault(key, []).append(operator)

    def producer(self, ref: Any, name: str) -> Operator | None:
        """Return the operator `name` if it alone writes the tensor's storage, else None."""
        if not isinstance(ref, TensorRef):
            return None
        found = self._producers.get(ref.storage, [])
        return found[0] if len(found) == 1 and found[0].name == name else None

    def consumer(self, ref: TensorRef | None, name: str) -> Operator | None:
        """Return the operator `name` if it alone reads the tensor's storage, else None."""
        found = self.consumers(ref)
        return found[0] if len(found) == 1 and found[0].name == name else None

    def consumers(self, ref: TensorRef | None) -> list[Operator]:
        """Return the operators that read the tensor's storage."""
        return [] if ref is None else self._consumers.get(ref.storage, [])


def _pack_products(recording: Recording) -> Recording:
    """Replace products with small constant matrices, e.g. of routers, by packed ones: a row of torch's product may have
    other bits in another batch. The constant stays in memory."""

    def pack(operator: Operator) -> Operator:
        x, weight = operator.inputs
        constant = recording.constants.get(weight.storage[1]) if weight.storage[0] == "constant" else None
        sizes, strides = [size[0] for size in weight.size], [stride[0] for stride in weight.stride]
        transposed = strides == [1, sizes[0]] and math.prod(sizes) <= _SMALL_MATRIX
        rows = x.size[-1] == (sizes[0], 0, 0) and [stride[0] for stride in x.stride] == [sizes[0], 1]
        if constant is None or not transposed or not rows or {x.dtype, weight.dtype} - set(_FORMATS):
            return operator
        matrix = constant.detach().as_strided(sizes[::-1], strides[::-1], weight.offset[0])
        return replace(operator, name="linear", target=(pack_weight(matrix, _FORMATS[weight.dtype]), None), inputs=[x])

    operators = [pack(one) if one.name == "aten.mm.default" else one for one in recording.operators]
    return replace(recording, operators=operators)


def _fold_constants(recording: Recording) -> Recording:
    """Replace operators with only constant inputs by their results."""
    mutated = {
        ref.storage for op in recording.operators if op.mutates for ref in references([op.inputs[:1], op.outputs])
    }
    constants = dict(recording.constants)
    folded: dict[StorageKey, StorageKey] = {}
    kept = []

    def resolve(value: Any) -> Any:
        if isinstance(value, TensorRef):
            key = folded.get(value.storage, value.storage)
            return replace(value, storage=key)
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict):
            return {name: resolve(item) for name, item in value.items()}
        return value

    for operator in recording.operators:
        inputs, named = resolve(operator.inputs), resolve(operator.named)
        refs = list(references([inputs, named]))
        constant = (
            isinstance(operator.target, torch._ops.OpOverload)
            and all(ref.storage[0] == "constant" for ref in refs)
            and not has_batch_sizes([inputs, named])
            and not operator.mutates
            and len(operator.outputs) == 1
            and isinstance(operator.outputs[0], TensorRef)
            and not any(affine[1:] != (0, 0) for ref in [*refs, operator.outputs[0]] for affine in ref.size)
            and operator.outputs[0].storage not in mutated
        )
        if not constant:
            kept.append(replace(operator, inputs=inputs, named=named))
            continue
        arguments = _constant_values(inputs, constants)
        number = max(constants, default=-1) + 1
        constants[number] = operator.target(*arguments, **_constant_values(named, constants))
        output = operator.outputs[0]
        assert isinstance(output, TensorRef)
        folded[output.storage] = ("constant", number)
    return replace(recording, operators=kept, constants=constants, result=resolve(recording.result))


def _constant_values(value: Any, constants: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, TensorRef):
        base = constants[value.storage[1]]
        size, stride = ([affine[0] for affine in part] for part in (value.size, value.stride))
        return base.as_strided(size, stride, value.offset[0])
    if isinstance(value, list):
        return [_constant_values(item, constants) for item in value]
    if isinstance(value, dict):
        return {name: _constant_values(item, constants) for name, item in value.items()}
    return value


def _drop_unused(recording: Recording) -> Recording:
    assert recording.result is not None
    needed = {recording.result.storage}
    kept: list[Operator] = []
    for operator in reversed(recording.operators):
        written = {ref.storage for ref in references(operator.outputs)}
        if operator.mutates:
            written |= {ref.storage for ref in references(operator.inputs[:1])}
        if operator.name == "attention" or written & needed:
            kept.append(operator)
            needed |= {ref.storage for ref in references([operator.inputs, operator.named])}
    return replace(recording, operators=kept[::-1])


def _rewrite(
    recording: Recording,
    removed: Sequence[Operator],
    inserted: dict[int, Operator],
    renamed: Callable[[TensorRef], TensorRef] | None = None,
) -> Recording:
    """Return a recording without the operators `removed`. `inserted` maps the `id` of a replaced operator to its
    replacement; `renamed` maps each tensor among the arguments and in the result to the tensor that replaces it.
    """
    gone = {id(operator) for operator in removed}

    def resolve(value: Any) -> Any:
        if renamed is None:
            return value
        if isinstance(value, TensorRef):
            return renamed(value)
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict):
            return {name: resolve(item) for name, item in value.items()}
        return value

    operators = []
    for operator in recording.operators:
        chosen = inserted.get(id(operator), operator)
        if chosen is operator and id(operator) in gone:
            continue
        operators.append(replace(chosen, inputs=resolve(chosen.inputs), named=resolve(chosen.named)))
    return replace(recording, operators=operators, result=resolve(recording.result))


def _fuse_norms(recording: Recording) -> Recording:
    """Fuse RMS norms: `x * rsqrt(mean(x ** 2) + epsilon) * weight`."""
    uses = _Uses(recording.operators)
    removed: list[Operator] = []
    inserted: dict[int, Operator] = {}
    for root in recording.operators:
        if root.name != "aten.rsqrt.default":
            continue
        add = uses.producer(root.inputs[0], "aten.add.Tensor")
        mean = uses.producer(add.inputs[0], "aten.mean.dim") if add else None
        square = uses.producer(mean.inputs[0], "aten.pow.Tensor_Scalar") if mean else None
        if add is None or mean is None or square is None or not isinstance(add.inputs[1], (int, float)):
            continue
        if square.inputs[1] != 2 or mean.inputs[1:] != [[-1], True]:
            continue
        x = square.inputs[0]
        scaled = uses.consumer(root.outputs[0], "aten.mul.Tensor")
        if scaled is None or x not in scaled.inputs or root.outputs[0] not in scaled.inputs:
            continue
        widened = uses.producer(x, "aten._to_copy.default")
        steps = [square, mean, add, root, scaled]
        narrow = x
        last = scaled
        if widened is not None and x.dtype == torch.float32 and widened.inputs[0].dtype == torch.bfloat16:
            rounded = uses.consumer(scaled.outputs[0], "aten._to_copy.default")
            if rounded is None or rounded.outputs[0] is None or rounded.outputs[0].dtype != torch.bfloat16:
                continue
            narrow, last = widened.inputs[0], rounded
            steps.append(rounded)
        weighted = uses.consumer(last.outputs[0], "aten.mul.Tensor")
        if weighted is None:
            continue
        weights = [ref for ref in weighted.inputs if isinstance(ref, TensorRef) and ref.storage[0] == "constant"]
        features = x.size[-1]
        if len(weights) != 1 or weights[0].size != (features,) or features[1:] != (0, 0):
            continue
        single = all(len(uses.consumers(step.outputs[0])) == 1 for step in steps)
        output = weighted.outputs[0]
        if not single or output is None:
            continue
        if not (_has_rows(narrow) and _has_rows(output)):
            read, written = head_layout(narrow), head_layout(output)
            if read is None or written is None or not written.is_dense or narrow.size != output.size:
                continue
        if output.dtype != narrow.dtype:  # a float32 weight widens bfloat16 rows; the kernel has one dtype
            continue
        weight = _constant_values(weights[0], recording.constants).float().contiguous()
        call = NormCall(features[0], float(add.inputs[1]), weight)
        inserted[id(weighted)] = Operator("rms_norm", call, [narrow], {}, weighted.outputs)
        removed += [*steps, weighted]
    return _rewrite(recording, removed, inserted)


def _fuse_rotations(recording: Recording) -> Recording:
    """Replace rotary embeddings, `x * cos + cat(-x2, x1) * sin`, by rotations in place."""
    uses = _Uses(recording.operators)
    removed: list[Operator] = []
    inserted: dict[int, Operator] = {}
    aliases: dict[StorageKey, tuple[TensorRef, TensorRef]] = {}
    for root in recording.operators:
        if root.name != "aten.cat.default" or len(root.inputs[0]) != 2 or root.inputs[1:] != [-1]:
            continue
        negated = uses.producer(root.inputs[0][0], "aten.neg.default")
        turned = uses.consumer(root.outputs[0], "aten.mul.Tensor")
        total = uses.consumer(turned.outputs[0], "aten.add.Tensor") if turned else None
        if negated is None or turned is None or total is None or len(total.inputs) != 2:
            continue
        straight = next(
            (op for op in (uses.producer(ref, "aten.mul.Tensor") for ref in total.inputs) if op not in (None, turned)),
            None,
        )
        if straight is None or total.outputs[0] is None:
            continue
        x, cosines = straight.inputs
        sines = next((ref for ref in turned.inputs if ref != root.outputs[0]), None)
        low, high = root.inputs[0][1], negated.inputs[0]
        if not all(isinstance(ref, TensorRef) for ref in (x, cosines, sines, low, high)) or sines is None:
            continue
        call = _rotary_call(x, low, high)
        if call is None or not _is_table(cosines, call.head_dim) or not _is_table(sines, call.head_dim):
            continue
        steps = [negated, root, turned, straight, total]
        if any(len(uses.consumers(step.outputs[0])) != 1 for step in steps[:-1]):
            continue
        output = total.outputs[0]
        readers = uses.consumers(output)
        if any(ref != output for op in readers for ref in references(op.inputs) if ref.storage == output.storage):
            continue
        if _overlaps_others(x, call, uses, [negated, root, straight]):
            continue
        inserted[id(total)] = Operator("rotary", call, [x, cosines, sines], {}, [], mutates=True)
        aliases[output.storage] = (output, x)
        removed += steps

    def renamed(ref: TensorRef) -> TensorRef:
        return aliases[ref.storage][1] if ref.storage in aliases else ref

    return _rewrite(recording, removed, inserted, renamed)


def _rotary_call(x: TensorRef, low: TensorRef, high: TensorRef) -> RotaryCall | None:
    """Return the call for `x` `[1, heads, tokens, head_dim]` with contiguous heads, whose halves are `low` and `high`.
    None for other tensors.
    """
    layout = head_layout(x)
    if layout is None or x.size[2] != (0, 1, 0) or layout.head_dim % 2:
        return None
    half = (layout.head_dim // 2, 0, 0)
    wanted = (*x.size[:3], half)
    if low.storage != x.storage or high.storage != x.storage or low.size != wanted or high.size != wanted:
        return None
    if low.offset != x.offset or high.offset != (x.offset[0] + half[0], 0, 0):
        return None
    return RotaryCall(layout.heads, layout.head_dim, layout.token_stride)


def _is_table(ref: TensorRef, width: int) -> bool:
    """Return True if the tensor is float32 `[..., tokens, width]`, with contiguous rows and leading sizes of 1."""
    return (
        ref.dtype == torch.float32
        and ref.size[-2:] == ((0, 1, 0), (width, 0, 0))
        and all(size == (1, 0, 0) for size in ref.size[:-2])
        and ref.stride[-2:] == ((width, 0, 0), (1, 0, 0))
    )


def _overlaps_others(x: TensorRef, call: RotaryCall, uses: _Uses, steps: Sequence[Operator]) -> bool:
    """Return True if an operator outside `steps` may read memory that the rotation overwrites."""
    begin, end = x.offset[0], x.offset[0] + call.heads * call.head_dim
    own = {id(step) for step in steps}
    for operator in uses.consumers(x):
        if id(operator) in own:
            continue
        for ref in references([operator.inputs, operator.named]):
            if ref.storage != x.storage:
                continue
            strides = [stride for size, stride in zip(ref.size, ref.stride, strict=True) if size != (1, 0, 0)]
            if any(affine[1:] != (0, 0) for affine in (*strides, ref.offset)):
                return True
            within = [
                (size[0] - 1) * stride[0]
                for size, stride in zip(ref.size, ref.stride, strict=True)
                if size[1:] == (0, 0)
            ]
            if ref.offset[0] < end and ref.offset[0] + sum(within) + 1 > begin:
                return True
    return False


def _fuse_gates(recording: Recording) -> Recording:
    """Fuse gated activations: `activation(gate) * up` of the two halves of one matrix product."""
    uses = _Uses(recording.operators)
    removed: list[Operator] = []
    inserted: dict[int, Operator] = {}
    for root in recording.operators:
        activation = _ACTIVATIONS.get(root.name)
        if activation is None or (activation == "gelu_tanh" and root.named.get("approximate") != "tanh"):
            continue
        product = uses.consumer(root.outputs[0], "aten.mul.Tensor")
        gate = root.inputs[0]
        if product is None or product.outputs[0] is None:
            continue
        up = next((ref for ref in product.inputs if ref != root.outputs[0]), None)
        if not isinstance(up, TensorRef) or up.storage != gate.storage or up.size != gate.size:
            continue
        features, row = gate.size[-1], gate.stride[-2] if len(gate.stride) > 1 else None
        halves = gate.offset == (0, 0, 0) and up.offset == features and up.stride == gate.stride
        if not halves or features[1:] != (0, 0) or row != (2 * features[0], 0, 0):
            continue
        if any(size != (1, 0, 0) for size in gate.size[:-2]) or not _has_rows(product.outputs[0]):
            continue
        if len(uses.consumers(gate)) != 2:
            continue
        call = GateCall(features[0], activation)
        inserted[id(product)] = Operator("gate", call, [gate], {}, product.outputs)
        removed += [root, product]
    return _rewrite(recording, removed, inserted)


def head_layout(ref: TensorRef) -> HeadLayout | None:
    """Return the heads of a tensor `[1, tokens, heads, head_dim]`, or `[1, heads, tokens, head_dim]` of that memory:
    float32 or bfloat16 with contiguous heads, as in a part of a product. None for other tensors.
    """
    if len(ref.size) != 4 or ref.dtype not in (torch.float32, torch.bfloat16) or ref.size[0] != (1, 0, 0):
        return None
    tokens = next((place for place in (1, 2) if ref.size[place] == (0, 1, 0)), None)
    if tokens is None:
        return None
    heads, dim, stride = ref.size[3 - tokens], ref.size[3], ref.stride[tokens]
    if any(affine[1:] != (0, 0) for affine in (heads, dim, stride, ref.offset)) or ref.stride[3] != (1, 0, 0):
        return None
    if (heads[0] > 1 and ref.stride[3 - tokens] != dim) or stride[0] < heads[0] * dim[0]:
        return None
    return HeadLayout(heads[0], dim[0], stride[0])


def _has_rows(ref: TensorRef | None) -> bool:
    """Return True if the tensor is contiguous, float32 or bfloat16, and at most one dimension depends on the batch."""
    if ref is None or ref.dtype not in (torch.float32, torch.bfloat16):
        return False
    expected: Affine = (1, 0, 0)
    for size, stride in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size != (1, 0, 0) and stride != expected:
            return False
        if size[1:] == (0, 0):
            expected = (expected[0] * size[0], expected[1] * size[0], expected[2] * size[0])
        elif expected[1:] == (0, 0):
            expected = (size[0] * expected[0], size[1] * expected[0], size[2] * expected[0])
        else:
            return False
    return True
