"""Sharding policy: the kinds of slots that a ZeRO stage shards. Only this module interprets the stage number."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class ShardingPolicy:
    """Kinds of slots that are sharded over the shard axis of the data mesh.

    Attributes:
        stage: ZeRO stage, for display only. No code branches on it.
        param: Each rank keeps only its shard of a parameter between uses; else every rank keeps full parameters.
        grad: Gradients are reduced in every backward, and only the shard is kept; else they are reduced once, at the
            accumulation boundary.
        state: Master weights and optimizer states exist only for the shard.
    """

    stage: int
    param: bool
    grad: bool
    state: bool

    @property
    def can_keep_local_gradients(self) -> bool:
        """Return True if the stage reduces gradients once per step, so that a rank can keep its local gradients until
        then. The result does not depend on the number of ranks, so that a configuration is valid on every number of
        ranks or on none."""
        return self.stage <= 1


_STAGES = {
    0: ShardingPolicy(0, param=False, grad=False, state=False),
    1: ShardingPolicy(1, param=False, grad=False, state=True),
    2: ShardingPolicy(2, param=False, grad=True, state=True),
    3: ShardingPolicy(3, param=True, grad=True, state=True),
}


def sharding_policy(stage: int, shards: int, *, has_offload: bool = False) -> ShardingPolicy:
    """Return the policy of a stage over `shards` ranks. On one rank nothing is sharded, unless slots are offloaded.

    Args:
        has_offload: Some slots are offloaded to another tier than the device.

    Raises:
        ConfigError: the stage does not exist.
    """
    if stage not in _STAGES:
        raise ConfigError(f"zero_optimization.stage = {stage!r}; write 0, 1, 2 or 3")
    return _STAGES[stage] if shards > 1 or has_offload else ShardingPolicy(stage, param=False, grad=False, state=False)
