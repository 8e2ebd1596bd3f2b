"""Access of a script to the gradients of one model: see [Note: gradients that a script sees]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from windlass.base.errors import ModelError
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.sharded_parameter import put_grad, raw_grad
from windlass.zero.parameter_registry import ParameterLocation, find


@dataclass(frozen=True)
class ScriptGradientCallbacks:
    """Callables of the engine that decide what a script may do with gradients.

    Attributes:
        hides_gradients: Returns True if `.grad` reads as None, as in DeepSpeed at stages 1 to 3. Functions named
            `zero_grad` still read a `ShardedGradient`.
        refuses_external_gradients: Returns True if setting a gradient raises at once.
        keeps_accumulated: Returns True if drops are ignored now, because the engine accumulates gradients of
            micro-batches.
        before_drop: Called before gradients of the current step are dropped.
    """

    hides_gradients: Callable[[], bool] = lambda: False
    refuses_external_gradients: Callable[[], bool] = lambda: True
    keeps_accumulated: Callable[[], bool] = lambda: False
    before_drop: Callable[[], None] = lambda: None


class ScriptGradients:
    """Gradients of a model's parameters as a script reads, sets and drops them through `.grad`.

    Args:
        gradients: Reducer of the model's gradients.
        callbacks: Callables of the engine.
    """

    def __init__(self, gradients: GradientReducer, callbacks: ScriptGradientCallbacks) -> None:
        self._gradients, self._callbacks = gradients, callbacks

    def has(self, place: ParameterLocation, *, anywhere: bool) -> bool:
        """See `GradientStore`."""
        number = self._number(place)
        if number is None:
            return False
        return (
            self._gradients.unit_has_gradient(number) if anywhere else self._gradients.has_gradient(number, place.index)
        )

    def hides(self) -> bool:
        """See `GradientStore`."""
        return self._callbacks.hides_gradients()

    def drop(self, place: ParameterLocation, *, zero: bool) -> None:
        """See `GradientStore`."""
        number = self._number(place)
        if number is None or not self._gradients.unit_has_gradient(number) or self._callbacks.keeps_accumulated():
            return
        self._callbacks.before_drop()
        self._gradients.drop_gradient(number, place.index, zero=zero)

    def drop_all(self, parameters: Iterable[nn.Parameter], *, zero: bool) -> None:
        """Drop or zero the gradients and `.grad` of `parameters`, which may belong to any engine or to none."""
        for parameter in parameters:
            raw = raw_grad(parameter)
            if raw is not None and zero:
                raw.detach_().zero_()
            elif raw is not None:
                put_grad(parameter, None)
            if (place := find(parameter)) is not None:
                place.model.script_gradients.drop(place, zero=zero)

    def refuse(self, place: ParameterLocation, parameter: nn.Parameter) -> None:
        """See `GradientStore`.

        Raises:
            ModelError: the parameter's unit is trainable, and the engine raises at once instead of dropping the
                gradient at the step with a warning.
        """
        if self._callbacks.refuses_external_gradients() and self._number(place) is not None:
            raise ModelError(format_foreign_gradients([place.name]))

    def _number(self, place: ParameterLocation) -> int | None:
        return self._gradients.number_of(place.unit)


def format_foreign_gradients(names: list[str]) -> str:
    """Return the message about gradients that a script set."""
    return (
        f"{names[0]!r}.grad was assigned by the script ({len(names)} such parameters): a step uses only gradients "
        "that a backward reduces, "
        "and drops this one. To reduce it, call torch.autograd.backward(parameters, gradients); to replace the reduced "
        "gradient, call windlass.zero.set_full_grad(parameter, gradient)"
    )
