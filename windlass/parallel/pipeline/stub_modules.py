"""What stands where a module of another stage would be: no parameters, no work, and shapes that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

OutputForm = str  # "tensor": a layer returns hidden states; "tuple": as the first of several


@dataclass
class StageForwardState:
    """The forward that runs: what its stage was given, which layers are its own, and what it came to.

    Attributes:
        given: hidden states from the stage before; None in the first.
        start, stop: numbers of the stage's layers.
        passed: hidden states behind its last layer, once they are there.
    """

    stage_input: torch.Tensor | None = None
    first_layer: int = 0
    end_layer: int = 0
    stage_output: torch.Tensor | None = None


class StubModule(nn.Module):
    """No hooks run around its call: a parameter that it has is one of another module's, which it does not use."""

    is_stub = True  # for a module of another stage: who cuts a model along other axes passes over it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class StubLayer(StubModule):
    """Hands hidden states on: those the stage was given, before its layers; behind them those they returned, which it
    notes down.

    Plain attributes of the layer are kept, since models read them (the kind of its attention, say).
    """

    def __init__(self, index: int, state: StageForwardState, output_form: OutputForm, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float, bool)) and name not in vars(self):
                setattr(self, name, value)
        self.index, self.state, self.output_form = index, state, output_form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what a layer takes."""
        hidden = get_hidden_states(args, kwargs)
        if self.index < self.state.first_layer:
            hidden = hidden if self.state.stage_input is None else self.state.stage_input
        elif self.state.stage_output is None:
            self.state.stage_output = hidden
        return wrap_hidden_states(hidden, self.output_form)


def get_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a layer's arguments."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def wrap_hidden_states(hidden: torch.Tensor, output_form: OutputForm) -> Any:
    """Hidden states as a layer returns them; of what else some return (a cache, weights) there is none."""
    return hidden if output_form == "tensor" else (hidden, None, None, None)


@dataclass(frozen=True)
class OutputShapeRule:
    """The shape of what a module returns: one dimension more than that of its first tensor, or another last one."""

    width: int
    adds_dim: bool

    def output_shape(self, input_shape: torch.Size) -> tuple[int, ...]:
        """For an input of this shape."""
        return (*(input_shape if self.adds_dim else input_shape[:-1]), self.width)


class StubInput(StubModule):
    """An embedding, or what else comes before the layers: nothing depends on what it returns but shapes, so it is a
    zero seen many times."""

    def __init__(self, shape_rule: OutputShapeRule, state: StageForwardState, module: nn.Module) -> None:
        super().__init__()
        self.shape_rule, self.state = shape_rule, state
        _add_empty_weight(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes what the module takes."""
        given = first_tensor(args, kwargs)
        like = (
            self.state.stage_input
            if self.state.stage_input is not None
            else given.new_empty(0, dtype=torch.get_default_dtype())
        )
        return like.new_zeros(()).expand(self.shape_rule.output_shape(given.shape))


class StubOutput(StubModule):
    """A norm or head behind the layers: nobody looks at what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _add_empty_weight(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Its first tensor, as it came."""
        return first_tensor(args, kwargs)


def _add_empty_weight(stub: nn.Module, module: nn.Module) -> None:
    """No elements, of the weight's dtype: models ask for that."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        stub.weight = weight.detach().new_empty(0)


def register_alias(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Have `parameter`, which lies in `model` under other names, under this one too, where something absent is."""
    *path, last = name.split(".")
    module = model
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    vars(module).pop(last, None)
    module.register_parameter(last, parameter)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The first tensor among a module's arguments."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
