"""Choice of the update class of an optimizer."""

from __future__ import annotations

import torch

from windlass.optim.elementwise_optimizers import is_elementwise
from windlass.zero.update.elementwise_update import ElementwiseUpdate
from windlass.zero.update.update_protocol import Update
from windlass.zero.update.whole_parameter_update import WholeParameterUpdate


def update_class(optimizer: torch.optim.Optimizer) -> type[Update]:
    """Return the class that steps `optimizer`: flat segments for elementwise rules, whole parameters for any other."""
    return ElementwiseUpdate if is_elementwise(optimizer) else WholeParameterUpdate
