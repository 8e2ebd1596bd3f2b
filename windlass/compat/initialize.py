"""`deepspeed.initialize`: windlass's, as DeepSpeed's scripts call it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.collectives import initialize_mesh_device
from windlass.compat import groups, parameters
from windlass.compat.config_sections import DeepSpeedZeroLeafModuleConfig
from windlass.compat.engine import DeepSpeedEngine
from windlass.compat.leaves import apply_zero_leaf_module_config
from windlass.compat.messages import log_dist, set_log_level_from_string
from windlass.compat.pipeline import DeepSpeedPipelineEngine
from windlass.compat.standard import git_branch, git_hash
from windlass.compat.tensor_parallel import asked_of, of_readers
from windlass.compat.tolerance import tolerated
from windlass.compat.version import VERSION
from windlass.config.source import read
from windlass.engine.pipeline import use_in_pipelines
from windlass.engine.watch import installed
from windlass.initialize import build, source_of
from windlass.parallel.pipeline.module import PipelineModule

use_in_pipelines(DeepSpeedEngine, DeepSpeedPipelineEngine)


class ArgumentError(ConfigError, AssertionError):
    """Arguments of `initialize` that exclude each other; DeepSpeed asserts that they do not."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """As `windlass.initialize`, with DeepSpeed's manners: `engine.config` is the caller's dict, top-level keys that
    nobody knows are passed over with one warning, `args.local_rank` is checked. A model may be given again: its former
    engine makes way (lightning does so when it evaluates after training).

    Args:
        mpu: knows along which axes ranks have what. Layers are cut by whoever wrote them, and say so of parameters
            (`tensor_model_parallel`, `partition_dim`); only what the configuration asks for is cut here.
        mesh_param: `(data, sequence)`, ranks along each; sequences are cut by the script.

    Returns:
        `(engine, optimizer, loader, scheduler)`; the optimizer is `engine.optimizer` (at stage 3 without
        one: what stands for DeepSpeed's manager of parameters); the last three may be None.

    Raises:
        ArgumentError: no model, no configuration or two, or a local rank that is not this process's.
        ConfigError: the configuration is wrong or asks for what is not built.
        ModelError: the model or the optimizer can't be trained.
    """
    if model is None:
        raise ArgumentError("deepspeed.initialize requires a model")
    _check_local_rank(args)
    try:
        source = installed().config or source_of(args, config, config_params)
    except ConfigError as error:
        raise ArgumentError(str(error)) from None
    given = source if isinstance(source, dict) else read(source).data
    if isinstance(model, PipelineModule) and mpu is not None:
        raise ArgumentError("mpu must be None with a PipelineModule, whose topology knows its groups")
    asked = asked_of(model, source)
    parameters.install()
    trains_nothing = isinstance(model_parameters, (list, tuple)) and not model_parameters
    engine = build(
        DeepSpeedEngine,
        tolerated(asked if mpu is not None else of_readers(asked)),
        model=model,
        optimizer=optimizer,
        model_parameters=None if trains_nothing else model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=_needless(mpu),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        mesh_param=mesh_param,
        supersedes=True,
    )
    log_dist(f"DeepSpeed info: version={VERSION}, git-hash={git_hash}, git-branch={git_branch}", ranks=[0])
    engine.become(given, mpu, optimizer, lr_scheduler, training_data, collate_fn)
    engine.mesh_device = _mesh_device(mesh_param, given)
    if engine.zero_optimization_stage() == 3:
        leaves = (given.get("zero_optimization") or {}).get("leaf_module") or {}
        apply_zero_leaf_module_config(engine.module, DeepSpeedZeroLeafModuleConfig(**leaves))
    if isinstance(given.get("log_level"), str):
        set_log_level_from_string(given["log_level"])
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _check_local_rank(args: Any) -> None:
    asked, here = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if asked is None or here is None:
        return
    if asked >= 0 and asked != int(here):
        raise ArgumentError(f"args.local_rank is {asked}, but the environment says LOCAL_RANK={here}")
    args.local_rank = int(here)


def _needless(mpu: Any) -> Any:
    """None for an `mpu` whose every other axis has one rank: the data axis is all there is."""
    kinds = "model tensor_model slice pipeline_model pipe sequence context expert_model expert"
    sizes = [getattr(mpu, f"get_{kind}_parallel_world_size", None) for kind in kinds.split()]
    return mpu if any(size is not None and size() > 1 for size in sizes) else None


def _mesh_device(mesh_param: Any, given: dict[str, Any]) -> Any:
    """The mesh of data and sequence that was asked for, as torch has it; None if none was. Collective."""
    if mesh_param is None and "sequence_parallel_size" in given and "data_parallel_size" in given:
        mesh_param = (given["data_parallel_size"], given["sequence_parallel_size"])
    if mesh_param is None:
        return None
    made = initialize_mesh_device(mesh_param, ("data_parallel", "sequence_parallel"))
    for place in (groups.__dict__, getattr(sys.modules.get("deepspeed.utils.groups"), "__dict__", {})):
        place["mesh_device"] = made
    return made
