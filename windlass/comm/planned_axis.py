"""Mesh axis of a run that has not started: its collectives return tensors of the right shapes, and send nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from windlass.base.pending import DONE, Pending
from windlass.comm.mesh_axis import MeshAxis


class PlannedAxis(MeshAxis):
    """Axis whose other ranks do not exist.

    Results have the shapes, dtypes and memory sizes of the results of a `MeshAxis`; their values are undefined. Bytes
    are counted as by a `MeshAxis`. Used to partition a model as on one rank of the planned run, and to trace the
    result on the meta device or with `FakeTensor`s.
    """

    def _start_sum(self, tensor: torch.Tensor, op: Any) -> Pending:
        return DONE

    def _fill_gathered(self, full: torch.Tensor, own: torch.Tensor) -> None:
        pass

    def _fill_scattered(self, own: torch.Tensor, full: torch.Tensor) -> None:
        pass

    def _fill_exchanged(self, out: torch.Tensor, tensor: torch.Tensor, receives: list[int], sends: list[int]) -> None:
        pass

    def _fill_shifted(
        self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], to: int, source: int
    ) -> None:
        pass

    def _fill_broadcast(self, tensor: torch.Tensor, source: int) -> None:
        pass

    def _gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def _read_counts(
        self, counts: torch.Tensor, arriving: torch.Tensor, spans: Sequence[tuple[int, int]], most: int
    ) -> list[int]:
        # Assumption: each rank has `most` rows, spread over the receivers as evenly as possible.
        each, rest = divmod(most, len(counts))
        even = [each + (receiver < rest) for receiver in range(len(counts))]
        first, end = spans[self.index]
        return even + even[first:end] * self.size
