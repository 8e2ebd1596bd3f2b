"""Layers that are described before they are built, so that a rank builds those of its stage alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError


class LayerSpec:
    """A layer that is built later: `typename(*module_args, **module_kwargs)`.

    Args:
        typename: a subclass of `torch.nn.Module`.
        module_args, module_kwargs: what it is made from.

    Raises:
        ModelError: `typename` makes no module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ModelError(f"LayerSpec({typename!r}, ...): a layer is made by a subclass of torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer. `log` is accepted for DeepSpeed's sake."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *arguments])})"


class TiedLayerSpec(LayerSpec):
    """A layer that is the same module wherever its key occurs: in one stage, or in several that then share it.

    Args:
        key: its name; the first spec of a key says how the module is made.
        typename, module_args, module_kwargs: as of `LayerSpec`.
        forward_fn: called as `forward_fn(module, inputs)` in place of the module.
        tied_weight_attr: names of its parameters that stages share. All of the module's parameters are shared, as they
            are where one process has them all; these have to be there.
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
    """The name of a layer's class, or function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def count_layer_parameters(layers: Iterable[LayerLike]) -> list[int]:
    """Elements of each layer's parameters. What is not built yet is built without memory for that, and no random number
    is drawn."""
    with torch.random.fork_rng():
        return [sum(p.numel() for p in _build_for_size(layer).parameters()) for layer in layers]


def _build_for_size(layer: LayerLike) -> nn.Module:
    if isinstance(layer, LayerSpec):
        try:
            with torch.device("meta"):
                return layer.build()
        except (NotImplementedError, RuntimeError):  # its constructor looks at values
            return layer.build()
    return layer if isinstance(layer, nn.Module) else nn.Identity()
