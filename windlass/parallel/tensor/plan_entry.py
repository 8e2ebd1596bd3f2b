"""What is said of single modules before anybody looked at how they belong together."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle


@dataclass(frozen=True)
class PlanEntry:
    """How one module should be cut.

    Attributes:
        name: of the module, or of a parameter by itself.
        style: how.
        sections: sizes of what lies fused along the dimension that is cut, one after another; none: it is one.
        heads: in each section, or in the whole; none: they are looked for.
        chain: the layer whose output ends what begins here, where that is known.
        said: the user said so.
    """

    name: str
    style: ShardStyle
    sections: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    chain: str = ""
    is_from_user: bool = False
