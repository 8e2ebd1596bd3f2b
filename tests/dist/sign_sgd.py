"""Optimizer rule that reduces gradients itself: sign-compressed SGD with momentum and error feedback, and its
simulation.

Each rank sends the sign and the mean size of `gradient + error` (Karimireddy et al., "Error Feedback Fixes SignSGD",
arXiv:1901.09847) and keeps what the message left out as its error. The momentum takes the mean of all ranks' messages.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tests.toy_codecs import SignCodec
from windlass.comm.byte_channel import ProcessGroupChannel
from windlass.comm.compressed_collectives import CompressedCollectives
from windlass.optim import register_update
from windlass.zero.update.rank_state import RelayRule, mean_of_ranks
from windlass.zero.update.self_reducing_update import LocalParameter, SelfReducingUpdate
from windlass.zero.update.update_protocol import UpdateContext

NAME = "TestSignSGD"


class SignSGD(torch.optim.Optimizer):
    """Optimizer of the rule: its groups and hyper-parameters."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})


class SignSGDUpdate(SelfReducingUpdate):
    """Update of the rule with one compressed message per unit."""

    rank_state_rules: ClassVar[Mapping[str, RelayRule]] = {"error": mean_of_ranks}

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self._sign = SignCodec()
        self._collectives = CompressedCollectives(ProcessGroupChannel(self.group, "compressed gradients"), self._sign)

    def step_parameters(self, parameters: list[LocalParameter]) -> None:
        for item in parameters:
            corrected = item.gradient + item.rank_states["error"]
            if self.group.size > 1:
                messages = self._collectives.all_gather(corrected).view(self.group.size, -1)
            else:
                messages = compressed(corrected)[None]
            item.rank_states["error"].copy_(corrected - messages[self.group.index])
            sign_step(item, messages.mean(0)[item.start : item.stop])


def sign_step(one: LocalParameter, mean: torch.Tensor) -> None:
    if "momentum" not in one.state:
        one.state["momentum"] = torch.zeros_like(one.values)
        one.state["step"] = torch.zeros(())
    one.state["step"] += 1
    one.state["momentum"].mul_(one.options["momentum"]).add_(mean)
    # two roundings as in the simulation: a fused multiply-add would flip the sign of elements near zero
    one.values.sub_(one.state["momentum"] * one.options["lr"])


def compressed(values: torch.Tensor) -> torch.Tensor:
    """Return `values` `[n]` as the other ranks decode them."""
    codec, decoded = SignCodec(), torch.empty_like(values)
    encoded = torch.empty(codec.encoded_size(values.numel(), values.dtype), dtype=torch.uint8)
    codec.encode(values, encoded)
    codec.decode(encoded, decoded, values.dtype)
    return decoded


class SimulatedSignSGD:
    """Simulation of the rule on the data of all ranks in one process, in plain PyTorch.

    Args:
        masters: parameters in float32.
        ranks: number of simulated ranks.
    """

    def __init__(self, masters: list[torch.Tensor], ranks: int, lr: float, momentum: float, clipping: float) -> None:
        self.masters, self.lr, self.momentum, self.clipping = masters, lr, momentum, clipping
        self.errors = [[torch.zeros(m.numel()) for m in masters] for _ in range(ranks)]
        self.momenta = [torch.zeros(m.numel()) for m in masters]

    def step(self, gradients: list[list[torch.Tensor | None]]) -> float:
        """Update with the local gradients `[rank][parameter]`. Return the root mean square of the ranks' norms."""
        ranks = len(gradients)
        squares = sum(float(g.double().square().sum()) for item in gradients for g in item if g is not None)
        norm = (squares / ranks) ** 0.5
        factor = min(1.0, self.clipping / (norm + 1e-6)) if self.clipping else 1.0
        for index, master in enumerate(self.masters):
            local = [item[index] for item in gradients]
            if all(g is None for g in local):
                continue
            messages = []
            for rank, g in enumerate(local):
                flat = torch.zeros(master.numel()) if g is None else g.reshape(-1) * factor
                corrected = flat + self.errors[rank][index]
                messages.append(compressed(corrected))
                self.errors[rank][index] = corrected - messages[-1]
            self.momenta[index] = self.momentum * self.momenta[index] + torch.stack(messages).mean(0)
            master -= (self.lr * self.momenta[index]).view(master.shape)
        return norm

    def relay(self, ranks: int) -> None:
        """Continue with another number of ranks, each with the mean of the former ranks' errors."""
        means = [torch.stack([item[index] for item in self.errors]).mean(0) for index in range(len(self.masters))]
        self.errors = [[mean.clone() for mean in means] for _ in range(ranks)]


if multiprocessing.parent_process() is not None:  # on ranks only: the pytest process keeps windlass's own registry
    register_update(NAME, SignSGD, SignSGDUpdate)
