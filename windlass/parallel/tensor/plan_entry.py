"""Requested sharding style of each module, before dependent layers are reconciled."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle


@dataclass(frozen=True)
class PlanEntry:
    """Requested sharding of one module.

    Attributes:
        name: name of the module, or of a single parameter.
        style: sharding style.
        sections: sizes of fused sections along the sharded dimension, in order; empty: one section.
        heads: number of heads in each section, or in total; empty: deduced from the module.
        chain: name of the row-parallel layer that ends this module's chain of sharded layers; empty: unknown.
        is_from_user: True if the entry comes from the user's table.
    """

    name: str
    style: ShardStyle
    sections: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    chain: str = ""
    is_from_user: bool = False
