"""Text generation with sharded parameters, which are unsharded once per call if memory allows."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.device_memory import emulated_device_memory
from windlass.base.log import logger
from windlass.storage.staging_memory import available_memory
from windlass.zero.core.collective_scheduler import SyncPoint

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel

_SHARE = 0.5  # maximum fraction of the free memory for parameters; the rest is for the key-value cache


class ShardedGenerate:
    """Replacement for the method `generate` of a model at stage 3, e.g. a transformers model. Collective.

    All units are unsharded before the first token and resharded after the last one. In between, the ranks need no
    collectives, so prompts and answers may differ in length between ranks.

    If the unsharded units need too much memory on some rank, each forward gathers units as in training. Then
    `synced_gpus=True` is passed to the original method if it has that argument: transformers continues the forwards of
    finished ranks until all ranks have finished.
    """

    def __init__(self, model: nn.Module, sharded: ShardedModel) -> None:
        self._model, self._sharded = ref(model), ref(sharded)
        self._own: Callable[..., Any] = type(model).generate  # type: ignore[attr-defined]
        self.__doc__ = self._own.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, sharded = self._model(), self._sharded()
        assert model is not None
        if sharded is None or not sharded.units:
            return self._own(model, *args, **kwargs)
        sharded.finish_update()
        with unsharded_for_generation(sharded) as fits:
            if fits:
                return self._own(model, *args, **kwargs)
        logger.info(
            "generate: the unsharded model does not fit in the free memory; parameters are all-gathered for each token"
        )
        if "synced_gpus" in inspect.signature(self._own).parameters and sharded.mesh.dense.data.size > 1:
            kwargs.setdefault("synced_gpus", True)
        return self._own(model, *args, **kwargs)

    def remove(self) -> None:
        """Restore the model's original method."""
        model = self._model()
        if model is not None and vars(model).get("generate") is self:
            del vars(model)["generate"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the class's method bound to the copied model, or this object if the model is not part of the copy."""
        copied = memo.get(id(self._model()))
        return self if copied is None else MethodType(self._own, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._model(), "generate")


@contextmanager
def unsharded_for_generation(sharded: ShardedModel) -> Iterator[bool]:
    """Unshard all parameters for forwards without collectives, and reshard them afterwards. Collective.

    Yields:
        True; or False if the parameters do not fit in the memory of some rank. Then they stay sharded, and all ranks
        need the same number of forwards.
    """
    units = [unit for unit in sharded.units if unit.reshards]
    if not units:
        yield True
        return
    sharded.scheduler.sync(SyncPoint.FULL_GATHER)
    if not _fits(sharded):
        yield False
        return
    with sharded.runtime.unsharded(units):
        # No agreement on collectives during the context, because ranks run different numbers of forwards.
        before, sharded.scheduler.paused = sharded.scheduler.paused, True
        try:
            yield True
        finally:
            sharded.scheduler.paused = before


def attach_generation(model: nn.Module, sharded: ShardedModel) -> list[ShardedGenerate]:
    """Replace the method `generate` of `model`, if it has one, by a `ShardedGenerate`.

    Returns:
        A list with the replacement, whose `remove` restores the method. Empty if the model has no method `generate`, or
        if the instance already has a replacement.
    """
    if not callable(getattr(type(model), "generate", None)) or "generate" in vars(model):
        return []
    generation = ShardedGenerate(model, sharded)
    vars(model)["generate"] = generation
    return [generation]


def _fits(sharded: ShardedModel) -> bool:
    """Return True if every rank has memory to unshard all parameters at once. Collective."""
    missing = sum(unit.nbytes for unit in sharded.units if unit.frees_memory)
    fits = torch.tensor([float(missing <= _SHARE * _free_bytes(sharded.device))], device=sharded.device)
    return bool(sharded.mesh.world.all_reduce(fits, dist.ReduceOp.MIN).item())


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may still allocate on the device.

    If device memory is emulated, these are the rest of its budget. On a CUDA device they include the memory that
    torch's caching allocator has reserved but not allocated. On the CPU they are this rank's part of the free host
    memory.
    """
    place = emulated_device_memory()
    if place is not None:
        return place.budget - place.used
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return available_memory(ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
