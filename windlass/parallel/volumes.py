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

from windlass.comm.grid import Grid
from windlass.parallel.model_shape import ModelShape


@dataclass(frozen=True)
class Work:
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
    stage: int = 0
    activation_bytes: int = 2
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    regather: int = 0
    once: bool = True
    recompute: bool = False
    cut_norms: bool = False
    ulysses: int = 0
    chunks: int = 1


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank receives in a step: along which axis, by which operation, and of what."""

    axis: str
    operation: str
    what: str
    nbytes: int


def volumes(model: ModelShape, grid: Grid, work: Work, pipe: int = 0) -> list[Volume]:
    """What a rank of pipeline stage `pipe` receives in a step, along every axis of several ranks."""
    dense, experts = parameters_here(model, grid, pipe)
    layers, tokens = layers_here(model.layers, grid.pp, pipe), -(-work.tokens // grid.sp)
    shared = tokens * model.hidden * work.activation_bytes  # one activation of a micro-batch between layers
    found = list(data_volumes("data", dense, grid.data, grid.dp_replicate, work, grid.pp > 1))
    near = replace(work, regather=0)  # which dense parameters alone have
    found += data_volumes("experts", experts, grid.data // grid.ep, grid.dp_replicate, near, grid.pp > 1)
    ends = (pipe == 0, pipe == grid.pp - 1)
    found += tensor_volumes(layers, shared, tokens, grid.tp, work, *ends, chosen=model.chosen)
    found += pipeline_volumes(shared, grid.pp, work, *ends)
    if model.balanced:
        found += router_volumes(model, tokens * work.activation_bytes, grid.pp, work, pipe)
    found += sequence_volumes(model, layers, grid.sp, grid.tp, work)
    if model.experts:
        found += expert_volumes(layers, tokens * model.chosen, model.hidden, grid.ep, work)
    return [volume for volume in found if volume.nbytes]


def by_axis(found: Iterable[Volume]) -> dict[str, int]:
    """Bytes along each axis."""
    totals: dict[str, int] = {}
    for volume in found:
        totals[volume.axis] = totals.get(volume.axis, 0) + volume.nbytes
    return totals


def layers_here(layers: int, stages: int, pipe: int) -> int:
    """Layers of a stage, where the first ones have one more if they don't divide."""
    return layers // stages + (pipe < layers % stages)


def parameters_here(model: ModelShape, grid: Grid, pipe: int = 0) -> tuple[int, int]:
    """Elements on a rank of stage `pipe`, before ZeRO cuts them: of what is no expert, and of experts.

    tp cuts matrices, embedding and head; ep spreads experts. A tied head is a copy of the embedding where that lies on
    another stage.
    """
    layers = layers_here(model.layers, grid.pp, pipe)
    first, last = pipe == 0, pipe == grid.pp - 1
    matrices = layers * (model.attention + (0 if model.experts else model.feed_forward))
    rows = int(first) + int(last and not (model.tied and first))
    dense = (matrices + rows * model.embedding) // grid.tp + layers * model.small + (model.hidden if last else 0)
    return dense, layers * model.experts * model.feed_forward // (grid.ep * grid.tp)


def data_volumes(
    axis: str, elements: int, ranks: int, replicas: int, work: Work, pipelined: bool = False
) -> Iterable[Volume]:
    """ZeRO's reductions and gathers of `elements` over `ranks`, in `replicas` groups of which each has all state.

    Of B bytes each gather and each reduction brings B (n - 1) / n, and a step has, with m micro-batches (Rajbhandari et
    al. 2020, section 7): stages 0 and 1 one of each; stage 2 m reductions and a gather; stage 3 m reductions and 2 m
    gathers, forward and backward, less what the default knobs keep between them; with a second copy (hpZ, Wang et al.
    2023) backward gathers among fewer. A pipeline that gathers once a step has one of each at every stage. Among
    replicas each rank's part of the gradient is reduced once a step.
    """
    cut = ranks // replicas if work.stage else ranks
    often = 1 if pipelined and work.once else work.micro_batches
    reductions = often if work.stage >= 2 else 1
    again = often if work.stage == 3 and not (pipelined and work.once) else 0
    whole = elements * work.parameter_bytes
    gathered = (often if work.stage == 3 else 1) * _of_others(whole, cut)
    gathered += again * _of_others(whole, work.regather or cut)
    yield Volume(axis, "reduce", "gradients", reductions * _of_others(elements * work.gradient_bytes, cut))
    yield Volume(axis, "gather", "parameters", gathered)
    if work.stage:
        part = -(-elements // cut) * work.gradient_bytes
        yield Volume(axis, "replicate", "gradients among replicas", 2 * _of_others(part, replicas))


def tensor_volumes(
    layers: int,
    shared: int,
    tokens: int,
    ranks: int,
    work: Work,
    first: bool = True,
    last: bool = True,
    *,
    chosen: int = 0,
) -> Iterable[Volume]:
    """What tensor parallelism sends, of activations of `shared` bytes between layers (Shoeybi et al. 2019, section 3).

    A layer has four all-reduces of `shared`: after attention and after the feed-forward network, forward and backward;
    six where its forward runs twice (five where that stops at what backward needs, as torch's non-reentrant kind does).
    With norms cut along the sequence each is a gather and a scatter of as many bytes together (Korthikanti et al. 2022,
    section 4.2), and a stage gathers twice more: its output, and the gradient of its input. The embedding has one
    all-reduce forward, the head one backward, and the loss of a cut vocabulary three of a float32 a token: the greatest
    logit, the sum, and the target's. Where a token goes to `chosen` experts, each layer adds up the gradient of their
    weights, a float32 each.
    """
    often, ends = layers * (6 if work.recompute else 4), int(first) + int(last)
    one = _of_others(shared, ranks) * work.micro_batches
    if work.cut_norms:
        yield Volume("tp", "all_gather", "activations", (often + 2) * one)
        yield Volume("tp", "reduce_scatter", "activations", often * one)
        often = 0
    yield Volume("tp", "all_reduce", "activations", 2 * (often + ends) * one)
    weights = 2 * _of_others(4 * tokens * chosen, ranks)
    yield Volume("tp", "all_reduce", "weights of experts", layers * weights * work.micro_batches)
    if last:
        loss = 2 * _of_others(4 * tokens, ranks)
        yield Volume("tp", "all_reduce", "the loss of a cut vocabulary", 3 * loss * work.micro_batches)


def pipeline_volumes(shared: int, ranks: int, work: Work, first: bool, last: bool) -> Iterable[Volume]:
    """What a stage receives: for each of its parts of the model one activation from the part before and one gradient
    from the part after, a micro-batch (Huang et al. 2019; Narayanan et al. 2021, section 2.2 for several parts)."""
    if ranks > 1:
        before, after = work.chunks - int(first), work.chunks - int(last)
        yield Volume("pp", "pass_on", "activations", before * shared * work.micro_batches)
        yield Volume("pp", "pass_on", "gradients of activations", after * shared * work.micro_batches)


def router_volumes(model: ModelShape, each: int, ranks: int, work: Work, pipe: int) -> Iterable[Volume]:
    """What the loss that balances the routers of all layers adds where these lie on several stages: their logits, one
    for each expert and token, go along with activations to the last stage.

    Args:
        each: bytes of one expert's logits of one layer, for a micro-batch.
    """
    parts = ranks * work.chunks
    before = list(accumulate((layers_here(model.layers, parts, part) for part in range(parts)), initial=0))
    mine = range(pipe, parts, ranks)
    once = each * model.experts * work.micro_batches
    yield Volume("pp", "pass_on", "logits of routers", once * sum(before[part] for part in mine))
    back = sum(before[part + 1] for part in mine if part + 1 < parts)
    yield Volume("pp", "pass_on", "gradients of logits of routers", once * back)


def sequence_volumes(model: ModelShape, layers: int, ranks: int, tensor: int, work: Work) -> Iterable[Volume]:
    """What attention sends to see whole sequences, of N tokens over P ranks.

    Ulysses (Jacobs et al. 2023, section 3.2): queries, keys, values and outputs go by all-to-all, forward and backward:
    each time N / P tokens of all heads a rank, (P - 1) / P of it to others: the paper's 4 N h / P a forward, where keys
    and values have as many heads as queries. With fewer of them than ranks each goes to several: every rank has one.

    Ring (Liu et al. 2023): keys and values pass P - 1 times, forward and again backward, and their gradients P times,
    in float32, until they are home. With both, rings join the groups that exchange heads, and what passes is one rank's
    heads of the tokens of its group.
    """
    degree = work.ulysses or ranks
    rounds = ranks // degree
    forwards = 2 if work.recompute else 1
    heads, keys = -(-model.heads // tensor), -(-model.key_heads // tensor)
    here, kept = -(-heads // degree), max(1, -(-keys // degree))
    seen = -(-work.tokens // rounds)  # tokens of a group that exchanges heads
    others = (seen - -(-seen // degree)) * model.width * work.activation_bytes * work.micro_batches * layers
    yield Volume("sp", "all_to_all", "queries, keys, values, outputs", (forwards + 1) * 2 * (here + kept) * others)
    block = 2 * seen * kept * model.width * work.micro_batches * layers  # elements
    passes = (forwards + 1) * (rounds - 1) * work.activation_bytes + rounds * max(work.activation_bytes, 4)
    yield Volume("sp", "pass_on", "keys, values and their gradients", passes * block if rounds > 1 else 0)


def expert_volumes(layers: int, rows: int, hidden: int, ranks: int, work: Work) -> Iterable[Volume]:
    """What goes to experts and back: each of `rows` (tokens times chosen experts) four times, forward and backward
    (Lepikhin et al. 2020, section 3.2), where routing is even; the rows that stay are left out."""
    often = (6 if work.recompute else 4) * layers * work.micro_batches
    yield Volume("ep", "all_to_all", "tokens", often * _of_others(rows * hidden * work.activation_bytes, ranks))


def _of_others(nbytes: int, ranks: int) -> int:
    """The part of `nbytes`, spread evenly over ranks, that a rank does not have."""
    return nbytes * (ranks - 1) // ranks
