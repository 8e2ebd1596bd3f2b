"""Stubs for modules of other stages: no parameters, no computation, outputs of the right shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.hidden_states import get_hidden_states

OutputForm = str  # "tensor": a layer returns hidden states; "tuple": it returns a tuple that begins with them


@dataclass
class StageForwardState:
    """State of the running forward: input, layers and output of its stage.

    Attributes:
        stage_input: hidden states from the previous stage; None on the first stage.
        first_layer, end_layer: the stage has the layers `[first_layer, end_layer)`.
        stage_output: hidden states after the stage's last layer, once they are computed.
        has_passed_layers: True once the forward has called a layer of a stage before this one.
    """

    stage_input: torch.Tensor | None = None
    first_layer: int = 0
    end_layer: int = 0
    stage_output: torch.Tensor | None = None
    has_passed_layers: bool = False


class StubModule(nn.Module):
    """Base class of stubs.

    A call runs no hooks, such as those that all-gather parameters: a parameter registered in a stub belongs to another
    module, and the stub does not use it.
    """

    is_stub = True  # marks a module of another stage, so that sharding along other mesh axes skips it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class StubLayer(StubModule):
    """Stub that replaces a layer and passes hidden states on.

    A stub before the stage's layers returns the stage's input. A stub after them returns the hidden states that it
    receives; the first such stub records them as the stage's output. Plain attributes of the layer, e.g. the type of
    its attention, are copied, because models read them.
    """

    def __init__(self, index: int, state: StageForwardState, output_form: OutputForm, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float, bool)) and name not in vars(self):
                setattr(self, name, value)
        self.index, self.state, self.output_form = index, state, output_form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Accept a layer's arguments and return hidden states in the layer's output form."""
        hidden = get_hidden_states(args, kwargs)
        if self.index < self.state.first_layer:
            self.state.has_passed_layers = True
            hidden = hidden if self.state.stage_input is None else self.state.stage_input
        elif self.state.stage_output is None:
            self.state.stage_output = hidden
        return wrap_hidden_states(hidden, self.output_form)


def wrap_hidden_states(hidden: torch.Tensor, output_form: OutputForm) -> Any:
    """Wrap hidden states in a layer's output form. Other outputs (a cache, attention weights) are None."""
    return hidden if output_form == "tensor" else (hidden, None, None, None)


@dataclass(frozen=True)
class OutputShapeRule:
    """Rule for the shape of a module's output, given the shape of its first tensor argument.

    Attributes:
        width: size of the output's last dimension.
        adds_dim: True if the last dimension is added, False if it replaces the argument's last dimension.
    """

    width: int
    adds_dim: bool

    def output_shape(self, input_shape: torch.Size) -> tuple[int, ...]:
        """Return the output shape for an input shape."""
        return (*(input_shape if self.adds_dim else input_shape[:-1]), self.width)


class StubInput(StubModule):
    """Stub of an embedding, or another module before the layers.

    Later modules use only the shape of its output, so the output is a single zero, expanded. The stub of an embedding
    copies the options for which a weight cannot be sharded, so that all stages make the same decision for tied weights.
    """

    def __init__(self, path: str, shape_rule: OutputShapeRule, state: StageForwardState, module: nn.Module) -> None:
        super().__init__()
        self.path, self.shape_rule, self.state = path, shape_rule, state
        _add_empty_weight(self, module)
        if isinstance(module, nn.Embedding):
            self.max_norm, self.scale_grad_by_freq = module.max_norm, module.scale_grad_by_freq
            self.sparse = module.sparse

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Accept the module's arguments and return a zero of the output's shape.

        Raises:
            ModelError: the forward of a stage calls the module after layers, so it uses the values.
        """
        if self.state.has_passed_layers and self.state.stage_output is None:
            raise ModelError(
                f"the forward calls {self.path} after layers of the model, which the trial before the split did not "
                "show, e.g. because it happens in training only; this stage lacks the module. Write the model as a "
                "PipelineModule, or train it without pp"
            )
        given = first_tensor(args, kwargs)
        like = (
            self.state.stage_input
            if self.state.stage_input is not None
            else given.new_empty(0, dtype=torch.get_default_dtype())
        )
        return like.new_zeros(()).expand(self.shape_rule.output_shape(given.shape))


class StubOutput(StubModule):
    """Stub of a norm or head after the layers. Its output is not used."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _add_empty_weight(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the first tensor argument unchanged."""
        return first_tensor(args, kwargs)


def _add_empty_weight(stub: nn.Module, module: nn.Module) -> None:
    """Give the stub an empty `weight` of the module's dtype, because models read `weight.dtype`."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        stub.weight = weight.detach().new_empty(0)


def register_alias(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter of `model` under the additional `name`. Missing modules on its path are created."""
    *path, last = name.split(".")
    module = model
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    vars(module).pop(last, None)
    module.register_parameter(last, parameter)


def drop_aliases(model: nn.Module) -> None:
    """Remove the parameters of stubs, which belong to other modules, so that their memory can be freed."""
    for stub in model.modules():
        if isinstance(stub, StubModule):
            for name, parameter in list(stub.named_parameters(recurse=False)):
                del stub._parameters[name]
                setattr(stub, name, parameter.detach().new_empty(0))


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first tensor among a module's arguments."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
