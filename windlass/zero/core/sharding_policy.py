"""What a ZeRO stage means: which kinds of slots are cut. The only place that reads the stage number."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class ShardingPolicy:
    """Which slots are cut over the shard axis of the data mesh.

    Attributes:
        stage: for people to read; no code branches on it.
        param: every rank keeps only its cut of a parameter while nobody uses it; else each keeps all.
        grad: gradients are reduced at every backward, and only the cut is kept; else once, at the accumulation
        boundary.
        state: master weights and optimizer state exist only for the cut.
    """

    stage: int
    param: bool
    grad: bool
    state: bool

    @property
    def can_keep_local_gradients(self) -> bool:
        """Return True if the stage reduces gradients once in a step, so that a rank can keep its own until then. It is
        the stage's on any number of ranks, so that a configuration is refused everywhere or nowhere."""
        return self.stage <= 1


_STAGES = {
    0: ShardingPolicy(0, param=False, grad=False, state=False),
    1: ShardingPolicy(1, param=False, grad=False, state=True),
    2: ShardingPolicy(2, param=False, grad=True, state=True),
    3: ShardingPolicy(3, param=True, grad=True, state=True),
}


def sharding_policy(stage: int, shards: int, *, away: bool = False) -> ShardingPolicy:
    """The policy of a stage over `shards` ranks. A cut over one rank is no cut, unless it shall rest away from the
    device.

    Args:
        away: some slots have another home than the device.

    Raises:
        ConfigError: there is no such stage.
    """
    if stage not in _STAGES:
        raise ConfigError(f"zero_optimization.stage = {stage!r}; there are stages 0, 1, 2 and 3")
    return _STAGES[stage] if shards > 1 or away else ShardingPolicy(stage, param=False, grad=False, state=False)
