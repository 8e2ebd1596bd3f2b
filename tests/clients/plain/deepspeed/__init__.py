"""Parts of `deepspeed` that DeepSpeedExamples imports, in plain PyTorch: the reference for its losses.

Every rank has the whole model in the configuration's dtype, and master weights in float32. Gradients are averaged over
ranks once in a step.
"""

from __future__ import annotations

import contextlib
import enum
import json
import operator
import os
import random
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def low(config: dict[str, Any]) -> bool:
    """Return True if parameters are bf16."""
    return any(config.get(name, {}).get("enabled") for name in ("bf16", "bfloat16"))


class Engine(nn.Module):
    """Plain PyTorch engine: a model and a torch optimizer."""

    device = torch.device("cpu")

    def __init__(self, model: nn.Module, config: dict[str, Any], optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.ranks, self.scheduler, self.optimizer, self.passes = dist.get_world_size(), scheduler, optimizer, 0
        self.clip = config.get("gradient_clipping", 1.0)
        micro = config.get("train_micro_batch_size_per_gpu", config.get("train_batch_size", 0) // self.ranks)
        self.passes_of_step = config.get("train_batch_size", micro * self.ranks) // (micro * self.ranks)
        assert not config.get("fp16", {}).get("enabled"), "fp16 has a loss scale, and the steps that it skips"
        if optimizer is None and "optimizer" in config:
            options = config["optimizer"]["params"]
            self.optimizer = torch.optim.AdamW(model.parameters(), **{"weight_decay": 0.0, **options})
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for parameter in group["params"]:
                self.masters[parameter] = parameter.detach().float().clone().requires_grad_()
            group["params"] = [self.masters[parameter] for parameter in group["params"]]
        self.module = model.bfloat16() if low(config) else model
        self.tput_timer = SimpleNamespace(update_epoch_count=lambda: None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def gradient_accumulation_steps(self) -> int:
        return int(self.passes_of_step)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.passes_of_step).backward()

    def step(self) -> None:
        self.passes += 1
        if self.passes % self.passes_of_step:
            return
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
            if master.grad is not None and self.ranks > 1:
                dist.all_reduce(master.grad)
                master.grad /= self.ranks
        if self.clip:
            nn.utils.clip_grad_norm_(self.masters.values(), self.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for parameter, master in self.masters.items():
            parameter.detach().copy_(master)

    def save_checkpoint(self, save_dir: Any, client_state: Any = None) -> None:
        """Do nothing."""


class Pipe(nn.Sequential):
    """Layers that run one after the other on one rank."""

    def __init__(self, layers: Any, loss_fn: Any, **others: Any) -> None:
        super().__init__(*(layer if isinstance(layer, nn.Module) else _Call(layer) for layer in layers))
        self.loss_fn = loss_fn.__call__  # a bound method, so that it is not registered as a layer


class _Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


class PipeEngine(Engine):
    """Engine that trains layers on micro-batches, in the order of the dataset."""

    def __init__(self, model: Pipe, config: dict[str, Any], data: Any) -> None:
        super().__init__(model, config, None, None)
        self.rows = iter(RepeatingLoader(DataLoader(data, batch_size=config["train_micro_batch_size_per_gpu"])))

    def train_batch(self) -> torch.Tensor:
        losses = []
        for _ in range(self.passes_of_step):
            inputs, labels = next(self.rows)
            losses.append(self.module.loss_fn(self.module(inputs), labels))
            self.backward(losses[-1])
            self.step()
        print(f"loss: {torch.stack(losses).mean().item()}")
        return losses[-1]


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    dist_init_required: Any = None,
    config: Any = None,
) -> Any:
    """Return an engine, its optimizer, its data loader and its learning rate schedule."""
    init_distributed()
    if config is None:
        with open(args.deepspeed_config) as file:
            config = json.load(file)
    if isinstance(model, Pipe):
        return PipeEngine(model, config, training_data), None, None, None
    engine = Engine(model, config, optimizer, lr_scheduler)
    loader = None
    if training_data is not None:
        sampler = DistributedSampler(training_data, dist.get_world_size(), dist.get_rank())
        loader = DataLoader(training_data, batch_size=config["train_micro_batch_size_per_gpu"], sampler=sampler)
    return engine, engine.optimizer, loader, lr_scheduler


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Start gloo, unless a process group exists."""
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **alone)


def add_config_arguments(parser: Any) -> Any:
    """Add DeepSpeed's command-line arguments."""
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", type=str, default=None)
    return parser


def get_accelerator() -> Any:
    """Return an accelerator object for the CPU."""
    return SimpleNamespace(
        set_device=lambda rank: None,
        manual_seed_all=torch.manual_seed,
        device_name=lambda index=None: "cpu",
        current_device_name=lambda: "cpu",
        device_count=dist.get_world_size,
        communication_backend_name=lambda: "gloo",
        is_available=lambda: False,
    )


@contextlib.contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Context that broadcasts changes made on one rank. Parameters are never sharded here."""
    yield
    if enabled and modifier_rank is not None:
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            if isinstance(parameter, nn.Parameter):  # as in DeepSpeed, values of a state dict are skipped
                dist.broadcast(parameter.detach(), modifier_rank)


@contextlib.contextmanager
def Init(config_dict_or_path: Any) -> Iterator[None]:
    """Convert the parameters of modules built in this context to the configuration's dtype.

    transformers loads models in this context if the script's configuration has stage 3, and then draws other random
    numbers than outside of it.
    """
    init_distributed()
    built: list[nn.Parameter] = []

    def see(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            built.append(parameter)

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(see)
    try:
        yield
    finally:
        hook.remove()
    if low(config_dict_or_path):
        for parameter in built:
            parameter.data = parameter.data.bfloat16()


class ZeroParamStatus(enum.Enum):
    """Placeholder class; no parameter is an instance of it."""

    NOT_AVAILABLE = 1


class RepeatingLoader:
    """Loader that repeats the batches endlessly."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def set_random_seed(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _recursive_getattr(model: nn.Module, name: str) -> Any:
    return operator.attrgetter(name)(model)


def _recursive_setattr(model: nn.Module, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


def _module(name: str, **members: Any) -> ModuleType:
    """Make `deepspeed.name` importable and an attribute of its parent."""
    made = sys.modules.setdefault(f"{__name__}.{name}", ModuleType(f"{__name__}.{name}"))
    made.__dict__.update(members)
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[f"{__name__}.{parent}" if parent else __name__], last, made)
    return made


class _Adam(torch.optim.AdamW):
    def __init__(self, parameters: Any, lr: float, betas: Any) -> None:
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=0.0)


comm = sys.modules[f"{__name__}.comm"] = dist
_module("accelerator", get_accelerator=get_accelerator)
_module("ops")
_module("ops.adam", DeepSpeedCPUAdam=_Adam, FusedAdam=_Adam)
_module("pipe", PipelineModule=Pipe)
_module("utils", RepeatingLoader=RepeatingLoader)
_module("runtime")
_module("runtime.utils", set_random_seed=set_random_seed)
_module("runtime.zero")
_module("runtime.zero.partition_parameters", ZeroParamStatus=ZeroParamStatus)
_module("zero", GatheredParameters=GatheredParameters, Init=Init)
_module("compression")
_module("compression.helper", recursive_getattr=_recursive_getattr, recursive_setattr=_recursive_setattr)
