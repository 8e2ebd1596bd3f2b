"""Uniform interface to windlass and the engines it is compared with: forward, backward, step."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError
from windlass.base.malloc_thresholds import keep_freed_memory

BASELINE_ENGINES = ("none", "none-kept", "ddp", "zro", "fsdp2", "fsdp3", "ds1", "ds2", "ds3")
_WINDLASS_NAME = re.compile(r"windlass-([0-3])(?:-(shm|gloo|nccl))?")


@dataclass(frozen=True)
class BenchEngine:
    """Model that an engine trains. `step` updates the parameters and clears the gradients."""

    forward: Callable[..., Any]
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]
    parameter_sum: Callable[[], float]  # sum of all full parameters, in float64; collective
    engine: Any = None  # windlass's engine; None for other engines


@dataclass(frozen=True)
class BenchHyperparameters:
    """Hyperparameters that all engines share. The optimizer is AdamW; a `max_grad_norm` of 0 disables clipping."""

    lr: float
    max_grad_norm: float
    micro_batch: int


def check_engine_name(name: str) -> str:
    """Return `name` if it is the name of an engine.

    Raises:
        ConfigError: no engine has this name.
    """
    if name not in BASELINE_ENGINES and _WINDLASS_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"engine {name!r} does not exist; use windlass-STAGE[-TRANSPORT] (windlass-3, windlass-2-gloo) or one of "
            f"{', '.join(BASELINE_ENGINES)}"
        )
    return name


def synchronizes_gradients(name: str) -> bool:
    """Return True if the ranks of this engine train one model. Losses are compared only between such engines."""
    return not name.startswith("none")


def preload_engine_modules(name: str) -> None:
    """Import the modules of the engine, so that their code is not counted as training memory."""
    # creating the first optimizer imports many torch modules
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)
    modules = {
        "ddp": ["torch.nn.parallel"],
        "zro": ["torch.nn.parallel", "torch.distributed.optim"],
        "fsd": ["torch.distributed.fsdp", "torch.distributed.device_mesh"],
        "win": ["windlass.initialize", "windlass.zero"],
    }
    for module in modules.get(name[:3], []):
        importlib.import_module(module)
    if name.startswith("ds"):
        import_deepspeed()


def make_engine(
    name: str,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    hyperparameters: BenchHyperparameters,
    device: torch.device,
) -> BenchEngine:
    """Wrap `model` (full parameters, equal on all ranks) in the engine `name`. Collective.

    Args:
        name: `none` (each rank trains its own copy, without communication), `none-kept` (the same, with malloc set to
            keep freed memory, as windlass sets it), `ddp`, `zro` (DDP with ZeroRedundancyOptimizer), `fsdp2` and
            `fsdp3` (FSDP2 without and with `reshard_after_forward`), `ds1` to `ds3` (DeepSpeed),
            `windlass-STAGE[-TRANSPORT]`.
        blocks: modules that FSDP2 shards one by one.
    """
    check_engine_name(name)
    windlass = _WINDLASS_NAME.fullmatch(name)
    if windlass is not None:
        return _windlass_engine(model, int(windlass[1]), windlass[2] or "auto", hyperparameters)
    model.to(device)
    if name.startswith("none"):
        return _single_rank_engine(model, hyperparameters, keep_memory=name == "none-kept")
    if name in ("ddp", "zro"):
        return _ddp_engine(model, hyperparameters, zero_optimizer=name == "zro")
    if name.startswith("fsdp"):
        return _fsdp2_engine(model, blocks, hyperparameters, device, reshard=name == "fsdp3")
    return _deepspeed_engine(model, int(name[2]), hyperparameters)


def _windlass_engine(
    model: nn.Module, stage: int, transport: str, hyperparameters: BenchHyperparameters
) -> BenchEngine:
    config = {
        "train_micro_batch_size_per_gpu": hyperparameters.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": hyperparameters.lr}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": hyperparameters.max_grad_norm,
        "steps_per_print": 10**9,
        "comm": {"transport": transport},
    }
    return windlass_engine_from_config(model, config)


def windlass_engine_from_config(model: nn.Module, config: dict[str, Any]) -> BenchEngine:
    """Wrap `model` in a windlass engine with the given configuration. Collective."""
    import windlass

    engine, _, _, _ = windlass.initialize(model=model, config=config)

    def parameter_sum() -> float:
        total = 0.0
        for parameter in model.parameters():
            with windlass.zero.GatheredParameters(parameter):
                total += _sum_parameters([parameter])
        return total

    return BenchEngine(engine, engine.backward, engine.step, parameter_sum, engine)


def _single_rank_engine(model: nn.Module, hyperparameters: BenchHyperparameters, *, keep_memory: bool) -> BenchEngine:
    if keep_memory:
        keep_freed_memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=hyperparameters.lr, fused=True)

    def update() -> None:
        _clip_gradients(model, hyperparameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return BenchEngine(model, torch.Tensor.backward, update, lambda: _sum_parameters(model.parameters()))


def _ddp_engine(model: nn.Module, hyperparameters: BenchHyperparameters, *, zero_optimizer: bool) -> BenchEngine:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=hyperparameters.lr, fused=True)
        if zero_optimizer
        else torch.optim.AdamW(wrapped.parameters(), lr=hyperparameters.lr, fused=True)
    )
    return BenchEngine(
        wrapped,
        torch.Tensor.backward,
        _step_function(model, optimizer, hyperparameters),
        lambda: _sum_parameters(model.parameters()),
    )


def _fsdp2_engine(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    hyperparameters: BenchHyperparameters,
    device: torch.device,
    *,
    reshard: bool,
) -> BenchEngine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=hyperparameters.lr, fused=True)

    def parameter_sum() -> float:
        shards: Iterable[Any] = model.parameters()
        return sum((_sum_parameters([shard.full_tensor()]) for shard in shards), 0.0)

    return BenchEngine(model, torch.Tensor.backward, _step_function(model, optimizer, hyperparameters), parameter_sum)


def _deepspeed_engine(model: nn.Module, stage: int, hyperparameters: BenchHyperparameters) -> BenchEngine:
    config = {
        "train_micro_batch_size_per_gpu": hyperparameters.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": hyperparameters.lr, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "gradient_clipping": hyperparameters.max_grad_norm,
        "steps_per_print": 10**9,
    }
    return deepspeed_engine_from_config(model, config)


def deepspeed_engine_from_config(model: nn.Module, config: dict[str, Any]) -> BenchEngine:
    """Wrap `model` in a DeepSpeed engine with the given configuration. Collective."""
    deepspeed = import_deepspeed()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def parameter_sum() -> float:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return _sum_parameters(model.parameters())

    return BenchEngine(engine, engine.backward, engine.step, parameter_sum)


def import_deepspeed() -> Any:
    """Import DeepSpeed. Unless the environment sets them, choose this machine's device and the log level `error`."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    return importlib.import_module("deepspeed")


def _step_function(
    model: nn.Module, optimizer: torch.optim.Optimizer, hyperparameters: BenchHyperparameters
) -> Callable[[], None]:
    def update() -> None:
        _clip_gradients(model, hyperparameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _clip_gradients(model: nn.Module, hyperparameters: BenchHyperparameters) -> None:
    if hyperparameters.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), hyperparameters.max_grad_norm)


def _sum_parameters(parameters: Iterable[torch.Tensor]) -> float:
    return sum(float(parameter.detach().sum(dtype=torch.float64)) for parameter in parameters)
