"""Prediction of the memory of a run from its layout and a trace of its forward and backward.

[Note: planned memory] Parameters, gradients, master weights and states follow from the engine's own layout, so their
bytes are exact. Activations come from [Note: traced memory]. Unsharded parameters follow from the order of blocks in
the trace and from the engine's prefetcher. Freed memory that stays with the allocator counts as allocator slack from
the second step on: on a GPU all of it, on a CPU the part that malloc keeps ([Note: freed memory on CPU]). Holes of
malloc's heap follow from a replay of the trace's allocations on a model of the heap ([Note: fragmentation of the
heap]). Workspaces of a CPU's kernels cannot be computed: they are a measured share of the heap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from windlass.comm.gather_windows import WINDOWS
from windlass.config import Config
from windlass.plan.activation_trace import BACKWARD, FORWARD, ActivationTrace
from windlass.plan.heap_model import HeapModel
from windlass.plan.memory_plan import DEVICE, DISK, HOST, SLACK, Amounts, MemoryPlan, MomentMemory
from windlass.plan.planned_layout import PlannedLayout
from windlass.storage.extent_allocator import page_up
from windlass.storage.slot import Tier
from windlass.zero.core.prefetcher import Prefetcher
from windlass.zero.core.unit import ShardState, Unit
from windlass.zero.core.unit_plan import UnitPlan
from windlass.zero.update.compressed_phase import SERVER_ERROR
from windlass.zero.update.update_chunk import make_chunks

HOLES = "holes and workspaces"
"""Holes of malloc's heap that no later tensor fits into, and workspaces of a CPU's kernels."""
_BUILT = "model as built"
_WORKSPACES = 0.05  # fraction of the heap: fitted to the measurements of bench/plan.py
_STEPS = 3  # the heap hardly grows after these steps

_PLACES = {Tier.DEVICE: DEVICE, Tier.HOST: HOST, Tier.NVME: DISK}

Held = dict[tuple[str, str], int]  # bytes by place and kind


class MemoryPlanner:
    """Prediction of the memory of one rank.

    Args:
        model: The model, possibly on the meta device.
        layout: Layout of the model on one rank under `config`.
        trace: Trace of a micro-batch, or of a pipeline's schedule.
        sharded_init: The model is built under `zero.Init` or `from_pretrained`, so no rank ever has all of it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        layout: PlannedLayout,
        trace: ActivationTrace,
        *,
        sharded_init: bool = False,
    ) -> None:
        self._model, self._config, self._layout, self._trace = model, config, layout, trace
        self._sharded_init = sharded_init
        self._accumulate = layout.settings.accumulation_dtype.itemsize
        self._module_buffers = sum(b.numel() * b.element_size() for b in {id(b): b for b in model.buffers()}.values())

    def plan(self, world_size: int, micro_batch: int, length: int) -> MemoryPlan:
        """Return the memory at each moment of a run, from `init` to `save`."""
        plan = MemoryPlan(world_size, self._layout.built_numel, micro_batch, length)
        held = self._held()
        plan.moments["init"] = self._moment(self._built())
        plan.moments["load"] = self._load()
        plan.moments[FORWARD] = self._traced(held, FORWARD)
        plan.moments[BACKWARD] = self._traced(held, BACKWARD)
        plan.moments["step"] = self._step(held)
        plan.moments["save"] = self._save(held)
        self._add_slack(plan)
        return plan

    def slot_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind that this rank holds between two steps, summed over tiers."""
        kinds: dict[str, int] = defaultdict(int)
        for (_, kind), nbytes in self._held().items():
            kinds[kind] += nbytes
        return dict(kinds)

    def _place(self, tier: Tier) -> str:
        if tier is Tier.DEVICE and not self._layout.target.has_own_memory:
            return HOST
        return _PLACES[tier]

    @property
    def _device(self) -> str:
        return self._place(Tier.DEVICE)

    def _held(self) -> Held:
        """Return the bytes that a rank holds between two steps, from the first step on."""
        layout, held = self._layout, defaultdict[tuple[str, str], int](int)
        for unit, plan in zip(layout.units, layout.original, strict=True):
            for place, kind, nbytes in self._unit_bytes(unit, plan):
                held[place, kind] += nbytes
        for dp_group in {id(unit.dp_group): unit.dp_group for unit in layout.units}.values():
            if layout.settings.policy.grad:
                requests = layout.reducer.buffer_requests(dp_group)
                held[self._device, "gradient ring"] += sum(n.numel * n.dtype.itemsize for n in requests)
        held[self._device, "module buffers"] += self._module_buffers
        windows = self._window_bytes()
        if windows:
            held[HOST, "gather windows"] += windows
        output = max(
            (slot.unit.state_stop - slot.unit.state_start for slot in layout.slots if self._is_offloaded(slot.unit)),
            default=0,
        )
        if layout.settings.policy.grad and output:
            held[self._device, "gradient output buffers"] += 2 * output * self._accumulate
        return {key: nbytes for key, nbytes in held.items() if nbytes}

    def _is_offloaded(self, unit: Unit) -> bool:
        return unit.gradient_tier is not Tier.DEVICE

    def _window_bytes(self) -> int:
        """Return the bytes of this rank's shared-memory windows, by which ranks gather buffers that peers do not
        map."""
        layout = self._layout
        if not layout.shares_memory:
            return 0
        requests = [(unit.buffer_request(), layout.group_size(unit)) for unit in layout.units if unit.reshards]
        alone = [n.numel * n.dtype.itemsize // size for n, size in requests if n.transient and not n.shared]
        return WINDOWS * max(alone, default=0)

    def _unit_bytes(self, unit: Unit, plan: UnitPlan) -> Iterator[tuple[str, str, int]]:
        """Yield the place, kind and bytes of everything that a rank holds of a unit."""
        layout, settings = self._layout, self._layout.settings
        size, span = layout.group_size(unit), unit.state_stop - unit.state_start
        if layout.frees_memory(unit):
            yield self._place(unit.tier), "parameters", unit.nbytes // size
            near = unit.dp_group.mesh.secondary
            if near is not None and layout.tiers.param is Tier.DEVICE:
                yield self._device, "secondary shards", unit.nbytes // near.size
        else:
            # A buffer that all ranks of the host share counts once for all of them.
            yield self._device, "parameters", unit.nbytes // (size if layout.is_shared(unit) else 1)
        if not unit.trainable:
            return
        if settings.policy.grad:
            of_shard = "gradients"
            if layout.states.reduces_itself:  # compressed steps also need full local gradients
                yield self._device, "gradients", unit.layout.padded * self._accumulate
                of_shard = "gradients of averaged steps"
            yield self._place(unit.gradient_tier), of_shard, span * self._accumulate
            if settings.delayed_update:
                yield self._place(unit.gradient_tier), "gradients of a delayed update", span * self._accumulate
        else:
            yield self._device, "gradients", unit.layout.padded * self._accumulate
        separate, master = layout.has_separate_masters(unit, plan), layout.master_dtype(unit, plan)
        state_place = self._place(unit.state_tier)
        if separate:
            yield state_place, "master weights", span * master.itemsize
        if settings.delayed_update:
            yield HOST, "parameters of a delayed update", span * unit.dtype.itemsize
        # States have no padding.
        yield state_place, "optimizer states", sum(layout.state_tensors(unit, unit.pieces()))
        data = unit.dp_group.mesh.data
        owned = sum(piece.numel for piece in unit.layout.pieces(*unit.layout.shard_range(data.index, data.size)))
        of_keys = [owned if key == SERVER_ERROR else sum(unit.layout.numels) for key in layout.states.rank_keys]
        if settings.keeps_quantization_errors and size > 1:
            of_keys.append(sum(unit.layout.numels))
        place = state_place if settings.policy.state else self._device
        yield place, "per-rank states", sum(of_keys) * torch.float32.itemsize

    def _built(self) -> Held:
        """Return the bytes that a rank holds of the model as it is built: all of them on the host; with sharded init,
        the rank's shards, and on the host one full unit, or the largest parameter of the full model if that is more."""
        layout = self._layout
        parameters = [one.nbytes for one in layout.built]
        if not self._sharded_init:
            return {(HOST, _BUILT): sum(parameters) + layout.built_buffers}
        held = {(HOST, _BUILT): max(self._largest_unit(), *parameters, 0) + layout.built_buffers}
        _add(held, self._initial_place, _BUILT, sum(parameters) // layout.mesh.grid.world)
        return held

    @property
    def _initial_place(self) -> str:
        """Place of the shards of sharded init, see `init_tier`."""
        chosen_later = self._config.offload is not None  # `initialize` moves shards from host memory
        return HOST if chosen_later else self._place(self._layout.tiers.param)

    def _largest_unit(self) -> int:
        return max((unit.numel * plan.dtype.itemsize for unit, plan in self._pairs()), default=0)

    def _pairs(self) -> Iterator[tuple[Unit, UnitPlan]]:
        return zip(self._layout.units, self._layout.original, strict=True)

    def _load(self) -> MomentMemory:
        """Return the peak memory of `initialize`, which fills units in turn and frees their original parameters."""
        layout = self._layout
        local = sum(p.numel() * p.element_size() for p in self._model.parameters())
        waiting, parts = local + self._module_buffers, layout.mesh.grid.size("pp", "ep", "tp")
        stays_sharded, shards = self._sharded_init and parts == 1, 0
        if stays_sharded:
            waiting, shards = self._largest_unit() + self._module_buffers, local // layout.mesh.grid.world
        done: Held = defaultdict(int)
        if layout.target.has_own_memory:  # on a CPU, pages of buffers are allocated once they are written
            for (place, kind), nbytes in self._held().items():
                if kind in ("gradient ring", "gradients", "gradient output buffers"):
                    done[place, kind] += nbytes
        worst, peak, on_disk = MomentMemory(), -1, 0
        if self._sharded_init and not stays_sharded:
            worst = self._moment({**done, (HOST, _BUILT): layout.partitioning_bytes()})
            peak = worst.total(DEVICE) + worst.total(HOST)
        for unit, plan in self._pairs():
            filled = [
                (place, kind, nbytes)
                for place, kind, nbytes in self._unit_bytes(unit, plan)
                if kind in ("parameters", "secondary shards", "master weights")
            ]
            own = {(place, kind): nbytes for place, kind, nbytes in filled if place != DISK}
            stored = sum(nbytes for place, _, nbytes in filled if place == DISK)
            now: Held = defaultdict(int, done)
            for key, nbytes in own.items():
                now[key] += nbytes
            # Values are collected in the unit's buffer; if it is shared or has another dtype, in a temporary buffer.
            in_place = unit.dtype == plan.dtype and not layout.is_shared(unit)
            temporary = 0 if in_place else unit.layout.padded * plan.dtype.itemsize
            if layout.frees_memory(unit):
                temporary += unit.nbytes
            now[self._device, "values on their way"] += temporary
            now[HOST, _BUILT] += waiting
            now[self._initial_place, _BUILT] += shards
            # Values of earlier units on NVMe may still wait in the staging memory, up to its limit.
            now[HOST, "staging"] += min(layout.staging, page_up(on_disk))
            found = self._moment(now)
            total = found.total(DEVICE) + found.total(HOST)
            if total > peak:
                worst, peak = found, total
            waiting -= unit.numel * plan.dtype.itemsize if not stays_sharded else 0
            for key, nbytes in own.items():
                done[key] += nbytes
            on_disk += stored
        return worst

    def _traced(self, held: Held, phase: str) -> MomentMemory:
        """Return the peak memory of a forward or backward, including the units that are unsharded at that moment."""
        layout, worst = self._layout, (-1, 0, 0)
        wire = self._reduction_bytes() if phase == BACKWARD else 0
        unsharded = unsharded_bytes(layout, self._trace)
        for event, full in zip(self._trace.events, unsharded, strict=True):
            if event.phase == phase:
                worst = max(worst, (event.peak + full, event.peak, full))
        now = dict(held)
        _add(now, self._device, "activations", min(worst[1], self._trace.saved))
        _add(now, HOST if self._trace.tier == "cpu" else DISK, "activations", self._trace.stored)
        _add(now, self._device, "temporary tensors", max(0, worst[1] - self._trace.saved))
        _add(now, self._device, "unsharded parameters", worst[2])
        _add(now, self._device, "unreduced gradients", self._unreduced_bytes())
        _add(now, self._device, "reduction", wire)
        self._add_staging(now)
        return self._moment(now)

    def _unreduced_bytes(self) -> int:
        """Return the bytes of the gradients that a pipeline reduces only after its last backward."""
        layout = self._layout
        backwards = sum(event.phase == BACKWARD and event.kind == "done" for event in self._trace.events)
        if not (layout.unshards_per_step and layout.settings.policy.grad and backwards > 1):
            return 0
        return sum(slot.unit.layout.padded for slot in layout.slots) * self._accumulate

    def _reduction_bytes(self) -> int:
        """Return the temporary bytes of the largest reduction."""
        layout, most = self._layout, 0
        for slot in layout.slots:
            unit, settings = slot.unit, layout.settings
            wire = settings.lowered_reduce_dtype if unit.lowered and settings.lowered_reduce_dtype else None
            wire = wire or settings.reduce_dtype
            size = unit.dp_group.mesh.data.size
            casts = wire != settings.accumulation_dtype
            nbytes = unit.layout.padded * wire.itemsize if casts else 0
            if layout.target.has_own_memory and size > 1:
                nbytes += unit.layout.padded // size * wire.itemsize  # NCCL's sum, until it is scaled into the shard
            elif not layout.shares_memory and size > 1:
                # Without shared memory, a rank receives the parts of its peers in chunks of `reduce_bucket_size`.
                numel = min(unit.layout.padded, settings.wire_options.reduce_chunk)
                nbytes = (numel * wire.itemsize if casts else 0) + numel * (size - 1) // size * wire.itemsize
            if settings.keeps_quantization_errors and size > 1 and self._place(unit.state_tier) != self._device:
                # Quantization errors in transfer: fetched for this reduction, and stored by the last two.
                nbytes += 3 * unit.layout.padded * torch.float32.itemsize
            most = max(most, nbytes)
        return most

    def _step(self, held: Held) -> MomentMemory:
        layout, now = self._layout, dict(held)
        chunks = make_chunks(layout.slots, layout.batch_numel)
        largest = max((chunk.numel for chunk in chunks), default=0)
        settings = layout.settings
        widest = settings.state_dtype or settings.master_dtype or torch.float32
        temporary = 0
        if settings.widens_masters:
            temporary += largest * widest.itemsize
        if settings.accumulation_dtype.itemsize != widest.itemsize:
            temporary += largest * widest.itemsize
        offloaded = [c for c in chunks if c.tier is not Tier.DEVICE]
        if offloaded and layout.target.has_own_memory:
            # Gradients stay in host memory; new parameters are copied to the device in their own dtype.
            lowered = max(c.numel * c.unit.dtype.itemsize for c in offloaded)
            _add(now, HOST, "temporary tensors", 2 * lowered)
        _add(now, self._device, "temporary tensors", temporary)
        self._add_staging(now)
        return self._moment(now)

    def _add_staging(self, now: Held) -> None:
        """Add the host memory that stages NVMe transfers: the bytes on disk, but at most the staging limit."""
        on_disk = sum(nbytes for (place, _), nbytes in now.items() if place == DISK)
        if on_disk:
            _add(now, HOST, "staging", min(self._layout.staging, page_up(on_disk)))

    def _save(self, held: Held) -> MomentMemory:
        now = dict(held)
        kinds = ("master weights", "optimizer states")
        resident = sum(n for (place, kind), n in held.items() if kind in kinds and place != DISK)
        everything = sum(n for (_, kind), n in held.items() if kind in kinds)
        if not any(kind == "master weights" for _, kind in held):
            own = sum(unit.nbytes // self._layout.group_size(unit) for unit in self._layout.units)
            resident, everything = resident + own, everything + own
        if not self._layout.settings.policy.state:  # each rank saves an equal part of the replicated values
            ranks = self._layout.units[0].dp_group.mesh.data.size
            resident, everything = resident // ranks, everything // ranks
        own = sum(nbytes for (_, kind), nbytes in held.items() if kind == "per-rank states")
        resident, everything = resident + own, everything + own  # each rank saves all its per-rank states
        if self._config.checkpoint.async_save:
            _add(now, HOST, "copy of the checkpoint", resident)
        _add(now, DISK, "checkpoint", everything)
        return self._moment(now)

    def _moment(self, held: Held) -> MomentMemory:
        found = MomentMemory()
        for (place, kind), nbytes in held.items():
            if nbytes:
                found.of(place)[kind] = found.of(place).get(kind, 0) + nbytes
        return found

    def _add_slack(self, plan: MemoryPlan) -> None:
        """Add freed memory that the allocator keeps, to all moments of a step that is not the first."""
        place = self._device
        on_cpu = place == HOST
        keeps = _on_the_heap if on_cpu else _everything
        later = (FORWARD, BACKWARD, "step", "save")
        most = max(keeps(plan.moments[moment].of(place)) for moment in later)
        extent = max(most, self._heap_extent()) if on_cpu else most
        holes = int((1 + _WORKSPACES) * extent) - most
        for moment in later:
            amounts = plan.moments[moment].of(place)
            slack = most - keeps(amounts)
            if slack > 0:
                amounts[SLACK] = slack
            if on_cpu:
                amounts[HOLES] = holes

    def _heap_extent(self) -> int:
        """Return how far malloc's heap grows within the first steps of a run on a CPU."""
        heap = HeapModel()
        for step in range(_STEPS):
            heap.run(self._trace.storages)
            if step == 0:
                for number, nbytes in enumerate(self._state_blocks()):
                    heap.allocate(-1 - number, nbytes)
        return heap.extent

    def _state_blocks(self) -> Iterator[int]:
        """Yield the bytes of each optimizer state in memory, which the first step creates."""
        layout = self._layout
        limit = 1 << 62 if layout.states.steps_whole else layout.batch_numel
        for chunk in make_chunks(layout.slots, limit):
            if chunk.tier is not Tier.NVME:
                yield from layout.state_tensors(chunk.unit, chunk.pieces())


def unsharded_bytes(layout: PlannedLayout, trace: ActivationTrace) -> list[int]:
    """Return, for each event of the trace, the bytes of unsharded parameters between the previous event and this one.

    The engine's prefetcher selects the units that are prefetched and those that stay unsharded. Each figure is the
    larger one of the first step, in which the prefetcher records the order of units, and of the second step.
    """
    if layout.unshards_per_step:
        held = sum(unit.nbytes for unit in layout.units if layout.frees_memory(unit))
        return [held] * len(trace.events)
    of_block: dict[str, list[Unit]] = defaultdict(list)
    for unit in layout.units:
        if unit.reshards:
            for block in unit.blocks:
                of_block[block.name].append(unit)
    if not of_block:
        return [0] * len(trace.events)
    settings = layout.settings
    prefetcher = Prefetcher(
        settings.prefetch_numel, settings.max_live_numel, settings.max_reuse_distance, layout.tiers.read_ahead_numel
    )
    runs = [_UnshardedRun(layout, prefetcher, of_block).replay(trace, repeats=repeats) for repeats in (False, True)]
    return [max(pair) for pair in zip(*runs, strict=True)]


class _UnshardedRun:
    """Replay of one step of the runtime ([Note: when a unit is resharded]) on units without memory."""

    def __init__(self, layout: PlannedLayout, prefetcher: Prefetcher, of_block: dict[str, list[Unit]]) -> None:
        self._layout, self._prefetcher, self._of_block = layout, prefetcher, of_block
        self._units = [unit for unit in layout.units if unit.reshards]
        self._in_backward: dict[int, set[str]] = defaultdict(set)  # blocks whose backward runs, by unit index

    def replay(self, trace: ActivationTrace, *, repeats: bool) -> list[int]:
        """Return, for each event, the bytes of unsharded units between the previous event and this one.

        Args:
            repeats: True if the prefetcher has recorded this trace before, as in the second step.
        """
        for unit in self._units:
            unit.shard_state = ShardState.SHARDED
        self._prefetcher.begin_forward(had_backward=repeats)
        found, before, ended = [], 0, ""
        for event in trace.events:
            if ended and event.phase == FORWARD:  # the next forward of a pipeline's schedule
                self._prefetcher.begin_forward(had_backward=ended == BACKWARD)
            ended = event.phase if event.kind == "done" else ""
            if event.kind == "begin":
                for unit in self._of_block.get(event.name, ()):
                    self._in_backward[unit.index].update([event.name] if event.phase == BACKWARD else [])
                    self._use(unit)
            elif event.kind == "end":
                for unit in self._of_block.get(event.name, ()):
                    self._in_backward[unit.index].discard(event.name)
                    self._reshard(unit)
            elif event.kind == "done" and event.phase == BACKWARD:
                self._in_backward.clear()
                for unit in self._units:
                    unit.shard_state = ShardState.SHARDED
            found.append(before)
            before = self._live_bytes()
        return found

    def _use(self, unit: Unit) -> None:
        self._prefetcher.record_use(unit)
        unit.shard_state = ShardState.UNSHARDED
        if self._layout.frees_memory(unit):
            for other in list(self._prefetcher.units_to_prefetch(self._live_numel())):
                other.shard_state = ShardState.UNSHARDED

    def _reshard(self, unit: Unit) -> None:
        if self._in_backward[unit.index]:
            return
        if not self._prefetcher.is_reused_soon(unit, self._live_numel()):
            unit.shard_state = ShardState.SHARDED

    def _live_numel(self) -> int:
        return sum(unit.numel for unit in self._units if unit.shard_state is not ShardState.SHARDED)

    def _live_bytes(self) -> int:
        return sum(
            unit.nbytes
            for unit in self._units
            if unit.shard_state is not ShardState.SHARDED and self._layout.frees_memory(unit)
        )


_HEAP_KINDS = ("activations", "temporary tensors", "optimizer states", "per-rank states", "reduction")


def _on_the_heap(amounts: Amounts) -> int:
    """Return the bytes that malloc keeps after they are freed. Large buffers do not count: they are unmapped."""
    return sum(nbytes for kind, nbytes in amounts.items() if kind in _HEAP_KINDS)


def _everything(amounts: Amounts) -> int:
    return sum(amounts.values())


def _add(held: Held, place: str, kind: str, nbytes: int) -> None:
    if nbytes:
        held[place, kind] = held.get((place, kind), 0) + nbytes
