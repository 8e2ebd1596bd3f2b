"""Function `deepspeed.tp_model_init`: stores its arguments for the model; `initialize` applies them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.config.config_source import read_source


@dataclass(frozen=True)
class _TpModelInitArguments:
    size: int
    dtype: torch.dtype | None
    group: Any


_arguments_by_model: WeakKeyDictionary[nn.Module, _TpModelInitArguments] = WeakKeyDictionary()
_arguments_for_next_model: list[_TpModelInitArguments] = []  # at most one, for the next `initialize`


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Request tensor parallelism over `tp_size` neighbouring ranks, as `tensor_parallel.autotp_size` does.

    Return the model.

    `initialize` shards the model's matrices.

    Args:
        dtype: must match the dtype in the configuration.
        config: ignored; `initialize` receives the configuration.
        kwargs: `tp_group`, which must consist of the neighbouring ranks.

    Raises:
        ConfigError: `tp_size` is not positive, `tp_group` does not consist of the neighbouring ranks, or an earlier
            call for this model had other arguments.
    """
    asked = _checked_arguments(tp_size, dtype, kwargs.get("tp_group"))
    before = _arguments_by_model.setdefault(model, asked)
    if before != asked:
        raise ConfigError(
            f"tp_model_init was called for this model with tp_size {before.size} and {before.dtype}, and now with "
            f"{tp_size} and {dtype}; call it once"
        )
    return model


def record_tp_model_init_args(tp_size: int, dtype: torch.dtype, tp_group: Any, dist_module: Any) -> None:
    """Store the arguments of `tp_model_init` for the model that `initialize` receives next.

    Raises:
        ConfigError: `tp_size` is not positive, or `tp_group` does not consist of neighbouring ranks.
    """
    _arguments_for_next_model[:] = [_checked_arguments(tp_size, dtype, tp_group)]


def merge_tp_model_init_into_config(config_dict: dict[str, Any], mpu: Any, mesh_param: Any, dist_module: Any) -> None:
    """Merge the arguments of `record_tp_model_init_args` into a configuration, in place.

    Raises:
        ConfigError: the configuration contradicts the arguments.
    """
    if _arguments_for_next_model:
        _merge_into_config(config_dict, _arguments_for_next_model.pop())


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing: the configuration determines whether a model is sharded."""


def config_with_tp_arguments(model: nn.Module, source: Any) -> Any:
    """Return the configuration with the arguments stored for `model`, or else for the next model, merged in.

    Return `source` itself if no arguments are stored.

    Raises:
        ConfigError: the configuration contradicts the arguments.
    """
    asked = _arguments_by_model.get(model)
    if asked is None and _arguments_for_next_model:
        asked = _arguments_for_next_model.pop()
    if asked is None:
        return source
    data = copy.deepcopy(source if isinstance(source, dict) else read_source(source).data)
    _merge_into_config(data, asked)
    return data


def count_batch_by_data_ranks(source: Any) -> Any:
    """Return a configuration whose `train_batch_size` counts data-loading ranks only.

    DeepSpeed's AutoTP counts all ranks, also the tensor-parallel ranks that process the same samples. A script's value
    is thus larger by the factor `autotp_size`. A value that this factor does not divide is returned unchanged.
    """
    data = source if isinstance(source, dict) else read_source(source).data
    section, train = data.get("tensor_parallel"), data.get("train_batch_size")
    size = section.get("autotp_size") if isinstance(section, dict) else None
    if not (isinstance(size, int) and isinstance(train, int)) or size < 2 or train % size:
        return source
    logger.info(
        "train_batch_size: %d samples instead of %d, because %d ranks share each sample", train // size, train, size
    )
    return {**data, "train_batch_size": train // size}


def _checked_arguments(size: int, dtype: torch.dtype | None, group: Any) -> _TpModelInitArguments:
    if size < 1:
        raise ConfigError(f"tp_size = {size}; write the number of ranks that share a matrix, at least 1")
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
        first = dist.get_rank() // size * size
        if ranks != list(range(first, first + size)):
            raise ConfigError(
                f"tp_group has the ranks {ranks}, but the tp_size = {size} neighbours of rank {dist.get_rank()} are "
                f"{list(range(first, first + size))}; use a group of these ranks, or none"
            )
    return _TpModelInitArguments(size, dtype, group)


def _merge_into_config(data: dict[str, Any], arguments: _TpModelInitArguments) -> None:
    section = data.setdefault("tensor_parallel", {})
    sizes = {"autotp_size": section.get("autotp_size"), "tp.tp_size": (section.get("tp") or {}).get("tp_size")}
    for key, size in sizes.items():
        if size is not None and size != arguments.size:
            raise ConfigError(
                f"tensor_parallel.{key} is {size}, and tp_model_init was called with tp_size {arguments.size}; make "
                "them equal"
            )
    section["autotp_size"] = arguments.size
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        enabled = isinstance(data.get(name), dict) and data[name].get("enabled") is True
        if enabled and arguments.dtype not in (None, dtype):
            raise ConfigError(
                f"{name}.enabled is true, but tp_model_init was called with {arguments.dtype}; pass {dtype}, or set it "
                "to false"
            )
