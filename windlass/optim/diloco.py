"""DiLoCo: many local steps of AdamW, then one outer step on the changes of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError
from windlass.comm.codec import get_codec, list_codecs
from windlass.optim.hyperparameter_checks import check_hyperparameters
from windlass.optim.one_bit_adam import check_equal_in_groups, keep_options


class DiLoCo(torch.optim.AdamW):
    """DiLoCo. This class holds groups and hyper-parameters; an engine takes the steps (`zero/update/diloco_update`).

    Each rank takes `inner_steps` steps of AdamW on its own data, with states of its own. Then the mean of the ranks'
    changes is the gradient of an outer SGD with Nesterov momentum, which moves the parameters of all ranks. With
    `fragments` above 1 the units of the model are divided into that many parts, which take their outer steps at evenly
    distributed steps, so that each message is shorter. With `overlap_steps` above 0 inner steps continue while a
    message is in flight. The first `start_step` steps are those of AdamW with averaged gradients, because the paper
    starts from a pretrained model. Outside an engine every step is AdamW's.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105,
    algorithm 1; parts and overlap: "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, sections 2.2
    and 2.3.

    Args:
        inner_steps: number of local steps between two outer steps of a parameter.
        outer_lr, outer_momentum: learning rate and momentum of the outer SGD.
        fragments: number of parts of the model; 1: all parameters take their outer step at once.
        codec: registered name of the codec of the changes; the encoding error is added to the next change.
        overlap_steps: number of inner steps that a message may take; 0: the outer step waits for the message.
        mixing: with overlapped messages, weight of the local parameters in their average with the new common ones; 0
            discards the inner steps taken during the transfer.
        start_step: number of steps with averaged gradients before the first local step.

    Raises:
        ConfigError: an option of DiLoCo is out of range.
        ValueError: an option of AdamW is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        inner_steps: int = 32,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        codec: str = "int8",
        overlap_steps: int = 0,
        mixing: float = 0.5,
        start_step: int = 0,
    ) -> None:
        check_hyperparameters("DiLoCo", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if inner_steps < 1 or not 1 <= fragments <= inner_steps:
            raise ConfigError(
                f"DiLoCo: inner_steps is {inner_steps} and fragments is {fragments}; write at least 1, and at most one "
                "fragment for each inner step"
            )
        if outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise ConfigError(
                f"DiLoCo: outer_lr is {outer_lr} and outer_momentum is {outer_momentum}; write a rate above 0, such as "
                "0.7, and a momentum in [0, 1), such as 0.9"
            )
        if not 0 <= overlap_steps < inner_steps or not 0 <= mixing < 1:
            raise ConfigError(
                f"DiLoCo: overlap_steps is {overlap_steps}, inner_steps is {inner_steps} and mixing is {mixing}; write "
                "fewer overlapped than inner steps, so that a message arrives before the next one is sent, and a "
                "mixing in [0, 1), such as 0.5"
            )
        if start_step < 0:
            raise ConfigError(f"DiLoCo: start_step is {start_step}; write 0 or more steps with averaged gradients")
        if codec not in list_codecs() or not get_codec(codec).accepts(torch.float32):
            fit = [name for name in list_codecs() if get_codec(name).accepts(torch.float32)]
            raise ConfigError(
                f"DiLoCo: there is no codec {codec!r} for changes in float32; write one of {', '.join(fit)}"
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        kept: dict[str, Any] = {
            "inner_steps": inner_steps,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "fragments": fragments,
            "codec": codec,
            "overlap_steps": overlap_steps,
            "mixing": mixing,
            "start_step": start_step,
            "applied_steps": 0,
        }
        keep_options(self, kept)
        check_equal_in_groups(self, ("inner_steps", "fragments", "codec", "overlap_steps", "start_step"))


def fragment_due(step: int, unit: int, group: dict[str, Any]) -> bool:
    """Return True if the changes of unit number `unit` are sent after step `step`, counted from 1."""
    part, local = unit % group["fragments"], step - group["start_step"]
    due: bool = local > 0 and (local + part * group["inner_steps"] // group["fragments"]) % group["inner_steps"] == 0
    return due
