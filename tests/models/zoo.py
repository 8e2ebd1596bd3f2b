"""Table of all specimens by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.models.adapters import frozen, frozen_first, lora, mixed
from tests.models.buffers import BufferInForward, Normalised
from tests.models.layers import Attention, Convolutions, CrossAttention, Recurrent
from tests.models.plain import FourBlocks, mlp
from tests.models.recomputed import Checkpointed, CheckpointedPairs
from tests.models.shared import LayerReuse, Siamese, Sibling, SiblingBlock, Tied
from tests.models.specimen import Specimen, many_rows, one_loss, rows, tokens
from tests.models.training_variants import (
    Fragile,
    TwoHeads,
    alternating,
    discarded,
    gradient_penalty,
    interrupted,
    retained,
    summed_forwards,
    two_forwards,
    two_losses,
)
from tests.models.unused import Branches, Untidy, UnusedAlways, branch_by_micro, branch_by_rank, branch_by_step
from tests.models.unusual_inputs import LossOutside, Nested, Stashed, loss_outside, nested_loss
from tests.models.unusual_modules import (
    Containers,
    InPlace,
    OddShapes,
    OtherMethod,
    RootParameter,
    SparseTables,
    WeightNorm,
)


def _specimen(
    name: str, build: Callable[[], nn.Module], batch: Any = rows, train: Any = one_loss, *traits: str
) -> Specimen:
    return Specimen(name, build, batch, train, frozenset(traits))


# Traits: `moving` - step, micro-batch and rank determine the parameters that get a gradient;
# `divergent` - ranks run different modules;
# `chaotic` - gradients of the size of their rounding error, which AdamW would turn into full steps;
# `fp32` - has its own dtypes, or is unstable in 16 bits; `rounds` - computes in 16 bits in every precision;
# `once` - the forward depends on buffers that ranks share, for which DDP's rule is defined only without accumulation.
ZOO: dict[str, Specimen] = {
    specimen.name: specimen
    for specimen in (
        _specimen("mlp", mlp),
        _specimen("four_blocks", FourBlocks, rows, one_loss, "chaotic"),
        _specimen("tied", Tied, tokens),
        _specimen("sibling", Sibling, tokens),
        _specimen("sibling_block", SiblingBlock),
        _specimen("siamese", Siamese),
        _specimen("layer_reuse", LayerReuse),
        _specimen("frozen", frozen),
        _specimen("frozen_first", frozen_first),
        _specimen("lora", lora),
        _specimen("mixed", mixed, rows, one_loss, "fp32", "rounds"),
        _specimen("unused_always", UnusedAlways),
        _specimen("unused_by_step", Branches, branch_by_step, one_loss, "moving"),
        _specimen("unused_by_micro", Branches, branch_by_micro, one_loss, "moving"),
        _specimen("unused_by_rank", Branches, branch_by_rank, one_loss, "moving", "divergent"),
        _specimen("two_losses", TwoHeads, rows, two_losses),
        _specimen("two_forwards", mlp, rows, two_forwards),
        _specimen("alternating", mlp, rows, alternating),
        _specimen("summed_forwards", mlp, rows, summed_forwards),
        _specimen("retain_graph", mlp, rows, retained),
        _specimen("discarded_forward", mlp, rows, discarded),
        _specimen("interrupted_forward", Fragile, rows, interrupted),
        _specimen("gradient_penalty", mlp, rows, gradient_penalty),
        _specimen("checkpoint_two_losses", lambda: TwoHeads(recompute=True), rows, two_losses),
        _specimen("checkpoint_reentrant", lambda: Checkpointed(True)),
        _specimen("checkpoint", lambda: Checkpointed(False)),
        _specimen("checkpoint_pairs_reentrant", lambda: CheckpointedPairs(True)),
        _specimen("checkpoint_pairs", lambda: CheckpointedPairs(False)),
        _specimen(
            "nested", Nested, lambda place: {"batch": rows(place)}, lambda c, b, k: nested_loss(c, b["batch"], k)
        ),
        _specimen("loss_outside", LossOutside, rows, loss_outside),
        _specimen("batch_norm", Normalised, many_rows, one_loss, "chaotic", "fp32"),
        _specimen("buffer_in_forward", BufferInForward, rows, one_loss, "once"),
        _specimen("odd_shapes", OddShapes),
        _specimen("sparse_lookups", SparseTables, tokens),
        _specimen("other_method", OtherMethod),
        _specimen("in_place", InPlace),
        _specimen("cross_attention", CrossAttention, tokens, one_loss),
        _specimen("lstm", Recurrent, tokens),
        _specimen("attention", Attention, tokens, one_loss, "chaotic"),
        _specimen("weight_norm", WeightNorm),
        _specimen("root_parameter", RootParameter),
        _specimen("containers", Containers),
        _specimen("stashed", Stashed),
        _specimen("convolutions", Convolutions),
        _specimen("untidy", Untidy),
    )
}
