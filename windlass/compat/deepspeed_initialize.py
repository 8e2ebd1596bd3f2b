"""Function `deepspeed.initialize`: windlass's `initialize` with DeepSpeed's signature and behavior."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat import parallel_groups, parameter_attributes
from windlass.compat.announced_dtype import announce_half
from windlass.compat.collectives import initialize_mesh_device
from windlass.compat.config_assertions import assert_supported_by_deepspeed
from windlass.compat.config_sections import DeepSpeedZeroLeafModuleConfig
from windlass.compat.deepspeed_engine import DeepSpeedEngine
from windlass.compat.deepspeed_pipeline import DeepSpeedPipelineEngine
from windlass.compat.moe_layer import exchange_local_experts
from windlass.compat.mpu_sizes import spans_ranks
from windlass.compat.partition_parameters import requests_linear
from windlass.compat.rank_logging import log_dist, logger, set_log_level_from_string
from windlass.compat.root_names import git_branch, git_hash
from windlass.compat.script_config import mark_muon_matrices
from windlass.compat.stand_in_version import VERSION
from windlass.compat.tolerated_keys import resolve_tolerated_keys
from windlass.compat.tp_model_init import config_with_tp_arguments, count_batch_by_data_ranks
from windlass.compat.z3_leaf_modules import apply_zero_leaf_module_config, mark_fine_grained_modules
from windlass.compat.zero_linear import replace_linear
from windlass.config.config_source import read_source
from windlass.engine.pipeline_engine import register_pipeline_engine
from windlass.engine.trial_run import observer_of_run
from windlass.initialize import build_engine, config_source
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential

register_pipeline_engine(DeepSpeedEngine, DeepSpeedPipelineEngine)


class ArgumentError(ConfigError, AssertionError):
    """Error for mutually exclusive or missing arguments of `initialize`. DeepSpeed raises AssertionError here."""


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
    """Build an engine like `windlass.initialize`, with DeepSpeed's behavior.

    `engine.config` is the caller's dict. Unknown top-level keys are ignored with one warning. `args.local_rank` is
    checked against the environment. A model may be passed again: its previous engine is replaced (lightning does this
    when it evaluates after training).

    Args:
        mpu: object with the parallel sizes and groups. The script has already sharded the layers and marked their
            parameters (`tensor_model_parallel`, `partition_dim`). Only the parallelism that the configuration requests
            is applied here.
        mesh_param: `(data, sequence)`, the number of ranks along each axis; the script splits the sequences.

    Returns:
        `(engine, optimizer, loader, scheduler)`. The optimizer is `engine.optimizer`, which at stage 3 without an
            optimizer is a `ParameterOffload`. The last three may be None.

    Raises:
        ArgumentError: no model, no configuration or two, no process group with `dist_init_required=False`, a local
            rank that differs from the environment's, or an `mpu` with a `PipelineModule`.
        ConfigError: the configuration is invalid or requests an unsupported feature.
        CombinationError: the configuration combines keys that DeepSpeed asserts against.
        ModelError: the model or the optimizer is not trainable.
    """
    if model is None:
        raise ArgumentError("deepspeed.initialize requires a model")
    if dist_init_required is False and not dist.is_initialized():
        raise ArgumentError(
            "Distributed backend is not initialized. dist_init_required is False: call deepspeed.init_distributed() "
            "first, or leave the argument out"
        )
    _check_local_rank(args)
    try:
        observer = observer_of_run()
        source = observer.config_override or config_source(args, config, config_params)
        source = observer.change_config(source) or source
    except ConfigError as error:
        raise ArgumentError(str(error)) from None
    given = source if isinstance(source, dict) else read_source(source).data
    if isinstance(model, PipelineSequential) and mpu is not None:
        raise ArgumentError("mpu must be None with a PipelineModule, whose topology defines its groups")
    assert_supported_by_deepspeed(given, model, optimizer)
    if optimizer is None:
        mark_muon_matrices(given, model)
    asked = config_with_tp_arguments(model, source)
    parameter_attributes.install_parameter_attributes()
    exchange_local_experts(model, given, _drop_trivial_mpu(mpu), distributed_port)
    # An empty list means the same as None.
    trains_nothing = isinstance(model_parameters, (list, tuple)) and not model_parameters
    engine = build_engine(
        DeepSpeedEngine,
        resolve_tolerated_keys(asked if mpu is not None else count_batch_by_data_ranks(asked)),
        model=model,
        optimizer=optimizer,
        model_parameters=None if trains_nothing else model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=_drop_trivial_mpu(mpu),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        mesh_param=mesh_param,
        replace_training_engine=True,
    )
    log_dist(f"DeepSpeed info: version={VERSION}, git-hash={git_hash}, git-branch={git_branch}", ranks=[0])
    engine.record_arguments(given, mpu, optimizer, lr_scheduler, training_data, collate_fn)
    engine.mesh_device = _make_mesh_device(mesh_param, given)
    if engine.fp16_enabled():
        announce_half(engine.module)
    if engine.zero_optimization_stage() in (1, 2) and engine.optimizer is not None:
        _log_flat_groups(engine)
    if engine.zero_optimization_stage() == 3:
        if requests_linear(engine._config):
            replace_linear()
        leaves = (given.get("zero_optimization") or {}).get("leaf_module") or {}
        apply_zero_leaf_module_config(engine.module, DeepSpeedZeroLeafModuleConfig(**leaves))
        if threshold := engine._config.zero_optimization.stage3_module_granularity_threshold:
            mark_fine_grained_modules(engine.module, threshold)
    if isinstance(given.get("log_level"), str):
        set_log_level_from_string(given["log_level"])
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _log_flat_groups(engine: DeepSpeedEngine) -> None:
    """Log the device and size of each parameter group, in DeepSpeed's wording."""
    for number, group in enumerate(engine.optimizer.param_groups):
        numel = sum(parameter.numel() for parameter in group["params"])
        logger.info(
            f"Flattening param group {number} on {engine.device} (sufficient memory): "
            f"{len(group['params'])} parameters, {numel} elements"
        )


def _check_local_rank(args: Any) -> None:
    asked, here = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if asked is None or here is None:
        return
    if asked >= 0 and asked != int(here):
        raise ArgumentError(f"args.local_rank is {asked}, but the environment sets LOCAL_RANK={here}; make them equal")
    args.local_rank = int(here)


def _drop_trivial_mpu(mpu: Any) -> Any:
    """Return None for an `mpu` whose axes other than data all have one rank: it adds no information."""
    return mpu if spans_ranks(mpu) else None


def _make_mesh_device(mesh_param: Any, config_dict: dict[str, Any]) -> Any:
    """Create torch's device mesh of data and sequence ranks if one is requested, else return None. Collective."""
    if mesh_param is None and "sequence_parallel_size" in config_dict and "data_parallel_size" in config_dict:
        mesh_param = (config_dict["data_parallel_size"], config_dict["sequence_parallel_size"])
    if mesh_param is None:
        return None
    made = initialize_mesh_device(mesh_param, ("data_parallel", "sequence_parallel"))
    for place in (parallel_groups.__dict__, getattr(sys.modules.get("deepspeed.utils.groups"), "__dict__", {})):
        place["mesh_device"] = made
    return made
