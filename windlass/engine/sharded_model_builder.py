"""Construction of the sharded model of an engine: settings of the ZeRO core and tiers, from the configuration."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from windlass.base.dtypes import is_castable, parse_dtype
from windlass.base.errors import ConfigError, StorageError
from windlass.comm.codec_check import check_codec
from windlass.comm.mesh import Mesh
from windlass.comm.mesh_shape import AXES
from windlass.comm.quantized_options import LocoOptions, QuantizedGradients
from windlass.comm.rank_group import world_group
from windlass.comm.transport import WireOptions
from windlass.config import Config
from windlass.config.axis_sizes import Axes
from windlass.config.offload_section import AutoOffload, OffloadOptimizer, OffloadParam
from windlass.config.zero_section import ZeroConfig
from windlass.engine.tier_planning import plan_tiers
from windlass.storage import DeferredFailureTier, StagingPool, Tier, staging_buffer_bytes
from windlass.storage.extent_allocator import page_up
from windlass.zero.core.sharding_policy import ShardingPolicy
from windlass.zero.engine_callbacks import EngineCallbacks
from windlass.zero.setup.stage_policy import sharding_policy
from windlass.zero.setup.zero_settings import Placements, UnitRules, ZeroSettings
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.update_class import update_class

_TIER_OF_DEVICE = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
_BATCHES_IN_FLIGHT = 3  # batches of an NVMe update in flight: one is read, one is updated, one is written
_STAGING_SHARE, _LEAST_STAGING = 0.25, 1 << 16  # fraction of `offload.host_memory`; lower bound in bytes
_STAGED_BYTES_PER_ELEMENT = 16  # bytes per element of a batch: master weight, two moments and gradient, 4 each


def build_sharded_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    device: torch.device,
    mesh: Mesh,
    callbacks: EngineCallbacks,
    timeout: timedelta,
) -> ShardedModel:
    """Shard `model` over the data ranks of `mesh`, as the configuration requests. Collective.

    Args:
        optimizer: the user's optimizer; None: the model is only evaluated.
        timeout: time-out of collectives.

    Raises:
        ConfigError: `torch_autocast` names an unknown class, `offload` finds no placement that fits, or a codec cannot
            carry its messages.
        StorageError: the NVMe tier cannot be opened on some rank. Raised on all ranks.
    """
    tiers = _build_placements(config)
    try:
        settings = build_settings(model, config, mesh, tiers, timeout)
        if optimizer is not None:
            settings = replace(
                settings, unit_rules=replace(settings.unit_rules, unstepped=_unstepped_parameters(model, optimizer))
            )
        if config.offload is not None:
            accumulation = _accumulation_of(config, mesh)
            settings = plan_tiers(model, optimizer, config.offload, settings, mesh, device, accumulation)
            tiers = _without_unused_disk(settings.tiers)
            settings = replace(settings, tiers=tiers, policy=policy_of(config, mesh, tiers))
        _check_codecs(model, config.zero_optimization, settings.param_dtype, device)
        return ShardedModel(model, optimizer, settings, mesh, device, callbacks, trains=optimizer is not None)
    except BaseException:
        if tiers.disk is not None:
            tiers.disk.close()
        raise


def build_settings(model: nn.Module, config: Config, mesh: Mesh, tiers: Placements, timeout: timedelta) -> ZeroSettings:
    """Return the settings of the ZeRO core for `model`, which may be on the meta device.

    Args:
        tiers: tiers of parameters, gradients and states. `planned_placements` returns them without opening a disk.
        timeout: time-out of collectives.

    Raises:
        ConfigError: `torch_autocast` names an unknown class.
    """
    zero = config.zero_optimization
    policy = policy_of(config, mesh, tiers)
    table = config.dtype_table()
    mixed = config.fp16.enabled or config.bf16.enabled
    widest = torch.float64 if any(p.dtype == torch.float64 for p in model.parameters()) and not mixed else None
    accumulate = widest or parse_dtype(table.accumulation_dtype)
    wire = widest or parse_dtype(table.reduce_dtype)
    before, after = _gradient_divide_factors(config, wire, mesh)
    return ZeroSettings(
        policy=policy,
        unit_rules=UnitRules(
            persistence_threshold=zero.stage3_param_persistence_threshold,
            max_persistent_numel=zero.stage3_model_persistence_threshold,
            merge_below=zero.unit_merge_threshold,
            split_above=max(zero.stage3_max_live_parameters, 1 << 20),
            blocks=tuple(zero.blocks or ()),
            lowered=_autocast_reduced_parameters(model, config),
        ),
        lowered_reduce_dtype=parse_dtype(table.compute_dtype) if config.torch_autocast.enabled else None,
        param_dtype=parse_dtype(table.param_dtype) if mixed else None,
        master_dtype=parse_dtype(table.master_dtype) if table.master_dtype != "fp32" else None,
        state_dtype=parse_dtype(table.state_dtype) if table.master_dtype != "fp32" else None,
        accumulation_dtype=accumulate,
        reduce_dtype=wire,
        predivide_factor=before,
        postdivide_factor=after,
        overlap_comm=zero.overlap_comm_enabled,
        wire_options=WireOptions(
            reduce_chunk=zero.reduce_bucket_size,
            gather_chunk=zero.allgather_bucket_size,
            use_reduce_scatter=zero.reduce_scatter,
            use_all_gather=zero.allgather_partitions,
            rotate_peers=zero.round_robin_gradients,
            **_quantized_options(zero),
            **_node_options(zero),
        ),
        contiguous_gradients=zero.contiguous_gradients,
        ignore_unused_parameters=zero.ignore_unused_parameters,
        sub_group_size=zero.sub_group_size,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        max_live_numel=zero.stage3_max_live_parameters,
        max_reuse_distance=zero.stage3_max_reuse_distance,
        transport=config.comm.transport,
        timeout=timeout,
        tiers=tiers,
        delayed_update=zero.offload_optimizer is not None and zero.offload_optimizer.delayed_update,
        trained_codec=zero.zero_quantized_weights_codec if zero.zero_quantized_weights else None,
        frozen_codec=(
            zero.zero_quantized_weights_codec
            if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
            else None
        ),
    )


def _unstepped_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the ids of the trainable parameters that are in no group of the optimizer.

    Empty for an update that reduces gradients by itself: such an update drops the local gradients of every step.
    """
    if update_class(optimizer).reduces_itself:
        return frozenset()
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return frozenset(id(p) for p in model.parameters() if p.requires_grad and id(p) not in grouped)


def policy_of(config: Config, mesh: Mesh, tiers: Placements) -> ShardingPolicy:
    """Return the sharding policy of the configuration. `tiers` is used only to detect offloaded parameters or
    states."""
    stage = config.zero_optimization.stage
    has_offload = tiers.param is not Tier.DEVICE or tiers.state is not Tier.DEVICE
    return sharding_policy(stage, mesh.dense.shard.size if stage else mesh.dense.data.size, has_offload=has_offload)


def _without_unused_disk(tiers: Placements) -> Placements:
    """Return `tiers`. If nothing is on NVMe, close the disk and leave it out."""
    if tiers.disk is None or Tier.NVME in (tiers.param, tiers.state, tiers.gradient):
        return tiers
    tiers.disk.close()
    return replace(tiers, disk=None, staging=None, max_update_numel=_max_update_numel(None))


def _accumulation_of(config: Config, mesh: Mesh) -> int:
    """Return the number of micro-batches in a step, as `initialize` resolves it."""
    axes = Axes(**{axis: mesh.grid.size(axis) for axis in AXES})  # a script or a model may set sizes of axes
    return config.resolve_batch(mesh.grid.world, axes=axes).accumulation


def _quantized_options(zero: ZeroConfig) -> dict[str, Any]:
    """Return the options of a wire transport that ZeRO++ sets."""
    if not (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights or zero.zero_quantized_gradients):
        return {}
    gradients = None
    if zero.zero_quantized_gradients:
        loco = None
        if zero.zeropp_loco_param is not None:
            loco = LocoOptions(zero.zeropp_loco_param.err_beta, zero.zeropp_loco_param.reset_T)
        gradients = QuantizedGradients(
            zero.zero_quantized_gradients_codec, zero.zero_quantized_gradients_codec_across, loco
        )
    return {"quantizes": True, "gradients": gradients}


def _node_options(zero: ZeroConfig) -> dict[str, Any]:
    """Return the options of a wire transport that tell nodes apart."""
    hpz = zero.zero_hpz_partition_size
    return {"node_size": hpz} if hpz > 1 else {"host_size": max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))}


def _check_codecs(model: nn.Module, zero: ZeroConfig, param_dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise a ConfigError if a codec that ZeRO++ uses cannot carry its messages."""
    if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights:
        gathered = {
            param_dtype or p.dtype
            for p in model.parameters()
            if is_castable(p.dtype) and (zero.zero_quantized_weights or not p.requires_grad)
        }
        for dtype in sorted(gathered, key=str):
            key = "zero_optimization.zero_quantized_weights_codec"
            check_codec(key, zero.zero_quantized_weights_codec, dtype, device, keeps_overflow=False)
    if zero.zero_quantized_gradients:
        for key in ("zero_quantized_gradients_codec", "zero_quantized_gradients_codec_across"):
            name = getattr(zero, key)
            check_codec(f"zero_optimization.{key}", name, torch.float32, device, keeps_overflow=True)


def _autocast_reduced_parameters(model: nn.Module, config: Config) -> frozenset[int]:
    """Return the ids of parameters whose gradients are reduced in the autocast dtype.

    Raises:
        ConfigError: a name is not a class of an imported module.
    """
    section = config.torch_autocast
    kinds: set[Any] = set()
    for name in (section.lower_precision_safe_modules or ()) if section.enabled else ():
        package, _, own = name.rpartition(".")
        # the module is already imported, because the model uses the class
        kind = getattr(sys.modules.get(package), own, None)
        if not isinstance(kind, type):
            raise ConfigError(
                f"torch_autocast.lower_precision_safe_modules: {name!r} is not a class of an imported module; write "
                'the full name of a class, such as "torch.nn.Linear"'
            )
        kinds.add(kind)
    modules = [module for module in model.modules() if type(module) in kinds]
    return frozenset(id(parameter) for module in modules for parameter in module.parameters(recurse=False))


def _build_placements(config: Config) -> Placements:
    """Return the tiers of parameters, gradients and states, and open the NVMe tier if one of them is NVMe."""
    state, param = _offload_sections(config)
    paths = [path for section in (state, param) if section is not None for path in _nvme_paths(section)]
    paths += config.offload.nvme_path or () if config.offload is not None else ()
    disk = _open_nvme_tier(list(dict.fromkeys(paths)), config) if paths else None
    staging = StagingPool(disk, staging_bytes(config)) if disk is not None else None
    planned = planned_placements(config, staging.limit if staging is not None else None)
    return replace(planned, disk=disk, staging=staging)


def planned_placements(config: Config, staging_limit: int | None) -> Placements:
    """Return the tiers of parameters, gradients and states, without opening a disk.

    Args:
        staging_limit: bytes of host memory that stage NVMe transfers; None: nothing is on NVMe.
    """
    if config.offload is not None:
        return _undecided_placements(config, config.offload, staging_limit)
    state, param = _offload_sections(config)
    of_state = _TIER_OF_DEVICE[state.device] if state is not None else Tier.DEVICE
    gradient = of_state
    if of_state is Tier.NVME and state is not None:
        gradient = _TIER_OF_DEVICE[state.gradient_device]
    pins = [section.pin_memory for section in (state, param) if section is not None]
    return Placements(
        param=_TIER_OF_DEVICE[param.device] if param is not None else Tier.DEVICE,
        state=of_state,
        gradient=gradient,
        ratio=state.ratio if state is not None else 1.0,
        pin=any(pins),
        read_ahead_numel=param.buffer_count * param.buffer_size if param is not None else 0,
        max_update_numel=_max_update_numel(staging_limit),
    )


def _offload_sections(config: Config) -> tuple[OffloadOptimizer | None, OffloadParam | None]:
    """Return the sections of optimizer states and of parameters. At stage 0 states stay on the device; see
    `idle_offload_warning`.
    """
    zero = config.zero_optimization
    return zero.offload_optimizer if zero.stage else None, zero.offload_param


def _undecided_placements(config: Config, section: AutoOffload, staging_limit: int | None) -> Placements:
    """Return provisional placements: `plan_tiers` computes the sizes of units with them, then chooses their tiers."""
    return Placements(
        param=Tier.HOST if config.zero_optimization.stage == 3 else Tier.DEVICE,
        state=Tier.HOST,
        gradient=Tier.HOST,
        pin=section.pin_memory,
        read_ahead_numel=section.buffer_count * section.buffer_size,
        max_update_numel=_max_update_numel(staging_limit),
    )


def _max_update_numel(staging_limit: int | None) -> int:
    return 1 << 62 if staging_limit is None else staging_limit // (_BATCHES_IN_FLIGHT * _STAGED_BYTES_PER_ELEMENT)


def _open_nvme_tier(paths: list[str], config: Config) -> DeferredFailureTier:
    """Open the NVMe tier on every rank; if any rank fails, close it and raise on all ranks. Collective."""
    disk, problem = None, ""
    try:
        disk = DeferredFailureTier(
            paths,
            queue_depth=config.aio.queue_depth,
            block_size=config.aio.block_size,
            threads=config.aio.intra_op_parallelism if config.aio.intra_op_parallelism > 1 else None,
        )
    except StorageError as error:
        problem = str(error)
    problems = world_group().all_gather_object(problem)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if disk is None or failures:
        if disk is not None:
            disk.close()
        raise StorageError("; ".join(failures))
    return disk


def _nvme_paths(section: Any) -> list[str]:
    return list(section.nvme_path or ()) if section.device == "nvme" else []


def staging_bytes(config: Config, host_memory: int | None = None) -> int:
    """Return the bytes of host memory that stage this rank's NVMe reads and writes.

    The result is a fraction of `offload.host_memory` if that key is set. Otherwise it is a fraction of free host
    memory, which `offload_optimizer.buffer_count` also limits if it is set.

    Args:
        host_memory: free host memory of a rank in bytes; None: this rank's part of the machine's free memory.
    """
    zero = config.zero_optimization
    if config.offload is not None and config.offload.host_memory is not None:
        return max(_LEAST_STAGING, int(_STAGING_SHARE * config.offload.host_memory))
    if host_memory is None:
        free = staging_buffer_bytes(1 << 60, 1, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    else:
        free = page_up(int(_STAGING_SHARE * host_memory))
    free = max(48 << 20, free)
    state = zero.offload_optimizer
    if state is None or "buffer_count" not in state.model_fields_set:
        return free
    return min(free, max(_BATCHES_IN_FLIGHT, state.buffer_count) * zero.sub_group_size * _STAGED_BYTES_PER_ELEMENT)


def _gradient_divide_factors(config: Config, reduce_dtype: torch.dtype, mesh: Mesh) -> tuple[float, float]:
    """Return the factors of a gradient before and after the sum over ranks.

    The product of the two factors is 1 / data-parallel ranks. With `gradient_allreduce_op: sum` it is 1 / (ranks along
    sp), because those ranks share the loss of one sequence. A predivide factor is then multiplied back after the sum,
    and prescale_gradients has nothing to divide, as in DeepSpeed.

    By default 16-bit sums are divided after the sum, because small gradients would underflow if they were divided
    before. In float32 the order does not matter, and dividing before costs nothing.
    """
    world = mesh.dense.data.size
    divide = config.gradient_predivide_factor
    if config.gradient_allreduce_op == "sum":
        return mesh.grid.data_loading_size / world / divide, divide
    if config.prescale_gradients:
        return 1.0 / divide if divide != 1.0 else 1.0 / world, divide / world if divide != 1.0 else 1.0
    if divide != 1.0:
        return 1.0 / divide, divide / world
    return (1.0 / world, 1.0) if reduce_dtype.itemsize >= 4 else (1.0, 1.0 / world)
