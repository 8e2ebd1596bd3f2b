"""Channels and features of plain modules, whose dependencies are found by tracing marked values.

[Note: marked channels] The model runs on copies of one sample, and each copy has another channel of a layer's output
set to NaN. A layer whose inputs have NaN in some channels depends on the marked channel of that copy: activations,
additions, pooling, reshapes and normalizations between the layers need no description. A layer that mixes its inputs
gets them without NaN, so that a mark ends there. A channel whose mark reaches the output of the model, or a layer of an
unknown kind, cannot be removed.

Marks do not show tensors of a fixed size that are combined with the channels outside of these layers, e.g. a parameter
that scales them, or an input that is added. So some units are removed in a copy of the model, and its outputs are
compared with those of the model with these units set to 0. If they differ, all units of the group are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.base.module_modes import evaluating
from windlass.compress.pruning_units import CoupledTensor, UnitGroup, mask_units, remove_units

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AT_ONCE = 64  # maximum number of marked channels in one forward

Slot = tuple[str, str, int]
"""Name of a module, `out` or `in`, and index of a channel."""


def find_channel_units(model: nn.Module, example: Any) -> list[UnitGroup]:
    """Find the removable units of a model: channels of convolutions (kind channels) and features of linear layers (kind
    ffn); see [Note: marked channels].

    Args:
        example: inputs of the model: a tensor, a tuple of positional inputs, or a dict of named inputs. The first
            dimension of each tensor is the batch, whose first sample is used.

    Raises:
        ModelError: the model cannot run on the example.
    """
    trace = _Trace(model)
    producers = {name: module for name, module in model.named_modules() if _produces(module)}
    with evaluating(model), _without_fused_layers():
        for name, module in producers.items():
            channels = _outputs(module)
            for start in range(0, channels, _AT_ONCE):
                trace.run(name, start, min(start + _AT_ONCE, channels), example)
        return _removable(model, trace.groups(), example)


def _removable(model: nn.Module, groups: Sequence[UnitGroup], example: Any) -> list[UnitGroup]:
    """Return the groups whose units can be removed together with those of all other returned groups; see
    [Note: marked channels]."""
    if not groups or _removal_error(model, groups, example) is None:
        return list(groups)
    found: list[UnitGroup] = []
    for group in groups:
        error = _removal_error(model, [*found, group], example)
        if error is None:
            found.append(group)
        else:
            logger.info("all %s of %s stay: %s", group.kind, group.name, error)
    return found


def _removal_error(model: nn.Module, groups: Sequence[UnitGroup], example: Any) -> str | None:
    """Remove some units in a copy of a model. Return a text about the error of the copy, or about its first difference
    from the model in which these units are set to 0; None without an error or difference."""
    smaller, inputs = copy.deepcopy(model), _repeat(example, 2)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    # an odd number is removed from the beginning, so that code which regroups channels by fixed numbers fails
    kept = [
        (group, dict.fromkeys(group.parts, torch.arange((group.units // 2 - 1) | 1, group.units))) for group in groups
    ]
    for group, stays in kept:
        mask_units(smaller, group, stays)
    with torch.no_grad():
        with torch.random.fork_rng(devices):  # both forwards draw the same random numbers
            masked = list(_tensors(_call(smaller, inputs)))
        remove_units(smaller, kept)
        try:
            with torch.random.fork_rng(devices):
                removed = list(_tensors(_call(smaller, inputs)))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            return f"the model does not run with fewer ({error})"
    for one, two in zip(masked, removed, strict=False):
        if one.shape != two.shape:
            return f"the model's output has shape {tuple(two.shape)} with fewer, and {tuple(one.shape)} otherwise"
        span = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
        if not torch.allclose(two, one, rtol=0, atol=span * torch.finfo(one.dtype).eps ** 0.5, equal_nan=True):
            return "the model without them computes something else than with their weights set to 0"
    return None


def _produces(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (isinstance(module, _CONVOLUTIONS) and module.groups == 1)


def _outputs(module: nn.Module) -> int:
    return int(module.get_parameter("weight").shape[0])


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, _CONVOLUTIONS) and module.groups == module.in_channels == module.out_channels > 1


def _marked_rows(value: Any, count: int) -> Tensor:
    """Return, for each of `count` copies, True if its row of `value` has NaN.

    If `value` has no row for each copy, one NaN marks all copies; if it is not a tensor, all are marked.
    """
    if not isinstance(value, Tensor):
        return torch.ones(count).bool()
    marked = value.isnan()
    if not value.dim() or len(value) != count:
        return marked.any().expand(count)
    return marked.reshape(count, -1).any(1)


@dataclass
class _Marks:
    """Layer whose channels are marked in one forward."""

    name: str
    start: int
    stop: int


class _Trace:
    """Connections between channels, gathered over forwards."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parents: dict[Slot, Slot] = {}
        self._locked: set[Slot] = set()
        self._marks = _Marks("", 0, 0)

    def run(self, name: str, start: int, stop: int, example: Any) -> None:
        """Mark some channels of a layer, and connect them with the channels of all layers that they reach.

        Raises:
            ModelError: the model does not run on copies of the example's first sample.
        """
        self._marks = _Marks(name, start, stop)
        handles: list[Any] = []
        for inner, module in self._model.named_modules():
            if any(True for _ in module.parameters(recurse=False)) or isinstance(module, _NORMS):
                handles.append(module.register_forward_pre_hook(self._before(inner)))
        handles.append(self._model.get_submodule(name).register_forward_hook(self._mark))
        try:
            with torch.no_grad():
                out = _call(self._model, _repeat(example, stop - start))
        except (RuntimeError, ValueError, TypeError) as error:
            raise ModelError(
                f"{type(self._model).__name__} does not run on {stop - start} copies of the example's first sample: "
                f"{error}; give inputs whose first dimension is the batch"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        for tensor in _tensors(out):
            self._lock(_marked_rows(tensor, stop - start))

    def _mark(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        marks = self._marks
        rows = torch.arange(marks.stop - marks.start)
        marked = output.clone()
        if marked.dim() < 2 or len(marked) != len(rows):  # the batch is not the first dimension here
            self._lock(torch.ones(len(rows)).bool())
            return output
        moved = marked if isinstance(module, _CONVOLUTIONS) else marked.movedim(-1, 1)
        moved[rows, rows + marks.start] = float("nan")
        return marked

    def _before(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not any(isinstance(one, Tensor) and one.is_floating_point() and one.isnan().any() for one in inputs):
                return None
            self._arrive(name, module, inputs[0])
            if isinstance(module, _NORMS) or _is_depthwise(module):
                return None  # the module does not mix channels, so the marks pass through
            return tuple(torch.nan_to_num(one) if isinstance(one, Tensor) else one for one in inputs)

        return hook

    def _arrive(self, name: str, module: nn.Module, value: Any) -> None:
        marks = self._marks
        count = marks.stop - marks.start
        known = _produces(module) or isinstance(module, _NORMS) or _is_depthwise(module)
        if not known or not isinstance(value, Tensor) or value.dim() < 2 or len(value) != count:
            self._lock(_marked_rows(value, count))
            return
        moved = value.movedim(-1, 1) if isinstance(module, nn.Linear) else value
        reached = moved.flatten(2).isnan().any(2) if moved.dim() > 2 else moved.isnan()
        for row, channel in reached.nonzero().tolist():
            source = (marks.name, "out", marks.start + row)
            self._join(source, (name, "in", channel))
            if _is_depthwise(module):
                self._join(source, (name, "out", channel))

    def _lock(self, rows: Tensor) -> None:
        for row in rows.nonzero().flatten().tolist():
            self._locked.add((self._marks.name, "out", self._marks.start + row))

    def _find(self, slot: Slot) -> Slot:
        path = []
        while self._parents.setdefault(slot, slot) != slot:
            path.append(slot)
            slot = self._parents[slot]
        for one in path:
            self._parents[one] = slot
        return slot

    def _join(self, one: Slot, two: Slot) -> None:
        self._parents[self._find(one)] = self._find(two)

    def groups(self) -> list[UnitGroup]:
        """Return groups of units. A unit is a set of connected channels, none of them locked; units form a group if
        they have the same numbers of channels in the same tensors. A unit without others like it is left out."""
        self._join_shared()
        units: dict[Slot, list[Slot]] = {}
        for slot in list(self._parents):
            units.setdefault(self._find(slot), []).append(slot)
        locked = {self._find(slot) for slot in self._locked}
        places: dict[tuple[tuple[str, str, int], ...], list[list[Slot]]] = {}
        for root, slots in units.items():
            if root in locked or not any(side == "out" for _, side, _ in slots):
                continue
            counts: dict[tuple[str, str], int] = {}
            for name, side, _ in slots:
                counts[name, side] = counts.get((name, side), 0) + 1
            key = tuple(sorted((name, side, count) for (name, side), count in counts.items()))
            places.setdefault(key, []).append(sorted(slots))
        order = {name: place for place, (name, _) in enumerate(self._model.named_modules())}
        found = [self._group(sorted(members), order) for members in places.values() if len(members) > 1]
        return sorted(found, key=lambda group: order[group.name])

    def _join_shared(self) -> None:
        """Connect the channels of layers that share a parameter, or lock them if one of the layers is not traced."""
        holders: dict[int, dict[str, str]] = {}  # for each parameter: its name in each module that holds it
        for name, module in self._model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                holders.setdefault(id(parameter), {})[name] = leaf
        for users in holders.values():
            if len(users) < 2:
                continue
            first, *others = users
            traced = all(_produces(self._model.get_submodule(name)) for name in users)
            sides = {"out": 0, "in": 1} if "weight" in users.values() else {"out": 0}
            for side, dim in sides.items():
                if traced:
                    channels = self._model.get_submodule(first).get_parameter("weight").shape[dim]
                    for name in others:
                        for channel in range(channels):
                            self._join((first, side, channel), (name, side, channel))
                else:
                    self._locked |= {slot for slot in self._parents if slot[0] in users}

    def _group(self, members: list[list[Slot]], order: dict[str, int]) -> UnitGroup:
        sides = sorted({(name, side) for name, side, _ in members[0]}, key=lambda one: (order[one[0]], one[1]))
        first = next(name for name, side in sides if side == "out" and _produces(self._model.get_submodule(name)))
        members = sorted(members, key=lambda slots: next(channel for name, side, channel in slots if name == first))
        tensors = []
        for name, side in sides:
            module = self._model.get_submodule(name)
            index = torch.tensor(
                [[channel for one, where, channel in slots if (one, where) == (name, side)] for slots in members]
            )
            if isinstance(module, _NORMS):
                values = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
                tensors += [CoupledTensor(f"{name}.{leaf}", 0, index) for leaf, value in values if value.dim() == 1]
            elif side == "in" and not _is_depthwise(module):
                tensors.append(CoupledTensor(f"{name}.weight", 1, index, reads=True))
            elif side == "out":
                tensors.append(CoupledTensor(f"{name}.weight", 0, index))
                if module._parameters.get("bias") is not None:
                    tensors.append(CoupledTensor(f"{name}.bias", 0, index))
        kind = "ffn" if isinstance(self._model.get_submodule(first), nn.Linear) else "channels"
        return UnitGroup(first, kind, len(members), tuple(tensors))


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Run torch's encoder layers without their fused kernel, which skips the hooks of their modules."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _repeat(value: Any, count: int) -> Any:
    """Return `count` copies of the first sample."""
    if isinstance(value, Tensor):
        return value[:1].expand(count, *value.shape[1:]).clone() if value.dim() else value
    if isinstance(value, dict):
        return {name: _repeat(one, count) for name, one in value.items()}
    return tuple(_repeat(one, count) for one in value) if isinstance(value, (tuple, list)) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
