"""Saving of this rank's optimizer states to a checkpoint.

[Note: kinds of states] A checkpoint records the kind of each state of a parameter:

- `pieces DTYPE`: one value per element, sharded as the parameter is;
- `signed uint8`, `unsigned uint8`: likewise, but quantized to 8-bit codes; the scales of the span `[start, stop)` are
  stored under `.../KEY_scale/START` ([Note: 8-bit states of another sharding]). If a parameter is sharded over tp or
  ep, each rank divides its own part into blocks, and other layouts have other parts; so the dequantized values are
  saved, as `pieces float32`;
- `whole DTYPE`: one tensor for the parameter: a step count, or a state with another shape;
- `value`: a plain Python value (or a tensor without elements), kept in the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, LazyFlatTensor, LazyStorage
from windlass.engine.offloaded_storage import OffloadedChunkStorage
from windlass.optim import quantized_states
from windlass.optim.cpu_optimizer import StateFormat
from windlass.zero.update.optimizer_state_offload import OptimizerStateOffload
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk
from windlass.zero.update.update_protocol import Update


@dataclass
class StateFragments:
    """States that a rank saves: shards, scalar tensors, kinds and plain values by parameter and key, and the quantized
    spans by parameter.
    """

    shards: list[FlatShard] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """Return the kinds, values and spans as plain data."""
        return {"states": self.kinds, "values": self.values, "spans": self.spans}


def merge_state_metadata(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the state metadata of all ranks."""
    states: dict[str, dict[str, str]] = {}
    values: dict[str, dict[str, Any]] = {}
    spans: dict[str, set[tuple[int, int]]] = {}
    for part in parts:
        for name, keys in part["states"].items():
            states.setdefault(name, {}).update(keys)
        for name, found in part["values"].items():
            values.setdefault(name, {}).update(found)
        for name, cuts in part["spans"].items():
            spans.setdefault(name, set()).update(cuts)
    return {"states": states, "values": values, "spans": {name: sorted(cuts) for name, cuts in spans.items()}}


def collect_state_fragments(
    update: Update, storage_of: Callable[[UpdateChunk], LazyStorage], fragments: StateFragments
) -> None:
    """Add all states of this rank to `fragments`.

    Raises:
        CheckpointError: the optimizer is stepped on flat fragments, and a state has neither one value per element nor
            one value for the whole parameter.
    """
    formats = update.formats()
    for entry in update.state_entries():
        handle = storage_of(entry.chunk)
        state = update.state_offload.describe_state(entry.chunk, entry.state_key)
        codes = {key: one for key, one in formats.get(id(entry.parameter), {}).items() if is_coded(state, key, one)}
        scales = {f"{key}_scale" for key in codes}
        in_part = not entry.chunk.unit.placements[entry.index].is_full
        for key, value in state.items():
            if key in scales:
                continue
            if key in codes and in_part:
                kind = "pieces float32"
            elif key in codes:
                kind = "signed uint8" if codes[key].is_signed else "unsigned uint8"
                _add_scales(fragments, entry, key, _lazy_state(update, handle, entry, f"{key}_scale", state))
            else:
                kind = state_kind(update, entry, key, value)
            fragments.kinds.setdefault(entry.name, {})[key] = kind
            where = f"state/{entry.name}/{key}"
            if kind == "value":
                fragments.values.setdefault(entry.name, {})[key] = value
            elif value.dim() == 0:
                fragments.tensors[where] = value
            else:
                full = kind.startswith("whole")
                unit = entry.chunk.unit
                shape = tuple(value.shape if full else unit.shapes[entry.index])
                resting = _lazy_state(update, handle, entry, key, state)
                if key in codes and in_part:
                    resting = _decode_lazily(
                        resting, _lazy_state(update, handle, entry, f"{key}_scale", state), codes[key]
                    )
                of = None if full else unit.placements[entry.index]
                fragments.shards.append(FlatShard(where, shape, 0 if full else entry.start, resting, of))


def is_coded(state: dict[str, Any], key: str, state_format: StateFormat) -> bool:
    """Return True if a state with a quantized format is currently quantized."""
    return state_format.is_quantized and key in state and f"{key}_scale" in state


def state_kind(update: Update, entry: StateEntry, key: str, value: Any) -> str:
    """Return the kind of a state that is not quantized; see [Note: kinds of states].

    Raises:
        CheckpointError: the optimizer is stepped on flat fragments, and the state has neither one value per element nor
            one value for the whole parameter.
    """
    if not isinstance(value, torch.Tensor) or not value.numel():
        return "value"
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return f"whole {dtype}"
    if value.shape == entry.shape:
        return f"pieces {dtype}"
    if not update.needs_whole_parameters:
        raise CheckpointError(unsupported_shape_message(update, entry, key, tuple(value.shape)))
    return f"whole {dtype}"


def unsupported_shape_message(update: Update, entry: StateEntry, key: str, shape: tuple[int, ...]) -> str:
    """Return the message for a state that has neither one value per element nor one for the parameter."""
    rule = type(update.optimizer).__name__
    return (
        f"optimizer state {key!r} of {entry.name!r} has shape {shape}: {rule} is stepped on flat fragments (here of "
        f"{entry.stop - entry.start} elements), and a checkpoint can shard only states with one value per "
        "element or one for all; pass a subclass of the optimizer, which is stepped on whole parameters"
    )


def _add_scales(fragments: StateFragments, entry: StateEntry, key: str, scales: LazyFlatTensor) -> None:
    where = f"state/{entry.name}/{key}_scale/{entry.start}"
    fragments.shards.append(FlatShard(where, (scales.numel,), 0, scales))
    spans = fragments.spans.setdefault(entry.name, [])
    if (entry.start, entry.stop) not in spans[-1:]:
        spans.append((entry.start, entry.stop))


def _decode_lazily(codes: LazyFlatTensor, scales: LazyFlatTensor, state_format: StateFormat) -> LazyFlatTensor:
    """Return a lazy tensor of dequantized values, computed when the handle of the codes is open."""
    return LazyFlatTensor(
        codes.numel,
        torch.float32,
        codes.storage,
        lambda: decode_codes(codes.get(), scales.get(), state_format.is_signed),
    )


def decode_codes(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Dequantize flat codes with their own scales. The result is float32 on the CPU."""
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    quantized_states.dequantize_state(
        codes, 0, [quantized_states.BlockScales(0, codes.numel(), 0, scales)], signed, values
    )
    return values


def _lazy_state(
    update: Update, storage: LazyStorage, entry: StateEntry, key: str, state: dict[str, Any]
) -> LazyFlatTensor:
    like = state[key]
    if isinstance(storage, OffloadedChunkStorage):
        return LazyFlatTensor(like.numel(), like.dtype, storage, partial(storage.state, entry.state_key, key))
    return LazyFlatTensor(like.numel(), like.dtype, storage, partial(flat_state, update.state_offload, entry, key))


def flat_state(offload: OptimizerStateOffload, entry: StateEntry, key: str) -> torch.Tensor:
    """Return a state as a flat tensor, while its chunk is resident."""
    value: torch.Tensor = offload.states[entry.state_key][key]
    return value.reshape(-1)
