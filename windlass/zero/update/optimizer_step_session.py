"""One step of a user's optimizer, taken in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.comm.rank_group import RankGroup

_NOT_SHARED = frozenset(
    """
    state param_groups step _optimizer_step_pre_hooks _optimizer_step_post_hooks
    grad_scale found_inf low_precision_copies
    """.split()  # noqa: SIM905
)


class OptimizerStepSession:
    """One step of a user's optimizer, taken in parts under the hyper-parameters of its groups as they are now.

    Each part finds the groups' options, and the optimizer's own attributes, as they were before the step, so that what
    a rule counts there it counts once a step. What any part changed comes back to the user's object at the end; a step
    that fails changes nothing there. Hooks before a step run once, here; those after it once the parameters are new.

    Args:
        optimizer: the user's.
        inner: the one that is stepped: its clone, or another class with the same results.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
        self._optimizer, self._inner = optimizer, inner
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        self._options = [_without(group, ("params",)) for group in optimizer.param_groups]
        self._own = self._attributes(optimizer)
        self._new_options: list[dict[str, Any]] = [{} for _ in self._options]
        self._new: dict[str, Any] = {}

    def keep_options(self) -> None:
        """Parts may be stepped later: options that are tensors (a learning rate) are those of now, too."""
        for options in self._options:
            options.update({k: v.detach().clone() for k, v in options.items() if isinstance(v, torch.Tensor)})

    def step(self, tensors: dict[int, list[nn.Parameter]]) -> None:
        """Step `tensors` (by group number); their gradients are dropped."""
        inner = self._inner
        inner.__dict__.update(self._own)
        inner.param_groups = [{**options, "params": tensors.get(n, [])} for n, options in enumerate(self._options)]
        inner.step()
        for new, options, group in zip(self._new_options, self._options, inner.param_groups, strict=True):
            new.update(_changed(_without(group, ("params",)), options))
        self._new.update(_changed(self._attributes(inner), self._own))
        for stepped in tensors.values():
            for tensor in stepped:
                tensor.grad = None

    def end(self, among: RankGroup | None = None) -> None:
        """All parts were stepped.

        Args:
            among: ranks of which each stepped other parameters, so that one may have had none of a group: what others
                counted there counts here too. Collective over them.
        """
        if among is not None and among.size > 1:
            for others in self._gather_plain_values(among):
                for new, told in zip([*self._new_options, self._new], others, strict=True):
                    new.update(_without(told, new))
        for group, new in zip(self._optimizer.param_groups, self._new_options, strict=True):
            group.update(new)
        self._optimizer.__dict__.update(self._new)

    def _gather_plain_values(self, among: RankGroup) -> list[list[dict[str, Any]]]:
        """The plain values that each rank's rule left: by group, and the attributes last."""
        mine = [
            {key: value for key, value in new.items() if isinstance(value, int | float | str)}
            for new in (*self._new_options, self._new)
        ]
        return among.all_gather_object(mine)

    def _attributes(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return _without(optimizer.__dict__, _NOT_SHARED) if type(self._inner) is type(self._optimizer) else {}


def _without(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in before or value is not before[key]}
