"""Sharding policy of each ZeRO stage. Only this module interprets the stage number."""

from __future__ import annotations

from windlass.base.errors import ConfigError
from windlass.zero.core.sharding_policy import ShardingPolicy

_STAGES = {
    0: ShardingPolicy(0, param=False, grad=False, state=False),
    1: ShardingPolicy(1, param=False, grad=False, state=True),
    2: ShardingPolicy(2, param=False, grad=True, state=True),
    3: ShardingPolicy(3, param=True, grad=True, state=True),
}


def sharding_policy(stage: int, shards: int, *, has_offload: bool = False) -> ShardingPolicy:
    """Return the policy of a stage over `shards` ranks. On one rank nothing is sharded without offload.

    Args:
        has_offload: Parameters, or master weights and optimizer states, are offloaded to host memory or NVMe.

    Raises:
        ConfigError: the stage does not exist.
    """
    if stage not in _STAGES:
        raise ConfigError(f"zero_optimization.stage = {stage!r}; write 0, 1, 2 or 3")
    return _STAGES[stage] if shards > 1 or has_offload else ShardingPolicy(stage, param=False, grad=False, state=False)
