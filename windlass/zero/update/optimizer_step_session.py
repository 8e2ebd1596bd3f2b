"""One step of a user's optimizer, divided into several calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.trace_ranges import traced
from windlass.comm.rank_group import RankGroup

# Attributes of an optimizer that are not copied between the user's optimizer and the inner optimizer.
NOT_SHARED = frozenset(
    """
    state param_groups step train eval _optimizer_step_pre_hooks _optimizer_step_post_hooks
    grad_scale found_inf low_precision_copies page_sums
    """.split()  # noqa: SIM905
)


def run_pre_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that `optimizer.step` runs before a step."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})


class OptimizerStepSession:
    """One step of a user's optimizer, divided into parts: calls of `step` for different parameters.

    All parts use the groups' options and the optimizer's attributes from before the step, so that a counter among them
    advances once per step and not once per part. `end` copies changed options and attributes to the user's optimizer. A
    step that fails does not change them. Callers run `run_pre_step_hooks` before; the engine runs the post-step hooks.

    [Note: rules over all parameters] A rule that computes one value from all parameters (the step size of Prodigy or
    D-Adaptation) computes a different value in each part, so the result differs from that of one call. Optimizers store
    the value as an option of a group or as an attribute: if parts or ranks change it to different numbers, the step
    raises.

    Args:
        optimizer: the user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._options = [_without(group, ("params",)) for group in optimizer.param_groups]
        self._own = _without(optimizer.__dict__, NOT_SHARED)
        self._new_options: list[dict[str, Any]] = [{} for _ in self._options]
        self._new: dict[str, Any] = {}
        # Plain values (int, float, str) after the first part that had parameters, and the keys whose values a part
        # changed. Both have an entry for each group, and a last entry for the optimizer's attributes.
        self._after: list[dict[str, Any]] = [{} for _ in range(len(self._options) + 1)]
        self._moved: list[set[str]] = [set() for _ in self._after]

    def keep_options(self) -> None:
        """Copy options that are tensors (a learning rate), so that later changes do not affect the remaining parts."""
        for options in self._options:
            options.update({k: v.detach().clone() for k, v in options.items() if isinstance(v, torch.Tensor)})

    def step(self, inner: torch.optim.Optimizer, tensors: dict[int, list[nn.Parameter]]) -> None:
        """Step one part: `tensors`, by group number. Their gradients are dropped afterwards.

        Args:
            inner: optimizer whose `step` is called: a clone of the user's, or another class with the same results.

        Raises:
            ModelError: parts change an option or attribute to different values.
        """
        # Undo changes of the previous part, so that every part starts from the values before the step.
        shares_attributes = type(inner) is type(self._optimizer)  # another class has different attributes
        own = self._own if shares_attributes else {}
        inner.__dict__.update(own)
        inner.param_groups = [{**options, "params": tensors.get(n, [])} for n, options in enumerate(self._options)]
        with traced("update"):
            inner.step()
        for new, options, group in zip(self._new_options, self._options, inner.param_groups, strict=True):
            new.update(_changed(_without(group, ("params",)), options))
        attributes = _without(inner.__dict__, NOT_SHARED) if shares_attributes else {}
        self._new.update(_changed(attributes, own))
        self._compare_values(tensors, [*self._options, own], [*inner.param_groups, attributes])
        for stepped in tensors.values():
            for tensor in stepped:
                tensor.grad = None

    def end(self, among: RankGroup | None = None, failed: Exception | None = None) -> None:
        """End the step after its last part: copy changed options and attributes to the user's optimizer.

        Args:
            among: ranks that stepped different parameters. A rank without parameters of a group takes the changes of
                that group from the other ranks. Collective over these ranks.
            failed: error of a part of this rank, raised once the other ranks have received the changes.

        Raises:
            ModelError: ranks change an option or attribute to different values.
            Exception: `failed`.
        """
        if among is not None and among.size > 1:
            plain = [_plain(new) for new in (*self._new_options, self._new)]
            for others, after, moved in among.all_gather_object((plain, self._after, self._moved)):
                for new, changes in zip([*self._new_options, self._new], others, strict=True):
                    new.update(_without(changes, new))
                for number, values in enumerate(after):
                    self._record_values(number, values, moved[number])
        if failed is not None:
            raise failed
        for group, new in zip(self._optimizer.param_groups, self._new_options, strict=True):
            group.update(new)
        self._optimizer.__dict__.update(self._new)

    def _compare_values(
        self, tensors: dict[int, list[nn.Parameter]], before: list[dict[str, Any]], after: list[dict[str, Any]]
    ) -> None:
        """Compare plain options and attributes after this part with their values after the earlier parts."""
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if tensors.get(number) if number < len(self._options) else any(tensors.values()):
                values = _plain(new)
                self._record_values(number, values, {key for key in values if values[key] != old.get(key)})

    def _record_values(self, number: int, values: dict[str, Any], moved: set[str]) -> None:
        """Record plain values after a part of this rank or another.

        Raises:
            ModelError: a value that the step changes differs between parts: see [Note: rules over all parameters].
        """
        known = self._after[number]
        self._moved[number] |= moved
        for key, value in values.items():
            # NaN differs from itself, so it is not compared.
            if known.setdefault(key, value) != value and key in self._moved[number] and value == value:
                where = f"option {key!r} of group {number}" if number < len(self._options) else f"attribute {key!r}"
                raise ModelError(
                    f"{type(self._optimizer).__name__} set {where} to {known[key]!r} for some parameters and to "
                    f"{value!r} for others: its rule uses all parameters together, and the step calls it for a part of "
                    "them at a time, on the rank that owns them; use an optimizer whose update of a parameter depends "
                    "on that parameter alone"
                )


def _without(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in before or value is not before[key]}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the int, float and str values. Only these are compared, and sent to other ranks."""
    return {key: value for key, value in values.items() if isinstance(value, int | float | str)}
