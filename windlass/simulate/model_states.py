"""Bytes of a rank's parameters, gradients and optimizer states, and of a checkpoint, for any axes.

`windlass plan` predicts the whole memory of a rank, with activations, from the model itself; this module computes the
parts that follow from sizes alone.
"""

from __future__ import annotations

from windlass.parallel.comm_volumes import count_local_parameters
from windlass.simulate.step_workload import StepWork


def state_bytes_of_rank(work: StepWork) -> int:
    """Return the bytes that a rank of the first pipeline stage holds between two steps, without activations."""
    grid, stage = work.grid, work.volumes.zero_stage
    dense, experts = count_local_parameters(work.shape, grid)
    total = 0
    for numel, ranks in ((dense, grid.data), (experts, grid.data // grid.ep)):
        shards = ranks // grid.dp_replicate
        total += numel * work.volumes.parameter_bytes // (shards if stage == 3 else 1)
        total += numel * work.accumulation_bytes // (shards if stage >= 2 else 1)
        if work.offloading.states == "none":
            total += numel * (work.master_bytes + work.state_bytes) // (shards if stage else 1)
    return total


def checkpoint_bytes(work: StepWork) -> int:
    """Return the bytes of a checkpoint: master weights and optimizer states of the whole model."""
    return work.shape.numel * ((work.master_bytes or work.volumes.parameter_bytes) + work.state_bytes)
