"""A checkpoint as plain PyTorch's state dictionaries, in one process, for training or serving without an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.errors import CheckpointError
from windlass.checkpoint.deepspeed_files import names_in_order
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.export import absent_from, dtype_in_use, tensors_of
from windlass.checkpoint.stored import Stored, split
from windlass.kernels.piece import scales_of
from windlass.optim import coded
from windlass.optim.elementwise import COUNTS

# How an optimizer computes, and not what: each run decides that for itself.
IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable", "state_dtype"})


def read_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> PlainCheckpoint:
    """Opens a checkpoint for plain PyTorch: one of windlass's or of DeepSpeed's. No process group, no collective.

    Args:
        path: a checkpoint directory, or DIRECTORY/TAG.
        tag: in that directory; None for the one that `latest` names.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    directory, named = (path, tag) if tag is not None else split(path)
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
        stored = Stored(directory, tag)
        self._directory, self.tag, self._path = directory, stored.tag, stored.path
        if "engine" not in stored.plain:
            raise CheckpointError(f"{stored.path} was saved by no engine; read it with windlass.checkpoint.read_full")
        require_engine_data(stored.plain, stored.path, whole=True)
        self.global_steps: int = int(stored.said["engine"]["global_steps"])
        self.client_state: dict[str, Any] = dict(stored.said["client"])
        self.scheduler_state: dict[str, Any] | None = stored.said["schedule"]

    def model_state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """What `model.state_dict()` of the plain model would be, on the CPU: parameters under all their names,
        persistent buffers, and what modules keep beside them (`get_extra_state`). Of a checkpoint of trained parameters
        alone, those; load them with `strict=False`.

        Args:
            dtype: of floating-point parameters; None: as the model computed. float32 gives master weights, from which
                training in float32 goes on exactly.
        """
        found: dict[str, torch.Tensor] = {}
        with Stored(self._directory, self.tag) as stored:
            for name, where in tensors_of(stored).items():
                value, wanted = stored.whole(where), dtype_in_use(stored, where)
                if dtype is not None and where.startswith("param/") and value.is_floating_point():
                    wanted = dtype
                found[name] = value.to(wanted)
            tied = {alias: name for alias, name in stored.said.get("tied", {}).items() if name in found}
            extra: dict[str, Any] = stored.said.get("extra", {})
        return found | {alias: found[name] for alias, name in tied.items() if alias not in found} | extra

    def absent(self) -> tuple[str, ...]:
        """Parameters of the model that the checkpoint does not hold, since they were not trained."""
        return absent_from(Stored(self._directory, self.tag))

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
        order = names_in_order(model, optimizer)
        with Stored(self._directory, self.tag, order) as stored:
            state, groups, number = {}, [], 0
            for names, group in zip(order, optimizer.state_dict()["param_groups"], strict=True):
                numbers = list(range(number, number + len(names)))
                groups.append({**group, **_hyper(stored, names), "params": numbers})
                states = ((n, _states(stored, name)) for n, name in zip(numbers, names, strict=True))
                state.update({n: found for n, found in states if found})
                number += len(names)
        return {"state": state, "param_groups": groups}


def _hyper(stored: Stored, names: Iterable[str]) -> dict[str, Any]:
    """Hyper-parameters of the saved group that these parameters were in."""
    number_of = {name: number for number, group in enumerate(stored.said["groups"]) for name in group["parameters"]}
    found = {number_of.get(name) for name in names}
    if found <= {None}:
        return {}  # none of them was trained
    if len(found) > 1:
        raise CheckpointError(
            f"{stored.path}: parameters of one group were in several, or not trained at all: {', '.join(names)}; build "
            "the optimizer with the groups that were saved"
        )
    values = stored.said["groups"][found.pop()]["values"]
    kept = {key: value for key, value in values.items() if key not in IMPLEMENTATION}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}


def _states(stored: Stored, name: str) -> dict[str, Any]:
    """All states of a parameter, whole."""
    found: dict[str, Any] = {}
    for key, kind in stored.said.get("states", {}).get(name, {}).items():
        where, form = f"state/{name}/{key}", kind.split()[0]
        if form == "value":
            value = stored.said.get("values", {})[name][key]
            number = key in COUNTS and isinstance(value, int | float)
            found[key] = torch.tensor(float(value), dtype=torch.float32, device="cpu") if number else value
        elif form in ("signed", "unsigned"):
            found[key] = state_decoded(stored, name, key, signed=form == "signed")
        else:
            found[key] = stored.whole(where)
    return found


def state_decoded(stored: Stored, name: str, key: str, *, signed: bool) -> torch.Tensor:
    """A state that was kept in 8 bits, in float32."""
    codes = stored.whole(f"state/{name}/{key}")
    spans = stored.said.get("spans", {}).get(name, [])
    coded.require_covered(spans, 0, codes.numel(), f"the state {key!r} of {name!r}")
    scales = []
    for start, stop in spans:
        values = stored.whole(f"state/{name}/{key}_scale/{start}")
        kinds = codes.dtype, values.dtype, values.numel()
        if kinds != (torch.uint8, torch.float32, scales_of(stop - start)):
            raise CheckpointError(f"{stored.path}: the scales of the state {key!r} of {name!r} do not fit")
        scales.append(coded.Scales(start, stop, 0, values))
    values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    coded.read(codes.view(-1), 0, scales, signed, values.view(-1))
    return values
