"""Options and error feedback of quantized reductions, see [Note: quantized messages]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.comm.rank_group import RankGroup


@dataclass(frozen=True)
class LocoOptions:
    """Error feedback of quantized gradients (`zeropp_loco_param`).

    Attributes:
        err_beta: weight of the previous error.
        reset_t: number of reductions of a unit after which its errors are set to zero.
    """

    err_beta: float = 0.8
    reset_t: int = 1024


@dataclass(frozen=True)
class QuantizedGradients:
    """Options of quantized reductions.

    Attributes:
        inside, across: codecs inside a node, and between nodes.
        loco: options of error feedback; None: no error feedback.
    """

    inside: str = "int8"
    across: str = "int4"
    loco: LocoOptions | None = None


class LaneErrors:
    """Error feedback of one lane of a transport: of the reductions of one gradient.

    Attributes:
        flat: `[numel]` in float32, the error of each element of the buffer: a rank sends each element of the other
            shards once, in the first hop or in the second one. None before the first reduction.
        reductions: `[parts]` int64, the number of reductions of each part. The lane is one part until `divide`.
    """

    def __init__(self) -> None:
        self.flat: torch.Tensor | None = None
        self.reductions = torch.zeros(1, dtype=torch.int64)
        self._parts: list[slice] = [slice(None)]

    def divide(self, parts: list[slice]) -> None:
        """Count the reductions of these parts separately, because a checkpoint may hold a different number for each."""
        if self._parts != parts:
            self._parts, self.reductions = parts, self.reductions[:1].repeat(len(parts))

    def open(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return `flat`, which is zeros at first."""
        if self.flat is None:
            self.flat = torch.zeros(numel, dtype=torch.float32, device=device)
        return self.flat

    def begin(self, options: LocoOptions, numel: int, device: torch.device) -> torch.Tensor:
        """Count a reduction, and return `flat`, whose parts are set to zero after each `reset_t` reductions."""
        flat = self.open(numel, device)
        for part, reductions in zip(self._parts, self.reductions.tolist(), strict=True):
            if reductions and reductions % options.reset_t == 0:
                flat[part].zero_()
        self.reductions += 1
        return flat

    def forget(self) -> None:
        """Return to the state before the first reduction."""
        self.flat = None
        self.reductions.zero_()


def ranks_of_node(group: RankGroup, node_size: int) -> int:
    """Return the ranks of `group` on a node: `node_size` if it divides the group's size, else the group's size."""
    return node_size if group.size % node_size == 0 else group.size


def ranks_of_host(ranks: Sequence[int], host_size: int) -> int:
    """Return how many ranks of a group with global ranks `ranks` are on a host of `host_size` consecutive ranks.

    Ranks of a group need not be neighbours: those along the data axis are a tensor-parallel size apart.
    """
    return sum(rank // host_size == ranks[0] // host_size for rank in ranks)
