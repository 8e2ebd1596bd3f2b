"""What is said of single modules before anybody looked at how they belong together."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.parallel.tensor.plan import Style


@dataclass(frozen=True)
class Wish:
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
    style: Style
    sections: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    chain: str = ""
    said: bool = False
