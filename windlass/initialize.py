"""Entry point of training: builds an engine from a model and a configuration."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from windlass import watchdog
from windlass.base.compute_device import local_device, multiplies_fast
from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger, set_config_log_level
from windlass.base.malloc_thresholds import keep_freed_memory, returning_freed_memory
from windlass.base.text import join_abridged
from windlass.comm.bootstrap import DEFAULT_TIMEOUT, default_timeout, init_distributed
from windlass.comm.comms_logger import comms_logger
from windlass.comm.mesh import Mesh, build_mesh
from windlass.comm.mesh_shape import MeshShape
from windlass.compress.compressed_layers import shard_compressed_layers
from windlass.compress.engine_steps import check_compression, check_distillation, follow_engine_steps
from windlass.compress.quantize_training import plan_bits_of_stages, prepare_quantize_training
from windlass.compress.weight_quantization import is_requested, quantize_weights
from windlass.config import Axes, Config, load_config
from windlass.config.axis_sizes import axis_size
from windlass.config.offload_section import idle_offload_warning
from windlass.config.optimizer_section import late_start_warning
from windlass.engine.compression_observer import observe_compression
from windlass.engine.engine_reporter import startup_lines
from windlass.engine.out_of_memory import FailedRun, note_out_of_memory
from windlass.engine.parallelize import mesh_of_model, parallelize
from windlass.engine.pipeline_engine import engine_class_for
from windlass.engine.sharded_model_builder import build_sharded_model
from windlass.engine.training_engine import Engine
from windlass.engine.training_progress import TrainingProgress
from windlass.engine.trial_run import observer_of_run
from windlass.optim import muon_groups, optimizer_factory, scheduler_factory
from windlass.optim.loss_scale import LossScale, StaticLossScale, make_loss_scale
from windlass.parallel import activation_checkpoint_api
from windlass.parallel.experts import enable_router_bias_updates, get_requested_ep_size
from windlass.parallel.megatron_flags import has_flagged_parameters
from windlass.parallel.model_checkpointing import enable_checkpointing
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.pipeline.remote_parameters import drop_remote_parameters
from windlass.parallel.script_ranks import known_sizes, shards_model, sizes_of_mpu, sizes_of_topology
from windlass.zero import GatheredParameters, Init, parameter_registry
from windlass.zero.engine_callbacks import EngineCallbacks
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.update_class import update_class

EngineT = TypeVar("EngineT", bound=Engine)

_engines_by_model_id: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # keyed by the id of the module


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
) -> tuple[Engine, Any, Any, Any]:
    """Build an engine. Collective: every rank calls it with the same model, and rank 0's weights are used.

    Args:
        args: object whose `deepspeed_config` is a path to the configuration. Used when `config` is not given.
        model: the model to train, or to evaluate if there is no optimizer.
        optimizer: an optimizer over the model's parameters, or a callable that builds one from them. It overrides the
            configuration's optimizer.
        model_parameters: parameters or parameter groups for the optimizer. All trainable parameters by default.
        training_data: a dataset. If given, the third result is a loader of this rank's part of it.
        lr_scheduler: a scheduler, or a callable that builds one from the optimizer. It overrides the configuration's
            scheduler.
        distributed_port: port of the rendezvous if the environment sets none.
        mpu: object with the methods of Megatron's `mpu`, which return the sizes and groups of model-parallel axes.
        dist_init_required: False if the caller has already initialized torch.distributed.
        collate_fn: function that makes a batch from a list of samples, for the data loader.
        config: dict, path or base64 text. `config_params` is an older name of this argument.
        mesh_param: `(data-parallel size, sequence-parallel size)`.

    Returns:
        `(engine, optimizer, loader, scheduler)`; the last three may be None.

    Raises:
        ConfigError: the configuration is missing, invalid, or requests an unsupported feature.
        ModelError: the model or the optimizer cannot be trained.
        StorageError: no usable NVMe path or too little space on some rank. The model is unchanged.
    """
    observer = observer_of_run()
    source = observer.config_override or config_source(args, config, config_params)
    source = observer.change_config(source) or source
    engine = build_engine(
        Engine,
        source,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        mesh_param=mesh_param,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def build_engine(
    engine_class: type[EngineT],
    source: Any,
    *,
    model: nn.Module | None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    mesh_param: Any = None,
    replace_training_engine: bool = False,
) -> EngineT:
    """Build an engine of class `engine_class`, as `initialize` does.

    Args:
        source: the configuration.
        replace_training_engine: also destroy an engine that already trains this model, together with its optimizer
            states. If False, such an engine raises a ModelError.
    """
    if model is None:
        raise ModelError("initialize needs a model: initialize(model=..., config=...)")
    observer = observer_of_run()
    config = load_config(source)
    config.ensure_supported()
    set_config_log_level(config.log_level)
    if config.comments:
        logger.info(f"{config.name}: ignored as comments: {join_abridged(config.comments)}")
    if "activation_checkpointing" in config.model_fields_set and not activation_checkpoint_api.has_options():
        activation_checkpoint_api.configure(config)
    if dist_init_required is False and not dist.is_initialized():
        raise ConfigError(
            "dist_init_required=False, but torch.distributed is not initialised; initialise it or remove this argument"
        )
    if config.activation_checkpointing.enabled:
        function = activation_checkpoint_api.checkpoint if config.activation_checkpointing.changes_storage else None
        enable_checkpointing(model, "activation_checkpointing.enabled", function)
    setup_distributed(config, distributed_port)
    if "comms_logger" in config.model_fields_set:
        comms_logger.configure(config.comms_logger)
    world = dist.get_world_size()
    source = "torch.distributed" if "WORLD_SIZE" in os.environ else "one process, no launcher"
    by_script, by_model = _axis_sizes_from_script(model, mpu, mesh_param, world), _axis_sizes_from_model(model)
    axes = config.axes(world, source, {**by_script, **by_model})
    progress = TrainingProgress(
        config.resolve_batch(world, source, axes),
        managed_gradient_accumulation=config.managed_gradient_accumulation,
    )
    device = local_device()
    _check_hardware(config, device)
    _destroy_previous_engines(model, allow_training=replace_training_engine)
    if rate := config.parallel.expert_bias_update_rate:
        enable_router_bias_updates(model, rate, required=axes.pp == 1)
    if config.quantize_training is not None:
        in_stages = axes.pp > 1 or isinstance(model, PipelineSequential)
        prepare_quantize_training(model, config.quantize_training, config.eigenvalue, in_stages=in_stages)
    check_compression(model, config.compression_training)
    check_distillation(model, config.distillation, axes.sp)
    optimizer, model_parameters = _quantize_weights(model, optimizer, model_parameters, config)
    mesh = _get_or_build_mesh(model, config, axes)
    with returning_freed_memory():  # the block frees the original parameters unit by unit
        if mesh_of_model(model) is None:
            all_ids = {id(parameter) for parameter in model.parameters()}
            if shards_model(mpu):
                mpu.apply(model)
            parallelize(model, mesh, config, script_axes=_script_owned_axes(model, by_script, by_model, config))
            remote_ids = all_ids.difference(id(parameter) for parameter in model.parameters())
            optimizer, model_parameters = drop_remote_parameters(optimizer, model_parameters, remote_ids)
            plan_bits_of_stages(model, mesh.pp)
            if mesh.tp.size > 1:
                shard_compressed_layers(model, mesh.tp)
        built = _build_optimizer(model, optimizer, model_parameters, config, mesh)
        _check_checkpoint_format(built, config)
        observer.before_sharding(model, built, config)
        try:
            engine = engine_class_for(engine_class, model)(
                _ShardedModelBuilder(model, built, config, device, mesh),
                built,
                config,
                progress,
                _build_loss_scale(config),
            )
        except Exception as error:
            note_out_of_memory(error, FailedRun(model, config, world, device, "load"))
            raise
    _warn_of_late_freeze(built, config)
    if warning := idle_offload_warning(config.zero_optimization.offload_optimizer, config.zero_optimization.stage):
        logger.warning(warning)
    try:
        engine.lr_scheduler = _build_lr_scheduler(engine, lr_scheduler, config)
        if config.compile.enabled:
            engine.compile(config.compile.backend, config.compile.kwargs)
    except Exception:  # raised on every rank
        engine.destroy()
        raise
    if training_data is not None:
        engine.deepspeed_io(training_data, collate_fn=collate_fn)
    _engines_by_model_id[id(model)] = engine
    follow_engine_steps(model, progress)
    observe_compression(model, engine, mesh)
    if device.type == "cpu":
        keep_freed_memory()
    observer.after_initialize(engine)
    return engine


def _quantize_weights(
    model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None, config: Config
) -> tuple[Any, Iterable[Any] | None]:
    """Pack the modules that `weight_quantization` names.

    Return `(optimizer, model_parameters)` without the packed weights.

    Collective.
    """
    section = config.weight_quantization
    if not is_requested(section):
        return optimizer, model_parameters
    gone = quantize_weights(model, section, gather=GatheredParameters, shard=partial(_shard_packed, config))
    return drop_remote_parameters(optimizer, model_parameters, gone)


def _shard_packed(config: Config, module: nn.Module) -> None:
    if config.zero_optimization.stage == 3:
        Init(module=module, config_dict_or_path=config)


def setup_distributed(config: Config, port: int = 29500) -> None:
    """Initialize torch.distributed and start the watchdog as configured. Collective.

    Parts that are already initialized stay unchanged.
    """
    limits = _watchdog_limits(config)
    report_after = limits.report_after if limits is not None else None
    backend = None if config.comm.backend == "auto" else config.comm.backend
    init_distributed(backend, timeout=_collective_timeout(config), port=port, report_after=report_after)
    watchdog.start(limits)


AxisSizes = dict[str, dict[str, int]]  # {source of the sizes: {mesh axis: size}}


def _axis_sizes_from_script(model: nn.Module, mpu: Any, mesh_param: Any, world: int) -> AxisSizes:
    """Return axis sizes set by the script. Collective if `mpu` is given.

    The sizes come from the arguments `mpu` and `mesh_param` of `initialize`. Without `mpu`, the topology of a pipeline
    model also sets sizes if the topology has a tensor-parallel axis.
    """
    argument_sizes: AxisSizes = {}
    topology = model.topology() if isinstance(model, PipelineSequential) else None
    if mpu is not None:
        sizes, known = sizes_of_mpu(mpu, world), known_sizes(mpu)
        argument_sizes["mpu"] = {axis: size for axis, size in sizes.items() if axis in known}
    elif topology is not None and topology.get_dim("model") > 1:
        argument_sizes["the topology"] = sizes_of_topology(topology, world)
    if mesh_param is not None:
        _, sp = mesh_param  # DeepSpeed's order: data-parallel size, sequence-parallel size
        argument_sizes["mesh_param"] = {"sp": int(sp)}
    return argument_sizes


def _axis_sizes_from_model(model: nn.Module) -> AxisSizes:
    sizes: AxisSizes = {}
    if isinstance(model, PipelineSequential) and model.num_stages > 1:
        sizes["PipelineModule"] = {"pp": model.num_stages}
    if (ranks := get_requested_ep_size(model)) > 1:
        sizes["ep_size of MoE"] = {"ep": ranks}
    return sizes


def _script_owned_axes(model: nn.Module, by_script: AxisSizes, by_model: AxisSizes, config: Config) -> set[str]:
    """Return the axes along which the script itself shards its model.

    An axis is included if the script sets its size above 1, and neither the model nor the configuration requests
    sharding along this axis. The tp axis is also included if parameters carry Megatron's tensor-parallel flags.
    """
    known = {axis for sizes in by_script.values() for axis, size in sizes.items() if size > 1}
    requested = {axis for sizes in by_model.values() for axis in sizes} | {a for a in known if axis_size(config, a) > 1}
    return known - requested | ({"tp"} & known if has_flagged_parameters(model) else set())


def _watchdog_limits(config: Config) -> watchdog.WatchdogLimits | None:
    section = config.watchdog
    return watchdog.WatchdogLimits(section.report_after_s, section.timeout_s) if section.enabled else None


def _collective_timeout(config: Config) -> timedelta:
    """Return the timeout of a collective.

    The timeout exceeds the watchdog's, so that the watchdog can report the cause first. `DEEPSPEED_TIMEOUT` overrides
    the timeout of collectives.
    """
    section = config.watchdog
    patience = timedelta(seconds=1.5 * section.timeout_s) if section.enabled else DEFAULT_TIMEOUT
    return default_timeout(max(DEFAULT_TIMEOUT, patience))


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration from the arguments of a script.

    Raises:
        ConfigError: two configurations were given, or none.
    """
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = config if config is not None else config_params
    if from_args is not None and given is not None:
        raise ConfigError("there are two configurations: args.deepspeed_config and config; pass one")
    if from_args is None and given is None:
        raise ConfigError(
            "there is no configuration: pass config=... (a dict, a path or base64) or args.deepspeed_config"
        )
    return from_args if given is None else given


def _check_hardware(config: Config, device: torch.device) -> None:
    if config.bf16.enabled and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"bf16.enabled is true, but {torch.cuda.get_device_name(device)} has no bfloat16; write false, and "
            "fp16.enabled true for 16 bits"
        )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(config, name).enabled and not multiplies_fast(dtype, device):
            logger.warning(
                f"{name}.enabled is true, but this CPU has no fast {name} arithmetic: products of matrices take some "
                "4 to 40 times as long as in fp32; write false if fp32 fits"
            )


def _destroy_previous_engines(model: nn.Module, *, allow_training: bool) -> None:
    """Destroy an existing evaluation engine of this model.

    A training engine is destroyed only if `allow_training` is set.

    Raises:
        ModelError: the model has a training engine and `allow_training` is False.
    """
    others = {
        id(place.model): place.model for p in model.parameters() if (place := parameter_registry.find(p)) is not None
    }
    for other in others.values():
        trains = other.update is not None
        if trains and not allow_training:
            raise ModelError(
                "this model (or a part of it) has an engine that trains it; call engine.destroy() before the second "
                "initialize"
            )
        engine = _engines_by_model_id.pop(id(other.model), None)
        if engine is not None:
            lost = "; its optimizer states are dropped" if trains else ""
            logger.info(
                f"the {'training' if trains else 'evaluation'} engine of this model is replaced by the new one{lost}"
            )
            engine.destroy()


def _build_optimizer(
    model: nn.Module, given: Any, parameters: Iterable[Any] | None, config: Config, mesh: Mesh
) -> torch.optim.Optimizer | None:
    if isinstance(given, torch.optim.Optimizer):
        _check_optimizer_instance(given, single_stage=mesh.pp.size == 1)
        return given
    if given is None and config.optimizer is None:
        return None
    chosen: list[Any] = (
        list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    trains = any(p.requires_grad for p in model.parameters())
    if not any(mesh.of_stages(trains)):
        raise ModelError(
            "the model has no trainable parameter: set requires_grad on the parameters to train, or leave the "
            "optimizer out"
        )
    if not trains:
        chosen = [{"params": []}]  # this pipeline stage is frozen, other stages are not
    if callable(given):
        made = given(chosen)
        if not isinstance(made, torch.optim.Optimizer):
            raise ModelError(f"the optimizer callable returned a {type(made).__name__}; return a torch.optim.Optimizer")
        return made
    if given is not None:
        raise ModelError(f"optimizer is a {type(given).__name__}; pass a torch optimizer or a callable that makes one")
    assert config.optimizer is not None
    if config.optimizer.type.lower() == "muon" and parameters is None:
        chosen = muon_groups(model)  # embeddings, output heads and vectors are not matrices to orthogonalise
    return optimizer_factory.build_optimizer(config.optimizer.type, dict(config.optimizer.params), chosen)


def _check_checkpoint_format(optimizer: torch.optim.Optimizer | None, config: Config) -> None:
    if optimizer is not None and config.checkpoint.format == "deepspeed" and update_class(optimizer).reduces_itself:
        raise ConfigError(
            f"checkpoint.format is 'deepspeed', whose files cannot hold the per-rank states that "
            f"{type(optimizer).__name__} may keep; set it to 'windlass', or use another optimizer"
        )


def _warn_of_late_freeze(optimizer: torch.optim.Optimizer | None, config: Config) -> None:
    """Log a warning if the schedule ends before the freeze, or the first local step, of a compressed optimizer."""
    steps = config.scheduler.params.get("total_num_steps") if config.scheduler is not None else None
    for group in optimizer.param_groups if optimizer is not None else ():
        if warning := late_start_warning(group, steps):
            logger.warning(warning)
            return


def _check_optimizer_instance(optimizer: torch.optim.Optimizer, *, single_stage: bool) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"{type(optimizer).__name__} calls the model again inside its step, through a closure, which an engine "
            "cannot run; pass an optimizer whose step() needs no closure"
        )
    trains = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if not trains and single_stage:  # one stage of a pipeline may be frozen
        raise ModelError(
            "the optimizer holds no trainable parameter: set requires_grad on the parameters to train, or leave the "
            "optimizer out"
        )


def _get_or_build_mesh(model: nn.Module, config: Config, axes: Axes) -> Mesh:
    """Build the mesh of the configuration, or return the mesh of a model that is already sharded. Collective."""
    before, grid = mesh_of_model(model), MeshShape(**axes.sizes)
    if before is None:
        return build_mesh(grid, regather=axes.secondary_size, timeout=_collective_timeout(config))
    if before.grid != grid:
        raise ConfigError(
            f"this model was partitioned over the axes {before.grid}, and the configuration has {grid}: save it, and "
            "build and load it again to train it in another layout"
        )
    return before


@dataclass
class _ShardedModelBuilder:
    """Callable that shards an engine's model.

    Later calls use the mesh over which the model is partitioned, e.g. by tensor parallelism, or build a new one.

    Attributes:
        mesh: mesh for the first call; None afterwards, because destroying the sharded model may close its mesh.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    config: Config
    device: torch.device
    mesh: Mesh | None

    def __call__(self, callbacks: EngineCallbacks) -> ShardedModel:
        given, self.mesh, world = self.mesh, None, dist.get_world_size()
        mesh = (
            given or mesh_of_model(self.model) or _get_or_build_mesh(self.model, self.config, self.config.axes(world))
        )
        timeout = _collective_timeout(self.config)
        sharded = build_sharded_model(self.model, self.optimizer, self.config, self.device, mesh, callbacks, timeout)
        for line in startup_lines(sharded, self.config, world) if given is not None else ():
            logger.info(line)
        return sharded


def _build_loss_scale(config: Config) -> LossScale:
    return make_loss_scale(config.fp16) if config.fp16.enabled else StaticLossScale(1.0)


def _build_lr_scheduler(engine: Engine, given: Any, config: Config) -> Any:
    if given is not None:
        if hasattr(given, "step") or not callable(given):
            return given
        return given(engine.optimizer.optimizer if engine.optimizer is not None else None)
    if config.scheduler is None or engine.optimizer is None:
        return None
    return scheduler_factory.build_scheduler(config.scheduler.type, config.scheduler.params, engine.optimizer.optimizer)
