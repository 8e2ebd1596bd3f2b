"""What counts as a linear layer, and where its features lie in its weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_OWN_FORWARDS = ("FalconLinear",)
"""Subclasses of nn.Linear whose forward is their own and computes the same."""


@dataclass(frozen=True)
class Linear:
    """A linear layer: `nn.Linear`, or the `Conv1D` of transformers, whose weight is the transpose."""

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    transposed: bool

    @property
    def output_dim(self) -> int:
        """The dim of the weight along which output features lie."""
        return 1 if self.transposed else 0

    @property
    def input_dim(self) -> int:
        """The dim of the weight along which input features lie."""
        return 0 if self.transposed else 1

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]


def linear(name: str, module: nn.Module) -> Linear | None:
    """The linear layer that this module is, or None."""
    if isinstance(module, nn.Linear):
        return Linear(name, module, module.in_features, module.out_features, False)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2:
        return Linear(name, module, weight.shape[0], weight.shape[1], True)
    return None


def linears(root: nn.Module, prefix: str = "") -> Iterator[Linear]:
    """All linear layers below `root`, in the order in which they were registered."""
    for name, module in root.named_modules(prefix=prefix):
        found = linear(name, module)
        if found is not None:
            yield found


def computes_plainly(module: nn.Module) -> bool:
    """Its forward is the product with its weight and nothing else, so it may be computed in parts."""
    if "forward" in vars(module):
        return False
    kind = type(module)
    return kind.forward is nn.Linear.forward or kind.__name__ in ("Conv1D", *_OWN_FORWARDS)


def parents(name: str) -> Iterator[str]:
    """The names of the modules that hold `name`, the nearest first; the root is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def below(name: str, holder: str) -> bool:
    """Whether `name` lies in the module `holder`."""
    return not holder or name.startswith(holder + ".")


def stands_in(module: nn.Module) -> bool:
    """Whether it only stands where a module of another stage of a pipeline would be."""
    return bool(getattr(module, "stands_in", False))
