"""Observer that runs teachers before a pipeline's step, and updates masks and bits of a compressed model after each
step of its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from windlass.comm.mesh import Mesh
from windlass.compress.block_curvature import CurvatureRanks
from windlass.compress.distillation import attached_distillation
from windlass.compress.quantize_training import bit_planner
from windlass.compress.snip_pruning import drop_products, snip_layers, update_masks
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.pipeline_engine import PipelineEngine
from windlass.engine.training_engine import Engine


class CompressionObserver(EngineObserver):
    """Observer that runs teachers ahead, and updates masks that follow gradients and bits that follow curvature.

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

    def before_schedule(self, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
        distillation = attached_distillation(self._model)
        if distillation is not None and distillation.runs_ahead:
            distillation.run_ahead(self._model, batches, to_device)

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


def observe_compression(model: nn.Module, engine: Engine, mesh: Mesh) -> None:
    """Add the observer to an engine whose model needs it."""
    has_masks = any(True for _ in snip_layers(model))
    if bit_planner(model) is not None or has_masks or attached_distillation(model) is not None:
        engine.add_observer(CompressionObserver(model, engine, mesh))
