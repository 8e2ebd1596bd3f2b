"""ZeRO 0-3 on one path. Reading order: policy, layout, partition, access, unit, foresight, order, runtime, hooks, ring,
gradients, norm, health, turn, update, whole, registry, born, born_units, alike, sharded, generation, differentiable,
values, growing, carried, average, gathered, born_site,
born_homes, born_deferred, born_files, born_models, init_sharded."""

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
