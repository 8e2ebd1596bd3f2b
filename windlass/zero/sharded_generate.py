"""`generate` of a model with sharded parameters, which are unsharded once if memory allows."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.device_memory import emulated_device_memory
from windlass.base.log import logger
from windlass.storage.staging_memory import available_memory

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel

_SHARE = 0.5  # of the free memory that parameters may take: the rest is for the cache of keys and values


class ShardedGenerate:
    """Stands for the method `generate` of a model at stage 3, as transformers' models have one.

    All ranks call it together. All units are gathered before the first token and released after the last, so that no
    rank needs another in between and prompts and answers may be of any length. Where that takes too much memory on some
    rank, they are gathered in each forward as in training, and `synced_gpus=True` is passed where the method knows it,
    with which transformers keeps ranks that have ended in step with the others.
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
        units = [unit for unit in sharded.units if unit.reshards]
        sharded.finish_update()
        sharded.scheduler.sync("parameters gathered whole")
        if _fits(sharded):
            with sharded.runtime.unsharded(units):
                sharded.scheduler.paused = True
                try:
                    return self._own(model, *args, **kwargs)
                finally:
                    sharded.scheduler.paused = False
        logger.info("generate: the whole model does not fit beside what is in memory; it is gathered for each token")
        if "synced_gpus" in inspect.signature(self._own).parameters and sharded.mesh.dense.data.size > 1:
            kwargs.setdefault("synced_gpus", True)
        return self._own(model, *args, **kwargs)

    def remove(self) -> None:
        """Restore the model's own method."""
        model = self._model()
        if model is not None and vars(model).get("generate") is self:
            del vars(model)["generate"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model has its class's method."""
        copied = memo.get(id(self._model()))
        return self if copied is None else MethodType(self._own, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._model(), "generate")


def attach_generation(model: nn.Module, sharded: ShardedModel) -> list[ShardedGenerate]:
    """Put a `Generation` in place of the model's method, where it has one; `remove` takes it away again."""
    if not callable(getattr(type(model), "generate", None)) or "generate" in vars(model):
        return []
    generation = ShardedGenerate(model, sharded)
    vars(model)["generate"] = generation
    return [generation]


def _fits(sharded: ShardedModel) -> bool:
    """Return True if all sharded parameters can be unsharded at once on every rank. Collective."""
    missing = sum(unit.nbytes for unit in sharded.units if unit.frees_memory)
    fits = torch.tensor([float(missing <= _SHARE * _free_bytes(sharded.device))], device=sharded.device)
    return bool(sharded.mesh.world.all_reduce(fits, dist.ReduceOp.MIN).item())


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory that this rank may use."""
    place = emulated_device_memory()
    if place is not None:
        return place.budget - place.used
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return available_memory(ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
