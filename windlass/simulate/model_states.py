"""Bytes of a rank's parameters, gradients and optimizer states, and of a checkpoint, for any axes.

`windlass plan` predicts the full memory of a rank, with activations, from the model itself; this module computes the
parts that follow from sizes alone.
"""

from __future__ import annotations

from windlass.parallel.comm_volumes import count_local_parameters
from windlass.simulate.cluster import Cluster
from windlass.simulate.step_workload import StepWork


def state_bytes_of_rank(work: StepWork, cluster: Cluster) -> int:
    """Return the bytes of device memory that a rank of the first pipeline stage holds between two steps, without
    activations.

    Offloaded values do not count. If the device has no memory of its own, values on the host count too. The small
    parameters that `offload_param` leaves on the device do not count.
    """
    grid, stage, tiers = work.grid, work.volumes.zero_stage, work.offloading
    beside_device = {"nvme"} if cluster.host.host_link is None else {"cpu", "nvme"}
    gradients = "nvme" if tiers.states == "nvme" and tiers.gradients_on_disk else "cpu"
    # The engine offloads states and, from stage 2 on, gradients of the fraction `ratio` of the elements.
    share = tiers.ratio if stage and tiers.states != "none" else 0.0
    kept_states = 1 - share if tiers.states in beside_device else 1.0
    kept_gradients = 1 - share if stage >= 2 and gradients in beside_device else 1.0
    keeps_parameters = tiers.parameters not in beside_device
    # Parameters serve as master weights only if they are on the tier of the states.
    masters = work.master_bytes or (0 if keeps_parameters else work.volumes.parameter_bytes)
    dense, experts = count_local_parameters(work.shape, grid)
    total = 0
    for numel, ranks in ((dense, grid.data), (experts, grid.data // grid.ep)):
        shards = ranks // grid.dp_replicate
        if keeps_parameters:
            total += numel * work.volumes.parameter_bytes // (shards if stage == 3 else 1)
        total += int(kept_gradients * numel) * work.accumulation_bytes // (shards if stage >= 2 else 1)
        total += int(kept_states * numel) * (masters + work.state_bytes) // (shards if stage else 1)
    return total


def states_fit(work: StepWork, cluster: Cluster) -> bool:
    """Return True if the parameters, gradients and states of a rank fit the memory of its device."""
    return state_bytes_of_rank(work, cluster) <= cluster.device.memory


def checkpoint_bytes(work: StepWork) -> int:
    """Return the bytes of a checkpoint: master weights and optimizer states of the full model."""
    return work.shape.numel * ((work.master_bytes or work.volumes.parameter_bytes) + work.state_bytes)
