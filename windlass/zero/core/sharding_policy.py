"""Sharding policy: the kinds of tensors (parameters, gradients, states) that a ZeRO stage shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardingPolicy:
    """Kinds of tensors that are sharded over the data-parallel group.

    Attributes:
        stage: Configured ZeRO stage. On one rank without offload the other attributes are False at any stage.
        param: Each rank keeps only its shard of a parameter between uses; else every rank keeps full parameters.
        grad: Gradients are reduced in every backward outside `no_sync`, and each rank keeps only its shard; else they
            are reduced once, at the accumulation boundary.
        state: Each rank keeps master weights and optimizer states only for its shard; else for full parameters.
    """

    stage: int
    param: bool
    grad: bool
    state: bool

    @property
    def can_keep_local_gradients(self) -> bool:
        """Return True at stages 0 and 1, where each rank can keep its local gradients until the step.

        The result does not depend on the number of ranks, so that no configuration is valid only on some numbers of
        ranks.
        """
        return self.stage <= 1
