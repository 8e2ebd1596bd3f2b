"""Saving and loading of full weights, with one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from windlass.base.atomic_file import make_directory, temporary_path_beside
from windlass.base.dtypes import is_castable
from windlass.base.errors import CheckpointError, ModelError
from windlass.checkpoint.checkpoint_directory import disk_errors
from windlass.checkpoint.pickle_writer import PlannedTensor
from windlass.checkpoint.safetensors_file import TensorEntry, TensorFileWriter
from windlass.checkpoint.torch_file_writer import TorchFileWriter
from windlass.engine.extra_state import collect_extra_states, extra_state_names, set_extra_states
from windlass.engine.full_parameter_gather import FullParameterGather
from windlass.engine.module_buffers import modules_with_saved_buffers
from windlass.parallel.placement import get_global_name, get_placement
from windlass.zero.access.full_values import set_full_param
from windlass.zero.access.gathered_parameters import GatheredParameters
from windlass.zero.sharded_model import ShardedModel


def full_state_dict(model: ShardedModel, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the full state dict as `Engine.full_state_dict` describes. A tied parameter has an entry for each name."""
    model.finish_update()
    state: dict[str, torch.Tensor] = {}
    for names, full in FullParameterGather(model, model.units, _names_by_parameter(model)).full_parameters():
        values = full.to("cpu", dtype if is_castable(full.dtype) else None, copy=True)
        state.update(dict.fromkeys(names, values))
    state |= _gather_buffers(model)
    for theirs in model.mesh.of_stages(collect_extra_states(model.model) if model.mesh.first_of_stage else {}):
        state |= theirs
    return state if model.mesh.world.index == 0 else {}


def weight_metadata(model: ShardedModel, excluded: Collection[str]) -> dict[str, Any]:
    """Return the metadata of weights in a checkpoint, as plain data.

    `tied`: maps further names of a tensor to the name under which it is stored; `dtypes`: compute dtype of each
    parameter, where it is not float32; `absent`: parameters that are left out, in model order; `frozen`: stored
    parameters that are not trained.
    """
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in (*model.model.named_parameters(remove_duplicate=False), *_named_persistent_buffers(model)):
        kept = first.setdefault(id(tensor), name)
        if isinstance(tensor, nn.Parameter):
            kept = get_global_name(tensor, kept)
        if kept != name:
            tied[name] = kept
    units = [unit for unit in model.units if unit.dtype is not torch.float32]
    dtypes = {name: str(unit.dtype).removeprefix("torch.") for unit in units for name in unit.names}
    left_out = [name for unit in model.units for name in unit.names if name in excluded]
    frozen = [name for unit in model.units if not unit.trainable for name in unit.names if name not in excluded]
    return {"tied": tied, "dtypes": dtypes, "absent": left_out, "frozen": frozen}


def load_full_state_dict(
    model: ShardedModel, state: Mapping[str, torch.Tensor], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Load a full state dict as `Engine.load_module_state_dict` describes."""
    names, buffers = _names_by_parameter(model), dict(_named_persistent_buffers(model))
    extra = extra_state_names(model.model)
    parameters = {id(p): p for p in model.model.parameters()}
    here = {name for found in names.values() for name in found} | set(buffers) | set(extra)
    known = {name for theirs in model.mesh.gather_from_world(here) for name in theirs}
    known |= {get_global_name(parameter, "") for parameter in parameters.values()}
    given = {
        number: next((name for name in (*found, get_global_name(parameters[number], found[0])) if name in state), None)
        for number, found in names.items()
    }
    missing = [names[number][0] for number, name in given.items() if name is None]
    missing += [name for name in (*buffers, *extra) if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the state dictionary does not fit the model: missing {missing[:8]}, unexpected {unexpected[:8]}; pass "
            "strict=False to load what matches"
        )
    requested = {name: parameters[number] for number, name in given.items() if name is not None}
    shapes = {name: get_placement(parameter).global_shape for name, parameter in requested.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items() if name in state}
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(state[name].shape)} in the state dictionary, {shape} here; "
                "leave it out and pass strict=False to keep the present values"
            )
    for name, parameter in requested.items():
        set_full_param(parameter, state[name])
    model.forget_unsent()
    with torch.no_grad():
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])
    set_extra_states(model.model, state)
    return missing, unexpected


def load_with_function(model: ShardedModel, state: Mapping[str, Any], custom_load_fn: Callable[..., Any]) -> None:
    """Run `custom_load_fn(src=state, dst=module)` on every rank with gathered parameters. Rank 0's changes are kept.

    Collective.

    Every rank needs memory for the full model.
    """
    with GatheredParameters(list(model.model.parameters()), modifier_rank=model.mesh.world.ranks[0]), torch.no_grad():
        custom_load_fn(src=state, dst=model.model)


def _names_by_parameter(model: ShardedModel) -> dict[int, list[str]]:
    """Return all names of each parameter by its id.

    Raises:
        ModelError: a parameter was replaced, added or removed since the model was sharded.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    require_unchanged_model(model)
    return names


def _gather_buffers(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Return copies of the persistent buffers of all stages and experts on rank 0; other ranks may get only some.

    Collective.
    """
    mesh = model.mesh
    saved = modules_with_saved_buffers(model.model, mesh)
    own = {name: buffer.detach().cpu().clone() for name, buffer in _named_persistent_buffers(model, saved)}
    gathered = mesh.of_stages(own) if mesh.ep.size == 1 else mesh.gather_from_world(own)
    return {name: buffer for theirs in gathered for name, buffer in theirs.items()}


def _named_persistent_buffers(
    model: ShardedModel, modules: set[nn.Module] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, buffer)` for each name of a persistent buffer in `modules`; None: in all modules."""
    for prefix, module in model.model.named_modules(remove_duplicate=False):
        if modules is not None and module not in modules:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def require_unchanged_model(model: ShardedModel) -> None:
    """Check that no parameter was replaced, added or removed since `initialize` or the last `refresh`.

    The engine would neither train nor save a new parameter.

    Raises:
        ModelError: a parameter was replaced, added or removed.
    """
    held = {id(parameter) for unit in model.units for parameter in unit.parameters}
    present = {id(parameter): name for name, parameter in model.model.named_parameters()}
    strange = [name for identity, name in present.items() if identity not in held]
    missing = [n for u in model.units for n, p in zip(u.names, u.parameters, strict=True) if id(p) not in present]
    if strange or missing:
        raise ModelError(
            f"the model changed after initialize: {(strange or missing)[0]!r} is {'new' if strange else 'gone'}, and "
            "the engine neither trains nor saves it; call engine.refresh(), after removing deleted parameters from "
            "the optimizer's groups"
        )


def save_16bit_model(model: ShardedModel, directory: str, filename: str, exclude_frozen_parameters: bool) -> bool:
    """Write the file of `Engine.save_16bit_model`. One unit is unsharded at a time.

    Collective; all ranks raise if rank 0 cannot write.
    """
    model.finish_update()
    names = _names_by_parameter(model)
    units = [unit for unit in model.units if unit.trainable or not exclude_frozen_parameters]
    writing = _FullWeightsWriter(Path(directory) / filename) if model.mesh.world.index == 0 else None
    buffers = {} if exclude_frozen_parameters else _gather_buffers(model)
    collecting = FullParameterGather(model, units, names)
    if writing is not None:
        # A safetensors file holds each tensor once; a load ties the names again.
        entries = {
            announcement.names[0]: TensorEntry(announcement.dtype, announcement.shape)
            for announcement in collecting.entries
        }
        entries |= {name: TensorEntry(buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
        aliases = (
            (announcement.names[0], alias) for announcement in collecting.entries for alias in announcement.names[1:]
        )
        writing.begin(entries, dict((alias, name) for name, alias in aliases))
        writing.add(buffers)
    for found, full in collecting.full_parameters():
        if writing is not None:
            writing.add({found[0]: full})
    failure = model.mesh.world.broadcast_object(writing.finish() if writing is not None else "")
    if failure:
        raise CheckpointError(failure)
    return True


class _TorchFileTarget:
    """File for `torch.load`, with the interface of `TensorFileWriter`.

    Args:
        entries: all tensors that the file will hold, by name.
        tied: further names of some of these tensors.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry], tied: Mapping[str, str]) -> None:
        self._planned = {name: PlannedTensor(one.dtype, one.shape, list) for name, one in entries.items()}
        self._file = TorchFileWriter(path, self._planned | {alias: self._planned[name] for alias, name in tied.items()})

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of one tensor."""
        self._file.write(self._planned[name], [tensor.reshape(-1)])

    def __enter__(self) -> _TorchFileTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


class _FullWeightsWriter:
    """Writer of a file of full tensors on rank 0.

    Errors are recorded and returned by `finish`. An earlier raise would leave the other ranks waiting in an all-gather.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, temporary_path_beside(path)
        self._file: TensorFileWriter | _TorchFileTarget | None = None
        self._problem = ""

    def begin(self, entries: dict[str, TensorEntry], tied: Mapping[str, str]) -> None:
        """Open the file for these entries. `tied` gives further names, for formats that can name a tensor twice."""
        with self._recording_errors(), disk_errors(self._partial, 0):
            make_directory(self._path.parent)
            if self._path.suffix == ".safetensors":
                self._file = TensorFileWriter(self._partial, entries)
            else:
                self._file = _TorchFileTarget(self._partial, entries, tied)

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the values of these tensors."""
        with self._recording_errors():
            if (file := self._file) is not None:
                for name, tensor in tensors.items():
                    if tensor.layout is not torch.strided:
                        raise CheckpointError(
                            f"{name!r} is a buffer of the layout {tensor.layout}, which {self._path} cannot hold; "
                            "register it with persistent=False"
                        )
                    file.write(name, tensor)

    def finish(self) -> str:
        """Rename the temporary file to its final path. Return the recorded error, or an empty text."""
        with self._recording_errors(), disk_errors(self._path, 0):
            if self._file is not None:
                with self._file:
                    pass
                self._partial.replace(self._path)
        return self._problem

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._problem, file, self._file = str(error), self._file, None
            with suppress(CheckpointError, OSError):  # report the first error, not that of the clean-up
                if file is not None:
                    file.__exit__(type(error), error, None)
                self._partial.unlink(missing_ok=True)
