"""ZeRO's part of a step on one representative rank: all-gathers, reductions, updates, and transfers between tiers.

At stage 3 the engine's own prefetcher selects the units that are prefetched and those that stay unsharded, as in the
second step of a run.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, cast

import torch

from windlass.base.errors import ConfigError
from windlass.comm.codec import get_codec
from windlass.comm.mesh_shape import DATA_AXES, EXPERT_DATA_AXES
from windlass.comm.quantized_options import ranks_of_host
from windlass.simulate.collective_cost import RankPattern
from windlass.simulate.event_loop import SimulatedTask
from windlass.simulate.message_lanes import MessageLanes
from windlass.simulate.model_blocks import ModelChunk, SimulatedBlock
from windlass.simulate.rank_units import SimulatedUnit
from windlass.simulate.step_lanes import RankLanes
from windlass.simulate.step_workload import StepWork
from windlass.zero.core.prefetcher import Prefetcher
from windlass.zero.core.unit import ShardState

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_STREAM = "zero"


class ZeroLanes:
    """Simulated collectives and updates of the units (parameters that are sharded together) of one rank.

    Args:
        chunks: Model chunks of the rank.
        units: Units of the rank in model order.
    """

    def __init__(self, work: StepWork, lanes: RankLanes, chunks: list[ModelChunk], units: list[SimulatedUnit]) -> None:
        self._work, self._lanes, self._chunks, self._units = work, lanes, chunks, units
        self._cluster = lanes.costs.cluster
        self._neighbours = self._cluster.ranks_on_host(work.grid.world)
        self._stage = work.sharding_stage
        replicas = work.grid.dp_replicate > 1 and self._stage > 0
        self._patterns = {
            expert: RankPattern(tuple(axis for axis in axes if not (replicas and axis == "dp_replicate")))
            for expert, axes in ((False, DATA_AXES), (True, EXPERT_DATA_AXES))
        }
        self._reduced: dict[SimulatedUnit, SimulatedTask | None] = {}
        self._once = work.grid.pp > 1 and work.volumes.unshards_once
        is_local = work.grid.world <= self._cluster.host.devices
        on_cpu = self._cluster.host.host_link is None
        self._shares_memory = on_cpu and is_local and work.transport in ("auto", "shm")
        self._shares_memory = self._shares_memory and not (work.codecs.weights or work.codecs.gradients)
        self._algorithm = "pairwise" if on_cpu else "auto"
        self._prefetcher = Prefetcher(work.prefetch_numel, work.max_live_numel, work.max_reuse_distance, 0)
        self._had_backward = False
        self._messages = MessageLanes(work, lanes, self._patterns[False], self._state_rate, self._algorithm, _STREAM)
        has_disk = self._cluster.host.disk_read and self._cluster.host.disk_write
        if "nvme" in (work.offloading.states, work.offloading.parameters, work.offloading.activations) and not has_disk:
            raise ConfigError(
                f"{self._cluster.name}: the configuration offloads to nvme, and hosts have no disk; set "
                "host.disk_read and host.disk_write, e.g. 6GB/s"
            )

    def size(self, unit: SimulatedUnit) -> int:
        """Return the number of ranks over which a unit is sharded, or, at stage 0, reduced."""
        return self._lanes.costs.size(self._patterns[unit.is_expert])

    def shard_numel(self, unit: SimulatedUnit) -> int:
        """Return the number of elements of a unit whose states this rank has."""
        return unit.padded // self.size(unit) if self._stage else unit.padded

    # Unsharded parameters.

    def record(self, chunk: ModelChunk, *, backward: bool) -> None:
        """Record a forward or backward of the previous step, from which the prefetcher predicts."""
        if not backward:
            self.begin_forward()
        for block in (chunk.backward_order if backward else chunk.blocks) if self._reshards else ():
            for unit in _sharded(block):
                self._prefetcher.record_use(cast(Any, unit))
        self._had_backward = self._had_backward or backward

    @property
    def _reshards(self) -> bool:
        """True if parameters are resharded after each use."""
        return self._stage == 3 and not self._once

    def begin_forward(self) -> None:
        """Begin the forward of a chunk for one micro-batch."""
        if self._reshards:
            self._prefetcher.begin_forward(had_backward=self._had_backward)
            self._had_backward = False

    def use(self, chunk: ModelChunk, block: SimulatedBlock, *, backward: bool) -> None:
        """Unshard the units of a block, prefetch the next units, and make the computation wait for the block's own."""
        if self._stage < 3:
            return
        self._lanes.flush()
        own = _sharded(block)
        for number, unit in enumerate(own):
            if self._reshards:
                self._prefetcher.record_use(cast(Any, unit))
            if unit.shard_state is ShardState.SHARDED:
                self._gather(unit, backward=backward)
            self._lanes.block_on(unit.gathered)
            # The engine prefetches after each unit, so the next unit may be one of the same block.
            for other in self._ahead(chunk, block, own[number + 1 :], backward=backward):
                self._gather(other, backward=backward)

    def _ahead(
        self, chunk: ModelChunk, block: SimulatedBlock, rest: list[SimulatedUnit], *, backward: bool
    ) -> list[SimulatedUnit]:
        """Return the units to gather now, ahead of their use.

        Args:
            rest: units of the block that are used next.
        """
        if self._shares_memory:
            return []
        order = chunk.backward_order if backward else chunk.blocks
        after = order[order.index(block) + 1 :]
        if self._reshards:
            # A forward prefetches no units for the backward: ranks agree on the order of gathers in each phase.
            here = {*rest, *(unit for one in after for unit in _sharded(one))}
            predicted = self._prefetcher.units_to_prefetch(self._live_numel())
            return list(takewhile(here.__contains__, (cast(SimulatedUnit, one) for one in predicted)))
        following = [] if rest else [unit for one in after[:1] for unit in _sharded(one)]
        return [unit for unit in following if unit.shard_state is ShardState.SHARDED]

    def release(self, block: SimulatedBlock, *, in_use: SimulatedBlock | None = None) -> None:
        """Reshard the units of a block, unless they are used again soon.

        Args:
            in_use: Block whose backward has begun, and whose units stay unsharded.
        """
        for unit in _sharded(block) if self._reshards else ():
            if in_use is not None and unit in in_use.units:
                continue
            if not self._prefetcher.is_reused_soon(cast(Any, unit), self._live_numel()):
                unit.shard_state, unit.gathered = ShardState.SHARDED, None

    def _live_numel(self) -> int:
        return sum(u.numel for u in self._units if u.reshards and u.shard_state is not ShardState.SHARDED)

    def _gather(self, unit: SimulatedUnit, *, backward: bool) -> None:
        unit.shard_state = ShardState.UNSHARDED
        before = self._lanes.last
        source = self._upload(unit, before)
        near = self._work.volumes.backward_gather_ranks if backward and not unit.is_expert else 0
        unit.gathered = self._all_gather(unit, [before, source], near) or source

    def _upload(self, unit: SimulatedUnit, before: SimulatedTask | None) -> SimulatedTask | None:
        """Copy the shard of an offloaded unit to the device. Return the last task; None: nothing is copied."""
        tier, host = self._work.offloading.parameters, self._cluster.host
        if tier == "none" or host.host_link is None:
            return None
        nbytes = self.shard_numel(unit) * self._work.volumes.parameter_bytes
        source = before
        if tier == "nvme":
            rate = host.disk_read / self._neighbours
            source = self._lanes.transfer("disk read", rate, nbytes, f"read {unit.name}", "disk", [before])
        return self._lanes.transfer(
            "host to device", host.host_link.usable, nbytes, f"fetch {unit.name}", "host", [source]
        )

    def _all_gather(
        self, unit: SimulatedUnit, after: list[SimulatedTask | None], near: int = 0
    ) -> SimulatedTask | None:
        if self._shares_memory:
            return None  # no transfer: all ranks of the host map one buffer
        pattern, itemsize = self._patterns[unit.is_expert], self._work.volumes.parameter_bytes
        if near:
            pattern = RankPattern(pattern.axes, block=near)
        n = self._lanes.costs.size(pattern)
        shard = unit.padded // n * itemsize
        # Secondary shards have quantized values already, and persistent parameters are sent exactly.
        if self._work.codecs.weights and unit.reshards and not near:
            shard = get_codec(self._work.codecs.weights).encoded_size(unit.padded // n, _DTYPES[itemsize])
        return self._lanes.collective(
            "data", "all_gather", n * shard, pattern, label=unit.name, after=after,
            counted={"gather": (n - 1) * shard}, algorithm=self._algorithm, stream=_STREAM,
        )  # fmt: skip

    # Gradients.

    def end_block_backward(self, block: SimulatedBlock, *, is_last_micro: bool) -> None:
        """Copy the block's gradients into the reduction's buffers; reduce the units whose gradients are complete."""
        trained = sum(unit.padded / unit.uses for unit in block.units if unit.trainable)
        copied = trained * (self._work.volumes.parameter_bytes + self._work.volumes.gradient_bytes)
        self._lanes.spend(f"gradients of {block.name}", copied / self._state_rate)
        computed = self._lanes.flush()
        for unit in (unit for unit in block.units if unit.trainable):
            unit.backwards += 1
            unit.last_backwards += is_last_micro
            if self._reduces_each_micro_batch:
                if unit.backwards == unit.uses:
                    self._reduce_now(unit, computed)
            elif unit.last_backwards == unit.uses:
                self._reduce_now(unit, computed)

    def end_chunk_backward(self) -> None:
        """End a backward: reduce gradients of units whose other blocks are in other chunks, and reshard everything."""
        for unit in self._units:
            if self._reduces_each_micro_batch and unit.backwards:
                self._reduce_now(unit, self._lanes.flush())
            if self._reshards:
                unit.shard_state, unit.gathered = ShardState.SHARDED, None
        self._had_backward = True

    @property
    def _reduces_each_micro_batch(self) -> bool:
        """True if each micro-batch reduces its gradients."""
        return self._stage >= 2 and not self._once

    def _reduce_now(self, unit: SimulatedUnit, after: SimulatedTask | None) -> None:
        unit.backwards = unit.last_backwards = 0
        if self._work.messages.keeps_local:
            return
        self._reduced[unit] = self._reduce(unit, after)
        if not self._work.overlaps_reduction:
            self._lanes.block_on(self._reduced[unit])

    def _reduce(self, unit: SimulatedUnit, after: SimulatedTask | None) -> SimulatedTask | None:
        pattern, itemsize = self._patterns[unit.is_expert], self._work.volumes.gradient_bytes
        n = self._lanes.costs.size(pattern)
        if self._work.codecs.gradients and n > 1:
            task = self._reduce_encoded(unit, pattern, after)
        else:
            received = (n - 1) * unit.padded // n * itemsize
            task = self._lanes.collective(
                "data", "reduce_scatter", unit.padded * itemsize, pattern, label=unit.name, after=[after],
                counted={"reduce": received}, algorithm=self._algorithm, stream=_STREAM,
            )  # fmt: skip
        task = task or after
        host = self._cluster.host
        if self._work.offloading.states != "none" and host.host_link is not None:
            nbytes = self.shard_numel(unit) * self._work.accumulation_bytes * self._work.offloading.ratio
            task = self._lanes.transfer(
                "device to host", host.host_link.usable, nbytes, f"gradients of {unit.name}", "host", [task]
            )
            if self._work.offloading.gradients_on_disk:
                rate = host.disk_write / self._neighbours
                task = self._lanes.transfer("disk write", rate, nbytes, f"gradients of {unit.name}", "disk", [task])
        return task

    def _reduce_encoded(
        self, unit: SimulatedUnit, pattern: RankPattern, after: SimulatedTask | None
    ) -> SimulatedTask | None:
        """Reduce in two all-to-alls of encoded parts: inside nodes, then across (Wang et al. 2023)."""
        codecs, n = self._work.codecs, self._lanes.costs.size(pattern)
        ranks = self._lanes.costs.group_of(0, pattern)
        node = self._work.node_size or ranks_of_host(ranks, self._cluster.host.devices)
        node = node if n % node == 0 else n
        shard = unit.padded // n
        inside = _aligned(get_codec(codecs.gradients).encoded_size(shard, torch.float32)) * (n // node)
        across = _aligned(get_codec(codecs.gradients_across).encoded_size(shard, torch.float32))
        near, far = RankPattern(pattern.axes, block=node), RankPattern(pattern.axes, stride=node)
        first = self._lanes.collective(
            "data", "all_to_all", node * inside, near, label=unit.name, after=[after],
            counted={"reduce": (node - 1) * inside}, stream=_STREAM,
        )  # fmt: skip
        second = self._lanes.collective(
            "data", "all_to_all", n // node * across, far, label=unit.name, after=[first or after],
            counted={"reduce": (n // node - 1) * across}, stream=_STREAM,
        )  # fmt: skip
        return second or first

    # The step.

    def update(self) -> None:
        """Sum gradients over replicas, all-reduce the norm, update states, and all-gather parameters that stay
        unsharded."""
        lanes, stage = self._lanes, self._stage
        computed = lanes.flush()
        trained = [unit for unit in self._units if unit.trainable]
        for unit in trained:
            self._sum_copies(unit, computed)
        reduced = [task for task in self._reduced.values() if task is not None]
        local = self._work.messages.keeps_local
        if stage == 0 and not local:
            reduced += [task for unit in trained if (task := self._gather_gradients(unit)) is not None]
        for task in reduced:
            lanes.block_on(task)
        norm_bytes = sum(self.shard_numel(unit) for unit in trained) * self._work.accumulation_bytes
        lanes.spend("norm", norm_bytes / self._state_rate)
        computed = lanes.flush()
        agreed = lanes.collective(
            "data", "all_reduce", 8, self._patterns[False], label="norm", after=[computed], stream=_STREAM
        )
        lanes.block_on(agreed)
        if local:
            self._messages.exchange(trained)
        if local or stage:
            self._messages.combine_parts(trained)
        else:
            self._messages.gather_whole(trained)
        for unit in reversed(trained):
            self._update_unit(unit, agreed or computed)
        self._messages.publish(trained)
        lanes.flush()

    def _sum_copies(self, unit: SimulatedUnit, after: SimulatedTask | None) -> None:
        """Sum a unit's reduced gradient over its replicas: along dp_replicate, along tp for partial gradients, and over
        both ends of the pipeline for a tied embedding."""
        grid = self._work.grid
        shards = 1 if self._work.messages.keeps_local else self.size(unit)
        part = unit.padded // shards * self._work.accumulation_bytes
        patterns = [RankPattern(("dp_replicate",))] if self._stage else []
        patterns += [RankPattern(("tp",))] if unit.sums_over_tp else []
        patterns += [RankPattern(("pp",), stride=grid.pp - 1)] if unit.is_on_both_ends else []
        for pattern in patterns:
            ranks = self._lanes.costs.size(pattern)
            self._reduced[unit] = self._lanes.collective(
                "data", "all_reduce", part, pattern, label=f"copies of {unit.name}",
                after=[self._reduced.get(unit), after],
                counted={"replicate": 2 * part * (ranks - 1) // ranks}, stream=_STREAM,
            ) or self._reduced.get(unit)  # fmt: skip

    @property
    def _state_rate(self) -> float:
        """Bytes a second at which gradients and states are read and written. CPU ranks share the rate of host memory,
        though their activations may be in the faster caches of the cores."""
        device, host = self._cluster.device, self._cluster.host
        if host.host_link is None:
            return host.memory_rate / host.devices  # the cores of one rank do not reach the rate of all cores
        return device.memory_rate * device.memory_efficiency

    def _gather_gradients(self, unit: SimulatedUnit) -> SimulatedTask | None:
        if self._shares_memory:
            return None
        n, itemsize = self.size(unit), self._work.accumulation_bytes
        return self._lanes.collective(
            "data", "all_gather", unit.padded * itemsize, self._patterns[unit.is_expert],
            label=f"gradients of {unit.name}", after=[self._reduced.get(unit)],
            counted={"gather": (n - 1) * unit.padded // n * itemsize}, algorithm=self._algorithm, stream=_STREAM,
        )  # fmt: skip

    def _update_unit(self, unit: SimulatedUnit, after: SimulatedTask | None) -> None:
        work, lanes, host = self._work, self._lanes, self._cluster.host
        numel, offloading = self.shard_numel(unit), work.offloading
        touched = work.accumulation_bytes + 2 * (work.master_bytes + work.state_bytes)
        touched += work.volumes.parameter_bytes * (1 if work.master_bytes else 2)
        away = offloading.ratio if offloading.states != "none" and host.host_link is not None else 0.0
        if offloading.states == "nvme" and host.host_link is None:
            away = offloading.ratio  # states on disk, on a host whose devices compute in host memory
        if away < 1:
            lanes.spend(f"update {unit.name}", (1 - away) * numel * touched / self._state_rate)
        task = lanes.flush() if away < 1 else after
        if away:
            task = self._update_away(unit, away * numel, touched, None if offloading.delayed else after)
        gathers = self._stage in (1, 2) and not work.messages.keeps_local
        if gathers or (self._stage == 3 and not unit.reshards):
            self._all_gather(unit, [task, lanes.last])

    def _update_away(
        self, unit: SimulatedUnit, numel: float, touched: int, after: SimulatedTask | None
    ) -> SimulatedTask:
        """Add the update of states that are in host memory or on disk. A delayed update does not wait for tasks of this
        step."""
        work, lanes, host = self._work, self._lanes, self._cluster.host
        stored = numel * (work.master_bytes + work.state_bytes)
        ready = after
        if work.offloading.states == "nvme":
            read = stored + (numel * work.accumulation_bytes if work.offloading.gradients_on_disk else 0)
            rate = host.disk_read / self._neighbours
            ready = lanes.transfer("disk read", rate, read, f"read states of {unit.name}", "disk", [after])
        task = lanes.work_on_host(
            f"update {unit.name}", numel * touched / (host.memory_rate / self._neighbours), [ready, after]
        )
        if work.offloading.states == "nvme":
            rate = host.disk_write / self._neighbours
            lanes.transfer("disk write", rate, stored, f"write states of {unit.name}", "disk", [task])
        if host.host_link is not None and work.offloading.parameters == "none":
            task = lanes.transfer(
                "host to device", host.host_link.usable, numel * work.volumes.parameter_bytes,
                f"parameters of {unit.name}", "host", [task],
            )  # fmt: skip
        elif work.offloading.parameters == "nvme":
            nbytes = numel * work.volumes.parameter_bytes
            rate = host.disk_write / self._neighbours
            task = lanes.transfer("disk write", rate, nbytes, f"write {unit.name}", "disk", [task])
        return task


def _sharded(block: SimulatedBlock) -> list[SimulatedUnit]:
    """Return the units of a block that are resharded between two uses."""
    return [unit for unit in block.units if unit.reshards]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
