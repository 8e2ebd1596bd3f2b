"""Layer specifications, from which each rank builds and keeps the layers of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError


class LayerSpec:
    """Layer that is built later, as `typename(*module_args, **module_kwargs)`.

    Args:
        typename: a subclass of `torch.nn.Module`.
        module_args, module_kwargs: arguments of its constructor.

    Raises:
        ModelError: `typename` is not a subclass of `torch.nn.Module`.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ModelError(f"LayerSpec({typename!r}, ...): typename must be a subclass of torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build and return the layer. `log` is accepted for compatibility with DeepSpeed and ignored."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *arguments])})"


class TiedLayerSpec(LayerSpec):
    """Layer whose module is shared by all layers with the same key, in one stage or in several.

    Args:
        key: name of the shared module. The first spec with this key builds the module.
        typename, module_args, module_kwargs: as for `LayerSpec`.
        forward_fn: called as `forward_fn(module, inputs)` in place of the module.
        tied_weight_attr: names of parameters that the module must have, else `build` raises ModelError. All parameters
            of the module are shared, not only the named ones, as in a single process.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Iterable[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def build(self, log: bool = False) -> nn.Module:
        module = super().build(log)
        for name in self.tied_weight_attr:
            try:
                module.get_parameter(name)
            except AttributeError as error:
                raise ModelError(
                    f"TiedLayerSpec({self.key!r}, {self.typename.__name__}): it has no parameter {name!r}; write the "
                    "name of one as tied_weight_attr"
                ) from error
        return module


LayerLike = LayerSpec | nn.Module | Callable[[Any], Any]


def get_layer_name(layer: LayerLike) -> str:
    """Return the name of a layer's class, or of the function that is the layer."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def count_layer_parameters(layers: Iterable[LayerLike]) -> list[int]:
    """Return the number of parameter elements of each layer.

    Layers that are not built yet are built on the meta device, or with memory if the constructor fails there. The
    random state is restored.
    """
    with torch.random.fork_rng():
        return [sum(p.numel() for p in _build_for_size(layer).parameters()) for layer in layers]


def _build_for_size(layer: LayerLike) -> nn.Module:
    if isinstance(layer, LayerSpec):
        try:
            with torch.device("meta"):
                return layer.build()
        except (NotImplementedError, RuntimeError):  # the constructor reads values, which meta tensors do not have
            return layer.build()
    return layer if isinstance(layer, nn.Module) else nn.Identity()
