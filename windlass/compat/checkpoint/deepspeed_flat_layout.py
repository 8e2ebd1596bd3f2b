"""DeepSpeed's flat layout of parameters, and the spans of one rank; see [Note: DeepSpeed's files]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.log import logger
from windlass.checkpoint.pickle_writer import PlannedTensor
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.checkpoint.torch_state_dicts import decode_full_state

ParameterSpan = tuple[str, int, int]
"""Span: name, start and stop of elements `[start, stop)` of a parameter. An empty name means `stop - start` zeros."""

_ZEROS = 1 << 20  # number of zeros that are allocated at a time
_STEP = "step"


@dataclass(frozen=True)
class FlatLayout:
    """Flat layout of several parameters.

    Attributes:
        shapes: shapes of the parameters, in their order.
        ranks: number of parts.
        part_numel: number of elements in each rank's part, with padding.
        shards_each_parameter: True if each parameter is divided separately; False if the parameters are concatenated
            and the result is divided.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ranks: int
    part_numel: int
    shards_each_parameter: bool

    def spans(self, rank: int, *, padded: bool = True) -> list[ParameterSpan]:
        """Return the spans in a rank's part, in order. If `padded` is False, the zeros at its end are left out."""
        found = self._spans_per_parameter(rank) if self.shards_each_parameter else self._spans_concatenated(rank)
        if not padded and found and not found[-1][0]:
            found.pop()
        return found

    def padding_numel(self, rank: int) -> int:
        """Return the number of zeros at the end of a rank's part of concatenated parameters."""
        return self.part_numel - sum(stop - start for name, start, stop in self._spans_concatenated(rank) if name)

    def _spans_per_parameter(self, rank: int) -> list[ParameterSpan]:
        found: list[ParameterSpan] = []
        for name, shape in self.shapes.items():
            numel = math.prod(shape)
            size = -(-numel // self.ranks)
            start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
            found.append((name, start, stop))
            if size > stop - start:
                found.append(("", 0, size - (stop - start)))
        return found

    def _spans_concatenated(self, rank: int) -> list[ParameterSpan]:
        found: list[ParameterSpan] = []
        begin, end, at = rank * self.part_numel, (rank + 1) * self.part_numel, 0
        for name, shape in self.shapes.items():
            numel = math.prod(shape)
            first, last = max(begin, at), min(end, at + numel)
            if first < last:
                found.append((name, first - at, last - at))
            at += numel
        if (left := end - max(begin, at)) > 0:
            found.append(("", 0, left))
        return found


def concatenated_layout(shapes: Mapping[str, tuple[int, ...]], ranks: int, align: int = 2) -> FlatLayout:
    """Return the layout of stages 1 and 2: concatenated parameters in equal parts, each a multiple of `align`
    elements."""
    unit = align * ranks
    total = sum(math.prod(shape) for shape in shapes.values())
    return FlatLayout(shapes, ranks, -(-total // unit) * unit // ranks, shards_each_parameter=False)


def per_parameter_layout(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> FlatLayout:
    """Return the layout of stage 3: each parameter is divided separately."""
    return FlatLayout(
        shapes, ranks, sum(-(-math.prod(shape) // ranks) for shape in shapes.values()), shards_each_parameter=True
    )


@dataclass(frozen=True)
class FlatTensorSource:
    """Consecutive spans of a checkpoint's tensors.

    Attributes:
        stored: the checkpoint.
        spans: spans in the order of the flat tensor.
        stored_name_of: returns the stored name of a parameter's tensor; None: no tensor is stored, and its elements
            are zeros.
        read: returns elements `[start, stop)` of the tensor with a stored name, in parts; None: `stored.iter_span`.
    """

    stored: StoredCheckpoint
    spans: Sequence[ParameterSpan]
    stored_name_of: Callable[[str], str | None]
    read: Callable[[str, int, int], Iterable[torch.Tensor]] | None = None

    def plan(self, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> PlannedTensor:
        """Return the concatenated spans as a tensor that is read while it is written; flat unless `shape` is given."""
        numel = sum(stop - start for _, start, stop in self.spans)
        return PlannedTensor(dtype, (numel,) if shape is None else shape, lambda: self._iter_parts())

    def _iter_parts(self) -> Iterator[torch.Tensor]:
        for name, start, stop in self.spans:
            where = self.stored_name_of(name) if name else None
            if where is not None:
                yield from (self.read or self.stored.iter_span)(where, start, stop)
                continue
            for at in range(start, stop, _ZEROS):
                yield torch.zeros(min(_ZEROS, stop - at), dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class FlatGroup:
    """Optimizer group, or a part of one, that is stored as one flat tensor.

    Attributes:
        number: index of the optimizer group.
    """

    number: int
    layout: FlatLayout

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the group's parameters, in order."""
        return self.layout.shapes

    def step_count(self, stored: StoredCheckpoint) -> int:
        """Return the largest step count of the group's parameters; 0 if the optimizer does not count steps."""
        return max((_stored_step_count(stored, name) for name in self.shapes), default=0)

    def plan_states(
        self, stored: StoredCheckpoint, spans: Sequence[ParameterSpan], shape: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Return the group's optimizer states with one value per element, flat or of `shape`, and the step count.

        Other states are left out with a warning: DeepSpeed steps flat groups and has no states per parameter.
        """
        kinds: dict[str, dict[str, str]] = stored.engine_data.get("states", {})
        keys = dict.fromkeys(key for name in self.shapes for key in kinds.get(name, {}))
        found: dict[str, Any] = {}
        for key in keys:
            forms = {kinds.get(name, {}).get(key, "").split(" ")[0] for name in self.shapes} - {""}
            if key == _STEP and forms <= {"whole", "value"}:
                # a plain number, because all optimizers of DeepSpeed and torch load it
                found[key] = self.step_count(stored)
            elif forms <= {"pieces", "signed", "unsigned"}:
                found[key] = self._plan_flat_state(stored, spans, kinds, key, shape)
            else:
                _warn_left_out(stored, key, next(iter(self.shapes)))
        return found

    def _plan_flat_state(
        self,
        stored: StoredCheckpoint,
        spans: Sequence[ParameterSpan],
        kinds: Mapping[str, Mapping[str, str]],
        key: str,
        shape: tuple[int, ...] | None,
    ) -> PlannedTensor:
        def where(name: str) -> str | None:
            return f"state/{name}/{key}" if key in kinds.get(name, {}) else None

        def read(stored_as: str, start: int, stop: int) -> Iterable[torch.Tensor]:
            name = stored_as.removeprefix("state/").removesuffix(f"/{key}")
            form = kinds[name][key].split(" ")[0]
            if form == "pieces":
                return stored.iter_span(stored_as, start, stop)
            return [decode_full_state(stored, name, key, signed=form == "signed").view(-1)[start:stop]]

        return FlatTensorSource(stored, spans, where, read).plan(torch.float32, shape)


def _stored_step_count(stored: StoredCheckpoint, name: str) -> int:
    form = stored.engine_data.get("states", {}).get(name, {}).get(_STEP, "")
    if form == "value":
        return int(stored.engine_data["values"][name][_STEP])
    return int(stored.read_full(f"state/{name}/{_STEP}").item()) if form.startswith("whole") else 0


_WARNED_KEYS: set[str] = set()


def _warn_left_out(stored: StoredCheckpoint, key: str, name: str) -> None:
    if key not in _WARNED_KEYS:
        _WARNED_KEYS.add(key)
        logger.warning(
            "checkpoint.format: DeepSpeed's files lack the optimizer's state %r (e.g. of %r), which does not have one "
            "value per element; windlass' files contain it, so load this checkpoint with windlass",
            key,
            name,
        )
