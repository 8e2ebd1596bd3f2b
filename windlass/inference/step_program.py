"""Program of a step: the recorded operators of a model's forward, replayed with buffers that are allocated once.

[Note: native runs] Buffers have fixed addresses, so for most operators only the number of rows depends on the batch.
Consecutive operators of this kind form a native run, which is built once and takes one call from Python in each step.
Other operators are bound to each batch size at its first occurrence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.log import logger
from windlass.inference.paged_backend import AttentionCall, PagedAttention
from windlass.inference.step_batch import StepBatch
from windlass.inference.step_fusion import GateCall, NormCall, RotaryCall, fuse, head_layout
from windlass.inference.step_recording import (
    AffineInt,
    NotRecordableError,
    Operator,
    OperatorRecorder,
    Recording,
    StorageKey,
    TensorRef,
    evaluate,
    references,
    refuse_data_dependence,
    unify,
)
from windlass.inference.widened_products import fast_operator
from windlass.kernels.fused_layers import ACTIVATION_CODES
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.kernel_dispatch import REFERENCE_PATH
from windlass.kernels.packed_experts import PackedExperts
from windlass.kernels.packed_gemm import PackedPanels

_SIZES = ((5, 3), (7, 3), (5, 4), (9, 5))  # numbers of tokens and of rows of logits in each recording
_RECORDED_IDS = 16  # largest number of different token ids in a recording
_KEPT = 128  # maximum number of batch sizes with stored calls; the least recently used are dropped
_POSITIONS: StorageKey = ("input", 1)
# Operators whose result for a token depends on that token alone, if `cat` joins the last dimension.
_TABULATED = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default",
        "add.Tensor",
        "cat.default",
        "cos.default",
        "div.Tensor",
        "mul.Tensor",
        "sin.default",
    )
)
_TABLE_BYTES = 48 << 20  # maximum size of all tables: cosines and sines of 48k positions, for heads of 128 features
_TABLE_CALLS = 512  # maximum number of batches for which a table is computed

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Count = tuple[int, int]  # number of rows or elements for each token, and for each row of logits


@dataclass(eq=False)
class StepInputs:
    """Tensors of a batch at fixed addresses.

    Attributes:
        table: int32 `[sequences, widest]`, KV blocks of each sequence; each row has room for the longest sequence.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lengths: torch.Tensor
    table: torch.Tensor
    num_sequences: int = 0


class StepProgram:
    """Program that replays the forward of a model.

    Args:
        record: function that runs the forward of a batch and returns the logits `[rows, vocabulary]`. Packed products
            and attention in the forward add themselves to the active recorder.
        backend: the attention backend with its caches.
        max_tokens: largest number of tokens of a batch; larger batches are not replayed.
        max_blocks: KV blocks of the longest sequence.
        vocabulary: number of tokens of the model.

    Raises:
        NotRecordableError: the forward is not the same for every batch, or native kernels are missing, outdated, or
            lack the format of a weight.
    """

    def __init__(
        self,
        record: Callable[[StepBatch], torch.Tensor],
        backend: PagedAttention,
        *,
        max_tokens: int,
        max_blocks: int,
        vocabulary: int,
    ) -> None:
        path = get_inference_path()
        if path.module is None:
            raise NotRecordableError("there are no native kernels")
        if not hasattr(getattr(path.module, "StepProgram", None), "add_experts"):
            raise NotRecordableError("the native kernels were built from older sources; install windlass again")
        self._native, self._set = path.module, path.number
        self.max_tokens = max(max_tokens, 1)
        different = min(vocabulary, _RECORDED_IDS)
        recordings = [_record(record, *size, seed, different) for seed, size in enumerate(_SIZES)]
        recording = unify(recordings, _SIZES)
        for panels in (operator.target[0] for operator in recording.operators if operator.name == "linear"):
            if panels.path == REFERENCE_PATH:
                raise NotRecordableError(f"weights of format {panels.format.name!r} have no native product here")
        before = len(recording.operators)
        self._recording = fuse(recording)
        logger.debug("step program: %d operators of %d", len(self._recording.operators), before)
        self._backend = backend
        most = self.max_tokens
        self._inputs = StepInputs(
            torch.zeros(1, most, dtype=torch.long),
            torch.zeros(1, most, dtype=torch.long),
            torch.zeros(most, dtype=torch.long),
            torch.zeros(most, dtype=torch.long),
            torch.zeros(most + 1, dtype=torch.int32),
            torch.zeros(most, dtype=torch.int32),
            torch.zeros(most, max(max_blocks, 1), dtype=torch.int32),
        )
        inputs = self._inputs
        self._arrays = [
            tensor.numpy()
            for tensor in (
                inputs.token_ids[0],
                inputs.positions[0],
                inputs.query_start,
                inputs.context_lengths,
                inputs.table,
                inputs.slots,
                inputs.rows,
            )
        ]
        self._storages = self._allocate()
        self._programs: OrderedDict[tuple[int, int, int], tuple[list[Call], torch.Tensor]] = OrderedDict()
        self._typed: dict[tuple[StorageKey, torch.dtype], torch.Tensor] = {}
        self._kept: list[Any] = []
        self._parts = self._divide()

    @property
    def num_calls(self) -> int:
        """Approximate number of calls from Python in each step; a native run counts once."""
        return len(self._parts)

    @property
    def operators(self) -> list[str]:
        """Names of the replayed operators, in order."""
        return [operator.name for operator in self._recording.operators]

    def takes(self, batch: StepBatch) -> bool:
        """Return True if the batch fits into the buffers."""
        return batch.num_tokens <= self.max_tokens and batch.values.block_table.shape[1] <= self._inputs.table.shape[1]

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[rows, vocabulary]`, float32, valid until the next run."""
        tokens, rows, sequences = batch.num_tokens, len(batch.values.logit_rows), len(batch.sequence_ids)
        self._fill(batch)
        key = (tokens, rows, sequences)
        program = self._programs.get(key)
        if program is None:
            # A caller may be in inference mode, and a buffer made in it could not be written outside of it later.
            with torch.inference_mode(False), torch.no_grad():
                program = self._programs[key] = self._instantiate(*key)
            if len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        calls, result = program
        with torch.no_grad():
            self._replay(calls)
        return result

    def _fill(self, batch: StepBatch) -> None:
        """Copy the values of a batch to their addresses."""
        for target, value in zip(self._arrays, batch.values, strict=True):
            source = value.numpy() if isinstance(value, torch.Tensor) else value
            if source.ndim == 2:
                target[: len(source), : source.shape[1]] = source
            else:
                target[: len(source)] = source

    @staticmethod
    def _replay(calls: list[Call]) -> None:
        for function, arguments, named in calls:
            function(*arguments, **named)

    def _allocate(self) -> dict[StorageKey, torch.Tensor]:
        """Return a buffer for each value; values that are not needed at the same time share one."""
        last: dict[StorageKey, int] = {}
        operators = self._recording.operators
        for place, operator in enumerate(operators):
            for ref in references([operator.inputs, operator.named, operator.outputs]):
                last[ref.storage] = place
        assert self._recording.result is not None
        last[self._recording.result.storage] = len(operators)
        free: list[torch.Tensor] = []
        found: dict[StorageKey, torch.Tensor] = {}
        for place, operator in enumerate(operators):
            for ref in references(operator.outputs):
                if ref.storage in found or ref.storage[0] != "value":
                    continue
                nbytes = evaluate(self._recording.storages[ref.storage], self.max_tokens, self.max_tokens)
                fitting = [buffer for buffer in free if buffer.nbytes >= nbytes]
                if fitting:
                    chosen = min(fitting, key=lambda buffer: buffer.nbytes)
                    free = [buffer for buffer in free if buffer is not chosen]
                else:
                    chosen = torch.empty(max(nbytes, 64), dtype=torch.uint8)
                found[ref.storage] = chosen
            for key in {ref.storage for ref in references([operator.inputs, operator.named, operator.outputs])}:
                if last[key] == place and key in found:
                    free.append(found[key])
        return found

    def _instantiate(self, tokens: int, rows: int, sequences: int) -> tuple[list[Call], torch.Tensor]:
        """Return the calls for one batch size, and the tensor of the logits."""
        calls: list[Call] = []
        binder = _Binder(self, tokens, rows)
        for operator in self._parts:
            if not isinstance(operator, Operator):
                calls.append((operator.run, (tokens, rows, sequences, torch.get_num_threads()), {}))
                continue
            if any(0 in binder.size(ref) for ref in references(operator.outputs)):
                continue  # the batch requests no logits
            if operator.name == "linear":
                calls.append(self._linear(operator, binder))
            elif operator.name == "attention":
                calls += self._attention(operator, binder, tokens, sequences)
            elif operator.name == "rms_norm":
                calls.append(self._norm(operator, binder))
            elif operator.name == "rotary":
                calls.append(self._rotary(operator, binder, tokens))
            elif operator.name == "gate":
                calls.append(self._gate(operator, binder))
            elif operator.name == "experts":
                calls.append(self._experts(operator, binder))
            else:
                calls += _aten_calls(operator, binder)
        assert self._recording.result is not None
        result = binder.tensor(self._recording.result)
        return calls, result.reshape(rows, result.shape[-1])

    def _divide(self) -> list[Any]:
        """Return the parts of the program in order: runs of native operators, and single operators that are bound again
        for each batch size.
        """
        parts: list[Any] = []
        tables = self._tabulate()
        for place, operator in enumerate(self._recording.operators):
            if place in tables and tables[place] is None:
                continue
            run = parts[-1] if parts and not isinstance(parts[-1], Operator) else None
            program = run or self._native.StepProgram(self._set)
            native = _NativeRun(self, program)
            if not (native.add(operator) if place not in tables else native.add_table(operator, tables[place])):
                parts.append(operator)
            elif run is None:
                parts.append(program)
        return parts

    def _tabulate(self) -> dict[int, torch.Tensor | None]:
        """Return tables of the values that depend on positions alone, e.g. the cosines of rotary embeddings.

        Returns:
            For the place of each operator that a table replaces, the table `[positions, features]`; None if only other
            such operators use its result.
        """
        operators = self._recording.operators
        dependent, places = {_POSITIONS}, []
        for place, operator in enumerate(operators):
            if operator.mutates or not _is_tabulated(operator, dependent, self._recording.constants):
                if operator.mutates and any(ref.storage in dependent for ref in references(operator.inputs[:1])):
                    return {}
                continue
            places.append(place)
            dependent |= {ref.storage for ref in references(operator.outputs)}
        others = [operators[place] for place in sorted(set(range(len(operators))) - set(places))]
        used = {ref.storage for operator in others for ref in references([operator.inputs, operator.named])}
        shown = [place for place in places if any(ref.storage in used for ref in references(operators[place].outputs))]
        block_size = next((cache.block_size for cache in self._backend.caches.values()), 0)
        positions = self._inputs.table.shape[1] * block_size  # no context is longer
        if not shown or not 0 < positions <= _TABLE_CALLS * self.max_tokens:
            return {}
        targets = [ref for place in shown for ref in references(operators[place].outputs)]
        left = _TABLE_BYTES
        for target in targets:
            width = _count_elements(target)
            left -= 0 if width is None else width[0] * target.dtype.itemsize * positions
            if width is None or width[1] or left < 0:
                return {}
            if target.offset[1:] != (0, 0) or target.dtype not in (torch.float32, torch.bfloat16):
                return {}

        def compute(chosen: torch.Tensor) -> list[torch.Tensor]:
            binder = _Binder(self, len(chosen), 1)
            self._inputs.positions[0, : len(chosen)] = chosen
            found = []
            for place in places:
                self._replay(_aten_calls(operators[place], binder))
                if place in shown:  # later operators may use the buffer of this result
                    results = references(operators[place].outputs)
                    found += [binder.tensor(target).reshape(len(chosen), -1).clone() for target in results]
            return found

        with torch.no_grad():
            parts = [compute(chunk) for chunk in torch.arange(positions).split(self.max_tokens)]
            tables = [torch.cat(columns) for columns in zip(*parts, strict=True)]
            for sample in (torch.arange(positions).flip(0)[: self.max_tokens], torch.tensor([positions // 2])):
                if any(not torch.equal(a, b[sample]) for a, b in zip(compute(sample), tables, strict=True)):
                    return {}
        return {place: None for place in places} | dict(zip(shown, tables, strict=True))

    def keep(self, weight: Any) -> None:
        """Keep an object whose address a native run has."""
        self._kept.append(weight)

    @property
    def native_attributes(self) -> tuple[StepInputs, PagedAttention]:
        """Tensors of the batch, and the backend with the caches."""
        return self._inputs, self._backend

    def _linear(self, operator: Operator, binder: _Binder) -> Call:
        panels, bias = operator.target
        x, out = binder.tensor(operator.inputs[0]), binder.tensor(operator.outputs[0])
        assert isinstance(panels, PackedPanels)
        function, arguments = panels.native_call(x, out, bias)
        return function, arguments, {}

    def _norm(self, operator: Operator, binder: _Binder) -> Call:
        call = operator.target
        assert isinstance(call, NormCall)
        x, out = binder.tensor(operator.inputs[0]), binder.tensor(operator.outputs[0])
        layout = head_layout(operator.inputs[0])
        places = (1, 0) if layout is None else (layout.heads, layout.token_stride)
        return (
            self._native.rms_norm,
            (
                self._set,
                x.data_ptr(),
                0,
                call.weight.data_ptr(),
                out.data_ptr(),
                x.dtype == torch.bfloat16,
                x.numel() // call.features,
                call.features,
                call.epsilon,
                torch.get_num_threads(),
                *places,
            ),
            {},
        )

    def _rotary(self, operator: Operator, binder: _Binder, tokens: int) -> Call:
        call = operator.target
        assert isinstance(call, RotaryCall)
        x, cosines, sines = (binder.tensor(ref) for ref in operator.inputs)
        return (
            self._native.rotary,
            (
                self._set,
                x.data_ptr(),
                x.dtype == torch.bfloat16,
                tokens,
                call.token_stride,
                call.heads,
                call.head_dim,
                call.head_dim,
                cosines.data_ptr(),
                sines.data_ptr(),
                torch.get_num_threads(),
            ),
            {},
        )

    def _gate(self, operator: Operator, binder: _Binder) -> Call:
        call = operator.target
        assert isinstance(call, GateCall)
        gate, out = binder.tensor(operator.inputs[0]), binder.tensor(operator.outputs[0])
        return (
            self._native.gated_activation,
            (
                self._set,
                ACTIVATION_CODES[call.activation],
                gate.data_ptr(),
                out.data_ptr(),
                gate.dtype == torch.bfloat16,
                out.numel() // call.features,
                call.features,
                torch.get_num_threads(),
            ),
            {},
        )

    def _experts(self, operator: Operator, binder: _Binder) -> Call:
        x, index, weights = (binder.tensor(ref) for ref in operator.inputs)
        out, is_bf16 = binder.tensor(operator.outputs[0]), weights.dtype == torch.bfloat16
        addresses = (x.data_ptr(), index.data_ptr(), weights.data_ptr(), is_bf16, out.data_ptr())
        return operator.target.native(x.dtype).run, (*addresses, *index.shape, torch.get_num_threads()), {}

    def _attention(self, operator: Operator, binder: _Binder, tokens: int, sequences: int) -> list[Call]:
        call = operator.target
        assert isinstance(call, AttentionCall)
        cache = self._backend.caches[call.layer]
        calls: list[Call] = []
        flat = []
        for place, ref in enumerate(operator.inputs[:3]):
            tensor = binder.tensor(ref)[0].transpose(0, 1)  # [tokens, heads, features]
            if not tensor.is_contiguous():
                scratch = self._scratch(("scratch", place), tensor)
                calls.append((scratch.copy_, (tensor,), {}))
                tensor = scratch
            flat.append(tensor)
        query, key, value = flat
        inputs, is_bf16, threads = self._inputs, query.dtype == torch.bfloat16, torch.get_num_threads()
        out = binder.tensor(operator.outputs[0])
        calls.append(
            (
                self._native.write_cache,
                (
                    self._set,
                    cache.handle,
                    key.data_ptr(),
                    value.data_ptr(),
                    is_bf16,
                    inputs.slots.data_ptr(),
                    tokens,
                    threads,
                ),
                {},
            )
        )
        calls.append(
            (
                self._native.attention,
                (
                    self._set,
                    cache.handle,
                    query.data_ptr(),
                    out.data_ptr(),
                    is_bf16,
                    tokens,
                    query.shape[1],
                    inputs.table.data_ptr(),
                    inputs.table.shape[1],
                    inputs.query_start.data_ptr(),
                    inputs.context_lengths.data_ptr(),
                    sequences,
                    call.scaling,
                    call.softcap or 0.0,
                    call.sliding_window or 0,
                    call.chunk_size or 0,
                    0 if call.sinks is None else call.sinks.data_ptr(),
                    threads,
                ),
                {},
            )
        )
        return calls

    def _scratch(self, key: StorageKey, like: torch.Tensor) -> torch.Tensor:
        nbytes = like.numel() // max(like.shape[0], 1) * self.max_tokens * like.element_size()
        buffer = self._storages.get(key)
        if buffer is None or buffer.nbytes < nbytes:
            # programs of other batch sizes keep their views of the smaller buffer
            buffer = self._storages[key] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def storage_tensor(self, ref: TensorRef) -> torch.Tensor:
        """Return the tensor of a storage: an input, a constant, or the full buffer viewed in the dtype of `ref`."""
        kind, number = ref.storage
        if kind == "input":
            inputs = self._inputs
            return (inputs.token_ids, inputs.positions, inputs.rows)[number]
        if kind == "constant":
            return self._recording.constants[number]
        found = self._typed.get((ref.storage, ref.dtype))
        if found is None:
            buffer = self._storages[ref.storage]
            whole = buffer[: buffer.nbytes // ref.dtype.itemsize * ref.dtype.itemsize]
            found = self._typed[ref.storage, ref.dtype] = whole.view(ref.dtype)
        return found


class _NativeRun:
    """Native run under construction, of operators with tensors at fixed addresses."""

    def __init__(self, program: StepProgram, native: Any) -> None:
        self._program, self._native = program, native

    def add(self, operator: Operator) -> bool:
        """Add an operator, and return True. Return False if the operator has to be bound to each batch size."""
        add = {
            "linear": self._add_linear,
            "rms_norm": self._add_norm,
            "rotary": self._add_rotary,
            "gate": self._add_gate,
            "experts": self._add_experts,
            "attention": self._add_attention,
            "aten.add.Tensor": self._add_sum,
            "aten.embedding.default": self._add_embedding,
            "aten.index.Tensor": self._add_selection,
        }.get(operator.name)
        return add is not None and add(operator)

    def add_table(self, operator: Operator, table: torch.Tensor | None) -> bool:
        """Add a lookup of the operator's result by position in place of the operator."""
        assert table is not None
        target = operator.outputs[0]
        assert target is not None
        out, features = self._rows(target, table.shape[1]), table.shape[1]
        assert out is not None
        self._program.keep(table)
        positions = self._program.storage_tensor(TensorRef(_POSITIONS, (), (), (0, 0, 0), torch.int64)).data_ptr()
        row_bytes = features * table.element_size()
        self._native.add_gather(table.data_ptr(), row_bytes, (0, 0), len(table), positions, out[0], out[1])
        return True

    def _address(self, ref: TensorRef) -> int | None:
        if ref.offset[1:] != (0, 0) or ref.dtype not in (torch.float32, torch.bfloat16):
            return None
        return self._place(ref)

    def _place(self, ref: TensorRef) -> int:
        # An offset counts from the start of the storage, of which a constant may be a part.
        storage = self._program.storage_tensor(ref).untyped_storage()
        return int(storage.data_ptr() + ref.offset[0] * ref.dtype.itemsize)

    def _rows(self, ref: TensorRef, features: int) -> tuple[int, Count] | None:
        """Return the address and number of rows of a contiguous tensor; None for other tensors."""
        address, count = self._address(ref), _count_elements(ref)
        if address is None or count is None or any(part % features for part in count):
            return None
        return address, (count[0] // features, count[1] // features)

    def _add_linear(self, operator: Operator) -> bool:
        panels, bias = operator.target
        source, target = operator.inputs[0], operator.outputs[0]
        assert target is not None
        x, out = self._rows(source, panels.in_features), self._rows(target, panels.out_features)
        if x is None or out is None or x[1] != out[1] or source.dtype != target.dtype:
            return False
        is_bf16 = source.dtype == torch.bfloat16
        if (fixed := panels.native_weight(bias)) is not None:
            self._native.add_linear(*fixed, x[0], out[0], out[1], is_bf16, panels.quantize_inputs)
            return True
        if (foreign := panels.foreign_product(bias, is_bf16)) is None:
            return False
        function, first_part, weight = foreign
        self._program.keep(weight)
        self._native.add_foreign_product(function, first_part, weight.address, x[0], out[0], out[1])
        return True

    def _add_norm(self, operator: Operator) -> bool:
        call, source, target = operator.target, operator.inputs[0], operator.outputs[0]
        assert isinstance(call, NormCall) and target is not None
        x, out, places = self._rows(source, call.features), self._rows(target, call.features), (1, 0)
        if x is None or out is None:
            layout, written = head_layout(source), head_layout(target)
            begin, end = self._address(source), self._address(target)
            if layout is None or written is None or begin is None or end is None:
                return False
            if not written.is_dense or source.size != target.size:
                return False
            count, places = (layout.heads, 0), (layout.heads, layout.token_stride)
            x, out = (begin, count), (end, count)
        if x is None or out is None or x[1] != out[1] or source.dtype != target.dtype:
            return False
        is_bf16 = source.dtype == torch.bfloat16
        self._native.add_rms_norm(
            x[0], call.weight.data_ptr(), out[0], is_bf16, out[1], call.features, call.epsilon, *places
        )
        return True

    def _add_rotary(self, operator: Operator) -> bool:
        call = operator.target
        assert isinstance(call, RotaryCall)
        x, cosines, sines = (self._address(ref) for ref in operator.inputs)
        if x is None or cosines is None or sines is None:
            return False
        is_bf16 = operator.inputs[0].dtype == torch.bfloat16
        width = call.head_dim
        self._native.add_rotary(x, is_bf16, call.token_stride, call.heads, width, width, cosines, sines)
        return True

    def _add_gate(self, operator: Operator) -> bool:
        call, source, target = operator.target, operator.inputs[0], operator.outputs[0]
        assert isinstance(call, GateCall) and target is not None
        out, address = self._rows(target, call.features), self._address(source)
        if out is None or address is None or source.dtype != target.dtype:
            return False
        code, is_bf16 = ACTIVATION_CODES[call.activation], source.dtype == torch.bfloat16
        self._native.add_gated_activation(code, address, out[0], is_bf16, out[1], call.features)
        return True

    def _add_experts(self, operator: Operator) -> bool:
        experts, (source, index, weights), target = operator.target, operator.inputs, operator.outputs[0]
        assert isinstance(experts, PackedExperts) and target is not None
        chosen, dtype = index.size[-1][0], source.dtype
        x, out, factors = (
            self._rows(source, experts.features),
            self._rows(target, experts.features),
            self._rows(weights, chosen),
        )
        choices = _count_elements(index)
        if x is None or out is None or factors is None or choices is None or index.offset[1:] != (0, 0):
            return False
        if len({x[1], out[1], factors[1], (choices[0] // chosen, choices[1] // chosen)}) > 1 or dtype != target.dtype:
            return False
        self._native.add_experts(
            experts.native(dtype), x[0], self._place(index), factors[0], weights.dtype == torch.bfloat16, *out, chosen
        )
        return True

    def _add_sum(self, operator: Operator) -> bool:
        refs = [*operator.inputs[:2], operator.outputs[0]]
        if operator.named or len(operator.inputs) != 2 or not all(isinstance(ref, TensorRef) for ref in refs):
            return False
        found = [self._rows(ref, 1) for ref in refs]
        if len({(ref.size, ref.dtype) for ref in refs}) > 1 or any(rows is None for rows in found):
            return False
        addresses = [rows[0] for rows in found if rows is not None]
        assert found[0] is not None
        self._native.add_sum(*addresses, refs[0].dtype == torch.bfloat16, found[0][1])
        return True

    def _add_embedding(self, operator: Operator) -> bool:
        table, index = operator.inputs[:2]  # others do not change the forward
        address, constant = self._address(table), [size[0] for size in table.size]
        if address is None or len(constant) != 2 or any(size[1:] != (0, 0) for size in table.size):
            return False
        if table.stride != ((constant[1], 0, 0), (1, 0, 0)):
            return False
        return self._add_gather(operator, address, ((0, 0), constant[0]), index, constant[1])

    def _add_selection(self, operator: Operator) -> bool:
        """Add `x[rows]` or `x[:, rows]`, for a first dimension of 1."""
        table, indices = operator.inputs[:2]
        if operator.named or len(operator.inputs) != 2 or not indices or None in indices[-1:]:
            return False
        skipped = len(indices) - 1
        features = math.prod(size[0] for size in table.size[skipped + 1 :])
        if any(one is not None for one in indices[:-1]) or any(size != (1, 0, 0) for size in table.size[:skipped]):
            return False
        if any(size[1:] != (0, 0) for size in table.size[skipped + 1 :]) or features == 0:
            return False
        rows = self._rows(table, features)
        return rows is not None and self._add_gather(operator, rows[0], (rows[1], 0), indices[-1], features)

    def _add_gather(
        self, operator: Operator, table: int, table_rows: tuple[Count, int], index: Any, features: int
    ) -> bool:
        source, target = operator.inputs[0], operator.outputs[0]
        assert target is not None
        if not isinstance(index, TensorRef) or index.dtype != torch.int64 or index.offset[1:] != (0, 0):
            return False
        out, count = self._rows(target, features), _count_elements(index)
        if out is None or out[1] != count or source.dtype != target.dtype:
            return False
        row_bytes = features * source.dtype.itemsize
        self._native.add_gather(table, row_bytes, *table_rows, self._place(index), out[0], count)
        return True

    def _add_attention(self, operator: Operator) -> bool:
        call = operator.target
        assert isinstance(call, AttentionCall)
        places = [self._heads(ref) for ref in operator.inputs[:3]]
        target = operator.outputs[0]
        assert target is not None
        out = self._rows(target, 1)
        if out is None or any(place is None for place in places):
            return False
        query, key, value = (place for place in places if place is not None)
        inputs, backend = self._program.native_attributes
        self._native.add_attention(
            backend.caches[call.layer].handle,
            *query,
            *key,
            *value,
            out[0],
            operator.inputs[0].dtype == torch.bfloat16,
            operator.inputs[0].size[1][0],
            inputs.slots.data_ptr(),
            inputs.table.data_ptr(),
            inputs.table.shape[1],
            inputs.query_start.data_ptr(),
            inputs.context_lengths.data_ptr(),
            call.scaling,
            call.softcap or 0.0,
            call.sliding_window or 0,
            call.chunk_size or 0,
            0 if call.sinks is None else call.sinks.data_ptr(),
        )
        return True

    def _heads(self, ref: TensorRef) -> tuple[int, int] | None:
        """Return the address and the stride between tokens (in elements) of a tensor `[1, heads, tokens, features]`;
        None if the heads of a token are not contiguous."""
        address = self._address(ref)
        if address is None or len(ref.size) != 4 or ref.size[2] != (0, 1, 0):
            return None
        heads, features, stride = ref.size[1], ref.size[3], ref.stride[2]
        dense = ref.stride[3] == (1, 0, 0) and (heads == (1, 0, 0) or ref.stride[1] == features)
        return (address, stride[0]) if dense and stride[1:] == (0, 0) else None


def _is_tabulated(operator: Operator, dependent: set[StorageKey], constants: Any) -> bool:
    """Return True if the results depend on positions alone: `dependent` are the storages known to do so."""
    refs = list(references([operator.inputs, operator.named]))
    if operator.name not in _TABULATED or len(operator.outputs) != 1 or operator.outputs[0] is None:
        return False
    if not any(ref.storage in dependent for ref in refs):
        return False
    for ref in refs:
        if ref.storage not in dependent and ref.storage[0] != "constant":
            return False
        if ref.storage[0] == "constant" and isinstance(constants[ref.storage[1]], torch.nn.Parameter):
            return False  # training may change the parameter
    if operator.name == "aten.cat.default":
        dimension = operator.inputs[1] if len(operator.inputs) > 1 else operator.named.get("dim", 0)
        return bool(dimension in (-1, len(operator.outputs[0].size) - 1))
    return True


def _count_elements(ref: TensorRef) -> Count | None:
    """Return the number of elements of a contiguous tensor for each token and for each row of logits. None for tensors
    with other strides or sizes."""
    inner, outer = 1, None
    for size, stride in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size == (1, 0, 0):
            continue
        if outer is not None or stride != (inner, 0, 0):
            return None
        if size[1:] == (0, 0):
            inner *= size[0]
        elif size[0] == 0:
            outer = size
        else:
            return None
    return None if outer is None else (outer[1] * inner, outer[2] * inner)


class _Binder:
    """Values of a recording's tensors and integers for one batch size."""

    def __init__(self, program: StepProgram, tokens: int, rows: int) -> None:
        self._program, self._size = program, (tokens, rows)

    def size(self, ref: TensorRef) -> list[int]:
        return [evaluate(affine, *self._size) for affine in ref.size]

    def tensor(self, ref: TensorRef | None) -> torch.Tensor:
        assert ref is not None
        stride = [evaluate(affine, *self._size) for affine in ref.stride]
        offset = evaluate(ref.offset, *self._size)
        return self._program.storage_tensor(ref).as_strided(self.size(ref), stride, offset)

    def value(self, value: Any) -> Any:
        """Return an argument with tensors and integers instead of their references."""
        if isinstance(value, TensorRef):
            return self.tensor(value)
        if isinstance(value, AffineInt):
            return evaluate(value.value, *self._size)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {name: self.value(item) for name, item in value.items()}
        return value


def _record(
    record: Callable[[StepBatch], torch.Tensor], tokens: int, rows: int, seed: int, different: int
) -> Recording:
    """Record the forward of one sequence in block 0. The tokens depend on `seed`, so that recordings differ if the
    forward chooses experts by the tokens; they are less than `different`.
    """
    places = torch.arange(tokens)
    batch = StepBatch(
        token_ids=(places * 7 + seed) % different,
        positions=places.clone(),
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        context_lengths=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slots=places.clone(),
        logit_rows=torch.arange(rows),
        sequence_ids=[0],
    )
    recorder = OperatorRecorder([batch.token_ids, batch.positions, batch.logit_rows])
    with torch.no_grad(), recorder.active():
        logits = record(batch)
    recorder.recording.result = recorder.refer(logits)
    refuse_data_dependence(recorder.recording)
    return recorder.recording


def _aten_calls(operator: Operator, binder: _Binder) -> list[Call]:
    inputs, named = binder.value(operator.inputs), binder.value(operator.named)
    if operator.mutates:
        return [(operator.target, tuple(inputs), named)]
    outputs: Sequence[TensorRef | None] = operator.outputs
    if len(outputs) == 1 and outputs[0] is not None:
        out = binder.tensor(outputs[0])
        writer = _find_out_variant(operator.target)
        if writer is not None:
            known = {argument.name for argument in writer._schema.arguments}
            return [(writer, tuple(inputs), {**{n: v for n, v in named.items() if n in known}, "out": out})]
    results = [None if ref is None else binder.tensor(ref) for ref in outputs]
    compute = fast_operator(operator.target)

    def call() -> None:
        found = compute(*inputs, **named)
        for target, value in zip(results, found if isinstance(found, (tuple, list)) else [found], strict=True):
            if target is not None:
                target.copy_(value)

    return [(call, (), {})]


def _find_out_variant(overload: Any) -> Any:
    """Return the variant of an operator that writes into a given tensor, or None."""
    arguments_of = overload._schema.arguments
    wanted = [argument.name for argument in arguments_of if argument.name not in _LAYOUT]
    packet = overload.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [argument for argument in arguments if argument.is_out]
        rest = [a.name for a in arguments if not a.is_out and a.name not in _LAYOUT]
        same_types = all(
            str(a.type) == str(b.type) for a in arguments_of for b in arguments if a.name == b.name and not b.is_out
        )
        if len(outs) == 1 and outs[0].name == "out" and rest == wanted and same_types:
            return candidate
    return None


_LAYOUT = frozenset({"dtype", "layout", "device", "pin_memory"})
