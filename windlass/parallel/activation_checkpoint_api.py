"""Configuration and entry points of activation checkpointing and of saved-tensor offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from windlass.base.compute_device import local_device
from windlass.base.errors import ConfigError
from windlass.comm.rank_group import RankGroup
from windlass.config import Config, load_config
from windlass.parallel.activation_store import ActivationStore, ActivationTier, DeviceStore, HostStore
from windlass.parallel.checkpoint_profiler import CheckpointProfiler
from windlass.parallel.device_copies import has_separate_memory
from windlass.parallel.nvme_activation_store import open_nvme_store
from windlass.parallel.recompute import RecomputeSettings, is_inside_checkpoint, recompute
from windlass.parallel.rng_tracker import MODEL_PARALLEL_RNG, rng_tracker
from windlass.parallel.saved_tensor_offload import MIN_OFFLOAD_BYTES, OffloadCounters, SavedTensorOffloader
from windlass.parallel.sharded_activation_store import ShardedStore


@dataclass(frozen=True)
class ActivationCheckpointOptions:
    """Options of `configure`. All but `group` and `min_offload_bytes` are keys of the section
    `activation_checkpointing`."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    nvme_path: tuple[str, ...] = ()
    group: dist.ProcessGroup | None = None
    min_offload_bytes: int = MIN_OFFLOAD_BYTES

    @property
    def tier(self) -> ActivationTier:
        """Tier that stores the inputs of checkpointed calls."""
        return "nvme" if self.nvme_path else "cpu" if self.cpu_checkpointing else "device"

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: two options contradict each other, an option requires another that is not set, or
                `min_offload_bytes` is negative.
        """
        if self.cpu_checkpointing and self.nvme_path:
            raise ConfigError(
                f"activation_checkpointing.nvme_path {list(self.nvme_path)} and cpu_checkpointing true name two tiers; "
                "leave one out"
            )
        if self.contiguous_memory_optimization and not self.number_checkpoints:
            raise ConfigError(
                "activation_checkpointing.contiguous_memory_optimization is true, but the number of checkpoints "
                "in the buffer is not set; add number_checkpoints"
            )
        if self.contiguous_memory_optimization and self.nvme_path:
            raise ConfigError(
                "activation_checkpointing.contiguous_memory_optimization is true, but inputs are stored in files at "
                "nvme_path, without a buffer; write false"
            )
        if self.min_offload_bytes < 0:
            raise ConfigError(f"min_offload_bytes = {self.min_offload_bytes} is negative; write 0 or more")


_SEED_OFFSET = 2718
_options: ActivationCheckpointOptions | None = None
_configured = False
_settings: RecomputeSettings | None = None
_offloaders: dict[tuple[ActivationTier, tuple[str, ...], int], SavedTensorOffloader] = {}


def configure(
    config: Any = None,
    *,
    partition_activations: bool | None = None,
    contiguous_memory_optimization: bool | None = None,
    number_checkpoints: int | None = None,
    cpu_checkpointing: bool | None = None,
    synchronize_checkpoint_boundary: bool | None = None,
    profile: bool | None = None,
    nvme_path: str | Sequence[str] | None = None,
    group: dist.ProcessGroup | None = None,
    min_offload_bytes: int | None = None,
) -> None:
    """Configure how later calls of `checkpoint` store their inputs. Calls that already ran keep their settings.

    Args:
        config: a configuration; its section `activation_checkpointing` applies where an argument is None. None: the
            defaults.
        partition_activations: shard saved inputs over `group`. No effect without a group of several ranks.
        contiguous_memory_optimization: store saved inputs in one buffer.
        number_checkpoints: number of checkpointed calls for which the buffer has space.
        cpu_checkpointing: store saved inputs in host memory.
        synchronize_checkpoint_boundary: synchronize the device before and after each outermost checkpointed call.
        profile: log, once per backward, the time of checkpointed calls and of their recomputation.
        nvme_path: store saved inputs in files in these folders.
        group: the model-parallel group: ranks whose saved inputs are equal.
        min_offload_bytes: tensors of fewer bytes stay on the device.

    Raises:
        ConfigError: the configuration is invalid, or `ActivationCheckpointOptions.check` fails.
        StorageError: no files can be created at `nvme_path`.
    """
    global _configured
    given: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_memory_optimization,
        "number_checkpoints": number_checkpoints,
        "cpu_checkpointing": cpu_checkpointing,
        "synchronize_checkpoint_boundary": synchronize_checkpoint_boundary,
        "profile": profile,
        "nvme_path": None if nvme_path is None else _as_paths(nvme_path),
        "group": group,
        "min_offload_bytes": min_offload_bytes,
    }
    text = {name: value for name, value in given.items() if value is not None}
    _apply_options(replace(_options_from_config(config), **text))
    _configured = True


def current_options() -> ActivationCheckpointOptions:
    """Return the configured options, or the defaults if none are set."""
    return _options or ActivationCheckpointOptions()


def set_options(options: ActivationCheckpointOptions | None, *, configured: bool = False) -> None:
    """Set all options at once. None restores the state before `configure`.

    Args:
        configured: if True, `is_configured` returns True from now on, as after `configure`.

    Raises:
        ConfigError: `ActivationCheckpointOptions.check` fails.
        StorageError: no files can be created at `nvme_path`.
    """
    global _options, _configured
    _apply_options(options or ActivationCheckpointOptions())
    _options = options
    _configured = options is not None and (configured or _configured)


def has_options() -> bool:
    """Return True if options were set, by `configure` or by `set_options`."""
    return _options is not None


def is_configured() -> bool:
    """Return True after `configure`, or `set_options` with `configured`, until `set_options(None)`."""
    return _configured


def reset() -> None:
    """Free the buffers and restart the counters. The options stay as configured; inputs that are already saved are not
    affected.
    """
    _offloaders.clear()
    if _options is not None:
        _apply_options(_options)


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`, save only its inputs, and recompute it in the backward.

    The recomputation draws the same random numbers as the forward. The function may take and return any objects, may
    contain further checkpointed calls and may raise. If gradients are disabled, the function is called and nothing
    is saved. Side effects of the function (a cache, a counter) happen twice.

    Raises:
        StorageError: inputs are stored in files that cannot be written or read. Also raised by the backward.
        ModelError: raised by the backward if inputs are offloaded, and an input that stays on the device, or whose copy
            was not complete, was changed in place.
    """
    global _settings
    if _settings is None:
        _settings = _settings_from_options(ActivationCheckpointOptions())
    return recompute(_settings, function, args, kwargs)


def checkpoint_to_tier(
    tier: ActivationTier, *, nvme_path: str | Sequence[str] | None = None, min_offload_bytes: int = MIN_OFFLOAD_BYTES
) -> Callable[..., Any]:
    """Return a function like `checkpoint` that stores inputs in `tier`, independent of the configuration.

    Args:
        nvme_path: folders for `"nvme"`.
        min_offload_bytes: tensors of fewer bytes stay on the device.

    Raises:
        ConfigError: an unknown tier, `"nvme"` without a path, or a path with another tier.
        StorageError: no files can be created at `nvme_path`.
    """
    paths = () if nvme_path is None else _as_paths(nvme_path)
    if tier not in get_args(ActivationTier):
        raise ConfigError(f"checkpoint_to_tier({tier!r}): write one of {', '.join(get_args(ActivationTier))}")
    if (tier == "nvme") != bool(paths):
        raise ConfigError(
            f'checkpoint_to_tier("{tier}") with nvme_path {list(paths)}: pass nvme_path with "nvme", and only then'
        )
    manner = _settings_from_options(
        ActivationCheckpointOptions(
            cpu_checkpointing=tier == "cpu", nvme_path=paths, min_offload_bytes=min_offload_bytes
        )
    )

    def kept(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return recompute(manner, function, args, kwargs)

    return kept


@contextmanager
def offload_saved_tensors(
    tier: ActivationTier = "cpu",
    *,
    nvme_path: str | Sequence[str] | None = None,
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
) -> Iterator[OffloadCounters]:
    """Offload the tensors that autograd saves inside this context to `tier`, and prefetch them in the backward.

    Nothing is offloaded inside a checkpointed call, nor to `"cpu"` if device and host share one memory. Autograd uses
    the values at the time of saving: a later in-place change of a tensor that was already copied raises no error.

    Args:
        tier: `"cpu"` or `"nvme"`.
        nvme_path: folders for `"nvme"`; by default the configured ones.
        min_offload_bytes: tensors of fewer bytes stay on the device, as do parameters and views of parameters.

    Yields:
        Byte counters, shared by all contexts with the same `tier`, `nvme_path` and `min_offload_bytes`.

    Raises:
        ConfigError: `tier` is neither `"cpu"` nor `"nvme"`, or `"nvme"` has no path.
        StorageError: files cannot be written or read.
        ModelError: raised by the backward if a saved tensor that stays on the device, or whose copy was not complete,
            was changed in place.
    """
    keeper = _offloader_for_tier(tier, () if nvme_path is None else _as_paths(nvme_path), min_offload_bytes)
    if is_inside_checkpoint() or (tier == "cpu" and not has_separate_memory(local_device())):
        yield keeper.counters
        return
    with saved_tensors_hooks(keeper.pack, keeper.unpack):
        yield keeper.counters


def get_offload_counters() -> OffloadCounters | None:
    """Return the byte counters of calls of `checkpoint`; None if their inputs are not put in a store."""
    return _settings.offloader.counters if _settings is not None and _settings.offloader is not None else None


def model_parallel_rank() -> int:
    """Return this rank's index in the configured model-parallel group, or 0 without a group."""
    group = _options.group if _options is not None else None
    return 0 if group is None else dist.get_rank(group)


def _as_paths(path: str | Sequence[str]) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else tuple(path)


def _options_from_config(config: Any) -> ActivationCheckpointOptions:
    if config is None:
        return ActivationCheckpointOptions()
    section = (config if isinstance(config, Config) else load_config(config)).activation_checkpointing
    values = section.model_dump(exclude={"enabled"})  # `enabled` concerns the model's layers, not `checkpoint`
    return ActivationCheckpointOptions(**{**values, "nvme_path": tuple(section.nvme_path)})


def _apply_options(options: ActivationCheckpointOptions) -> None:
    global _options, _settings
    options.check()
    _settings = _settings_from_options(options)
    _options = options


def _settings_from_options(options: ActivationCheckpointOptions) -> RecomputeSettings:
    place = _make_store(options)
    return RecomputeSettings(
        None if place is None else SavedTensorOffloader(place, options.min_offload_bytes),
        CheckpointProfiler(log_times=options.profile, synchronize=options.synchronize_checkpoint_boundary),
    )


def _make_store(options: ActivationCheckpointOptions) -> ActivationStore | None:
    """Return the store of checkpointed inputs, or None if the inputs stay where they are."""
    checkpoints = options.number_checkpoints if options.contiguous_memory_optimization else None
    shards = options.partition_activations and options.group is not None and dist.get_world_size(options.group) > 1
    place: ActivationStore
    if options.tier == "nvme":
        place = open_nvme_store(options.nvme_path)
    elif options.tier == "cpu" and (shards or has_separate_memory(local_device())):
        place = HostStore(checkpoints)
    elif shards or checkpoints is not None:
        place = DeviceStore(checkpoints)
    else:
        return None
    if shards:
        assert options.group is not None
        return ShardedStore(RankGroup.of(options.group), place)
    return place


def _offloader_for_tier(tier: ActivationTier, paths: tuple[str, ...], min_offload_bytes: int) -> SavedTensorOffloader:
    if tier not in ("cpu", "nvme"):
        raise ConfigError(f'offload_saved_tensors(tier={tier!r}): unknown tier; write "cpu" or "nvme"')
    if tier == "nvme" and not paths:
        paths = _options.nvme_path if _options is not None else ()
        if not paths:
            raise ConfigError(
                'offload_saved_tensors("nvme") has no folder; pass nvme_path=..., or configure(nvme_path=...)'
            )
    key = tier, paths, min_offload_bytes
    if key not in _offloaders:
        _offloaders[key] = SavedTensorOffloader(
            open_nvme_store(paths) if tier == "nvme" else HostStore(), min_offload_bytes
        )
    return _offloaders[key]


def manual_seed(seed: int) -> None:
    """Seed torch's default generator with `seed`, and the generator `"model-parallel-rng"` with a seed that differs
    between the ranks of the model-parallel group.

    All generators of the RNG tracker are removed first.
    """
    rng_tracker.reset()
    torch.manual_seed(seed)
    rng_tracker.add(MODEL_PARALLEL_RNG, model_parallel_seed(seed))


def model_parallel_seed(seed: int) -> int:
    """Return the seed of this rank's `"model-parallel-rng"` for a seed that all ranks share.

    The offset is Megatron's, so that layers that draw weights from this generator start with the same values as in
    Megatron.
    """
    return seed + _SEED_OFFSET + model_parallel_rank()
