"""Formula for the bytes that tensor parallelism transfers in a step. Tests compare it with the measured traffic."""

from __future__ import annotations

from collections import Counter

from windlass.parallel.placement import compute_shard_range
from windlass.parallel.tensor.layer_stacks import LayerStack
from windlass.parallel.tensor.rank_ranges import count_elements
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, TensorParallelPlan

_LOSS = 3  # per token: maximum, sum, and the label's logit, in 4 bytes each


def count_step_bytes(
    plan: TensorParallelPlan,
    rank: int,
    *,
    batch: int,
    tokens: int,
    hidden: int,
    itemsize: int,
    top_k: int = 0,
    stacks: list[LayerStack] | None = None,
) -> Counter[str]:
    """Compute the bytes that a rank receives in the forward and backward of one micro-batch with labels, by operation.

    With n ranks and B = batch x tokens x hidden x itemsize: each chain, and each module of experts, costs an all-reduce
    of B in forward and one in backward, `2 B (n - 1) / n` bytes each; so do the embedding in forward and the head in
    backward. The loss costs three numbers a token. With sequence sharding, chains use all-gathers and reduce-scatters
    instead, with the same number of bytes.

    The formula assumes no recomputation, that all parameters are trained, and that each chain has one input tensor
    (latent attention has several, of other widths).

    Args:
        plan: plan of the model.
        rank: index of the rank along the axis.
        batch, tokens: samples, and the length of each.
        hidden: features between layers.
        itemsize: bytes of an element of the hidden states.
        top_k: experts per token.
        stacks: layer stacks with sequence sharding; None: none.
    """
    found: Counter[str] = Counter()
    ranks, rows = plan.ranks, batch * tokens
    if ranks == 1:
        return found

    def all_reduce(numbers: int, size: int = itemsize) -> None:
        found["all_reduce"] += 2 * numbers * size * (ranks - 1) // ranks

    def all_gather(features: int, own: int) -> None:
        found["all_gather"] += rows * (features - own) * itemsize

    start, stop = compute_shard_range(tokens, ranks, rank)
    own = batch * (stop - start) * hidden * itemsize
    full = rows * hidden * itemsize
    chains = {chain for stack in stacks or [] for chain in stack.chains}
    for shard in plan.shards:
        if shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT) and shard.chain in chains:
            found["all_gather"] += 2 * (full - own)
            found["reduce_scatter"] += 2 * own * (ranks - 1)
        elif shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT):
            all_reduce(rows * hidden)
            all_reduce(rows * hidden)
        elif shard.style is ShardStyle.EXPERTS:
            all_reduce(rows * hidden)
            all_reduce(rows * hidden)
            all_reduce(rows * top_k)
        elif shard.style is ShardStyle.VOCABULARY:
            all_reduce(rows * hidden)
        if shard.style in (ShardStyle.COLUMN_GATHERED, ShardStyle.ROW_SPLIT):
            all_gather(shard.sharded_size, count_elements(shard.rank_ranges[rank]))
    for stack in stacks or []:
        found["all_gather"] += (2 + 2 * len(stack.full_sequence_modules)) * (full - own)
    all_reduce(rows, 4)
    all_reduce((_LOSS - 1) * rows, 4)
    return found
