"""Choice of the update class of an optimizer."""

from __future__ import annotations

import torch

from windlass.optim.elementwise_optimizers import is_elementwise
from windlass.optim.update_registry import find_registered_update
from windlass.zero.update.elementwise_update import ElementwiseUpdate
from windlass.zero.update.update_protocol import Update
from windlass.zero.update.whole_parameter_update import WholeParameterUpdate


def update_class(optimizer: torch.optim.Optimizer) -> type[Update]:
    """Return the class that steps `optimizer`.

    That is the one registered for it (`windlass.optim.register_update`); else flat segments are stepped for elementwise
    rules, and whole parameters for any other.
    """
    registered = find_registered_update(optimizer)
    if registered is not None:
        return registered
    return ElementwiseUpdate if is_elementwise(optimizer) else WholeParameterUpdate
