"""Checkpoints as plain PyTorch state dictionaries, in one process, for training or serving without an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.dtypes import is_castable
from windlass.base.errors import CheckpointError
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.foreign_formats import optimizer_parameter_order
from windlass.checkpoint.safetensors_export import missing_parameters, stored_names, stored_param_dtype
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint, split_checkpoint_path
from windlass.kernels.update_tensors import count_scales
from windlass.optim import quantized_states
from windlass.optim.elementwise_optimizers import SCALAR_STATES
from windlass.optim.one_bit_adam import MOMENTUM_MASK

# Keys of parameter groups that are not restored, since each run chooses its own: implementations, and masks of momenta.
UNRESTORED_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable", "state_dtype", MOMENTUM_MASK})


def read_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> PlainCheckpoint:
    """Open a checkpoint of windlass or DeepSpeed for plain PyTorch. Needs no process group.

    Args:
        path: a checkpoint directory, or DIRECTORY/TAG.
        tag: a tag in that directory; None: the tag in `path`, or in `latest` if `path` has none.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it was not saved by an engine.
    """
    directory, named = (path, tag) if tag is not None else split_checkpoint_path(path)
    return PlainCheckpoint(directory, named)


class PlainCheckpoint:
    """Checkpoint opened by `read_checkpoint`. Each method reads its result from disk, and the caller owns it.

    Attributes:
        tag: tag of the checkpoint.
        global_steps: number of optimizer steps.
        client_state: data that the caller passed to the save.
        scheduler_state: state of the learning rate scheduler; None without one.
    """

    def __init__(self, directory: str | os.PathLike[str], tag: str | None) -> None:
        stored = StoredCheckpoint(directory, tag)
        self._directory, self.tag, self._path = directory, stored.tag, stored.path
        if "engine" not in stored.plain:
            raise CheckpointError(
                f"{stored.path} was not saved by an engine; read it with windlass.checkpoint.read_full"
            )
        require_engine_data(stored.plain, stored.path, require_all=True)
        self.global_steps: int = int(stored.engine_data["engine"]["global_steps"])
        self.client_state: dict[str, Any] = dict(stored.engine_data["client"])
        self.scheduler_state: dict[str, Any] | None = stored.engine_data["schedule"]

    def model_state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the `model.state_dict()` of the plain model, on the CPU.

        The dictionary has parameters under all their names, persistent buffers, and extra states (`get_extra_state`). A
        checkpoint without frozen parameters gives only the trained ones; load them with `strict=False`.

        Args:
            dtype: dtype of floating-point parameters; None: their compute dtype. float32 gives the master weights, from
                which training in float32 can continue exactly.
        """
        found: dict[str, torch.Tensor] = {}
        with StoredCheckpoint(self._directory, self.tag) as stored:
            for name, where in stored_names(stored).items():
                value, requested = stored.read_full(where), stored_param_dtype(stored, where)
                if dtype is not None and where.startswith("param/") and is_castable(value.dtype):
                    requested = dtype
                found[name] = value.to(requested)
            tied = {alias: name for alias, name in stored.engine_data.get("tied", {}).items() if name in found}
            extra: dict[str, Any] = stored.engine_data.get("extra", {})
        return found | {alias: found[name] for alias, name in tied.items() if alias not in found} | extra

    def missing_parameters(self) -> tuple[str, ...]:
        """Return the model's parameters that the checkpoint lacks because they were not trained."""
        return missing_parameters(StoredCheckpoint(self._directory, self.tag))

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return a state dictionary for a plain torch optimizer's `load_state_dict`: full states and hyper-parameters.

        Args:
            model: the plain model, which defines the names of parameters.
            optimizer: an optimizer over the model's parameters, of the class used in training; its groups may be in
                another order.

        Raises:
            CheckpointError: parameters of one group were in several groups in training or only partly trained, the
                optimizer has parameters that the model lacks, or the checkpoint is damaged.
        """
        known = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise CheckpointError("the optimizer has parameters that the model does not; build it from this model's")
        order = optimizer_parameter_order(model, optimizer)
        with StoredCheckpoint(self._directory, self.tag, order) as stored:
            state, groups, number = {}, [], 0
            for names, group in zip(order, optimizer.state_dict()["param_groups"], strict=True):
                numbers = list(range(number, number + len(names)))
                groups.append({**group, **_hyperparameters(stored, names), "params": numbers})
                states = ((n, _full_states(stored, name)) for n, name in zip(numbers, names, strict=True))
                state.update({n: found for n, found in states if found})
                number += len(names)
        return {"state": state, "param_groups": groups}


def _hyperparameters(stored: StoredCheckpoint, names: Iterable[str]) -> dict[str, Any]:
    """Return the hyper-parameters of the saved group that had these parameters."""
    number_of = {
        name: number for number, group in enumerate(stored.engine_data["groups"]) for name in group["parameters"]
    }
    found = {number_of.get(name) for name in names}
    if found <= {None}:
        return {}  # none of the parameters was trained
    if len(found) > 1:
        raise CheckpointError(
            f"{stored.path}: these parameters of one group were in several groups, or were not trained: "
            f"{', '.join(names)}; build "
            "the optimizer with the saved groups"
        )
    values = stored.engine_data["groups"][found.pop()]["values"]
    kept = {key: value for key, value in values.items() if key not in UNRESTORED_KEYS}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}


def _full_states(stored: StoredCheckpoint, name: str) -> dict[str, Any]:
    """Return all states of a parameter in full."""
    found: dict[str, Any] = {}
    for key, kind in stored.engine_data.get("states", {}).get(name, {}).items():
        where, form = f"state/{name}/{key}", kind.split()[0]
        if form == "value":
            value = stored.engine_data.get("values", {})[name][key]
            number = key in SCALAR_STATES and isinstance(value, int | float)
            found[key] = torch.tensor(float(value), dtype=torch.float32, device="cpu") if number else value
        elif form in ("signed", "unsigned"):
            found[key] = decode_full_state(stored, name, key, signed=form == "signed")
        else:
            found[key] = stored.read_full(where)
    return found


def decode_full_state(stored: StoredCheckpoint, name: str, key: str, *, signed: bool) -> torch.Tensor:
    """Return a full state in float32 that was quantized to 8 bits.

    Raises:
        CheckpointError: the scales do not fit the state.
    """
    codes = stored.read_full(f"state/{name}/{key}")
    spans = stored.engine_data.get("spans", {}).get(name, [])
    quantized_states.check_coverage(spans, 0, codes.numel(), f"the state {key!r} of {name!r}")
    scales = []
    for start, stop in spans:
        values = stored.read_full(f"state/{name}/{key}_scale/{start}")
        kinds = codes.dtype, values.dtype, values.numel()
        if kinds != (torch.uint8, torch.float32, count_scales(stop - start)):
            raise CheckpointError(f"{stored.path}: the scales of the state {key!r} of {name!r} do not fit")
        scales.append(quantized_states.BlockScales(start, stop, 0, values))
    values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    quantized_states.dequantize_state(codes.view(-1), 0, scales, signed, values.view(-1))
    return values
