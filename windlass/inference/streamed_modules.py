"""Modules that read their weights from a weight file for each use; see [Note: streamed weights]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from windlass.base.errors import ConfigError, StorageError
from windlass.inference.model_forward import find_decoder
from windlass.inference.packed_modules import (
    LinearGroup,
    PackedModules,
    find_groups,
    free_weights,
    join_biases,
    pack_group,
)
from windlass.inference.weight_file import MappedFile, StoredUnit, WeightFileWriter, WeightIndex
from windlass.inference.weight_stream import StreamStats, WeightStream
from windlass.kernels.kernel_dispatch import REFERENCE_PATH
from windlass.kernels.packed_gemm import BorrowedPanels
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format
from windlass.storage.direct_file_reader import DirectFileReader, FileRead

LentTensors = AbstractContextManager[dict[str, torch.Tensor]]

_STACKED_DIMS = 3  # dimensions of the stacked matrices of experts
_ADVICE = "see dmesg; if the disk works, delete the file, and it is made again from the model"


class WeightLender(Protocol):
    """Reader that lends the units of a weight file to forwards. A unit is a set of weights that are read together."""

    stats: StreamStats

    def lend(self, unit: int) -> AbstractContextManager[torch.Tensor]:
        """Yield the bytes of a unit, uint8 `[bytes]`, which are valid inside the `with` block."""
        ...

    def begin_forward(self) -> None:
        """Prepare for the next forward."""
        ...

    def without_values(self) -> AbstractContextManager[None]:
        """Allow `lend` to yield undefined values inside the `with` block, for forwards whose results are not used."""
        ...

    def close(self) -> None:
        """Stop reading, and free the staging memory if there is any."""
        ...


def _file_identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class DiskUnits:
    """Units of a weight file, read by direct I/O. A `WeightSource`."""

    def __init__(self, path: Path, units: Sequence[StoredUnit]) -> None:
        self._path, self._units = path, units
        self.reader = DirectFileReader(path, advice=_ADVICE)
        self._identity = _file_identity(path)

    def reopen(self) -> None:
        """Open the file again after `close`. Staging memory stays valid.

        Raises:
            StorageError: the file cannot be opened, or it is not the one that was opened first.
        """
        reader = DirectFileReader(self._path, advice=_ADVICE)
        if _file_identity(self._path) != self._identity:
            reader.close()
            raise StorageError(
                f"{self._path} was replaced or changed while this engine ran, so its weights may be those of another "
                "model; build the engine again"
            )
        self.reader = reader

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        """Return `[nbytes]` uint8 staging memory."""
        return self.reader.allocate_buffer(nbytes)

    def start(self, unit: int, into: torch.Tensor) -> FileRead:
        """Start to read a unit."""
        found = self._units[unit]
        return self.reader.start(f"the weights of {found.name}", found.offset, into)

    def close(self) -> None:
        """Wait for reads in flight; later reads raise."""
        self.reader.close()


class MappedUnits:
    """Units of a weight file in host memory: the file is mapped, and all processes of the host share its pages."""

    def __init__(self, path: Path, units: Sequence[StoredUnit]) -> None:
        self._units, self._file = units, MappedFile(path)
        self.stats = StreamStats()
        for unit in units:
            self._file.read_ahead(unit.offset, unit.nbytes)

    @contextmanager
    def lend(self, unit: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of a unit."""
        found = self._units[unit]
        self.stats.bytes_read += found.nbytes
        yield self._file.bytes[found.offset : found.offset + found.nbytes]

    def begin_forward(self) -> None:
        """Do nothing: the system reads ahead."""

    def without_values(self) -> AbstractContextManager[None]:
        """Do nothing: `lend` yields the mapped values."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing: the file is unmapped when the last view of it is freed."""


class StackedParameters:
    """Hooks that set the stacked matrices of a module as its parameters only during its forward."""

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        lend: Callable[[], AbstractContextManager[dict[str, torch.Tensor]]],
    ) -> None:
        self._lend, self._module = lend, module
        self._absent = {name: module.get_parameter(name) for name in names}
        self._lent: LentTensors | None = None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: object) -> None:
        self.release()
        lent = self._lend()
        tensors = lent.__enter__()
        self._lent = lent
        for name, tensor in tensors.items():
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        self.release()

    def release(self) -> None:
        """Give back the memory of the matrices. torch does not call the hook after a forward that Ctrl-C ends."""
        self._module._parameters.update(self._absent)
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.__exit__(None, None, None)


class StreamedModules(PackedModules):
    """Linear layers and stacked experts of a model, with weights in a weight file.

    Args:
        model: model with its streamed parameters on the meta device.
        index: index of the units in the file.
        lender: access to the file.
    """

    def __init__(self, model: nn.Module, index: WeightIndex, lender: WeightLender) -> None:
        self.index, self.lender = index, lender
        groups = []
        self.stacked: list[StackedParameters] = []
        for number, unit in enumerate(index.units):
            modules = [model.get_submodule(name) for name in unit.modules]
            if "format" in unit.details:
                groups.append(self._make_group(number, unit, modules))
            else:
                self.stacked.append(StackedParameters(modules[0], list(unit.tensors), self._lend_tensors(number)))
        super().__init__(groups, permanent=True)
        stacked = self.stacked  # not `self`: a hook of the model must not keep it alive
        # Embeddings call only the decoder. Inside a forward of the model, its hook is harmless: units that were used
        # before it and those after it are parts of the same order.
        for one in (model, find_decoder(model)):
            if isinstance(one, nn.Module):
                one.register_forward_pre_hook(lambda module, args: _begin_forward(stacked, lender))

    @property
    def stats(self) -> StreamStats:
        """Counters of the stream."""
        return self.lender.stats

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory; 0 if the file is mapped."""
        return self.lender.buffer_bytes if isinstance(self.lender, WeightStream) else 0

    def begin_forward(self) -> None:
        """Prepare for the next forward of the model."""
        _begin_forward(self.stacked, self.lender)

    def without_values(self) -> AbstractContextManager[None]:
        """Allow undefined weights inside the `with` block, so that a `WeightStream` does not read the file."""
        return self.lender.without_values()

    def close(self) -> None:
        """Stop reading, and free the staging memory."""
        for one in self.stacked:
            one.release()
        self.lender.close()

    def _make_group(self, number: int, unit: StoredUnit, modules: list[nn.Module]) -> LinearGroup:
        details, sizes = unit.details, unit.details["sizes"]
        panels = BorrowedPanels(
            get_weight_format(details["format"]),
            details["out_features"],
            details["in_features"],
            None if details["native"] else REFERENCE_PATH,
            self._lend_tensors(number),
        )
        free_weights(modules)
        return LinearGroup(modules, panels, join_biases(modules, sizes), sizes)

    def _lend_tensors(self, number: int) -> Callable[[], LentTensors]:
        unit, lender = self.index.units[number], self.lender

        @contextmanager
        def lend() -> Iterator[dict[str, torch.Tensor]]:
            with lender.lend(number) as memory:
                yield unit.views(memory)

        return lend


def _begin_forward(stacked: Sequence[StackedParameters], lender: WeightLender) -> None:
    for one in stacked:
        one.release()
    lender.begin_forward()


def store_units(
    model: nn.Module, probe: Callable[[], Any], writer: WeightFileWriter, weight_format: str | None
) -> list[StoredUnit]:
    """Write the packed linear layers and the stacked experts of a model unit by unit, and free each written unit.

    Args:
        model: model whose weights may be views of mapped files.
        probe: function that runs a forward of the model.
        weight_format: registered name; None: the dtype of the weights.

    Returns:
        Units in the order of their first use; then experts that the probe did not reach.

    Raises:
        ConfigError: a layer is packed already.
    """
    names = {module: name for name, module in model.named_modules()}
    order: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: object) -> None:
        order.setdefault(module, len(order))

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        groups = find_groups(model, probe, weight_format)
    finally:
        for handle in handles:
            handle.remove()
    last = len(order)
    jobs: list[tuple[int, list[nn.Module], list[str]]] = [(order.get(g[0], last), g, []) for g in groups]
    jobs += [(order[module], [module], stacked) for module, stacked in _find_stacked(model) if module in order]
    units = []
    for _, modules, stacked in sorted(jobs, key=lambda job: job[0]):
        listed = [names[module] for module in modules]
        if stacked:
            tensors = {name: modules[0].get_parameter(name).detach() for name in stacked}
            units.append(writer.add(listed, tensors))
            for name in stacked:
                absent = torch.empty_like(tensors[name], device="meta")
                modules[0]._parameters[name] = nn.Parameter(absent, requires_grad=False)
            del tensors
        else:
            if any(isinstance(module, PackedLinear) for module in modules):
                raise ConfigError(
                    f"{', '.join(listed)} is packed already, and weights_tier packs weights itself; load the "
                    "model with weights_tier='device'"
                )
            group = pack_group(modules, weight_format)
            panels = group.panels
            details = {
                "format": panels.format.name,
                "native": panels.path != REFERENCE_PATH,
                "out_features": panels.out_features,
                "in_features": panels.in_features,
                "sizes": group.sizes,
            }
            units.append(writer.add(listed, panels.tensors, details))
            free_weights(modules)
            del group, panels
    return units


def _find_stacked(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Return modules outside of torch.nn that have stacked matrices and no child with parameters, and the names of the
    matrices.
    """
    found = []
    for module in model.modules():
        names = [name for name, p in module.named_parameters(recurse=False) if p.dim() >= _STACKED_DIMS]
        # Exclude torch.nn: a model may read the weight of an nn.Conv1d without calling the module.
        own = not type(module).__module__.startswith("torch.nn")
        if own and names and not any(True for child in module.children() for _ in child.parameters()):
            found.append((module, names))
    return found
