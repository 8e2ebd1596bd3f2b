"""Attributes and hooks that the files of an engine's class share.

[Note: files of an engine] The class of an engine is written in several files: `training_engine` has forward, backward
and step; `query_methods` and `checkpoint_methods` are base classes; `pipeline_engine` and `windlass.compat` subclass
it. `EngineParts` declares every private name that more than one of these files uses, which
`tests/unit/test_engine_interfaces.py` checks. Other files use an engine's public names, or receive the parts that they
need, as `EngineState` does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.checkpoint.async_save import AsyncSave
from windlass.config import Config
from windlass.engine.batch_shapes import BatchShapes
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.engine_reporter import EngineReporter
from windlass.engine.failed_call_barrier import FailedCallBarrier
from windlass.engine.input_consistency import InputConsistencyCheck
from windlass.engine.nonfinite_locator import NonFiniteLocator
from windlass.engine.sharded_optimizer import ShardedOptimizer
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale
from windlass.zero.engine_callbacks import EngineCallbacks
from windlass.zero.sharded_model import ShardedModel


class EngineParts:
    """Shared attributes of an engine, and the hooks that a subclass may override.

    Attributes:
        config: the configuration as the script gave it.
        _config: the validated configuration.
        _sharded: the sharded model; `refresh` replaces it.
        _optimizer: None in an engine that only evaluates.
        _grad_norm: norm of the last step's gradient; None before the first step.
        _step_start_position: data position at the start of the current step.
        _loss_weight: factor of the loss of the running micro-batch, usually 1 / accumulation steps.
        _loss_is_scaled: True if the loss of the next backward includes the loss scale.
        _batch_shapes: inputs of the last forward, for a note on an out-of-memory error.
    """

    config: Any
    device: torch.device
    progress: TrainingProgress
    lr_scheduler: Any
    training_dataloader: Any
    _step_start_position: dict[str, Any] | None
    saved_tags: set[tuple[str, str]]
    _config: Config
    _sharded: ShardedModel
    _optimizer: ShardedOptimizer | None
    _scaler: LossScale
    _async_save: AsyncSave
    _observers: list[EngineObserver]
    _reporter: EngineReporter
    _failed_call_barrier: FailedCallBarrier
    _nonfinite_locator: NonFiniteLocator
    _grad_norm: float | None
    _loss_weight: float
    _loss_is_scaled: bool
    _batch_shapes: BatchShapes | None

    def _record_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the shapes of a forward's inputs in `_batch_shapes`."""
        raise NotImplementedError

    def _note_out_of_memory(self, error: BaseException, moment: str) -> None:
        """Add a note to an out-of-memory error: the predicted memory, and a configuration that would fit."""
        raise NotImplementedError

    def _require_ready(self, what: str) -> None:
        """Raise ModelError if the engine was destroyed or its states are offloaded; `what` names the call."""
        _require_intact(self._sharded, what)
        if self._sharded.state_offloader.has_offloaded:
            raise ModelError(f"{what}: states are offloaded; call engine.reload_states() first")

    def _require_ready_to_compute(self, what: str) -> None:
        """Raise ModelError if the engine was destroyed or a forward needs offloaded values; `what` names the call."""
        if self._sharded.replicas.keeps_local_weights:  # a forward makes them from master weights and optimizer states
            self._require_ready(what)
        _require_intact(self._sharded, what)
        self._sharded.state_offloader.require_for_compute(self._sharded.units, "parameters")

    def _attach(self, sharded: ShardedModel) -> None:
        """Connect the engine to a sharded model that it has built."""
        raise NotImplementedError

    def _note_step_start(self) -> None:
        """Record the data position at which a step starts."""
        raise NotImplementedError

    def _make_callbacks(self) -> EngineCallbacks:
        """Return the callables that the engine's sharded models call."""
        raise NotImplementedError

    def _make_input_check(self, sharded: ShardedModel) -> InputConsistencyCheck:
        """Return the check that ranks with the same samples get the same inputs."""
        raise NotImplementedError

    def _is_syncing(self) -> bool:
        """Return True if the running backward reduces gradients."""
        raise NotImplementedError

    def _on_backward_begin(self) -> None:
        """Prepare for a backward that autograd has begun."""
        raise NotImplementedError

    def _on_backward_end(self) -> None:
        """Clear the state of one backward."""
        raise NotImplementedError

    def _run_backward(self, run: Callable[[], None], is_last: bool) -> None:
        """Call the backward of a pipeline's micro-batch, which reduces gradients if `is_last`."""
        raise NotImplementedError

    def _end_gradients(self) -> None:
        """Handle the end of an outermost backward that reached parameters."""
        raise NotImplementedError

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of a forward."""
        raise NotImplementedError

    def _step_by_optimizer(self) -> None:
        """Implement `engine.optimizer.step()`."""
        raise NotImplementedError

    def _step_lr_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        """Step the learning-rate scheduler after an applied step, with the arguments of `step(lr_kwargs=...)`."""
        raise NotImplementedError

    def _update_loss_scale(self, overflow: bool, location: str = "") -> None:
        """Update the loss scale at the end of a step, and the values that contain it."""
        raise NotImplementedError

    def _drop_token_counts(self) -> None:
        """Drop the token counts of router biases, so that tokens of dropped micro-batches do not move the biases."""
        raise NotImplementedError

    def _checkpoint_metadata(self) -> dict[str, Any]:
        """Return plain data of the engine's class that a checkpoint contains in addition to the state."""
        raise NotImplementedError

    def _loaded_client_state(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the client state for the caller of `load_checkpoint`, from the plain data of a checkpoint."""
        raise NotImplementedError

    def _report_external_gradients(self, names: list[str]) -> None:
        """Report that the step drops the gradients that the script set on the parameters `names`."""
        raise NotImplementedError


def _require_intact(sharded: ShardedModel, what: str) -> None:
    if sharded.destroyed:
        raise ModelError(f"{what}: this engine was destroyed; use the model itself, or initialize a new engine")
