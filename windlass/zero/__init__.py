"""ZeRO 0-3 in one implementation.

Reading order: core (sharding_policy, unit_layout, unit_partition, sharded_parameter, unit, prefetcher,
collective_scheduler, unshard_runtime, module_hooks, buffer_ring, gradient_reducer, gradient_norm, disk_health),
update, sharded_model, access, sharded_init.
"""

from windlass.zero.access.full_values import full_grad as full_grad
from windlass.zero.access.full_values import full_param as full_param
from windlass.zero.access.full_values import full_state as full_state
from windlass.zero.access.full_values import set_full_grad as set_full_grad
from windlass.zero.access.full_values import set_full_param as set_full_param
from windlass.zero.access.full_values import set_full_state as set_full_state
from windlass.zero.access.gathered_parameters import GatheredParameters as GatheredParameters
from windlass.zero.access.moving_average import ExponentialMovingAverage as ExponentialMovingAverage
from windlass.zero.access.shard_values import local_grad as local_grad
from windlass.zero.access.shard_values import local_param as local_param
from windlass.zero.access.shard_values import local_state as local_state
from windlass.zero.access.shard_values import set_local_grad as set_local_grad
from windlass.zero.access.shard_values import set_local_param as set_local_param
from windlass.zero.access.shard_values import set_local_state as set_local_state
from windlass.zero.sharded_init.context import Init as Init

__all__ = [
    "ExponentialMovingAverage",
    "GatheredParameters",
    "Init",
    "full_grad",
    "full_param",
    "full_state",
    "local_grad",
    "local_param",
    "local_state",
    "set_full_grad",
    "set_full_param",
    "set_full_state",
    "set_local_grad",
    "set_local_param",
    "set_local_state",
]
