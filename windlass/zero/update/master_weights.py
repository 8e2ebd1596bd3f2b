"""Master weights of all trainable units: creation, transfer to memory, and write-back to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from windlass.base.device_memory import (
    DeviceMemoryLedger,
    copy_to_device,
    copy_to_host,
    device_has_own_memory,
    empty_host_tensor,
)
from windlass.base.pending import DONE, Pending
from windlass.comm.rank_group import RankGroup
from windlass.storage.slot import Tier
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharded_parameter import raw_data, version_of
from windlass.zero.core.unit import Unit
from windlass.zero.setup.zero_settings import Placements
from windlass.zero.update.disk_health import DiskHealth
from windlass.zero.update.optimizer_state_offload import OptimizerStateOffload, StateOffloadCallbacks
from windlass.zero.update.update_chunk import UpdateChunk, make_chunks

_KEPT = 0.5  # fraction of the staging memory that must be free for new parameters to stay there until the next forward


def _zero_padding(values: torch.Tensor, chunk: UpdateChunk) -> torch.Tensor:
    """Set the elements of new memory `[chunk.numel]` that belong to no parameter to zero, and return it.

    An update does not write them, but a codec of an all-gather scales its blocks by all elements of a shard.
    """
    end = 0
    for piece in sorted(chunk.pieces(), key=lambda piece: piece.offset):
        values[end : piece.offset].zero_()
        end = piece.offset + piece.numel
    values[end:].zero_()
    return values


@dataclass(frozen=True)
class MasterWeightsCallbacks:
    """Callables of the model for the offload of master weights and states; see `StateOffloadCallbacks`."""

    state_bytes: Callable[[torch.dtype], int]
    state_name_of: Callable[[UpdateChunk, nn.Parameter], str]


class MasterWeights:
    """Weights that the optimizer updates: this rank's state spans of all trainable units, in chunks.

    The parameters themselves serve as master weights if they have the same dtype and tier, that tier is not NVMe, and
    neither `delayed` nor `separate` is set. Otherwise the master weights are separate memory.

    Args:
        slots: gradients of the trainable units.
        limit: maximum elements of a chunk.
        tiers: disk tier, staging pool, and page-locking. The tier of a unit's master weights is `Unit.state_tier`.
        device: device of the model.
        ledger: receives the bytes of separate master weights on the device.
        health: health of the disk.
        stage_ranks: ranks that have the same units as this rank, if pipeline stages differ; None: all ranks.
        dtype, state_dtype: see `ZeroSettings.master_dtype` and `ZeroSettings.state_dtype`.
        delayed: updates may be delayed; see [Note: delayed update].
        separate: parameters never serve as master weights.
    """

    def __init__(
        self,
        slots: list[GradientSlot],
        limit: int,
        tiers: Placements,
        device: torch.device,
        ledger: DeviceMemoryLedger,
        health: DiskHealth,
        callbacks: MasterWeightsCallbacks,
        *,
        dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        stage_ranks: RankGroup | None = None,
        delayed: bool = False,
        separate: bool = False,
    ) -> None:
        self.chunks: list[UpdateChunk] = []
        self.state_offload = OptimizerStateOffload(
            device,
            ledger,
            tiers.disk,
            tiers.staging,
            pin=tiers.pin,
            callbacks=StateOffloadCallbacks(
                state_bytes=callbacks.state_bytes, on_fetched=self.copy_edits, state_name_of=callbacks.state_name_of
            ),
        )
        self._health, self._stage_ranks = health, stage_ranks
        self._device, self._ledger, self._pin, self._staging = device, ledger, tiers.pin, tiers.staging
        self._separate = separate or delayed
        self._delayed, self._dtype, self._state_dtype = delayed, dtype, state_dtype
        self._limit = limit
        self._of_unit: dict[int, list[UpdateChunk]] = {}
        self.add_slots(slots)
        self._versions: dict[int, int] = {}
        self._refuses_edits = False  # see `follow_edits`
        # Copy of each parameter whose `.data` a script has read, by id. Changes through `.data` do not increment the
        # version, so values are compared: by `copy_edits` with the master weights, by `first_edited` with this copy.
        # The copy is made by `copy_all_edits`, `follow_edits`, or a late `track_data_edits`; None: there is no copy.
        self._data_snapshots: dict[int, torch.Tensor | None] = {}
        # Master weights of each unit that are neither its parameters nor on NVMe.
        self._separate_masters: dict[int, torch.Tensor] = {}

    def add_slots(self, slots: list[GradientSlot]) -> list[UpdateChunk]:
        """Add chunks for the units of `slots` and return them. `create` makes their master weights."""
        added = make_chunks(slots, self._limit)
        self.chunks += added
        for chunk in added:
            self._of_unit.setdefault(chunk.unit.index, []).append(chunk)
        return added

    def remove_chunks(self, chunks: list[UpdateChunk]) -> None:
        """Undo `add_slots`, given the chunks that it returned."""
        for chunk in chunks:
            self.chunks.remove(chunk)
            self._of_unit.pop(chunk.unit.index, None)

    def chunks_of(self, unit: Unit) -> list[UpdateChunk]:
        """Return the chunks of a unit; none if the unit is frozen."""
        return self._of_unit.get(unit.index, [])

    def create(self, unit: Unit, span: torch.Tensor) -> None:
        """Create the master weights of a unit on their tier. The parameters must have their values already.

        Args:
            span: `[state_stop - state_start]`, parameter values before the cast to the param_dtype.
        """
        chunks = self.chunks_of(unit)
        if not chunks:
            return
        full = self._same_memory(unit)
        if full is None:
            dtype = self._dtype_of(span.dtype)
            if unit.state_tier is Tier.DEVICE:
                self._ledger.set_held_bytes(f"master weights of {unit.names[0]}", span.numel() * dtype.itemsize)
                full = span.to(dtype, copy=True)
            else:
                full = empty_host_tensor(span.numel(), dtype, pin=self._pin).copy_(span)
            if unit.state_tier is not Tier.NVME:
                self._separate_masters[unit.index] = full
        for chunk in chunks:
            chunk.dtype = full.dtype
            chunk.state_dtype = self._state_dtype or full.dtype
            chunk.master = full[chunk.start : chunk.stop]
            self.state_offload.store(chunk)

    @contextmanager
    def resident(
        self, units: list[Unit], *, changes: bool = False, alone: bool = False, among: RankGroup | None = None
    ) -> Iterator[None]:
        """Context with master weights and optimizer states of `units` in memory.

        In-place changes of the parameters are copied to the master weights first. Collective if the model keeps data
        on NVMe, unless `alone`.

        Args:
            changes: store values that were changed in the context.
            alone: this rank does not wait for others, and errors are raised on this rank only.
            among: only these ranks take part; None: all ranks that have the units.

        Raises:
            StorageError: the data cannot be read or written on some rank, or training cannot continue from the model's
                state. Raised on all ranks that take part.
        """
        check = self._health.check_local if alone else partial(self._health.check, among=among or self._stage_ranks)
        self._health.require_intact("reading or setting master weights and optimizer states")
        chunks = [chunk for unit in units for chunk in self.chunks_of(unit)]
        with self.state_offload.resident(
            chunks, changes=changes, on_resident=lambda: check("master weights and optimizer states could not be read")
        ):
            yield
        if changes:
            check("changed master weights and optimizer states could not be stored", loses=True)

    def round_to_parameters(self, units: list[Unit]) -> None:
        """Round master weights to the dtype of their parameters, so that both have the same values.

        Collective if the model keeps data on NVMe.

        Raises:
            StorageError: as in `resident`.
        """
        for unit in units:
            with self.resident([unit], changes=True):
                for chunk in self.chunks_of(unit):
                    if chunk.dtype != unit.dtype:
                        chunk.values().copy_(chunk.values().to(unit.dtype))

    def disk_record_sizes(self, unit: Unit) -> Iterator[int]:
        """Yield the bytes on NVMe of each record of a unit's master weights and future states."""
        for chunk in self.chunks_of(unit):
            if chunk.tier is Tier.NVME:
                yield self.state_offload.record_nbytes(chunk, self._dtype_of(unit.parameters[0].dtype))

    def read_ahead(self, unit: Unit) -> None:
        """Start to read a unit's master weights and states from NVMe, in the order of the next step: last chunk first.

        Does nothing for other tiers.
        """
        self.state_offload.read_ahead(self.chunks_of(unit)[::-1])

    def pieces(self, unit: Unit) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield this rank's fragments of a unit's master weights: `(parameter index, start, stop, flat tensor)`.

        The master weights must be in memory.
        """
        for chunk in self.chunks_of(unit):
            for piece in chunk.pieces():
                yield piece.index, piece.start, piece.stop, chunk.values().narrow(0, piece.offset, piece.numel)

    def read_span(self, unit: Unit, *, among: RankGroup | None = None) -> torch.Tensor:
        """Return the master weights of this rank's state span `[state_stop - state_start]`.

        The caller must not change them: the result may be the master weights themselves or a copy. Collective if the
        model keeps data on NVMe: over the ranks `among`, by default over all ranks that have the unit.

        Raises:
            StorageError: the master weights cannot be read on some rank, or training cannot continue from the model's
                state. Raised on all ranks that take part.
        """
        self._health.require_intact("reading master weights")
        chunks = self.chunks_of(unit)
        if all(chunk.tier is not Tier.NVME for chunk in chunks):
            with self.state_offload.resident(chunks):
                parts = [chunk.values() for chunk in chunks]
            full = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            full = torch.empty(unit.state_stop - unit.state_start, dtype=chunks[0].dtype)
            for chunk in chunks:
                with self.state_offload.resident([chunk], changes=False):
                    full[chunk.start : chunk.stop].copy_(chunk.values())
        self._health.check("master weights could not be read", among=among or self._stage_ranks)
        return full

    @contextmanager
    def opened(
        self, chunk: UpdateChunk, refilled: dict[nn.Parameter, dict[str, torch.Tensor]] | None = None, *, changes: bool
    ) -> Iterator[None]:
        """Context with one chunk in memory, on this rank alone. Changes are written to the parameters, too.

        Args:
            refilled: states to create in the chunk, see `OptimizerStateOffload.overwritten`. The caller fills them.
                By default the chunk keeps its current states.
            changes: store values that were changed in the context. Pass True with `refilled`.

        Raises:
            StorageError: the chunk cannot be read. All ranks must then call `DiskHealth.check`.
        """
        if refilled is not None:
            bringing = self.state_offload.overwritten(chunk, refilled, on_resident=self._health.raise_local_failure)
        else:
            bringing = self.state_offload.resident(
                [chunk], changes=changes, on_resident=self._health.raise_local_failure
            )
        with bringing:
            yield
            if changes:
                self.write_back(chunk).wait()

    def is_separate(self, unit: Unit) -> bool:
        """Return True if a unit's master weights are separate from its parameters."""
        return bool(self.chunks_of(unit)) and self._same_memory(unit) is None

    def full_span(self, unit: Unit) -> torch.Tensor | None:
        """Return the master weights of this rank's state span; None if the parameters serve as master weights, or if
        the master weights are on NVMe."""
        return self._separate_masters.get(unit.index)

    def write_back(self, chunk: UpdateChunk, *, keep: bool = False) -> Pending:
        """Start to write a chunk's new master weights, cast to the param_dtype, to this rank's shard of the parameters.

        Does nothing if both are the same memory.

        Args:
            keep: if the parameters are on NVMe, also keep them in staging memory for the next forward if it has room.
        """
        unit = chunk.unit
        lowered, chunk.lowered_params = chunk.lowered_params, None
        values = chunk.values() if lowered is None else lowered
        if unit.shard_slot is not None and unit.shard_slot.tier is not Tier.DEVICE:
            if unit.shard_slot.tensor is not None and _same(unit.shard_slot.tensor[chunk.start : chunk.stop], values):
                return DONE  # the same memory, or the update wrote its 16-bit copy there (`lowered_output`)
            if unit.shard_slot.tensor is None:
                return self._store(chunk, lowered, keep=keep)
            if lowered is None and chunk.tier is Tier.DEVICE and device_has_own_memory(self._device):
                return unit.shard_slot.put(
                    values.to(unit.dtype, copy=True), chunk.start
                )  # a copy, since the master weights may change during the transfer
            return unit.shard_slot.store(values.to(unit.dtype), chunk.start)
        target = self._device_span(unit)[chunk.start : chunk.stop]
        if _same(target, values):
            return DONE
        if chunk.tier is Tier.DEVICE or not device_has_own_memory(self._device):
            target.copy_(values)
            return DONE
        # Copy master weights: their staging buffer may be reused before the transfer ends.
        return copy_to_device(target, values if lowered is not None else values.to(unit.dtype, copy=True))

    def keep_lowered_params(self, chunk: UpdateChunk) -> None:
        """Keep a copy of a chunk's new parameters in the param_dtype for a `write_back` in a later step.

        Master weights that are in memory in that dtype need no copy.
        """
        if chunk.lowered_params is None and (chunk.tier is Tier.NVME or chunk.dtype != chunk.unit.dtype):
            chunk.lowered_params = empty_host_tensor(chunk.numel, chunk.unit.dtype, pin=self._pin).copy_(chunk.values())

    def _store(self, chunk: UpdateChunk, lowered: torch.Tensor | None, *, keep: bool) -> Pending:
        """Start to write a chunk's new parameters to NVMe. The disk tier orders later reads after this write.

        Args:
            lowered: the new parameters in the param_dtype; None: cast the master weights.
            keep: see `write_back`.
        """
        slot = chunk.unit.shard_slot
        assert slot is not None and self._staging is not None
        # With delayed updates `lowered` is not a staging buffer (see `lowered_output`): there is nothing to release.
        if lowered is not None and self._delayed:
            return slot.store(lowered, chunk.start)
        if lowered is None:
            values = chunk.values()
            lowered = self._staging.acquire(chunk.numel, chunk.unit.dtype)
            if chunk.tier is Tier.DEVICE and device_has_own_memory(self._device):
                copy_to_host(lowered, values.to(chunk.unit.dtype)).wait()
            else:
                lowered.copy_(values)
        written = slot.store(lowered, chunk.start)
        if keep and self._staging.has_room(int(_KEPT * self._staging.limit)):
            slot.keep_staged(lowered, chunk.start, written)
        else:
            self._staging.release(lowered, written)
        return DONE  # the staging pool waits for the write; a failure surfaces at the next `DiskHealth.check`

    def lowered_output(self, chunk: UpdateChunk) -> torch.Tensor:
        """Return a host tensor `[stop - start]` in the param_dtype, to which an update writes a chunk's new parameters.

        Without delayed updates this is the shard itself on the host tier, and a staging buffer for the NVMe tier. In
        all other cases it is new memory: during a delayed update, the forward and backward use the old values.
        """
        slot = chunk.unit.shard_slot
        if not self._delayed and slot is not None and slot.tier is Tier.HOST and slot.tensor is not None:
            return slot.tensor[chunk.start : chunk.stop]
        if not self._delayed and slot is not None and slot.tier is Tier.NVME and self._staging is not None:
            return _zero_padding(self._staging.acquire(chunk.numel, chunk.unit.dtype), chunk)
        return _zero_padding(empty_host_tensor(chunk.numel, chunk.unit.dtype, pin=self._pin), chunk)

    def drop_lowered_params(self, chunk: UpdateChunk) -> None:
        """Drop new parameters in the param_dtype that a failed step has left."""
        slot = chunk.unit.shard_slot if not self._delayed else None
        if (
            chunk.lowered_params is not None
            and slot is not None
            and slot.tier is Tier.NVME
            and self._staging is not None
        ):
            self._staging.release(chunk.lowered_params)
        chunk.lowered_params = None

    def copy_edits(self, chunk: UpdateChunk) -> None:
        """Copy in-place changes of parameters since the last step to the chunk's master weights.

        Without this, the next update would overwrite the changes.
        """
        unit = chunk.unit
        if self._refuses_edits or unit.reshards:  # changes are detected by `first_edited` and `pop_lost_edit`
            return
        source = self._device_span(unit)[chunk.start : chunk.stop]
        if _same(source, chunk.values()):
            return
        for piece in chunk.pieces():
            parameter = unit.parameters[piece.index]
            place = slice(piece.offset, piece.offset + piece.numel)
            if version_of(parameter) != self._versions.get(id(parameter)):
                self.state_offload.compare_pages(chunk)
                chunk.values()[place].copy_(source[place])
            elif id(parameter) in self._data_snapshots:
                self.state_offload.compare_pages(chunk)
                # Any element may have changed; unchanged ones must not be rounded to the param_dtype.
                copy_differing(chunk.values()[place], source[place])

    def track_data_edits(self, unit: Unit, index: int, *, late: bool) -> None:
        """Record that a script reads `.data` of a parameter. From now on every step checks its values for changes.

        Args:
            late: a delayed update is in progress or replicas differ, so values cannot be compared with the master
                weights. The current values are copied for the comparison.
        """
        parameter = unit.parameters[index]
        if unit.reshards:
            unit.snapshot_data(index)
        if unit.reshards or id(parameter) in self._data_snapshots or not self.is_separate(unit):
            return
        self._data_snapshots[id(parameter)] = raw_data(parameter).clone() if late else None

    def copy_all_edits(self, units: list[Unit]) -> None:
        """Run `copy_edits` for the edited units of `units`, e.g. before a delayed update or an async save starts.

        Changes after this call are found by `first_edited` or by the next `copy_edits`. Not collective.

        Raises:
            StorageError: as in `resident`, but on this rank only.
        """
        exposed = (
            [unit for unit in units if any(id(p) in self._data_snapshots for p in unit.parameters)]
            if self._data_snapshots
            else []
        )
        edited = [unit for unit in units if unit in exposed or self._edited(unit) is not None]
        with self.resident(edited, changes=True, alone=True):
            self.remember_versions(units)
        for unit in exposed:
            for parameter in unit.parameters:
                if id(parameter) in self._data_snapshots:
                    self._data_snapshots[id(parameter)] = raw_data(parameter).clone()

    def follow_edits(self, units: list[Unit], *, refuses: bool) -> None:
        """Set the treatment of in-place changes of parameters from now on.

        Args:
            refuses: True: `first_edited` detects changes; it finds those through `.data` by comparison with a copy that
                is made here. False: `copy_edits` copies changes to the master weights.
        """
        self._refuses_edits = refuses
        for unit in units if self._data_snapshots else ():
            for parameter in unit.parameters:
                if id(parameter) in self._data_snapshots:
                    self._data_snapshots[id(parameter)] = raw_data(parameter).clone() if refuses else None

    def first_edited(self, units: list[Unit]) -> str | None:
        """Return the name of a parameter that was changed in place since `remember_versions`; None if there is none."""
        for unit in units:
            if (name := self._edited(unit)) is not None:
                return name
            for name, parameter in zip(unit.names, unit.parameters, strict=True) if self._data_snapshots else ():
                before = self._data_snapshots.get(id(parameter))
                if before is not None and not torch.equal(before, raw_data(parameter)):
                    return name
        return None

    def pop_lost_edit(self, units: list[Unit]) -> str:
        """Return the name of a parameter that was changed while it was unsharded, and lost the change when it was
        resharded; empty if there is none. Clear the record of such changes.
        """
        name_of_edit = ""
        with torch._C.DisableTorchFunctionSubclass():  # no values are read, so nothing has to be unsharded
            for unit in units:
                if unit.reshards:
                    name_of_edit, unit.lost_edit_name = name_of_edit or unit.lost_edit_name, ""
                    for name, parameter in zip(unit.names, unit.parameters, strict=True):
                        if version_of(parameter) != self._versions.get(id(parameter)):
                            name_of_edit = name_of_edit or name
                            self.accept_version(parameter)
        return name_of_edit

    def accept_version(self, parameter: nn.Parameter) -> None:
        """Record the current version of a parameter, so that earlier changes do not count as edits."""
        self._versions[id(parameter)] = version_of(parameter)

    def _edited(self, unit: Unit) -> str | None:
        """Return the name of a parameter whose version changed since it was recorded; None if there is none."""
        if unit.reshards or not self.chunks_of(unit):
            return None
        named = zip(unit.names, unit.parameters, strict=True)
        return next((n for n, p in named if version_of(p) != self._versions.get(id(p))), None)

    def remember_versions(self, units: list[Unit]) -> None:
        """Record the current versions of all parameters of `units`. Their master weights must have the same values."""
        self._versions.update({id(p): version_of(p) for unit in units for p in unit.parameters})

    def _device_span(self, unit: Unit) -> torch.Tensor:
        """Return this rank's state span of the parameters in device memory, as a view."""
        if unit.shard_slot is not None:
            assert unit.shard_slot.tensor is not None
            return unit.shard_slot.tensor
        return unit.local_shard if unit.reshards else unit.local_span(unit.full)

    def _same_memory(self, unit: Unit) -> torch.Tensor | None:
        """Return this rank's state span of the parameters if it serves as master weights, else None."""
        if self._separate or unit.dtype != self._dtype_of(unit.dtype) or unit.state_tier is Tier.NVME:
            return None
        tier = unit.shard_slot.tier if unit.shard_slot is not None else Tier.DEVICE
        if tier is not unit.state_tier:
            return None
        return unit.shard_slot.tensor if unit.shard_slot is not None else self._device_span(unit)

    def step_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the optimizer would update parameters of `dtype`."""
        return self._state_dtype or self._dtype_of(dtype)

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of master weights for parameters that had `dtype` before the cast to the param_dtype."""
        return self._dtype or (dtype if dtype == torch.float64 else torch.float32)


def copy_differing(masters: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` to `masters`, except where a master weight, rounded to the dtype of `values`, equals its value."""
    wide = values.to(masters.device, masters.dtype)
    torch.where(masters.to(values.dtype).to(masters.dtype) == wide, masters, wide, out=masters)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors are the same memory in the same dtype."""
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr()
