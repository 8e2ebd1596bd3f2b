"""PowerSGD: SGD on gradients that ranks exchange as products of two thin matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.optim.hyperparameter_checks import check_hyperparameters
from windlass.optim.one_bit_adam import keep_options


class PowerSGD(torch.optim.SGD):
    """SGD whose gradients are compressed by PowerSGD. This class holds groups and hyper-parameters; an engine takes the
    steps (`zero/update/power_sgd_update`).

    The first `start_step` steps are those of `torch.optim.SGD`. Afterwards ranks exchange rank-`rank` approximations of
    gradients with error feedback. Outside an engine every step is SGD's.

    Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    arXiv:1905.13727, algorithms 1 and 2.

    Args:
        rank: number of columns of the thin matrices.
        start_step: number of steps before gradients are compressed.
        min_compression_rate: a parameter is sent in full unless its thin matrices are smaller by this factor.

    Raises:
        ConfigError: an option of PowerSGD is out of range.
        ValueError: an option of SGD is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        rank: int = 4,
        start_step: int = 1000,
        min_compression_rate: float = 2.0,
    ) -> None:
        check_hyperparameters("PowerSGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and not momentum:
            raise ConfigError(f"PowerSGD: nesterov is true and momentum is {momentum}; write a momentum, such as 0.9")
        if rank < 1 or start_step < 0:
            raise ConfigError(
                f"PowerSGD: rank is {rank} and start_step is {start_step}; write at least 1, such as 4, and at least 0"
            )
        if min_compression_rate < 1:
            raise ConfigError(
                f"PowerSGD: min_compression_rate is {min_compression_rate}, and thin matrices larger than the gradient "
                "would save nothing; write at least 1, such as 2"
            )
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
        kept: dict[str, Any] = {
            "rank": rank,
            "start_step": start_step,
            "min_compression_rate": min_compression_rate,
            "applied_steps": 0,
        }
        keep_options(self, kept)


def thin_columns(shape: torch.Size, group: dict[str, Any]) -> int:
    """Return the number of columns of the thin matrices of a parameter; 0 if the parameter is sent in full.

    A parameter of more than two dimensions is flattened to the matrix [first dimension, all others].
    """
    if len(shape) < 2 or not shape.numel():
        return 0
    rows, columns = shape[0], shape.numel() // shape[0]
    rank = min(rows, columns, int(group["rank"]))
    smaller = (rows + columns) * rank * float(group["min_compression_rate"]) < rows * columns
    return rank if smaller else 0
