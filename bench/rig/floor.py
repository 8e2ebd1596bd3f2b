"""Lower bound of the time of a step on this machine: the computation, and the bytes that must move."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BYTES = 4  # size of a float32
_ADAM_BYTES = 28  # bytes per parameter: reads parameter, gradient and two moments, writes all but the gradient
_PASSES = 4  # memory passes of a byte over loopback: read and written on its way into the kernel, and out of it

EXPLANATION = (
    "forward and backward of `none` + AdamW on the parameters that a rank updates (28 bytes each, at the rate of "
    "torch's fused step) + bytes at memory bandwidth. shm: a rank reads its shard of every rank's gradients and "
    "writes the sum; a gather moves nothing, since all ranks can map the same pages. gloo: the shards of the others "
    "are sent and received once for each reduction and gather (stages 0, 1, 2: one each; stage 3: two gathers), "
    "four memory passes per byte. Norm and clipping are included in these. Rates are a rank's while all ranks do "
    "the same."
)


@dataclass(frozen=True)
class Roofs:
    """Bytes per second of one rank while all ranks work: plain memory traffic, and fused AdamW."""

    memory: float
    adam: float


def floor(engine: str, parameters: int, ranks: int, compute: float, roofs: Roofs) -> float | None:
    """Return the lower bound of a step of `engine` in seconds; None for rivals, for which it is not derived.

    Args:
        parameters: elements of the full model.
        compute: seconds of forward and backward.
    """
    if engine.startswith("none"):
        return compute + _ADAM_BYTES * parameters / roofs.adam
    result = re.fullmatch(r"windlass-([0-3])(?:-(\w+))?", engine)
    if result is None:
        return None
    stage, transport = int(result[1]), result[2] or "shm"
    updated = parameters / ranks if stage else parameters
    moved: float = 0
    if ranks > 1:
        moved = _BYTES * parameters * (1 + 1 / ranks)  # a rank reads its shard from every rank, and writes the sum
        if transport == "gloo":
            exchanges = 3 if stage == 3 else 2
            moved += exchanges * _PASSES * _BYTES * parameters * (ranks - 1) / ranks
    return compute + _ADAM_BYTES * updated / roofs.adam + moved / roofs.memory
