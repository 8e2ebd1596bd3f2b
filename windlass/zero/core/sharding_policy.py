"""Meaning of a ZeRO stage: the kinds of slots that it shards. Only this file reads the stage number."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class ShardingPolicy:
    """Slots that are sharded over the shard axis of the data-parallel mesh.

    Attributes:
        stage: number for messages; no code branches on it.
        param: each rank keeps only its shard of a parameter outside its use; otherwise the full parameter.
        grad: gradients are reduced at every backward, and only the shard is kept; otherwise they are reduced
            once, at the
            accumulation boundary.
        state: master weights and optimizer states exist only for the shard.
    """

    stage: int
    param: bool
    grad: bool
    state: bool


_STAGES = {
    0: ShardingPolicy(0, param=False, grad=False, state=False),
    1: ShardingPolicy(1, param=False, grad=False, state=True),
    2: ShardingPolicy(2, param=False, grad=True, state=True),
    3: ShardingPolicy(3, param=True, grad=True, state=True),
}


def sharding_policy(stage: int, shards: int, *, away: bool = False) -> ShardingPolicy:
    """Return the policy of a stage over `shards` ranks. With one rank nothing is sharded, unless slots are
    offloaded.

    Args:
        away: True if some slots are on another tier than the device.

    Raises:
        ConfigError: there is no such stage.
    """
    if stage not in _STAGES:
        raise ConfigError(f"zero_optimization.stage = {stage!r}; there are stages 0, 1, 2 and 3")
    return _STAGES[stage] if shards > 1 or away else ShardingPolicy(stage, param=False, grad=False, state=False)
