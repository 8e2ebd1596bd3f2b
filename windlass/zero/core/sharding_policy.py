"""Sharding policy: the kinds of slots that a ZeRO stage shards."""

from __future__ import annotations

from dataclasses import dataclass


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
