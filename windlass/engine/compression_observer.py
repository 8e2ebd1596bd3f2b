"""Observers of a compressed model's engine: they update pruning masks and bit widths after each step, and run a teacher
before a pipeline's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from windlass.comm.mesh import Mesh
from windlass.compress.block_curvature import CurvatureRanks
from windlass.compress.distillation import Distillation, attached_distillation
from windlass.compress.quantize_training import bit_planner
from windlass.compress.snip_pruning import drop_products, snip_layers, update_masks
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.pipeline_engine import PipelineEngine
from windlass.engine.training_engine import Engine


class CompressionObserver(EngineObserver):
    """Observer that updates pruning masks from gradients, and bit widths from curvature.

    Args:
        mesh: the ranks of the model.
    """

    def __init__(self, model: nn.Module, engine: Engine, mesh: Mesh) -> None:
        self._model, self._engine, self._mesh = model, engine, mesh
        self._ranks = CurvatureRanks(mesh.dense.data, mesh.pp)
        self._gradients = None
        if isinstance(engine, PipelineEngine) and bit_planner(model) is not None:
            engine.keep_last_micro_batch()
            self._gradients = engine.last_micro_batch_gradients

    def after_step(self) -> None:
        step = self._engine.global_steps
        update_masks(self._model, step, self._mesh, applied=self._engine.was_step_applied())
        planner = bit_planner(self._model)
        if planner is not None:
            planner.end_step(self._model, step, self._ranks, self._gradients)

    def after_failed_step(self) -> None:
        drop_products(self._model)

    def after_load(self) -> None:
        drop_products(self._model)


class TeacherObserver(EngineObserver):
    """Observer that runs the teacher of a pipeline on all micro-batches of a step."""

    def __init__(self, model: nn.Module, distillation: Distillation) -> None:
        self._model, self._distillation = model, distillation

    def before_schedule(self, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
        self._distillation.run_ahead(self._model, batches, to_device)


def observe_compression(model: nn.Module, engine: Engine, mesh: Mesh) -> None:
    """Add the observers to an engine whose model needs them."""
    if bit_planner(model) is not None or any(True for _ in snip_layers(model)):
        engine.add_observer(CompressionObserver(model, engine, mesh))
    distillation = attached_distillation(model)
    if distillation is not None and distillation.runs_ahead and isinstance(engine, PipelineEngine):
        engine.add_observer(TeacherObserver(model, distillation))
