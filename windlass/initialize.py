"""From a model and a configuration to an engine; the one file that knows every part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from windlass import watchdog
from windlass.base.device import keep_freed_memory, local_device
from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError, ModelError, StorageError
from windlass.base.freed_memory import freed_memory_returned
from windlass.base.log import logger, set_level_of_config
from windlass.base.text import abridged
from windlass.collectives.comms_log import comms_logger
from windlass.comm.bootstrap import DEFAULT_TIMEOUT, default_timeout, init_distributed
from windlass.comm.grid import Grid
from windlass.comm.mesh import Mesh, build_mesh
from windlass.comm.mpu import known_sizes, sizes_of_mpu
from windlass.comm.pipeline_grid import PipelineParallelGrid
from windlass.comm.transport import Ways
from windlass.config import Axes, Config, load
from windlass.config.axes import size_of
from windlass.engine.parallelize import mesh_of, parallelize
from windlass.engine.pipeline import engine_kind
from windlass.engine.progress import Progress
from windlass.engine.reporting import opening_lines
from windlass.engine.train import Engine
from windlass.engine.watch import installed
from windlass.optim import by_name, muon_groups, schedules
from windlass.optim.loss_scale import LossScale, StaticLossScale, from_config
from windlass.parallel import activations
from windlass.parallel.experts import asked_ranks, watch_balance
from windlass.parallel.flagged import any_flagged
from windlass.parallel.pipeline.leftovers import without
from windlass.parallel.pipeline.module import PipelineModule
from windlass.parallel.sequence.ulysses_sp import SequenceGroups
from windlass.storage import Home, PatientTier, Staging, buffer_bytes
from windlass.zero import registry
from windlass.zero.partition import Rules
from windlass.zero.policy import policy_of
from windlass.zero.settings import Homes, Settings
from windlass.zero.sharded import ShardedModel

Kind = TypeVar("Kind", bound=Engine)

_engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by id of the sharded model


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
    """Make an engine. Collective: every rank calls it with the same model; rank 0's weights count.

    Args:
        args: anything with `deepspeed_config`, a path to the configuration, when `config` is not given.
        model: to be trained, or only run where there is no optimizer.
        optimizer: an optimizer over the model's parameters, or a callable that makes one from them; goes before the
            configuration's.
        model_parameters: what the optimizer shall step: parameters or groups; all trainable ones by default.
        training_data: a dataset; the third result then is a loader of this rank's share.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer; goes before the configuration's.
        distributed_port: for the ranks to meet, where the environment names none.
        dist_init_required: False: the caller starts torch.distributed itself, and did.
        collate_fn: of the loader.
        config: dict, path or base64 text; `config_params` is its older name.

    Returns:
        `(engine, optimizer, loader, scheduler)`; the last three may be None.

    Raises:
        ConfigError: the configuration is missing, wrong, or asks for what is not built.
        ModelError: the model or the optimizer can't be trained.
        StorageError: what is to rest on disk finds no usable directory or no space, on any rank: the model is as it
            was.
    """
    source = installed().config or source_of(args, config, config_params)
    engine = build(
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


def build(
    kind: type[Kind],
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
    supersedes: bool = False,
) -> Kind:
    """As `initialize`, for an engine of the class `kind`; `source` is the configuration.

    Args:
        supersedes: an engine that trains this model makes way too, and its optimizer's states with it.
    """
    if model is None:
        raise ModelError("initialize needs a model: initialize(model=..., config=...)")
    watch = installed()
    settings_of = load(source)
    settings_of.ensure_supported()
    set_level_of_config(settings_of.log_level)
    if settings_of.comments:
        logger.info(f"{settings_of.name}: left out as comments: {abridged(settings_of.comments)}")
    if "activation_checkpointing" in settings_of.model_fields_set and not activations.is_configured():
        activations.configure(deepspeed_config=settings_of)
    if dist_init_required is False and not dist.is_initialized():
        raise ConfigError(
            "dist_init_required=False, but torch.distributed is not initialised; initialise it or leave that out"
        )
    meet(settings_of, distributed_port)
    if "comms_logger" in settings_of.model_fields_set:
        comms_logger.configure(settings_of.comms_logger)
    world = dist.get_world_size()
    source = "torch.distributed" if "WORLD_SIZE" in os.environ else "one process, no launcher"
    mpu = mpu if mpu is not None else _mpu_of(model)
    by_script, by_model = _said_by_script(mpu, mesh_param, world), _said_by_model(model)
    axes = settings_of.axes(world, source, {**by_script, **by_model})
    progress = Progress(
        settings_of.resolve_batch(world, source, axes), managed=settings_of.managed_gradient_accumulation
    )
    device = local_device()
    _check_hardware(settings_of, device)
    _supersede(model, trained=supersedes)
    if rate := settings_of.parallel.expert_balance_rate:
        watch_balance(model, rate, required=axes.pp == 1)
    mesh = _mesh(model, settings_of, axes)
    with freed_memory_returned():  # what the model lay in goes as its units come
        if mesh_of(model) is None:
            whole = {id(parameter) for parameter in model.parameters()}
            if isinstance(mpu, SequenceGroups):
                mpu.apply(model)
            parallelize(model, mesh, settings_of, own=_own(model, by_script, by_model, settings_of))
            gone = whole.difference(id(parameter) for parameter in model.parameters())
            optimizer, model_parameters = without(optimizer, model_parameters, gone)
        built = _optimizer(model, optimizer, model_parameters, settings_of, mesh)
        watch.before(model, built, settings_of)
        sharded = _shard(model, built, settings_of, device, mesh)
    engine = engine_kind(kind, model)(sharded, built, settings_of, progress, _loss_scale(settings_of))
    try:
        engine.lr_scheduler = _scheduler(engine, lr_scheduler, settings_of)
    except Exception:  # on every rank
        engine.destroy()
        raise
    if training_data is not None:
        engine.deepspeed_io(training_data, collate_fn=collate_fn)
    engine.rebuild = partial(_rebuild, built, settings_of, device)
    _engines[id(sharded)] = engine
    if device.type == "cpu":
        keep_freed_memory()
    for line in opening_lines(sharded, settings_of, world):
        logger.info(line)
    watch.after(engine)
    return engine


def meet(config: Config, port: int = 29500) -> None:
    """Have the ranks find each other, and the watchdog look after them, as the configuration says. Collective; what is
    there already stays as it is."""
    limits = _limits(config)
    report_after = limits.report_after if limits is not None else None
    init_distributed(timeout=_patience(config), port=port, report_after=report_after)
    watchdog.start(limits)


def _mpu_of(model: nn.Module) -> Any:
    """The groups of a row of layers whose own matrices are cut, as its topology says; None where it says nothing of
    that. Collective."""
    topology = model.topology() if isinstance(model, PipelineModule) else None
    return PipelineParallelGrid(topology) if topology is not None and topology.get_dim("model") > 1 else None


Sizes = dict[str, dict[str, int]]  # of axes, by what says them


def _said_by_script(mpu: Any, mesh_param: Any, world: int) -> Sizes:
    """What arguments of `initialize` say besides the configuration. Collective where there is an mpu."""
    said: Sizes = {}
    if mpu is not None:
        sizes, known = sizes_of_mpu(mpu, world), known_sizes(mpu)
        said["mpu"] = {axis: size for axis, size in sizes.items() if axis in known}
    if mesh_param is not None:
        _, sp = mesh_param  # DeepSpeed's: ranks that read data, ranks along the sequence
        said["mesh_param"] = {"sp": int(sp)}
    return said


def _said_by_model(model: nn.Module) -> Sizes:
    said: Sizes = {}
    if isinstance(model, PipelineModule) and model.num_stages > 1:
        said["PipelineModule"] = {"pp": model.num_stages}
    if (ranks := asked_ranks(model)) > 1:
        said["ep_size of MoE"] = {"ep": ranks}
    return said


def _own(model: nn.Module, by_script: Sizes, by_model: Sizes, config: Config) -> set[str]:
    """Axes along which a script cuts its model itself: its `mpu` or `mesh_param` knows them, and nothing asks for a
    model to be cut; or parameters say that they are cut."""
    known = {axis for sizes in by_script.values() for axis, size in sizes.items() if size > 1}
    asked = {axis for sizes in by_model.values() for axis in sizes} | {a for a in known if size_of(config, a) > 1}
    return known - asked | ({"tp"} & known if any_flagged(model) else set())


def _limits(config: Config) -> watchdog.Limits | None:
    section = config.watchdog
    return watchdog.Limits(section.report_after_s, section.timeout_s) if section.enabled else None


def _patience(config: Config) -> timedelta:
    """How long a collective waits for a peer: longer than the watchdog does, which knows the cause and tells it."""
    section = config.watchdog
    patience = timedelta(seconds=1.5 * section.timeout_s) if section.enabled else DEFAULT_TIMEOUT
    return default_timeout(max(DEFAULT_TIMEOUT, patience))


def source_of(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among those that a script may give.

    Raises:
        ConfigError: there are two, or none.
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
        raise ConfigError(f"bf16.enabled: {torch.cuda.get_device_name(device)} has no bfloat16; use fp16 or neither")


def _supersede(model: nn.Module, *, trained: bool) -> None:
    """A model has one engine: one that only evaluates makes way, one that trains is in the way, unless `trained`."""
    others = {id(place.model): place.model for p in model.parameters() if (place := registry.find(p)) is not None}
    for number, other in others.items():
        trains = other.update is not None
        if trains and not trained:
            raise ModelError(
                "this model (or a part of it) has an engine that trains it; call engine.destroy() before the second "
                "initialize"
            )
        engine = _engines.pop(number, None)
        if engine is not None:
            lost = ", and its optimizer's states with it" if trains else ""
            logger.info(
                f"the {'training' if trains else 'evaluation'} engine of this model makes way for the new one{lost}"
            )
            engine.destroy()


def _optimizer(
    model: nn.Module, given: Any, parameters: Iterable[Any] | None, config: Config, mesh: Mesh
) -> torch.optim.Optimizer | None:
    if isinstance(given, torch.optim.Optimizer):
        _check_instance(given, alone=mesh.pp.size == 1)
        return given
    if given is None and config.optimizer is None:
        return None
    chosen: list[Any] = (
        list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    trains = any(p.requires_grad for p in model.parameters())
    if not any(mesh.of_stages(trains)):
        raise ModelError(
            "the model has no trainable parameter: set requires_grad on what shall be trained, or leave the "
            "optimizer out"
        )
    if not trains:
        chosen = [{"params": []}]  # of a stage that is frozen, in a model that is not
    if callable(given):
        made = given(chosen)
        if not isinstance(made, torch.optim.Optimizer):
            raise ModelError(f"the optimizer callable returned a {type(made).__name__}, not a torch optimizer")
        return made
    if given is not None:
        raise ModelError(f"optimizer is a {type(given).__name__}; pass a torch optimizer or a callable that makes one")
    assert config.optimizer is not None
    if config.optimizer.type.lower() == "muon" and parameters is None:
        chosen = muon_groups(model)  # embeddings, heads and vectors are no matrices to orthogonalise
    return by_name.build(config.optimizer.type, dict(config.optimizer.params), chosen)


def _check_instance(optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "LBFGS calls the model again inside its step, which an engine cannot do; pass another optimizer"
        )
    trains = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if not trains and alone:  # a stage of a pipeline may be frozen
        raise ModelError(
            "the optimizer holds no trainable parameter: set requires_grad on what shall be trained, or leave the "
            "optimizer out"
        )


def _mesh(model: nn.Module, config: Config, axes: Axes) -> Mesh:
    """All ranks on the axes of the configuration; that of a model which is cut already is kept. Collective."""
    before, grid = mesh_of(model), Grid(**axes.sizes)
    if before is None:
        return build_mesh(grid, regather=axes.regather, timeout=_patience(config))
    if before.grid != grid:
        raise ConfigError(
            f"this model was cut over the axes {before.grid}, and the configuration has {grid}: save it, and build and "
            "load it anew to train it in another layout"
        )
    return before


def _shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, device: torch.device, mesh: Mesh
) -> ShardedModel:
    zero = config.zero_optimization
    homes = _homes(config)
    away = homes.param is not Home.DEVICE or homes.state is not Home.DEVICE
    policy = policy_of(zero.stage, mesh.dense.shard.size if zero.stage else mesh.dense.data.size, away=away)
    table = config.dtype_table()
    mixed = config.fp16.enabled or config.bf16.enabled
    widest = torch.float64 if any(p.dtype == torch.float64 for p in model.parameters()) and not mixed else None
    accumulate = widest or parse_dtype(table.accumulate)
    wire = widest or parse_dtype(table.reduce)
    before, after = _factors(config, wire, mesh)
    settings = Settings(
        policy=policy,
        rules=Rules(
            keep_below=zero.stage3_param_persistence_threshold,
            keep_at_most=zero.stage3_model_persistence_threshold,
            merge_below=zero.merge_below,
            split_above=max(zero.stage3_max_live_parameters, 1 << 20),
            blocks=tuple(zero.blocks or ()),
            lowered=_lowered(model, config),
        ),
        lowered_wire=parse_dtype(table.compute) if config.torch_autocast.enabled else None,
        compute=parse_dtype(table.parameter) if mixed else None,
        master=parse_dtype(table.master) if table.master != "fp32" else None,
        state=parse_dtype(table.state) if table.master != "fp32" else None,
        accumulate=accumulate,
        wire=wire,
        before=before,
        after=after,
        overlap=zero.overlaps,
        ways=Ways(
            reduce_chunk=zero.reduce_bucket_size,
            gather_chunk=zero.allgather_bucket_size,
            scatter=zero.reduce_scatter,
            together=zero.allgather_partitions,
            rotate=zero.round_robin_gradients,
        ),
        contiguous=zero.contiguous_gradients,
        ignore_unused=zero.ignore_unused_parameters,
        sub_group=zero.sub_group_size,
        ahead=zero.stage3_prefetch_bucket_size,
        live=zero.stage3_max_live_parameters,
        reuse=zero.stage3_max_reuse_distance,
        transport=config.comm.transport,
        timeout=_patience(config),
        homes=homes,
        delayed=zero.offload_optimizer is not None and zero.offload_optimizer.delayed_update,
    )
    try:
        return ShardedModel(model, optimizer, settings, mesh, device, trains=optimizer is not None)
    except BaseException:
        if homes.disk is not None:
            homes.disk.close()
        raise


def _lowered(model: nn.Module, config: Config) -> frozenset[int]:
    """Ids of the parameters whose gradients travel in the autocast dtype.

    Raises:
        ConfigError: a name is that of no class that is imported.
    """
    section = config.torch_autocast
    kinds: set[Any] = set()
    for name in (section.lower_precision_safe_modules or ()) if section.enabled else ():
        package, _, own = name.rpartition(".")
        kind = getattr(sys.modules.get(package), own, None)  # of the model's modules, so it is imported
        if not isinstance(kind, type):
            raise ConfigError(
                f"torch_autocast.lower_precision_safe_modules: {name!r} is no class of an imported module; write the "
                'full name of a class, such as "torch.nn.Linear"'
            )
        kinds.add(kind)
    modules = [module for module in model.modules() if type(module) in kinds]
    return frozenset(id(parameter) for module in modules for parameter in module.parameters(recurse=False))


def _rebuild(
    optimizer: torch.optim.Optimizer | None, config: Config, device: torch.device, engine: Engine
) -> ShardedModel:
    """Another layout of an engine's model, as it is now."""
    before = mesh_of(engine.module)
    mesh = before if before is not None else _mesh(engine.module, config, config.axes(dist.get_world_size()))
    sharded = _shard(engine.module, optimizer, config, device, mesh)
    _engines[id(sharded)] = engine
    return sharded


def _homes(config: Config) -> Homes:
    """Where slots rest, and the disk if any rests there."""
    zero = config.zero_optimization
    state, param = zero.offload_optimizer, zero.offload_param
    paths = [path for section in (state, param) if section is not None for path in _nvme_paths(section)]
    disk = _open_disk(list(dict.fromkeys(paths)), config) if paths else None
    staging = Staging(disk, _staging_bytes(config)) if disk is not None else None
    of_state = _HOMES[state.device] if state is not None else Home.DEVICE
    gradient = of_state
    if of_state is Home.NVME and state is not None:
        gradient = _HOMES[state.gradients]
    pins = [section.pin_memory for section in (state, param) if section is not None]
    return Homes(
        param=_HOMES[param.device] if param is not None else Home.DEVICE,
        state=of_state,
        gradient=gradient,
        ratio=state.ratio if state is not None else 1.0,
        pin=any(pins),
        disk=disk,
        staging=staging,
        read_ahead=param.buffer_count * param.buffer_size if param is not None else 0,
        at_once=staging.limit // (_AT_ONCE * _STAGED) if staging is not None else 1 << 62,
    )


def _open_disk(paths: list[str], config: Config) -> PatientTier:
    """The disk, on every rank or on none. Collective."""
    disk, problem = None, ""
    try:
        disk = PatientTier(
            paths,
            queue_depth=config.aio.queue_depth,
            block_size=config.aio.block_size,
            threads=config.aio.intra_op_parallelism if config.aio.intra_op_parallelism > 1 else None,
        )
    except StorageError as error:
        problem = str(error)
    problems = [problem] * dist.get_world_size()
    if len(problems) > 1:
        dist.all_gather_object(problems, problem)
    said = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if disk is None or said:
        if disk is not None:
            disk.close()
        raise StorageError("; ".join(said))
    return disk


_HOMES = {"none": Home.DEVICE, "cpu": Home.HOST, "nvme": Home.NVME}


def _nvme_paths(section: Any) -> list[str]:
    return list(section.nvme_path or ()) if section.device == "nvme" else []


_AT_ONCE = 3  # batches of an update on disk: one comes, one is updated, one goes
_STAGED = 16  # bytes of an element of a batch: master weight, two moments, gradient


def _staging_bytes(config: Config) -> int:
    """Of host memory through which a rank's part of what is on disk comes and goes: a share of what is free, or less
    where the number and the size of buffers was said."""
    zero = config.zero_optimization
    free = max(48 << 20, buffer_bytes(1 << 60, 1, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    state = zero.offload_optimizer
    if state is None or "buffer_count" not in state.model_fields_set:
        return free
    return min(free, max(_AT_ONCE, state.buffer_count) * zero.sub_group_size * _STAGED)


def _factors(config: Config, wire: torch.dtype, mesh: Mesh) -> tuple[float, float]:
    """Factors of a gradient before and after the sum over ranks; together 1 / world, or 1 / ranks along sp where
    gradients are summed (those ranks have the loss of the same sequence).

    Sums in 16 bits divide after, unless the configuration says otherwise: small gradients would vanish before. In
    float32 the order is free, and before costs nothing.
    """
    world = mesh.dense.data.size
    if config.gradient_allreduce_op == "sum":
        return mesh.grid.readers / world, 1.0
    divide = config.gradient_predivide_factor
    if config.prescale_gradients:
        return 1.0 / divide if divide != 1.0 else 1.0 / world, divide / world if divide != 1.0 else 1.0
    if divide != 1.0:
        return 1.0 / divide, divide / world
    return (1.0 / world, 1.0) if wire.itemsize >= 4 else (1.0, 1.0 / world)


def _loss_scale(config: Config) -> LossScale:
    return from_config(config.fp16) if config.fp16.enabled else StaticLossScale(1.0)


def _scheduler(engine: Engine, given: Any, config: Config) -> Any:
    if given is not None:
        if hasattr(given, "step") or not callable(given):
            return given
        return given(engine.optimizer.optimizer if engine.optimizer is not None else None)
    if config.scheduler is None or engine.optimizer is None:
        return None
    return schedules.build(config.scheduler.type, config.scheduler.params, engine.optimizer)
