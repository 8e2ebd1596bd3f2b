"""How many bytes each axis of the mesh sends in an optimizer step, by formula.

All are bytes that one rank has to receive, as `comm.axis.Axis.traffic` counts them: of an all-reduce of B bytes over n
ranks 2 B (n - 1) / n, of an all-gather, a reduce-scatter and an all-to-all of B bytes a rank in all B (n - 1) / n.
Scalars (a loss, a norm, counts of tokens) and padding are left out. Where a size does not divide, a rank with the
largest part is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.model_shape import ModelShape


@dataclass(frozen=True)
class StepWorkload:
    """What a step does.

    Attributes:
        tokens: of one micro-batch of one reader: samples times whole sequences.
        micro_batches: in a step.
        stage: of ZeRO.
        activation_bytes, parameter_bytes: of an element, while it is computed with.
        gradient_bytes: of an element of a gradient on its way.
        regather: ranks from which backward gathers stage-3 parameters again; 0: those that cut them.
        once: a pipeline gathers parameters and reduces gradients once a step, not once a micro-batch.
        recompute: a layer's forward runs again before its backward.
        cut_norms: between tensor-parallel layers activations are cut along the sequence.
        ulysses: of the ranks along sp, how many exchange heads; 0: all. The others pass keys and values round.
        chunks: parts of the model on each rank along pp.
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


@dataclass(frozen=True)
class CommVolume:
    """Bytes that a rank receives in a step: along which axis, by which operation, and of what."""

    axis: str
    operation: str
    tensors: str
    nbytes: int


def compute_step_volumes(
    model: ModelShape, grid: MeshShape, workload: StepWorkload, pipeline_rank: int = 0
) -> list[CommVolume]:
    """What a rank of pipeline stage `pipe` receives in a step, along every axis of several ranks."""
    dense, experts = count_local_parameters(model, grid, pipeline_rank)
    layers, tokens = count_local_layers(model.layers, grid.pp, pipeline_rank), -(-workload.tokens // grid.sp)
    shared = tokens * model.hidden * workload.activation_bytes  # one activation of a micro-batch between layers
    found = list(compute_data_parallel_volumes("data", dense, grid.data, grid.dp_replicate, workload, grid.pp > 1))
    near = replace(workload, backward_gather_ranks=0)  # which dense parameters alone have
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
    """Bytes along each axis."""
    totals: dict[str, int] = {}
    for volume in volumes:
        totals[volume.axis] = totals.get(volume.axis, 0) + volume.nbytes
    return totals


def count_local_layers(layers: int, stages: int, pipeline_rank: int) -> int:
    """Layers of a stage, where the first ones have one more if they don't divide."""
    return layers // stages + (pipeline_rank < layers % stages)


def count_local_parameters(model: ModelShape, grid: MeshShape, pipeline_rank: int = 0) -> tuple[int, int]:
    """Elements on a rank of stage `pipe`, before ZeRO cuts them: of what is no expert, and of experts.

    tp cuts matrices, embedding and head; ep spreads experts. A tied head is a copy of the embedding where that lies on
    another stage.
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
    return dense, layers * model.experts * model.feed_forward_numel // (grid.ep * grid.tp)


def compute_data_parallel_volumes(
    axis: str, elements: int, ranks: int, replicas: int, workload: StepWorkload, is_pipelined: bool = False
) -> Iterable[CommVolume]:
    """ZeRO's reductions and gathers of `elements` over `ranks`, in `replicas` groups of which each has all state.

    Of B bytes each gather and each reduction brings B (n - 1) / n, and a step has, with m micro-batches (Rajbhandari et
    al. 2020, section 7): stages 0 and 1 one of each; stage 2 m reductions and a gather; stage 3 m reductions and 2 m
    gathers, forward and backward, less what the default knobs keep between them; with a second copy (hpZ, Wang et al.
    2023) backward gathers among fewer. A pipeline that gathers once a step has one of each at every stage. Among
    replicas each rank's part of the gradient is reduced once a step.
    """
    cut = ranks // replicas if workload.zero_stage else ranks
    often = 1 if is_pipelined and workload.unshards_once else workload.micro_batches
    reductions = often if workload.zero_stage >= 2 else 1
    again = often if workload.zero_stage == 3 and not (is_pipelined and workload.unshards_once) else 0
    whole = elements * workload.parameter_bytes
    gathered = (often if workload.zero_stage == 3 else 1) * _bytes_from_others(whole, cut)
    gathered += again * _bytes_from_others(whole, workload.backward_gather_ranks or cut)
    yield CommVolume(
        axis, "reduce", "gradients", reductions * _bytes_from_others(elements * workload.gradient_bytes, cut)
    )
    yield CommVolume(axis, "gather", "parameters", gathered)
    if workload.zero_stage:
        part = -(-elements // cut) * workload.gradient_bytes
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
    """What tensor parallelism sends, of activations of `shared` bytes between layers (Shoeybi et al. 2019, section 3).

    A layer has four all-reduces of `shared`: after attention and after the feed-forward network, forward and backward;
    six where its forward runs twice (five where that stops at what backward needs, as torch's non-reentrant kind does).
    With norms cut along the sequence each is a gather and a scatter of as many bytes together (Korthikanti et al. 2022,
    section 4.2), and a stage gathers twice more: its output, and the gradient of its input. The embedding has one
    all-reduce forward, the head one backward, and the loss of a cut vocabulary three of a float32 a token: the greatest
    logit, the sum, and the target's. Where a token goes to `chosen` experts, each layer adds up the gradient of their
    weights, a float32 each.
    """
    often, ends = layers * (6 if workload.recompute else 4), int(is_first_stage) + int(is_last_stage)
    one = _bytes_from_others(activation_bytes, ranks) * workload.micro_batches
    if workload.tp_sequence_norms:
        yield CommVolume("tp", "all_gather", "activations", (often + 2) * one)
        yield CommVolume("tp", "reduce_scatter", "activations", often * one)
        often = 0
    yield CommVolume("tp", "all_reduce", "activations", 2 * (often + ends) * one)
    weights = 2 * _bytes_from_others(4 * tokens * top_k, ranks)
    yield CommVolume("tp", "all_reduce", "weights of experts", layers * weights * workload.micro_batches)
    if is_last_stage:
        loss = 2 * _bytes_from_others(4 * tokens, ranks)
        yield CommVolume("tp", "all_reduce", "the loss of a cut vocabulary", 3 * loss * workload.micro_batches)


def compute_pipeline_volumes(
    activation_bytes: int, ranks: int, workload: StepWorkload, is_first_stage: bool, is_last_stage: bool
) -> Iterable[CommVolume]:
    """What a stage receives: for each of its parts of the model one activation from the part before and one gradient
    from the part after, a micro-batch (Huang et al. 2019; Narayanan et al. 2021, section 2.2 for several parts)."""
    if ranks > 1:
        before, after = workload.virtual_stages - int(is_first_stage), workload.virtual_stages - int(is_last_stage)
        yield CommVolume("pp", "pass_on", "activations", before * activation_bytes * workload.micro_batches)
        yield CommVolume("pp", "pass_on", "gradients of activations", after * activation_bytes * workload.micro_batches)


def compute_router_volumes(
    model: ModelShape, bytes_per_expert: int, ranks: int, workload: StepWorkload, pipeline_rank: int
) -> Iterable[CommVolume]:
    """What the loss that balances the routers of all layers adds where these lie on several stages: their logits, one
    for each expert and token, go along with activations to the last stage.

    Args:
        each: bytes of one expert's logits of one layer, for a micro-batch.
    """
    parts = ranks * workload.virtual_stages
    before = list(accumulate((count_local_layers(model.layers, parts, part) for part in range(parts)), initial=0))
    mine = range(pipeline_rank, parts, ranks)
    once = bytes_per_expert * model.experts * workload.micro_batches
    yield CommVolume("pp", "pass_on", "logits of routers", once * sum(before[part] for part in mine))
    back = sum(before[part + 1] for part in mine if part + 1 < parts)
    yield CommVolume("pp", "pass_on", "gradients of logits of routers", once * back)


def compute_sequence_parallel_volumes(
    model: ModelShape, layers: int, ranks: int, tp_ranks: int, workload: StepWorkload
) -> Iterable[CommVolume]:
    """What attention sends to see whole sequences, of N tokens over P ranks.

    Ulysses (Jacobs et al. 2023, section 3.2): queries, keys, values and outputs go by all-to-all, forward and backward:
    each time N / P tokens of all heads a rank, (P - 1) / P of it to others: the paper's 4 N h / P a forward, where keys
    and values have as many heads as queries. With fewer of them than ranks each goes to several: every rank has one.

    Ring (Liu et al. 2023): keys and values pass P - 1 times, forward and again backward, and their gradients P times,
    in float32, until they are home. With both, rings join the groups that exchange heads, and what passes is one rank's
    heads of the tokens of its group.
    """
    degree = workload.ulysses_degree or ranks
    rounds = ranks // degree
    forwards = 2 if workload.recompute else 1
    heads, keys = -(-model.heads // tp_ranks), -(-model.resolved_kv_heads // tp_ranks)
    here, kept = -(-heads // degree), max(1, -(-keys // degree))
    seen = -(-workload.tokens // rounds)  # tokens of a group that exchanges heads
    others = (
        (seen - -(-seen // degree))
        * model.resolved_head_dim
        * workload.activation_bytes
        * workload.micro_batches
        * layers
    )
    yield CommVolume("sp", "all_to_all", "queries, keys, values, outputs", (forwards + 1) * 2 * (here + kept) * others)
    block = 2 * seen * kept * model.resolved_head_dim * workload.micro_batches * layers  # elements
    passes = (forwards + 1) * (rounds - 1) * workload.activation_bytes + rounds * max(workload.activation_bytes, 4)
    yield CommVolume("sp", "pass_on", "keys, values and their gradients", passes * block if rounds > 1 else 0)


def compute_expert_parallel_volumes(
    layers: int, rows: int, hidden: int, ranks: int, workload: StepWorkload
) -> Iterable[CommVolume]:
    """What goes to experts and back: each of `rows` (tokens times chosen experts) four times, forward and backward
    (Lepikhin et al. 2020, section 3.2), where routing is even; the rows that stay are left out."""
    often = (6 if workload.recompute else 4) * layers * workload.micro_batches
    yield CommVolume(
        "ep", "all_to_all", "tokens", often * _bytes_from_others(rows * hidden * workload.activation_bytes, ranks)
    )


def _bytes_from_others(nbytes: int, ranks: int) -> int:
    """The part of `nbytes`, spread evenly over ranks, that a rank does not have."""
    return nbytes * (ranks - 1) // ranks
