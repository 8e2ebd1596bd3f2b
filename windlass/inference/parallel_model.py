"""Sharding of a model for inference over the ranks of one engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.log import logger
from windlass.comm.mesh_axis import MeshAxis
from windlass.inference.rank_channel import RankChannel
from windlass.parallel.experts import apply_expert_parallel
from windlass.parallel.experts.stacked_experts import ExpertParallelForward
from windlass.parallel.placement import get_placement
from windlass.parallel.tensor import apply_tensor_parallel


def is_sharded(model: nn.Module) -> bool:
    """Return True if the model is sharded over tp or ep, e.g. by a training engine."""
    return any(get_placement(parameter).sharded_axes & {"tp", "ep"} for parameter in model.parameters())


def shard_for_inference(model: nn.Module, channel: RankChannel) -> None:
    """Shard a model in place over the axes tp and ep of a channel. All ranks must hold the same values.

    Raises:
        ModelError: a part of the model cannot be sharded.
        ConfigError: there are fewer experts than ranks along ep.
    """
    tp, ep = channel.axes["tp"], channel.axes["ep"]
    if ep.size > 1:
        plan = apply_expert_parallel(model, ep)
        for layer in plan.layers:
            share_tokens(model.get_submodule(layer.name), ep)
        _log(plan, channel)
    if tp.size > 1:
        _log(apply_tensor_parallel(model, tp), channel)


def share_tokens(experts: nn.Module, axis: MeshAxis) -> None:
    """Let each rank along ep dispatch only a part of the tokens, since all ranks have the same tokens.

    A layer whose forward is not an `ExpertParallelForward` is not changed: each rank dispatches all tokens, which gives
    the same result.
    """
    if isinstance(experts.__dict__.get("forward"), ExpertParallelForward):
        hooks = SharedTokens(axis)
        experts.register_forward_pre_hook(hooks.before)
        experts.register_forward_hook(hooks.after)


class SharedTokens:
    """Hooks around an expert layer with equal tokens on all ranks of an axis: they split the tokens, and all-gather the
    outputs."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._sizes: list[int] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return this rank's part of the tokens of each argument. Return all tokens if there are fewer tokens than
        ranks, or if the arguments are not three tensors `[tokens, ...]`.
        """
        count = args[0].shape[0] if args and isinstance(args[0], torch.Tensor) else 0
        flat = all(isinstance(value, torch.Tensor) and value.shape[:1] == (count,) for value in args[:3])
        if len(args) != 3 or not flat or args[0].dim() != 2 or count < self._axis.size:
            self._sizes = None
            return args
        self._sizes = [len(part) for part in torch.arange(count).tensor_split(self._axis.size)]
        return tuple(value.tensor_split(self._axis.size)[self._axis.index] for value in args)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all tokens."""
        return output if self._sizes is None else self._axis.all_gather(output, 0, self._sizes)


def _log(plan: object, channel: RankChannel) -> None:
    if channel.is_leader:
        for line in str(plan).splitlines():
            logger.debug(line)
