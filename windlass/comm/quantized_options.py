"""Options of quantized reductions, see [Note: quantized messages]."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.comm.rank_group import RankGroup


@dataclass(frozen=True)
class LocoOptions:
    """Error feedback of quantized gradients (`zeropp_loco_param`).

    Attributes:
        err_beta: weight of the error of before.
        reset_t: reductions of a unit after which its errors return to zero.
    """

    err_beta: float = 0.8
    reset_t: int = 1024


@dataclass(frozen=True)
class QuantizedGradients:
    """Options of quantized reductions.

    Attributes:
        inside, across: codecs inside a node, and between nodes.
        loco: error feedback; None: there is none.
    """

    inside: str = "int8"
    across: str = "int4"
    loco: LocoOptions | None = None


def ranks_of_node(group: RankGroup, node_size: int) -> int:
    """Return the ranks of a node in `group`: all of it if nodes do not divide it."""
    return node_size if group.size % node_size == 0 else group.size
