"""Loading of optimizer states from a checkpoint into any sharding and any format."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.tensor_tree import iterate_tensors, replace_tensors
from windlass.checkpoint import FlatShard, LazyFlatTensor, LazyStorage
from windlass.engine.optimizer_state_saving import flat_state, unsupported_shape_message
from windlass.kernels.update_tensors import count_scales
from windlass.optim import quantized_states
from windlass.optim.cpu_optimizer import StateFormat
from windlass.parallel.full_parameters import select_local_shard
from windlass.parallel.placement import Placement
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.master_weights import MasterWeights
from windlass.zero.update.optimizer_state_offload import is_offloadable
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk
from windlass.zero.update.update_protocol import Update


@dataclass
class _StateConversion:
    """One state to convert: saved in another format, or quantized with blocks that may not match this sharding.

    If this rank holds only a part of a parameter, quantized codes are read for the full parameter, because their blocks
    divide the full parameter.

    Attributes:
        spans: ranges of elements that the saved run quantized separately, each with a tensor of scales.
        loaded, scales: saved values or codes of `_element_range`, and their scales, while the handle is open.
    """

    entry: StateEntry
    key: str
    saved_format: StateFormat
    target_format: StateFormat
    spans: list[tuple[int, int]]
    loaded: torch.Tensor | None = None
    scales: list[quantized_states.BlockScales] = field(default_factory=list)

    @property
    def _placement(self) -> Placement:
        return self.entry.chunk.unit.placements[self.entry.index]

    @property
    def _loads_full_parameter(self) -> bool:
        return self.saved_format.is_quantized and not self._placement.is_full

    @property
    def _element_range(self) -> tuple[int, int]:
        """Return the range of elements to read: the fragment `entry` of the parameter, or the full parameter."""
        if self._loads_full_parameter:
            return 0, math.prod(self._placement.global_shape)
        return self.entry.start, self.entry.stop

    def allocate(self) -> None:
        """Allocate buffers for the saved values and scales."""
        start, stop = self._element_range
        self.loaded = torch.empty(stop - start, dtype=self.saved_format.dtype, device="cpu")
        self.scales = []
        for first, last in self.spans:
            lowest, highest = quantized_states.blocks_between(first, last, start, stop)
            self.scales.append(
                quantized_states.BlockScales(
                    first, last, lowest, torch.empty(highest - lowest, dtype=torch.float32, device="cpu")
                )
            )

    def flat_shards(self, storage: LazyStorage) -> Iterator[FlatShard]:
        """Yield the shards to read: one shard with the codes or values, and one with the scales of each span."""
        where = f"state/{self.entry.name}/{self.key}"
        start, stop = self._element_range
        shape = self._placement.global_shape if self._loads_full_parameter else self._placement.local_shape
        of = None if self._loads_full_parameter else self._placement
        yield FlatShard(
            where, shape, start, LazyFlatTensor(stop - start, self.saved_format.dtype, storage, self._loaded_values), of
        )
        for number, (first, last) in enumerate(self.spans):
            lowest, highest = quantized_states.blocks_between(first, last, start, stop)
            resting = LazyFlatTensor(highest - lowest, torch.float32, storage, partial(self._scale_values, number))
            yield FlatShard(f"{where}_scale/{first}", (count_scales(last - first),), lowest, resting)

    def _loaded_values(self) -> torch.Tensor:
        assert self.loaded is not None
        return self.loaded

    def _scale_values(self, number: int) -> torch.Tensor:
        return self.scales[number].values

    def store(self, state: dict[str, Any]) -> None:
        """Convert the loaded values and write them to the optimizer state in this optimizer's format."""
        assert self.loaded is not None
        into, signed = state[self.key].view(-1), self.saved_format.is_signed
        if self._loads_full_parameter:
            full = torch.empty(self.loaded.numel(), dtype=torch.float32)
            quantized_states.dequantize_state(self.loaded, 0, self.scales, signed, full)
            part = select_local_shard(full.view(self._placement.global_shape), self._placement).reshape(-1)
            values = part[self.entry.start : self.entry.stop]
            if self.target_format.is_quantized:
                quantized_states.quantize_state(values, into, state[f"{self.key}_scale"], self.target_format.is_signed)
            else:
                into.copy_(values)
        elif not self.saved_format.is_quantized:
            quantized_states.quantize_state(self.loaded, into, state[f"{self.key}_scale"], self.target_format.is_signed)
        elif self.target_format.is_quantized:
            quantized_states.requantize_state(
                self.loaded, self.entry.start, self.scales, signed, into, state[f"{self.key}_scale"]
            )
        else:
            quantized_states.dequantize_state(self.loaded, self.entry.start, self.scales, signed, into)
        self.loaded, self.scales = None, []


class ChunkLoadStorage:
    """Lazy storage handle of an update chunk (elements that the optimizer updates together). Master weights, and
    optionally states, are loaded into it.

    Attributes:
        shards: shards to read into the chunk's states.
        was_opened: True once the handle was opened, so that the chunk's states are those of the checkpoint.
    """

    def __init__(self, master_weights: MasterWeights, chunk: UpdateChunk) -> None:
        self._master_weights, self._chunk = master_weights, chunk
        self._expected: dict[Any, dict[str, torch.Tensor]] = {}
        self._scalars: dict[Any, dict[str, Any]] = {}  # step counts and plain values, by state key
        self._conversions: list[_StateConversion] = []
        self._loads_states = False
        self.shards: list[FlatShard] = []
        self.was_opened = False

    @property
    def converts_states(self) -> bool:
        """True if a state is converted to another format, or was saved in a quantized format."""
        return bool(self._conversions)

    def expect_states(self, entry: StateEntry, scalars: dict[str, Any]) -> None:
        """Plan to load the checkpoint's states of `entry`, a fragment of a parameter.

        Args:
            scalars: plain values and step counts of the entry. The counts are filled before the handle is opened.
        """
        self._loads_states = True
        self._expected[entry.state_key], self._scalars[entry.state_key] = {}, scalars

    def add_state(
        self,
        entry: StateEntry,
        key: str,
        template: torch.Tensor,
        shape: tuple[int, ...],
        placement: Placement | None = None,
    ) -> None:
        """Plan to read the state `key`, without conversion, into a tensor like `template`.

        Args:
            template: meta tensor with the shape and dtype of what this rank reads: all or a range of the elements.
            shape: shape of the tensor to which the elements belong: the full state, or this rank's part of it.
            placement: placement of this rank's part in the full state; None: `shape` is the shape of the full state.
        """
        state_offload = self._master_weights.state_offload
        self._expected[entry.state_key][key] = template
        resting = LazyFlatTensor(template.numel(), template.dtype, self, partial(flat_state, state_offload, entry, key))
        self.shards.append(FlatShard(f"state/{entry.name}/{key}", shape, entry.start, resting, placement))

    def add_conversion(self, conversion: _StateConversion) -> None:
        """Plan to read a state in its saved format and convert it to the format of this optimizer."""
        entry, kept = conversion.entry, conversion.target_format
        likes = self._expected[entry.state_key]
        likes[conversion.key] = torch.empty(entry.shape, dtype=kept.dtype, device="meta")
        if kept.is_quantized:
            scales = count_scales(entry.stop - entry.start)
            likes[f"{conversion.key}_scale"] = torch.empty(scales, dtype=torch.float32, device="meta")
        self._conversions.append(conversion)
        self.shards += conversion.flat_shards(self)

    @property
    def is_resident(self) -> bool:
        """False: the handle's values are in memory only while it is open, see `LazyStorage`."""
        return False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the values in memory inside the context, and convert states at the end of it."""
        self.was_opened = True
        state_offload = self._master_weights.state_offload
        with self._master_weights.opened(self._chunk, self._expected if self._loads_states else None, changes=True):
            for state_key, loose in self._scalars.items():
                _set_scalars(state_offload.states[state_key], loose)
            for conversion in self._conversions:
                conversion.allocate()
            yield
            for conversion in self._conversions:
                conversion.store(state_offload.states[conversion.entry.state_key])


def _set_scalars(state: dict[str, Any], scalars: dict[str, Any]) -> None:
    """Set step counts and plain values to the saved ones, and delete those that were not saved.

    An existing count keeps its dtype and device.
    """
    for key in [key for key, value in state.items() if key not in scalars and not is_offloadable(value)]:
        del state[key]
    for key, value in scalars.items():
        now = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dim() == 0:
            now.copy_(value)
        else:
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _to_device(value: Any, device: torch.device) -> Any:
    """Return a plain value with the tensors in it on `device`, where the optimizer made them (lists of factors)."""
    return replace_tensors(value, {id(tensor): tensor.to(device) for tensor in iterate_tensors(value)})


def plan_state_loading(
    model: ShardedModel,
    metadata: dict[str, Any],
    saved_tensors: dict[str, torch.Tensor],
    storage_of: Callable[[UpdateChunk], ChunkLoadStorage],
    scalar_tensors: dict[str, torch.Tensor],
    without_states: Collection[str] = (),
) -> None:
    """Plan which states each chunk reads.

    Args:
        metadata: the checkpoint's metadata of states.
        saved_tensors: every tensor of the checkpoint by name, on the meta device.
        scalar_tensors: receives the step counts by name, which are loaded before all other tensors.
        without_states: names of parameters that begin without states.

    Raises:
        CheckpointError: the checkpoint has a state that this optimizer cannot have, or lacks a state that its index
            lists.
    """
    update = model.update
    assert update is not None
    formats = update.formats()
    for entry in update.state_entries():
        handle = storage_of(entry.chunk)
        if entry.name in without_states:
            handle.expect_states(entry, {})
            continue
        values = metadata.get("values", {}).get(entry.name, {})
        loose = {key: _to_device(copy.deepcopy(value), entry.chunk.device) for key, value in values.items()}
        handle.expect_states(entry, loose)
        for key, kind in metadata.get("states", {}).get(entry.name, {}).items():
            where, form = f"state/{entry.name}/{key}", kind.split()[0]
            if form == "value":
                continue
            if where not in saved_tensors:
                raise CheckpointError(
                    f"the index of the checkpoint lists {where!r}, but the checkpoint lacks it; load another one"
                )
            if form == "whole" and saved_tensors[where].dim() == 0:
                count = torch.empty((), dtype=saved_tensors[where].dtype, device=entry.chunk.device)
                loose[key] = scalar_tensors.setdefault(where, count)
                continue
            kept = formats.get(id(entry.parameter), {}).get(key)
            _plan_state(update, handle, entry, key, form, saved_tensors[where], kept, metadata.get("spans", {}))


def _plan_state(
    update: Update,
    storage: ChunkLoadStorage,
    entry: StateEntry,
    key: str,
    form: str,
    saved: torch.Tensor,
    target_format: StateFormat | None,
    spans: dict[str, list[list[int]]],
) -> None:
    """Plan the load of one state into a chunk's handle."""
    if form == "whole":
        if not update.needs_whole_parameters:
            raise CheckpointError(unsupported_shape_message(update, entry, key, tuple(saved.shape)))
        storage.add_state(entry, key, saved, tuple(saved.shape))
    elif form in ("signed", "unsigned"):
        placement = entry.chunk.unit.placements[entry.index]
        start, stop = (entry.start, entry.stop) if placement.is_full else (0, math.prod(placement.global_shape))
        met = [(a, b) for a, b in spans.get(entry.name, ()) if a < stop and start < b]
        quantized_states.check_coverage(met, start, stop, f"the state {key!r} of {entry.name!r}")
        saved_as = StateFormat(saved.dtype, form == "signed")
        storage.add_conversion(
            _StateConversion(
                entry, key, saved_as, target_format or StateFormat(entry.chunk.state_dtype, saved_as.is_signed), met
            )
        )
    elif target_format is not None and target_format.is_quantized:
        storage.add_conversion(
            _StateConversion(entry, key, StateFormat(torch.float32, target_format.is_signed), target_format, [])
        )
    else:
        now = update.state_offload.describe_state(entry.chunk, entry.state_key).get(key)
        like = torch.empty(entry.shape, dtype=_state_dtype(update, entry, now, target_format, saved), device="meta")
        unit = entry.chunk.unit
        storage.add_state(entry, key, like, tuple(unit.shapes[entry.index]), unit.placements[entry.index])


def _state_dtype(
    update: Update, entry: StateEntry, current: Any, target_format: StateFormat | None, saved: torch.Tensor
) -> torch.dtype:
    """Return the dtype of a state with one value per element.

    The first of these that exists: dtype of the optimizer's format; current dtype of the state; the chunk's
    `state_dtype`, for floating-point states of an elementwise optimizer; the saved dtype.
    """
    if target_format is not None:
        return target_format.dtype
    if isinstance(current, torch.Tensor):
        return current.dtype
    wide = not update.needs_whole_parameters and saved.is_floating_point()
    return entry.chunk.state_dtype if wide else saved.dtype
