"""Formulas for the bytes that each mesh axis transfers in an optimizer step.

All values are bytes that one rank receives, as `MeshAxis.traffic` counts them: an all-reduce of B bytes over n ranks is
2 B (n - 1) / n; an all-gather, a reduce-scatter or an all-to-all whose parts have B bytes in total on each rank is
B (n - 1) / n. Scalars (a loss, a norm, token counts) and padding are left out. If the number of tokens, heads or
experts is not a multiple of the number of ranks, the value is that of a rank with the most of them; tp is assumed to
divide dense parameters evenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.model_shape import ModelShape


@dataclass(frozen=True)
class StepWorkload:
    """Workload of one optimizer step.

    Attributes:
        tokens: tokens in one micro-batch of a rank, before sequence parallelism shards it: samples times sequence
            length.
        micro_batches: micro-batches in a step.
        zero_stage: ZeRO stage.
        activation_bytes, parameter_bytes: bytes of an element in the computation.
        gradient_bytes: bytes of a gradient element in a reduction.
        backward_gather_ranks: ranks over which backward all-gathers stage-3 parameters again; 0: the ranks that shard
            them.
        unshards_once: True if a pipeline all-gathers parameters and reduces gradients once a step; False: once a
            micro-batch.
        recompute: True if a layer's forward runs again before its backward.
        tp_sequence_norms: True if activations between tensor-parallel layers are sharded along the sequence.
        ulysses_degree: number of sp ranks that exchange heads with each other; 0: all sp ranks. With fewer, keys and
            values are also passed along rings of sp / ulysses_degree ranks.
        virtual_stages: model chunks on each pp rank.
        samples: sequences of equal length that `tokens` consists of; sequence parallelism shards each by itself.
    """

    tokens: int
    micro_batches: int = 1
    zero_stage: int = 0
    activation_bytes: int = 2
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    backward_gather_ranks: int = 0
    unshards_once: bool = True
    recompute: bool = False
    tp_sequence_norms: bool = False
    ulysses_degree: int = 0
    virtual_stages: int = 1
    samples: int = 1


@dataclass(frozen=True)
class CommVolume:
    """Bytes that a rank receives in a step, with their axis, operation and kind of tensor."""

    axis: str
    operation: str
    tensors: str
    nbytes: int


def compute_step_volumes(
    model: ModelShape, grid: MeshShape, workload: StepWorkload, pipeline_rank: int = 0
) -> list[CommVolume]:
    """Compute the bytes that a rank of pipeline stage `pipeline_rank` receives in a step, for every axis with several
    ranks.
    """
    dense, experts = count_local_parameters(model, grid, pipeline_rank)
    layers, tokens = count_local_layers(model.layers, grid.pp, pipeline_rank), count_local_tokens(workload, grid.sp)
    # bytes of one activation between layers, for one micro-batch
    shared = tokens * model.hidden * workload.activation_bytes
    found = list(compute_data_parallel_volumes("data", dense, grid.data, grid.dp_replicate, workload, grid.pp > 1))
    near = replace(workload, backward_gather_ranks=0)  # backward_gather_ranks applies to dense parameters only
    found += compute_data_parallel_volumes(
        "experts", experts, grid.data // grid.ep, grid.dp_replicate, near, grid.pp > 1
    )
    ends = (pipeline_rank == 0, pipeline_rank == grid.pp - 1)
    found += compute_tensor_parallel_volumes(layers, shared, tokens, grid.tp, workload, *ends, top_k=model.top_k)
    found += compute_pipeline_volumes(shared, grid.pp, workload, *ends)
    if model.has_router_loss:
        found += compute_router_volumes(model, tokens * workload.activation_bytes, grid.pp, workload, pipeline_rank)
    found += compute_sequence_parallel_volumes(model, layers, grid.sp, grid.tp, workload)
    if model.experts:
        found += compute_expert_parallel_volumes(layers, tokens * model.top_k, model.hidden, grid.ep, workload)
    return [volume for volume in found if volume.nbytes]


def sum_bytes_by_axis(volumes: Iterable[CommVolume]) -> dict[str, int]:
    """Return the total bytes of each axis."""
    totals: dict[str, int] = {}
    for volume in volumes:
        totals[volume.axis] = totals.get(volume.axis, 0) + volume.nbytes
    return totals


def count_local_layers(layers: int, stages: int, pipeline_rank: int) -> int:
    """Return the number of layers of a stage; one more on the first stages if `stages` does not divide `layers`."""
    return layers // stages + (pipeline_rank < layers % stages)


def count_local_tokens(workload: StepWorkload, ranks: int) -> int:
    """Return the largest number of a micro-batch's tokens on one rank, if `ranks` ranks share each sequence."""
    return workload.samples * -(-workload.tokens // (workload.samples * ranks))


def count_local_parameters(model: ModelShape, grid: MeshShape, pipeline_rank: int = 0) -> tuple[int, int]:
    """Return the elements on a rank of stage `pipeline_rank`, before ZeRO shards them, as (dense parameters, expert
    parameters).

    tp shards the matrices, the embedding and the head; ep distributes the experts. A tied head is a copy of the
    embedding if the embedding is on another stage.
    """
    layers = count_local_layers(model.layers, grid.pp, pipeline_rank)
    first, last = pipeline_rank == 0, pipeline_rank == grid.pp - 1
    matrices = layers * (model.attention_numel + (0 if model.experts else model.feed_forward_numel))
    rows = int(first) + int(last and not (model.tied and first))
    dense = (
        (matrices + rows * model.embedding_numel) // grid.tp
        + layers * model.replicated_numel
        + (model.hidden if last else 0)
    )
    return dense, layers * -(-model.experts // grid.ep) * model.feed_forward_numel // grid.tp


def compute_data_parallel_volumes(
    axis: str, elements: int, ranks: int, replicas: int, workload: StepWorkload, is_pipelined: bool = False
) -> Iterable[CommVolume]:
    """Compute ZeRO's reductions and all-gathers of `elements` over `ranks`, which form `replicas` groups with a full
    copy of the states each.

    Each all-gather or reduction of B bytes receives B (n - 1) / n. A step with m micro-batches has (Rajbhandari et al.
    2020, section 7):
    - stages 0 and 1: one reduction and one all-gather;
    - stage 2: m reductions and one all-gather;
    - stage 3: m reductions and 2 m all-gathers (forward and backward). Parameters that the default settings keep
      unsharded between uses are counted too. With a secondary shard (hpZ, Wang et al. 2023) backward all-gathers over
      fewer ranks.

    A pipeline that unshards once a step has one reduction and one all-gather at every ZeRO stage. From stage 1 on, the
    replicas all-reduce each rank's gradient shard once a step.
    """
    shard_ranks = ranks // replicas if workload.zero_stage else ranks
    often = 1 if is_pipelined and workload.unshards_once else workload.micro_batches
    reductions = often if workload.zero_stage >= 2 else 1
    again = often if workload.zero_stage == 3 and not (is_pipelined and workload.unshards_once) else 0
    full = elements * workload.parameter_bytes
    gathered = (often if workload.zero_stage == 3 else 1) * _bytes_from_others(full, shard_ranks)
    gathered += again * _bytes_from_others(full, workload.backward_gather_ranks or shard_ranks)
    yield CommVolume(
        axis, "reduce", "gradients", reductions * _bytes_from_others(elements * workload.gradient_bytes, shard_ranks)
    )
    yield CommVolume(axis, "gather", "parameters", gathered)
    if workload.zero_stage:
        part = -(-elements // shard_ranks) * workload.gradient_bytes
        yield CommVolume(axis, "replicate", "gradients among replicas", 2 * _bytes_from_others(part, replicas))


def compute_tensor_parallel_volumes(
    layers: int,
    activation_bytes: int,
    tokens: int,
    ranks: int,
    workload: StepWorkload,
    is_first_stage: bool = True,
    is_last_stage: bool = True,
    *,
    top_k: int = 0,
) -> Iterable[CommVolume]:
    """Compute the traffic of tensor parallelism for activations of `activation_bytes` between layers (Shoeybi et al.
    2019, section 3).

    A layer has four all-reduces of `activation_bytes`: after attention and after the feed-forward network, in forward
    and in backward. With recomputation six are counted. (torch's non-reentrant checkpointing needs only five, because
    its recomputation stops at the last tensor that backward needs.) With sequence-sharded norms each all-reduce becomes
    an all-gather and a reduce-scatter with the same total (Korthikanti et al. 2022, section 4.2), and a model chunk has
    two more all-gathers: of its output, and of the gradient of its input. The embedding has one all-reduce in forward,
    the head one in backward. The loss of a sharded vocabulary has three all-reduces of one float32 per token: maximum
    logit, sum, and target logit. If a token goes to `top_k` experts, each layer all-reduces the gradients of its
    routing weights, `top_k` float32 per token.
    """
    often, ends = layers * (6 if workload.recompute else 4), int(is_first_stage) + int(is_last_stage)
    one = _bytes_from_others(activation_bytes, ranks) * workload.micro_batches
    if workload.tp_sequence_norms:
        yield CommVolume("tp", "all_gather", "activations", (often + 2 * workload.virtual_stages) * one)
        yield CommVolume("tp", "reduce_scatter", "activations", often * one)
        often = 0
    yield CommVolume("tp", "all_reduce", "activations", 2 * (often + ends) * one)
    weights = 2 * _bytes_from_others(4 * tokens * top_k, ranks)
    yield CommVolume("tp", "all_reduce", "weights of experts", layers * weights * workload.micro_batches)
    if is_last_stage:
        loss = 2 * _bytes_from_others(4 * tokens, ranks)
        yield CommVolume("tp", "all_reduce", "the loss of a sharded vocabulary", 3 * loss * workload.micro_batches)


def compute_pipeline_volumes(
    activation_bytes: int, ranks: int, workload: StepWorkload, is_first_stage: bool, is_last_stage: bool
) -> Iterable[CommVolume]:
    """Compute the bytes that a pipeline stage receives.

    Per micro-batch, each model chunk receives one activation from the previous chunk and one gradient from the next
    (Huang et al. 2019; Narayanan et al. 2021, section 2.2 for several chunks).
    """
    if ranks > 1:
        before, after = workload.virtual_stages - int(is_first_stage), workload.virtual_stages - int(is_last_stage)
        yield CommVolume("pp", "pass_on", "activations", before * activation_bytes * workload.micro_batches)
        yield CommVolume("pp", "pass_on", "gradients of activations", after * activation_bytes * workload.micro_batches)


def compute_router_volumes(
    model: ModelShape, bytes_per_expert: int, ranks: int, workload: StepWorkload, pipeline_rank: int
) -> Iterable[CommVolume]:
    """Compute the traffic of a load-balancing loss over routers on several stages.

    The router logits, one for each expert and token, are sent with the activations to the last stage, and their
    gradients are sent back.

    Args:
        bytes_per_expert: bytes of one expert's logits in one layer, for one micro-batch.
    """
    parts = ranks * workload.virtual_stages
    before = list(accumulate((count_local_layers(model.layers, parts, part) for part in range(parts)), initial=0))
    local = range(pipeline_rank, parts, ranks)
    once = bytes_per_expert * model.experts * workload.micro_batches
    yield CommVolume("pp", "pass_on", "logits of routers", once * sum(before[part] for part in local))
    back = sum(before[part + 1] for part in local if part + 1 < parts)
    yield CommVolume("pp", "pass_on", "gradients of logits of routers", once * back)


def compute_sequence_parallel_volumes(
    model: ModelShape, layers: int, ranks: int, tp_ranks: int, workload: StepWorkload
) -> Iterable[CommVolume]:
    """Compute the traffic of sequence-parallel attention, for sequences of N tokens over P ranks.

    Ulysses (Jacobs et al. 2023, section 3.2): all-to-alls of queries, keys, values and outputs, in forward and
    backward. In each, a rank has N / P tokens of all heads and sends (P - 1) / P of this data to other ranks. That is
    about the paper's 4 N h / P per forward (h: hidden size) if keys and values have as many heads as queries. With
    fewer key heads than ranks, each key head goes to several ranks, so that every rank has a key head.

    Ring (Liu et al. 2023): keys and values are passed P - 1 times in forward and again in backward. The gradients of
    keys and values are passed P times in float32, until they reach the rank that owns the tokens.

    With both, ranks exchange heads within a group, and rings connect the groups: a message of the ring holds the keys
    and values of one rank's heads, for all tokens of its group.
    """
    degree = workload.ulysses_degree or ranks
    rounds = ranks // degree
    forwards = 2 if workload.recompute else 1
    heads, keys = -(-model.heads // tp_ranks), -(-model.resolved_kv_heads // tp_ranks)
    here, kept = -(-heads // degree), max(1, -(-keys // degree))
    seen, own = count_local_tokens(workload, rounds), count_local_tokens(workload, ranks)
    head = model.resolved_head_dim * workload.activation_bytes * workload.micro_batches * layers
    # Tokens of the other ranks of a group arrive for the rank's heads, and the rank's tokens for the others' heads.
    gathered, returned = (seen - own) * head, own * (degree - 1) * head
    forward = gathered * (here + 2 * kept) + returned * here
    backward = gathered * here + returned * (here + 2 * kept)
    yield CommVolume("sp", "all_to_all", "queries, keys, values, outputs", forwards * forward + backward)
    block = 2 * seen * kept * model.resolved_head_dim * workload.micro_batches * layers  # elements of keys and values
    passes = (forwards + 1) * (rounds - 1) * workload.activation_bytes + rounds * max(workload.activation_bytes, 4)
    yield CommVolume("sp", "pass_on", "keys, values and their gradients", passes * block if rounds > 1 else 0)


def compute_expert_parallel_volumes(
    layers: int, rows: int, hidden: int, ranks: int, workload: StepWorkload
) -> Iterable[CommVolume]:
    """Compute the traffic to experts and back.

    Each of the `rows` rows of a layer (tokens times chosen experts) is sent four times, twice in forward and twice in
    backward (Lepikhin et al. 2020, section 3.2), and twice more with recomputation. Routing is assumed to be even. Rows
    for local experts are not counted.
    """
    often = (6 if workload.recompute else 4) * layers * workload.micro_batches
    yield CommVolume(
        "ep", "all_to_all", "tokens", often * _bytes_from_others(rows * hidden * workload.activation_bytes, ranks)
    )


def _bytes_from_others(nbytes: int, ranks: int) -> int:
    """Return the number of bytes on the other ranks, if `nbytes` bytes are spread evenly over `ranks` ranks."""
    return nbytes * (ranks - 1) // ranks
