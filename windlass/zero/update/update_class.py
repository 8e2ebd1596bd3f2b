"""Choice of the update class of an optimizer, and check of the settings for an update with local gradients."""

from __future__ import annotations

import torch

from windlass.base.errors import ConfigError
from windlass.comm.mesh import Mesh
from windlass.optim.diloco import DiLoCo
from windlass.optim.elementwise_optimizers import is_elementwise
from windlass.optim.one_bit_adam import OneBitAdam
from windlass.optim.one_bit_lamb import OneBitLamb
from windlass.optim.power_sgd import PowerSGD
from windlass.optim.update_registry import find_registered_update
from windlass.optim.zero_one_adam import ZeroOneAdam
from windlass.storage.slot import Tier
from windlass.zero.setup.zero_settings import ZeroSettings
from windlass.zero.update.diloco_update import DiLoCoUpdate
from windlass.zero.update.elementwise_update import ElementwiseUpdate
from windlass.zero.update.one_bit_adam_update import OneBitAdamUpdate
from windlass.zero.update.one_bit_lamb_update import OneBitLambUpdate
from windlass.zero.update.power_sgd_update import PowerSGDUpdate
from windlass.zero.update.sharded_one_bit_lamb_update import ShardedOneBitLambUpdate
from windlass.zero.update.update_protocol import Update
from windlass.zero.update.whole_parameter_update import WholeParameterUpdate
from windlass.zero.update.zero_one_adam_update import ZeroOneAdamUpdate

_ONE_BIT: dict[type[torch.optim.Optimizer], type[Update]] = {
    OneBitAdam: OneBitAdamUpdate,
    OneBitLamb: OneBitLambUpdate,
    ZeroOneAdam: ZeroOneAdamUpdate,
    DiLoCo: DiLoCoUpdate,
    PowerSGD: PowerSGDUpdate,
}
_MODEL_AXES = ("pp", "ep", "sp", "tp")
_AXIS_NAMES = {"pp": "pipeline", "ep": "expert", "sp": "sequence", "tp": "tensor"}
_DEVICE_KEYS = {Tier.HOST: "cpu", Tier.NVME: "nvme"}


def update_class(optimizer: torch.optim.Optimizer, shards_states: bool = False) -> type[Update]:
    """Return the class that steps `optimizer`, with or without sharded states.

    A class registered for the optimizer (`windlass.optim.register_update`) has precedence. The 1-bit optimizers, DiLoCo
    and PowerSGD have separate update classes. Of the others, elementwise optimizers step flat segments, and the rest
    step full parameters.
    """
    registered = find_registered_update(optimizer)
    if registered is not None:
        return registered
    one_bit = _one_bit_class(optimizer)
    if one_bit is OneBitLambUpdate and shards_states:
        return ShardedOneBitLambUpdate
    if one_bit is not None:
        return one_bit
    return ElementwiseUpdate if is_elementwise(optimizer) else WholeParameterUpdate


def _one_bit_class(optimizer: torch.optim.Optimizer) -> type[Update] | None:
    return next((update for owner, update in _ONE_BIT.items() if isinstance(optimizer, owner)), None)


def check_self_reducing(optimizer: torch.optim.Optimizer, settings: ZeroSettings, mesh: Mesh) -> None:
    """Check that the settings permit the optimizer's update, if it reduces gradients by itself.

    Raises:
        ConfigError: the stage, an offload key, a delayed update, a parallel axis or `mics_shard_size` excludes local
            gradients.
    """
    if not update_class(optimizer).reduces_itself:
        return
    name, tiers = type(optimizer).__name__, settings.tiers
    why = f"and {name} receives the local gradients of each rank and reduces them itself"
    if _one_bit_class(optimizer) is not None:
        _check_one_bit(optimizer, settings)
    elif not settings.policy.can_keep_local_gradients:
        raise ConfigError(
            f"zero_optimization.stage is {settings.policy.stage}, which reduces and shards gradients during the "
            f"backward, {why}; set it to 0 or 1, or use another optimizer"
        )
    for key, tier in (("offload_param", tiers.param), ("offload_optimizer", tiers.state)):
        if tier is not Tier.DEVICE and _one_bit_class(optimizer) is None:
            raise ConfigError(
                f"zero_optimization.{key}.device is {_DEVICE_KEYS[tier]!r}, {why}, on the device; set it to 'none', or "
                "use another optimizer"
            )
    refused = ("ep", "sp") if _one_bit_class(optimizer) is not None else _MODEL_AXES
    long_axes = [f"{name} = {axis.size}" for name, axis in mesh.axes.items() if name in refused and axis.size > 1]
    if long_axes or mesh.experts is not mesh.dense:
        raise ConfigError(
            f"the parallel axes {', '.join(long_axes)} shard the model or its inputs, {why} over data-parallel ranks "
            f"alone; set {', '.join(_AXIS_NAMES[one] for one in refused)} parallel sizes to 1, or use another optimizer"
        )
    if settings.policy.state and mesh.dense.replicate.size > 1:
        raise ConfigError(
            f"states are sharded over {mesh.dense.shard.size} of {mesh.dense.data.size} data-parallel ranks, {why} "
            "over all of them; delete zero_optimization.mics_shard_size, or use another optimizer"
        )


def _check_one_bit(optimizer: torch.optim.Optimizer, settings: ZeroSettings) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, DiLoCo) and settings.policy.stage:
        raise ConfigError(
            f"zero_optimization.stage is {settings.policy.stage}, and each rank of {name} takes local steps with whole "
            "parameters and states of its own; set it to 0, or use ZeroOneAdam"
        )
    if isinstance(optimizer, PowerSGD) and settings.policy.stage:
        raise ConfigError(
            f"zero_optimization.stage is {settings.policy.stage}, where new parameters are gathered in full, so that "
            f"the thin matrices of {name} would save half at most; set it to 0, or use OneBitAdam or ZeroOneAdam"
        )
    if settings.policy.stage == 3:
        raise ConfigError(
            f"zero_optimization.stage is 3, at which every use of a parameter gathers it in full and no rank has a "
            f"whole gradient, so the one bit of {name} would save little; set the stage to 0, 1 or 2, or keep stage 3 "
            "with AdamW and zero_quantized_weights and zero_quantized_gradients"
        )
    if settings.delayed_update:
        raise ConfigError(
            f"offload_optimizer.delayed_update is true, and {name} communicates during an update; set it to false"
        )
