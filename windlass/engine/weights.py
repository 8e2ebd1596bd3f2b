"""Whole weights out of an engine, one unit in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from windlass.base.errors import CheckpointError, ModelError
from windlass.zero.sharded import ShardedModel


def full_state_dict(
    model: ShardedModel, *, dtype: torch.dtype | None = None, trainable_only: bool = False
) -> dict[str, torch.Tensor]:
    """See `Engine.full_state_dict`. A tied parameter appears under each of its names, as in a plain state dict."""
    model.finish_update()
    first = model.mesh.data.index == 0
    names: dict[int, list[str]] = {}
    for name, parameter in model.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    _require_all_known(model, names)
    found: dict[str, torch.Tensor] = {}
    for unit in model.units:
        if trainable_only and not unit.trainable:
            continue
        with model.runtime.holding([unit]):
            if not first:
                continue
            for parameter, view in zip(unit.parameters, unit.views(), strict=True):
                whole = view.detach().to("cpu", dtype if view.is_floating_point() else None, copy=True)
                found.update(dict.fromkeys(names[id(parameter)], whole))
    if first and not trainable_only:
        for prefix, module in model.model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer.detach().cpu().clone()
    return found


def _require_all_known(model: ShardedModel, names: dict[int, list[str]]) -> None:
    """A module that was exchanged or added after `initialize` trains nowhere, and would be missing from a file."""
    held = {id(parameter) for unit in model.units for parameter in unit.parameters}
    strange = [found[0] for identity, found in names.items() if identity not in held]
    gone = [n for u in model.units for n, p in zip(u.names, u.parameters, strict=True) if id(p) not in names]
    if model.units and (strange or gone):
        raise ModelError(
            f"the model changed after initialize: {(strange or gone)[0]!r} is {'new' if strange else 'gone'}, and the "
            "engine neither trains nor saves what it did not see; change the model first, or destroy() the engine, "
            "change it and initialize again"
        )


def save_16bit_model(model: ShardedModel, directory: str, filename: str, trainable_only: bool) -> bool:
    """See `Engine.save_16bit_model`. Collective; raises on all ranks if rank 0 can't write."""
    from safetensors.torch import save_file

    state = full_state_dict(model, trainable_only=trainable_only)
    problem = ""
    if model.mesh.data.index == 0:
        path = Path(directory) / filename
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shared: dict[int, str] = {}
            plain: dict[str, torch.Tensor] = {}
            for name, tensor in state.items():  # a file holds each tensor once; loading ties the names again
                if shared.setdefault(tensor.data_ptr() or id(tensor), name) == name:
                    plain[name] = tensor.contiguous()
            save_file(plain, partial, metadata={"format": "pt"})
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            problem = f"cannot write {path}: {error}; free some space or choose another directory"
    told = [problem]
    dist.broadcast_object_list(told, model.mesh.data.ranks[0], group=model.mesh.data.process_group)
    if told[0]:
        raise CheckpointError(told[0])
    return True
