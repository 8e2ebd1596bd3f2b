"""What stands where a module of another stage would be: no parameters, no work, and shapes that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Form = str  # "tensor": a layer returns hidden states; "tuple": as the first of several


@dataclass
class Now:
    """The forward that runs: what its stage was given, which layers are its own, and what it came to.

    Attributes:
        given: hidden states from the stage before; None in the first.
        start, stop: numbers of the stage's layers.
        passed: hidden states behind its last layer, once they are there.
    """

    given: torch.Tensor | None = None
    start: int = 0
    stop: int = 0
    passed: torch.Tensor | None = None


class Absent(nn.Module):
    """No hooks run around its call: a parameter that it has is one of another module's, which it does not use."""

    stands_in = True  # for a module of another stage: who cuts a model along other axes passes over it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class AbsentLayer(Absent):
    """Hands hidden states on: those the stage was given, before its layers; behind them those they returned, which it
    notes down.

    Plain attributes of the layer are kept, since models read them (the kind of its attention, say).
    """

    def __init__(self, number: int, now: Now, form: Form, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float, bool)) and name not in vars(self):
                setattr(self, name, value)
        self.number, self.now, self.form = number, now, form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what a layer takes."""
        hidden = hidden_of(args, kwargs)
        if self.number < self.now.start:
            hidden = hidden if self.now.given is None else self.now.given
        elif self.now.passed is None:
            self.now.passed = hidden
        return formed(hidden, self.form)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a layer's arguments."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def formed(hidden: torch.Tensor, form: Form) -> Any:
    """Hidden states as a layer returns them; of what else some return (a cache, weights) there is none."""
    return hidden if form == "tensor" else (hidden, None, None, None)


@dataclass(frozen=True)
class Rule:
    """The shape of what a module returns: one dimension more than that of its first tensor, or another last one."""

    width: int
    more: bool

    def shape(self, given: torch.Size) -> tuple[int, ...]:
        """For an input of this shape."""
        return (*(given if self.more else given[:-1]), self.width)


class AbsentInput(Absent):
    """An embedding, or what else comes before the layers: nothing depends on what it returns but shapes, so it is a
    zero seen many times."""

    def __init__(self, rule: Rule, now: Now, module: nn.Module) -> None:
        super().__init__()
        self.rule, self.now = rule, now
        _lend_weight(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes what the module takes."""
        given = first_tensor(args, kwargs)
        like = self.now.given if self.now.given is not None else given.new_empty(0, dtype=torch.get_default_dtype())
        return like.new_zeros(()).expand(self.rule.shape(given.shape))


class AbsentOutput(Absent):
    """A norm or head behind the layers: nobody looks at what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _lend_weight(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Its first tensor, as it came."""
        return first_tensor(args, kwargs)


def _lend_weight(absent: nn.Module, module: nn.Module) -> None:
    """No elements, of the weight's dtype: models ask for that."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        absent.weight = weight.detach().new_empty(0)


def name_too(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
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
