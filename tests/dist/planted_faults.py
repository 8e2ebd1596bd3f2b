"""Faults of sharded training that are temporarily planted in windlass, and that `windlass verify` has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from windlass.comm import shm_transport, wire_transport
from windlass.zero import sharded_model as sharded_module
from windlass.zero.core import step_agreement
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.elementwise_update import ElementwiseUpdate


@contextmanager
def missing_reduce() -> Iterator[None]:
    """Use the gradients of rank 0 in place of the sum over ranks."""
    full = shm_transport.ordered_sum

    def own_part(parts: Any, out: torch.Tensor, **how: Any) -> Any:
        return full([parts[0]], out, **how)

    with patch.object(shm_transport, "ordered_sum", own_part), patch.object(wire_transport, "ordered_sum", own_part):
        yield


@contextmanager
def doubled_scale() -> Iterator[None]:
    """Accumulate gradients with twice their weight."""
    arrive = GradientReducer.accumulate_grad

    def twice(self: GradientReducer, number: int, index: int) -> bool:
        slot = self.slots[number]
        gradient = slot.unit.parameters[index].grad
        if gradient is not None:
            gradient.mul_(2)
        return arrive(self, number, index)

    with patch.object(GradientReducer, "accumulate_grad", twice):
        yield


@contextmanager
def doubled_loss() -> Iterator[None]:
    """Make the backward inside `engine.backward` start with twice the gradient."""
    backward = torch.Tensor.backward

    def twice(self: torch.Tensor, **more: Any) -> None:
        backward(self, torch.full_like(self, 2.0), **more)

    with patch.object(torch.Tensor, "backward", twice):
        yield


@contextmanager
def untied_weight() -> Iterator[None]:
    """Give the head a weight of its own with the values of the embedding's."""
    build = ShardedModel.__init__

    def untying(self: ShardedModel, model: Any, *args: Any, **more: Any) -> None:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        build(self, model, *args, **more)

    with patch.object(ShardedModel, "__init__", untying):
        yield


@contextmanager
def untied_gradient() -> Iterator[None]:
    """Make the head compute with a detached copy of the embedding's weight."""
    build = ShardedModel.__init__

    def untying(self: ShardedModel, model: Any, *args: Any, **more: Any) -> None:
        build(self, model, *args, **more)
        head = model.head
        head.forward = lambda x: nn.functional.linear(x, head.weight.detach())

    with patch.object(ShardedModel, "__init__", untying):
        yield


@contextmanager
def stale_gather() -> Iterator[None]:
    """Skip the all-gather of the last unit's shards after a step (stages 1 and 2)."""
    bring = ShardedModel._gather_updated

    def all_but_the_last(self: ShardedModel, units: list[Any]) -> None:
        bring(self, [unit for unit in units if unit is not self.units[-1]])

    with patch.object(ShardedModel, "_gather_updated", all_but_the_last):
        yield


@contextmanager
def kept_gather() -> Iterator[None]:
    """Keep units unsharded across a step, with the old values (stage 3)."""

    def keep(units: list[Any]) -> None:
        for unit in units:
            if unit.frees_memory:
                unit.keep_unsharded = True

    def reshard_all(self: Any) -> None:
        return

    with (
        patch.object(sharded_module, "_mark_updated", keep),
        patch("windlass.zero.core.unshard_runtime.UnshardRuntime.reshard_all", reshard_all),
    ):
        yield


@contextmanager
def wrong_clip() -> Iterator[None]:
    """Clip gradients to half the requested norm."""
    coefficient = sharded_module.clip_coefficient

    with patch.object(sharded_module, "clip_coefficient", lambda norm, limit: coefficient(norm, limit / 2)):
        yield


@contextmanager
def wrong_norm() -> Iterator[None]:
    """Count every square twice in the norm, as if two ranks held copies of all gradients."""
    reduce = step_agreement.reduce_step_status

    def double(*args: Any, **more: Any) -> Any:
        from dataclasses import replace

        status = reduce(*args, **more)
        return replace(status, norm=status.norm * 2**0.5)

    with patch.object(step_agreement, "reduce_step_status", double):
        yield


@contextmanager
def skipped_update() -> Iterator[None]:
    """Omit the first parameter of the first updated unit from every update."""
    run = ElementwiseUpdate.run

    def without(self: ElementwiseUpdate, used: dict[int, list[bool]], divisor: float) -> Any:
        first = min(used)
        return run(self, {**used, first: [False, *used[first][1:]]}, divisor)

    with patch.object(ElementwiseUpdate, "run", without):
        yield


@contextmanager
def wrong_divisor() -> Iterator[None]:
    """Divide gradients by half the correct divisor before the update."""
    run = ElementwiseUpdate.run

    def halved(self: ElementwiseUpdate, used: dict[int, list[bool]], divisor: float) -> Any:
        return run(self, used, divisor / 2)

    with patch.object(ElementwiseUpdate, "run", halved):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        missing_reduce,
        doubled_scale,
        doubled_loss,
        untied_weight,
        untied_gradient,
        stale_gather,
        kept_gather,
        wrong_clip,
        wrong_norm,
        skipped_update,
        wrong_divisor,
    )
}
