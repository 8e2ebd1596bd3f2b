"""Choice of how often parameters are unsharded and gradients reduced: once per pipeline step or per micro-batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from windlass.base.device_memory import emulated_device_memory
from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.config import Config
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel


class ScheduleUnshardPolicy:
    """Policy of a pipeline rank to unshard its parameters once per step or once per micro-batch.

    Parameters are unsharded once per step if the configuration requests it and memory allows. The construction is
    collective over the ranks that share a stage, which make the same choice.

    Args:
        sharded: sharded model with the rank's stages.

    Attributes:
        unshards_once: True if parameters are all-gathered once per step; gradients then stay unsharded until the step's
            last backward.

    Raises:
        ConfigError: the schedule needs unsharded parameters, and they do not fit in memory.
    """

    def __init__(self, sharded: ShardedModel, config: Config) -> None:
        self._sharded = sharded
        requested = config.pipeline.unshard_per == "step"
        fits, needed, left = _fits_in_memory(sharded)
        self.unshards_once = requested and fits
        if requested and not fits:
            logger.warning(
                f'pipeline.unshard_per is "step", but unsharded parameters and gradients of this stage, '
                f"{needed / 2**20:.1f} MiB, do not fit into the {left / 2**20:.1f} MiB left on the device; they are "
                'gathered and reduced for each micro-batch. Write "micro-batch" to avoid this warning'
            )
        if sharded.policy.param and config.pipeline.schedule == "zero-bubble" and not self.unshards_once:
            raise ConfigError(
                'pipeline.schedule "zero-bubble" needs parameters again that stage 3 has already resharded: write '
                '"1f1b", a lower stage, or pipeline.unshard_per "step" and leave room for this stage\'s parameters'
            )

    def held_units(self) -> list[Unit]:
        """Return the units that stay unsharded during a schedule."""
        return [unit for unit in self._sharded.units if unit.reshards] if self.unshards_once else []

    def traffic_summary(self, micro_batches: int) -> str:
        """Describe the traffic of a step of this many micro-batches, under this policy and under the other policy."""
        once, often = self._received_bytes(1, 1), self._received_bytes(micro_batches, 2 * micro_batches)
        now, other = (once, often) if self.unshards_once else (often, once)
        how, instead = ("step", "micro-batch") if now is once else ("micro-batch", "step")
        return (
            f"gathered and reduced once a {how}: at most {now[0] / 2**20:.1f} and {now[1] / 2**20:.1f} MiB received a "
            f"step (once a {instead}: {other[0] / 2**20:.1f} and {other[1] / 2**20:.1f})"
        )

    def _received_bytes(self, reductions: int, gathers: int) -> tuple[float, float]:
        sharded = self._sharded
        wire = sharded.settings.reduce_dtype.itemsize
        gathered = reduced = 0.0
        for unit in sharded.units:
            size = unit.dp_group.group.size
            others = unit.numel * (size - 1) / size
            if unit.reshards:
                gathered += others * unit.dtype.itemsize * gathers
            elif unit.trainable and sharded.policy.state:
                gathered += others * unit.dtype.itemsize
            if unit.trainable:
                reduced += others * wire * (reductions if sharded.policy.grad else 1)
        return gathered, reduced


def _fits_in_memory(sharded: ShardedModel) -> tuple[bool, int, int]:
    """Return `(fits, needed, free)`: True if the unsharded data fits on every rank of the
    stage; needed and free bytes of this rank."""
    needed = sum(unit.layout.padded * unit.dtype.itemsize for unit in sharded.units if unit.reshards)
    if sharded.policy.grad:
        wide = sharded.settings.accumulation_dtype.itemsize
        needed += sum(slot.unit.layout.padded * wide for slot in sharded.slots)
    place, device = emulated_device_memory(), sharded.device
    left = 1 << 62
    if place is not None:
        left = place.budget - place.used
    elif device.type == "cuda":
        left = torch.cuda.mem_get_info(device)[0]
    fits = torch.tensor([float(needed <= left)], device=device)
    sharded.mesh.dense.data.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits.item()), needed, left
