"""`deepspeed.initialize`: windlass's, as DeepSpeed's scripts call it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat import parameters
from windlass.compat.engine import DeepSpeedEngine
from windlass.compat.messages import log_dist
from windlass.compat.standard import git_branch, git_hash
from windlass.compat.tolerance import tolerated
from windlass.compat.version import VERSION
from windlass.config.source import read
from windlass.engine.watch import installed
from windlass.initialize import build, source_of


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
    nobody knows are passed over with one warning, an `mpu` that cuts nothing is taken, `args.local_rank` is checked. A
    model may be given again: its former engine makes way (lightning does so when it evaluates after training).

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
    parameters.install()
    trains_nothing = isinstance(model_parameters, (list, tuple)) and not model_parameters
    engine = build(
        DeepSpeedEngine,
        tolerated(source),
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
    engine.mpu = mpu
    engine.become(given, optimizer, lr_scheduler, training_data, collate_fn)
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
    if mpu is None:
        return None
    for name in (
        "get_model_parallel_world_size",
        "get_tensor_model_parallel_world_size",
        "get_pipeline_model_parallel_world_size",
        "get_sequence_parallel_world_size",
    ):
        if hasattr(mpu, name) and getattr(mpu, name)() > 1:
            return mpu
    return None
