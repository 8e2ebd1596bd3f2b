"""ZeRO stages 0 to 3 in one implementation.

`sharded_model` connects the five parts:

1. core: the path of a step. Start with unit, sharded_parameter, unshard_runtime, collective_scheduler, module_hooks,
   gradient_reducer, step_agreement.
2. update: master weights, their offload, and optimizer steps. Start with update_protocol, update_chunk, master_weights,
   elementwise_update, optimizer_state_offload.
3. setup: partition of a model into units, and their tiers and buffers. Start with zero_settings,
   unit_partition, unit_builder.
4. access: full values and shards of single parameters, `GatheredParameters`, averages, generation, `.grad` and
   `.data`, unfreezing. Start with shard_values, full_values.
5. sharded_init: construction of models under `zero.Init`. Start with context, initial_shard.
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
