"""Linear layers, and the positions of their features in the weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from windlass.kernels.packed_linear import PackedLinear

EQUIVALENT_CLASSES = ("FalconLinear",)
"""Subclasses of nn.Linear with a forward of their own that computes the same as nn.Linear's."""


@dataclass(frozen=True)
class LinearLayer:
    """Linear layer: `nn.Linear`, `PackedLinear`, or the `Conv1D` of transformers, whose weight is transposed.

    Attributes:
        name: name of the layer, or of the module around it that adds low-rank adapters.
        module: the layer itself.
        adapter_module: the module around it that adds adapters, if there is one.
    """

    name: str
    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool
    adapter_module: nn.Module | None = None

    @property
    def entry_module(self) -> nn.Module:
        """Module that other layers call."""
        return self.adapter_module if self.adapter_module is not None else self.module

    @property
    def output_dim(self) -> int:
        """Dimension of the weight for output features."""
        return 1 if self.transposed else 0

    @property
    def input_dim(self) -> int:
        """Dimension of the weight for input features."""
        return 0 if self.transposed else 1

    @property
    def leaf_name(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]


def as_linear_layer(name: str, module: nn.Module) -> LinearLayer | None:
    """Return the linear layer that this module is or adapts; None for any other module."""
    base = get_adapter_base_layer(module)
    if base is not None:
        found = as_linear_layer(name, base)
        return None if found is None else replace(found, adapter_module=module)
    if isinstance(module, nn.Linear | PackedLinear):
        return LinearLayer(name, module, module.in_features, module.out_features, False)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2:
        return LinearLayer(name, module, weight.shape[0], weight.shape[1], True)
    return None


def find_linear_layers(root: nn.Module, prefix: str = "") -> Iterator[LinearLayer]:
    """Yield all linear layers in `root`, which may be one itself, in the order of registration."""
    adapted: list[str] = []
    for name, module in root.named_modules(prefix=prefix):
        found = as_linear_layer(name, module) if not any(is_inside(name, holder) for holder in adapted) else None
        if found is not None:
            yield found
            if found.adapter_module is not None:
                adapted.append(name)


def get_adapter_base_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer to which a peft module adds low-rank adapters, or None for other modules."""
    base = getattr(module, "base_layer", None)
    pairs = (getattr(module, "lora_A", None), getattr(module, "lora_B", None))
    adds = isinstance(base, nn.Module) and all(isinstance(one, nn.ModuleDict) for one in pairs)
    return base if adds else None


def has_plain_lora(adapter_module: nn.Module) -> bool:
    """Return True if the adapters only add matrix products: no variant of LoRA, such as DoRA with its row norms."""
    return not getattr(adapter_module, "lora_variant", None) and not len(
        getattr(adapter_module, "lora_magnitude_vector", ())
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Return True if the forward is only the product with the weight, so that it can be computed in parts."""
    if "forward" in vars(module):
        return False
    kind = type(module)
    return (
        hasattr(kind, "compressed_weight")
        or issubclass(kind, PackedLinear)
        or kind.forward is nn.Linear.forward
        or kind.__name__ in ("Conv1D", *EQUIVALENT_CLASSES)
    )


def used_weight(module: nn.Module) -> Tensor:
    """Return the weight as the forward of the module's class uses it: a class may round or mask it."""
    change: Any = getattr(module, "compressed_weight", None)
    found: Tensor = module.weight if change is None else change()  # type: ignore[assignment]
    return found


def used_input(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs as the forward of the module's class uses them."""
    change: Any = getattr(module, "compressed_input", None)
    found: Tensor = inputs if change is None else change(inputs)
    return found


def used_bias(module: nn.Module) -> Tensor | None:
    """Return the bias as the forward of the module's class uses it."""
    change: Any = getattr(module, "compressed_bias", None)
    found: Tensor | None = module._parameters.get("bias") if change is None else change()
    return found


def iterate_parent_names(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain `name`, the nearest first; the root is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_inside(name: str, module_name: str) -> bool:
    """Return True if `name` is inside the module `module_name`. Every name is inside the root ""."""
    return not module_name or name.startswith(module_name + ".")


def is_stub(module: nn.Module) -> bool:
    """Return True if the module is a placeholder for a module on another pipeline stage."""
    return bool(getattr(module, "is_stub", False))


def is_pipeline_stage(model: nn.Module) -> bool:
    """Return True if `model` is a part of a pipeline, so that other ranks have its other layers."""
    stages, total = getattr(model, "stages", None), getattr(model, "total_stages", None)
    if isinstance(stages, list) and isinstance(total, int):
        return len(stages) < total
    return any(is_stub(module) for module in model.modules())


def find_local_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name, without the stubs of other pipeline stages and the modules inside stubs.

    Stubs hold parameters of local modules under second names.
    """
    modules = dict(model.named_modules())
    stubs = {name for name, module in modules.items() if is_stub(module)}
    return {
        name: module
        for name, module in modules.items()
        if name not in stubs and stubs.isdisjoint(iterate_parent_names(name))
    }
