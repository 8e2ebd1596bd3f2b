"""What counts as a linear layer, and where its features lie in its weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

_EQUIVALENT_CLASSES = ("FalconLinear",)
"""Subclasses of nn.Linear whose forward is their own and computes the same."""


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer: `nn.Linear`, or the `Conv1D` of transformers, whose weight is the transpose.

    Attributes:
        name: of the layer, or of the module around it that adds low-rank adapters.
        module: the layer itself.
        outer: the module around it, if there is one.
    """

    name: str
    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool
    adapter_module: nn.Module | None = None

    @property
    def entry_module(self) -> nn.Module:
        """The module that other layers call."""
        return self.adapter_module if self.adapter_module is not None else self.module

    @property
    def output_dim(self) -> int:
        """The dim of the weight along which output features lie."""
        return 1 if self.transposed else 0

    @property
    def input_dim(self) -> int:
        """The dim of the weight along which input features lie."""
        return 0 if self.transposed else 1

    @property
    def leaf_name(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]


def as_linear_layer(name: str, module: nn.Module) -> LinearLayer | None:
    """The linear layer that this module is, or to which it adds adapters; None: neither."""
    base = get_adapter_base_layer(module)
    if base is not None:
        found = as_linear_layer(name, base)
        return None if found is None else replace(found, adapter_module=module)
    if isinstance(module, nn.Linear):
        return LinearLayer(name, module, module.in_features, module.out_features, False)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2:
        return LinearLayer(name, module, weight.shape[0], weight.shape[1], True)
    return None


def find_linear_layers(root: nn.Module, prefix: str = "") -> Iterator[LinearLayer]:
    """All linear layers below `root`, in the order in which they were registered."""
    adapted: list[str] = []
    for name, module in root.named_modules(prefix=prefix):
        found = as_linear_layer(name, module) if not any(is_inside(name, holder) for holder in adapted) else None
        if found is not None:
            yield found
            if found.adapter_module is not None:
                adapted.append(name)


def get_adapter_base_layer(module: nn.Module) -> nn.Module | None:
    """The layer to which a module of peft adds low-rank adapters; None: it is no such module."""
    base = getattr(module, "base_layer", None)
    pairs = (getattr(module, "lora_A", None), getattr(module, "lora_B", None))
    adds = isinstance(base, nn.Module) and all(isinstance(one, nn.ModuleDict) for one in pairs)
    return base if adds else None


def has_plain_lora(adapter_module: nn.Module) -> bool:
    """Whether adapters add products alone: no norms of whole rows (DoRA), nothing of other tuners."""
    return not getattr(adapter_module, "lora_variant", None) and not len(
        getattr(adapter_module, "lora_magnitude_vector", ())
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Its forward is the product with its weight and nothing else, so it may be computed in parts."""
    if "forward" in vars(module):
        return False
    kind = type(module)
    return kind.forward is nn.Linear.forward or kind.__name__ in ("Conv1D", *_EQUIVALENT_CLASSES)


def iterate_parent_names(name: str) -> Iterator[str]:
    """The names of the modules that hold `name`, the nearest first; the root is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_inside(name: str, module_name: str) -> bool:
    """Whether `name` lies in the module `holder`."""
    return not module_name or name.startswith(module_name + ".")


def is_stub(module: nn.Module) -> bool:
    """Whether it only stands where a module of another stage of a pipeline would be."""
    return bool(getattr(module, "is_stub", False))
