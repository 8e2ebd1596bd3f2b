"""A checkpoint as plain PyTorch's state dictionaries, in one process, for training or serving without an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import CheckpointError
from windlass.checkpoint.deepspeed_index import optimizer_parameter_order
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.safetensors_export import missing_parameters, stored_names, stored_param_dtype
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint, split_checkpoint_path
from windlass.kernels.update_tensors import count_scales
from windlass.optim import quantized_states
from windlass.optim.elementwise_optimizers import SCALAR_STATES

# How an optimizer computes, and not what: each run decides that for itself.
IMPLEMENTATION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable", "state_dtype"})


def read_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> PlainCheckpoint:
    """Opens a checkpoint for plain PyTorch: one of windlass's or of DeepSpeed's. No process group, no collective.

    Args:
        path: a checkpoint directory, or DIRECTORY/TAG.
        tag: in that directory; None for the one that `latest` names.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    directory, named = (path, tag) if tag is not None else split_checkpoint_path(path)
    return PlainCheckpoint(directory, named)


class PlainCheckpoint:
    """What `read_checkpoint` opened. Each method reads what it returns, which is the caller's own.

    Attributes:
        tag: of the checkpoint.
        global_steps: optimizer steps that were done.
        client_state: what the caller gave to the save.
        scheduler_state: of the learning-rate schedule; None without one.
    """

    def __init__(self, directory: str | os.PathLike[str], tag: str | None) -> None:
        stored = StoredCheckpoint(directory, tag)
        self._directory, self.tag, self._path = directory, stored.tag, stored.path
        if "engine" not in stored.plain:
            raise CheckpointError(f"{stored.path} was saved by no engine; read it with windlass.checkpoint.read_full")
        require_engine_data(stored.plain, stored.path, require_all=True)
        self.global_steps: int = int(stored.engine_data["engine"]["global_steps"])
        self.client_state: dict[str, Any] = dict(stored.engine_data["client"])
        self.scheduler_state: dict[str, Any] | None = stored.engine_data["schedule"]

    def model_state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """What `model.state_dict()` of the plain model would be, on the CPU: parameters under all their names,
        persistent buffers, and what modules keep beside them (`get_extra_state`). Of a checkpoint of trained parameters
        alone, those; load them with `strict=False`.

        Args:
            dtype: of floating-point parameters; None: as the model computed. float32 gives master weights, from which
                training in float32 goes on exactly.
        """
        found: dict[str, torch.Tensor] = {}
        with StoredCheckpoint(self._directory, self.tag) as stored:
            for name, where in stored_names(stored).items():
                value, wanted = stored.read_full(where), stored_param_dtype(stored, where)
                if dtype is not None and where.startswith("param/") and value.is_floating_point():
                    wanted = dtype
                found[name] = value.to(wanted)
            tied = {alias: name for alias, name in stored.engine_data.get("tied", {}).items() if name in found}
            extra: dict[str, Any] = stored.engine_data.get("extra", {})
        return found | {alias: found[name] for alias, name in tied.items() if alias not in found} | extra

    def missing_parameters(self) -> tuple[str, ...]:
        """Parameters of the model that the checkpoint does not hold, since they were not trained."""
        return missing_parameters(StoredCheckpoint(self._directory, self.tag))

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What `optimizer.load_state_dict` of a plain torch optimizer takes: whole states and hyper-parameters.

        Args:
            model: the plain model, by whose names parameters are known.
            optimizer: over its parameters, of the class that was trained with; its groups may be in another order.

        Raises:
            CheckpointError: parameters that were in one group are in several, or the optimizer's are not the model's.
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
    """Hyper-parameters of the saved group that these parameters were in."""
    number_of = {
        name: number for number, group in enumerate(stored.engine_data["groups"]) for name in group["parameters"]
    }
    found = {number_of.get(name) for name in names}
    if found <= {None}:
        return {}  # none of them was trained
    if len(found) > 1:
        raise CheckpointError(
            f"{stored.path}: parameters of one group were in several, or not trained at all: {', '.join(names)}; build "
            "the optimizer with the groups that were saved"
        )
    values = stored.engine_data["groups"][found.pop()]["values"]
    kept = {key: value for key, value in values.items() if key not in IMPLEMENTATION_KEYS}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}


def _full_states(stored: StoredCheckpoint, name: str) -> dict[str, Any]:
    """All states of a parameter, whole."""
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
    """A state that was kept in 8 bits, in float32."""
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
