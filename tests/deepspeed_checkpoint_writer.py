"""Writer of checkpoints in the format of DeepSpeed 0.19, without DeepSpeed, for tests."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass
class Trained:
    """Full training state.

    Attributes:
        module: `module.state_dict()`, with every name of tied parameters, in the dtype of the forward.
        buffers: the names in `module` that are buffers.
        masters: trained parameters in float32, in the order of the optimizer's groups.
        groups: names of parameters by optimizer group.
        moments: optimizer states by parameter and key, of the parameter's shape.
        step: step count of the optimizer, one for all parameters.
        hyper: hyper-parameters by group.
    """

    module: dict[str, Tensor]
    buffers: list[str]
    tied: dict[str, str]
    masters: dict[str, Tensor]
    groups: list[list[str]]
    moments: dict[str, dict[str, Tensor]]
    step: float
    hyper: list[dict[str, Any]]
    steps: int
    samples: int
    schedule: dict[str, Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=lambda: {"cur_scale": 1.0, "dynamic": False})


@contextmanager
def deepspeed_classes() -> Iterator[dict[str, type]]:
    """Make classes importable under DeepSpeed's names, for pickling. Yield the classes by name."""
    names = {
        "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
        "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
        "ZeroStageEnum": "deepspeed.runtime.zero.config",
        "fragment_address": "deepspeed.utils.tensor_fragment",
    }
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    classes: dict[str, type] = {}
    for name, module in names.items():
        bases: tuple[type, ...] = (int,) if name == "ZeroStageEnum" else (object,)
        classes[name] = type(name, bases, {"__module__": module, "__qualname__": name})
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        setattr(sys.modules[module], name, classes[name])
    try:
        yield classes
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(before)


def write(directory: Path, tag: str, state: Trained, *, stage: int, ranks: int, sub_group: int = 1 << 30) -> Path:
    """Write `state` as DeepSpeed would at this stage on `ranks` ranks, and the file `latest`.

    Args:
        sub_group: largest number of elements of a flat buffer at stage 3.
    """
    path = directory / tag
    path.mkdir(parents=True)
    common = {
        "buffer_names": state.buffers,
        "lr_scheduler": state.schedule,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": state.steps,
        "global_samples": state.samples,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"gradient_accumulation_steps": 1},
        "ds_version": "0.19.8",
        **state.client,
    }
    with deepspeed_classes() as classes:
        if stage == 0:
            _write_whole(path, state, common)
        elif stage < 3:
            _write_in_a_row(path, state, common, classes, stage, ranks)
        else:
            _write_in_parts(path, state, common, classes, ranks, sub_group)
    (directory / "latest").write_text(tag)
    return path


def _write_whole(path: Path, state: Trained, common: dict[str, Any]) -> None:
    numbers = {name: number for number, name in enumerate(name for names in state.groups for name in names)}
    moments = {
        numbers[name]: {"step": torch.tensor(state.step), **result} for name, result in state.moments.items() if result
    }
    groups = [
        {**hyper, "params": [numbers[name] for name in names]}
        for names, hyper in zip(state.groups, state.hyper, strict=True)
    ]
    optimizer: dict[str, Any] = {"state": moments, "param_groups": groups}
    if any(state.module[name].dtype != torch.float32 for name in state.masters):
        optimizer = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3, "optimizer_state_dict": optimizer}
        optimizer["fp32_groups"] = [[state.masters[name] for name in names] for names in state.groups]
    none = dict.fromkeys(("param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"))
    module = OrderedDict(state.module)
    torch.save({"module": module, "optimizer": optimizer, **none, **common}, path / "mp_rank_00_model_states.pt")


def _shapes(names: Sequence[str], state: Trained) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, state.masters[name].shape) for name in names)


def _write_in_a_row(
    path: Path, state: Trained, common: dict[str, Any], classes: Mapping[str, type], stage: int, ranks: int
) -> None:
    shapes = [_shapes(names, state) for names in state.groups]
    torch.save(
        {
            "module": OrderedDict(state.module),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "shared_params": state.tied,
            "frozen_param_fragments": None,
            **common,
        },
        path / "mp_rank_00_model_states.pt",
    )
    for rank in range(ranks):
        states, masters, paddings = {}, [], []
        for number, names in enumerate(state.groups):
            keys = list(state.moments[names[0]]) if names else []
            flat = torch.cat([state.masters[name].reshape(-1) for name in names])
            part = 2 * math.ceil(flat.numel() / (2 * ranks))  # DeepSpeed aligns shards to even sizes
            local = slice(rank * part, (rank + 1) * part)
            padding = min(part, max(0, (rank + 1) * part - flat.numel()))
            masters.append(flat[local].clone())
            paddings.append(padding)
            states[number] = {"step": torch.tensor(state.step)} | {
                key: _padded(torch.cat([state.moments[name][key].reshape(-1) for name in names])[local], part)
                for key in keys
            }
        groups = [{**hyper, "params": [number]} for number, hyper in enumerate(state.hyper)]
        optimizer = {
            "loss_scaler": _object(classes["LossScaler"], state.scaler),
            "dynamic_loss_scale": state.scaler["dynamic"],
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": classes["ZeroStageEnum"](stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(names) for names in state.groups],
            "partition_count": [ranks] * len(state.groups),
            "ds_version": "0.19.8",
            "param_slice_mappings": [OrderedDict(x=_object(classes["fragment_address"], {"numel": 1, "start": 0}))],
        }
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, _optim(path, rank))


def _write_in_parts(
    path: Path, state: Trained, common: dict[str, Any], classes: Mapping[str, type], ranks: int, sub_group: int
) -> None:
    parts = [part for names in state.groups for part in _split(names, state, sub_group)]
    frozen = {n: t for n, t in state.module.items() if n not in {*state.masters, *state.buffers, *state.tied}}
    for rank in range(ranks):
        module = OrderedDict((n, t if n in state.buffers else t.new_empty(0)) for n, t in state.module.items())
        torch.save(
            {
                "module": module,
                "optimizer": None,
                "param_shapes": [_shapes(names, state) for names in parts],
                "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
                "shared_params": state.tied if rank == 0 else {},
                "frozen_param_fragments": OrderedDict((n, _part(t, rank, ranks)) for n, t in frozen.items()),
                **common,
            },
            path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        states = {}
        for number, names in enumerate(parts):
            states[number] = {"step": torch.tensor(state.step)} | {
                key: torch.cat([_part(state.moments[name][key], rank, ranks) for name in names])
                for key in state.moments[names[0]]
            }
        numbers = [[n for n, part in enumerate(parts) if part[0] in names] for names in state.groups]
        groups = [{**hyper, "params": local} for local, hyper in zip(numbers, state.hyper, strict=True)]
        optimizer = {
            "zero_stage": classes["ZeroStageEnum"](3),
            "loss_scaler": _object(classes["LossScaler"], state.scaler),
            "dynamic_loss_scale": state.scaler["dynamic"],
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": [torch.cat([_part(state.masters[n], rank, ranks) for n in names]) for names in parts],
        }
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, _optim(path, rank))


def _split(names: Sequence[str], state: Trained, most: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for name in names:
        if parts[-1] and sum(state.masters[n].numel() for n in parts[-1]) + state.masters[name].numel() > most:
            parts.append([])
        parts[-1].append(name)
    return parts


def _part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    size = -(-tensor.numel() // ranks)
    return _padded(tensor.reshape(-1)[rank * size : (rank + 1) * size], size)


def _padded(flat: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, size - flat.numel())).clone()


def _optim(path: Path, rank: int) -> Path:
    return path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _object(cls: type, attributes: Mapping[str, Any]) -> Any:
    made = cls()
    made.__dict__.update(attributes)
    return made
