"""Engine methods that read and write checkpoints and full weights, and that compute the fingerprint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from windlass.base.log import logger
from windlass.engine.engine_loading import LoadOptions, load_engine
from windlass.engine.engine_parts import EngineParts
from windlass.engine.engine_saving import save_engine
from windlass.engine.engine_state import EngineState
from windlass.engine.full_weights import full_state_dict, load_full_state_dict, load_with_function, save_16bit_model
from windlass.engine.state_fingerprint import compute_fingerprint
from windlass.zero.core.collective_scheduler import SyncPoint


class CheckpointMethods(EngineParts):
    """Saving and loading methods of an engine. Names are DeepSpeed's where it has an equivalent."""

    def fingerprint(self) -> str:
        """Return a short hash of all parameters and optimizer states: 16 hexadecimal digits each, joined by a dash.

        The hash does not depend on tiers, sharding or the number of ranks. See docs/checkpoints.md. Collective.

        Raises:
            CheckpointError: a value cannot be hashed. Raised on all ranks.
            StorageError: an offloaded value cannot be read. Raised on all ranks.
        """
        self._require_ready("fingerprint")
        self._sharded.scheduler.sync(SyncPoint.STATE_READ)
        return str(compute_fingerprint(self._sharded))

    def full_state_dict(self, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return full parameters, buffers and extra states (`get_extra_state`), named as in a plain `state_dict()`.

        Rank 0 gets the dictionary, with CPU tensors; other ranks get an empty dictionary. Collective.
        """
        self._require_ready("full_state_dict")
        self._sharded.scheduler.sync(SyncPoint.STATE_READ)
        return full_state_dict(self._sharded, dtype=dtype)

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Load a plain `model.state_dict()` of full tensors, the same on every rank. Collective, between steps.

        Master weights take the given values at their precision, up to float32; parameters are updated from the master
        weights.

        Args:
            state_dict: the state dictionary, or a dictionary that holds it under the key `module`.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` on every rank, with all parameters
                gathered. Changes that it makes on rank 0 are kept.
            fetch_z3_params: accepted and ignored; the given tensors are full at every stage.

        Returns:
            List of the names that are missing in the state dictionary, and list of the names that the model lacks.

        Raises:
            CheckpointError: a name is in one of these lists and `strict` is set, or a shape differs. Nothing was
                changed.
        """
        self._require_ready("load_module_state_dict")
        if isinstance(state_dict.get("module"), Mapping):
            state_dict = state_dict["module"]
        if custom_load_fn is not None:
            load_with_function(self._sharded, state_dict, custom_load_fn)
            self._sharded.forget_unsent()
            return [], []
        return load_full_state_dict(self._sharded, state_dict, strict=strict)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return `module.state_dict(...)`, optionally without frozen parameters.

        At stage 3 parameters are sharded: outside of `GatheredParameters` this method raises an error, as
        `module.state_dict()` does. `full_state_dict` gathers the parameters instead.
        """
        state: dict[str, Any] = self._module().state_dict(
            destination=cast("dict[str, Any]", destination), prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, parameter in self._module().named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _module(self) -> torch.nn.Module:
        return self._sharded.model

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write full parameters and buffers in their compute dtype to one file, with one unit in memory at a time.

        Collective.

        Args:
            save_filename: a name that ends in `.safetensors` selects that format; any other name gives a file for
                `torch.load`.

        Returns:
            True; False, with a warning, if nothing was written: at stage 3 if the configuration sets
            `stage3_gather_16bit_weights_on_model_save` to false.
        """
        zero = self._config.zero_optimization
        refused = "stage3_gather_16bit_weights_on_model_save" in zero.model_fields_set
        if self._sharded.policy.stage == 3 and refused and not zero.stage3_gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model wrote nothing: zero_optimization.stage3_gather_16bit_weights_on_model_save is false; "
                "write true"
            )
            return False
        self._require_ready("save_16bit_model")
        self._sharded.scheduler.sync(SyncPoint.STATE_READ)
        return save_16bit_model(self._sharded, save_dir, save_filename, exclude_frozen_parameters)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool | None = None,
        blocking: bool | None = None,
    ) -> bool:
        """Write all state that is needed to resume training. Collective.

        Args:
            tag: name of the folder inside `save_dir`, a text or a number; `global_stepN` by default.
            client_state: the caller's plain data, returned by `load_checkpoint`. Objects of classes declared with
                `torch.serialization.add_safe_globals` are saved as their state.
            save_latest: write this tag to the file `latest`.
            exclude_frozen_parameters: leave out frozen parameters, and store a hash of each so that a load detects a
                changed base model. None: leave them out if at most a tenth of all elements is trained (adapters).
            blocking: return when the checkpoint is written; else return once a copy is taken, and write it during
                training. Only one such save is in flight at a time: the next save, `load_checkpoint` and `destroy` wait
                for it. If it failed, the first of these calls or the next step raises its error: a step at its end, the
                others at their start. None: use `checkpoint.async_save` of the configuration.

        Raises:
            ValueError: `save_dir` is empty.
            CheckpointError: the checkpoint could not be written, or there is no consistent state to save because a step
                was made only in part (see `step`). Existing checkpoints are intact.
            StorageError: an offloaded value cannot be read.
        """
        if not str(save_dir):
            raise ValueError("save_checkpoint: save_dir is empty; give the directory that checkpoints go to")
        self._require_ready("save_checkpoint")
        self._sharded.scheduler.sync(SyncPoint.CHECKPOINT)
        at_once = not self._config.checkpoint.async_save if blocking is None else blocking
        name = None if tag is None else str(tag)  # scripts may pass numbers as tags
        begun = time.monotonic()
        saved = save_engine(
            self._state(), save_dir, name, client_state or {}, save_latest, exclude_frozen_parameters, at_once
        )
        action = "save" if at_once else "copy for an async save"
        self._reporter.record_checkpoint(action, str(save_dir), time.monotonic() - begun)
        return saved

    def finish_checkpoint(self) -> None:
        """Wait until the async save in flight is written, if there is one (see `save_checkpoint`). Collective.

        Raises:
            CheckpointError: the checkpoint was not written. Raised on all ranks. Existing checkpoints are intact.
        """
        self._async_save.finish()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        load_optimizer_strict: bool = True,
        load_data_position: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint that was saved on any number of ranks, at any stage, with any tiers. Collective.

        Matched, missing and unexpected names are logged. See docs/checkpoints.md.

        Accumulated gradients are dropped, unless `load_module_only`: the next micro-batch begins a new step.

        Args:
            tag: the tag in the file `latest` by default; `.` for `load_dir` itself.
            custom_load_fn: loads parameters and buffers in place of the default, as `custom_load_fn(src=state_dict,
                dst=module)` on every rank, with the full saved state dictionary and all parameters gathered. Changes
                that it makes on rank 0 are kept. Each rank needs memory for the full model.
            load_module_strict: require that parameters and buffers are the saved ones; else load those with matching
                names and leave the others unchanged.
            load_optimizer_states: load optimizer states and hyper-parameters too.
            load_lr_scheduler_states: load the learning rate scheduler's state too.
            load_module_only: load parameters and buffers and nothing else: no optimizer states, counters, loss scale,
                scheduler, random states or data position.
            load_optimizer_strict: require that the optimizer has the saved groups; else load what matches by name.
            load_data_position: continue `training_dataloader` at the saved position.

        Returns:
            The checkpoint's path and the saved `client_state`; `(None, None)` with a warning if there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit the model or the optimizer.
        """
        self._require_ready("load_checkpoint")
        self._sharded.scheduler.sync(SyncPoint.CHECKPOINT)
        requested = LoadOptions(
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states and not load_module_only,
            load_optimizer_strict=load_optimizer_strict,
            load_lr_scheduler_states=load_lr_scheduler_states and not load_module_only,
            load_data_position=load_data_position and not load_module_only,
            load_progress=not load_module_only,
            custom_load_fn=custom_load_fn,
        )
        begun = time.monotonic()
        if tag == ".":
            load_dir, tag = os.path.split(os.path.realpath(load_dir))  # the real name, as `load_dir` may be a link
        loaded = load_engine(self._state(), load_dir, None if tag is None else str(tag), requested)
        if loaded is not None:
            self._reporter.record_checkpoint("load", loaded[0], time.monotonic() - begun)
        if not self.progress.is_step_started:
            self._note_step_start()
        for observer in self._observers:
            observer.after_load()
        return (None, None) if loaded is None else (loaded[0], self._loaded_client_state(loaded[1]))

    def _loaded_client_state(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the client state in the plain data of a checkpoint."""
        return dict(plain["client"])

    def _checkpoint_metadata(self) -> dict[str, Any]:
        """Return the plain data that this class adds to a checkpoint."""
        return {}

    def _state(self) -> EngineState:
        return EngineState(
            sharded=self._sharded,
            optimizer=self._optimizer,
            config=self._config,
            raw_config=self.config,
            progress=self.progress,
            scaler=self._scaler,
            lr_scheduler=self.lr_scheduler,
            training_dataloader=self.training_dataloader,
            step_start_position=self._step_start_position,
            async_save=self._async_save,
            saved_tags=self.saved_tags,
            metadata=self._checkpoint_metadata(),
        )
