"""Transfers of one pipeline rank for a plan of a run: buffers are allocated as in the run, and nothing is sent."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.pipeline.stage_message import MessageLayout, pack_message
from windlass.parallel.pipeline.stage_transfers import StageTransfers


class PlannedTransfers(StageTransfers):
    """Transfers whose other ranks do not exist.

    Received tensors have the shapes, dtypes and memory of a run, and undefined values. Used with models of
    `FakeTensor`s.

    Args:
        axis: a `PlannedAxis`.
        passed: output of a stage as another rank sends it; only shapes and dtypes are read.
    """

    def __init__(self, axis: MeshAxis, device: torch.device, passed: Any) -> None:
        super().__init__(axis, device)
        layout = pack_message(passed)[0]
        self._layout = replace(layout, skeleton=pickle.dumps(layout.skeleton))

    def _start(self, tensors: list[torch.Tensor], stage: int, tag: int, *, sends: bool) -> list[Any]:
        return []

    def _take_received(self, kind: int, stage: int, micro_batch: int) -> list[torch.Tensor]:
        return self._receiving.pop((kind, stage, micro_batch)).tensors

    def _send_header(self, stage: int, layout: MessageLayout | None) -> None:
        pass

    def _receive_header(self, stage: int) -> MessageLayout | None:
        return self._layout
