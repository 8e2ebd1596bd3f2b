"""The part of an engine that reads and writes files: checkpoints, whole weights, and the hash that tells them apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.checkpoint.async_save import AsyncSave
from windlass.config import Config
from windlass.engine.engine_checkpoint import LoadOptions, load_engine, save_engine
from windlass.engine.full_weights import full_state_dict, load_full_state_dict, load_with_function, save_16bit_model
from windlass.engine.state_fingerprint import compute_fingerprint
from windlass.zero.sharded_model import ShardedModel

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine


class CheckpointMethods:
    """Saving and loading. Names are DeepSpeed's where it has them."""

    _config: Config
    _sharded: ShardedModel
    _async_save: AsyncSave

    def _require_ready(self, what: str) -> None:
        if self._sharded.destroyed:
            raise ModelError(f"{what}: this engine was destroyed; use the model itself, or initialize a new engine")
        if self._sharded.state_offloader.offloaded_kinds:
            raise ModelError(f"{what}: states are offloaded; call engine.reload_states() first")

    def fingerprint(self) -> str:
        """A short hash of all parameters and optimizer states, the same wherever they rest, in whatever cut, on any
        number of ranks: 16 hexadecimal digits of the parameters, 16 of the states. See docs/checkpoints.md. Collective.

        Raises:
            CheckpointError: something has no hash; on all ranks.
            StorageError: what rests on disk can't be read; on all ranks.
        """
        self._require_ready("fingerprint")
        self._sharded.scheduler.sync("the reading of parameters or states")
        return str(compute_fingerprint(self._sharded))

    def full_state_dict(self, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by name on the CPU of rank 0, and what modules keep beside them
        (`get_extra_state`), as the plain model's `state_dict()` has them; empty on other ranks. Collective."""
        self._require_ready("full_state_dict")
        self._sharded.scheduler.sync("the reading of parameters or states")
        return full_state_dict(self._sharded, dtype=dtype)

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Take a plain `model.state_dict()`: whole tensors, the same on every rank. Collective, between steps.

        Master weights are set to its values, in float32 if they are; parameters follow.

        Args:
            state_dict: or a dictionary that has it as its `module`.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` on every rank, with all parameters
                gathered; what it changes on rank 0 is kept.
            fetch_z3_params: accepted; parameters are whole tensors at every stage.

        Returns:
            Names that are missing in it, and names that the model does not have.

        Raises:
            CheckpointError: there are some and `strict` is set, or a shape differs. Nothing was changed.
        """
        self._require_ready("load_module_state_dict")
        if isinstance(state_dict.get("module"), Mapping):
            state_dict = state_dict["module"]
        if custom_load_fn is not None:
            load_with_function(self._sharded, state_dict, custom_load_fn)
            return [], []
        return load_full_state_dict(self._sharded, state_dict, strict=strict)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """`module.state_dict(...)`, without parameters that are not trained if so asked.

        At stage 3 parameters are spread over ranks: there it is refused outside of `GatheredParameters`, as
        `module.state_dict()` is; `full_state_dict` gathers them.
        """
        found: dict[str, Any] = self._module().state_dict(
            destination=cast("dict[str, Any]", destination), prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, parameter in self._module().named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    found.pop(prefix + name, None)
        return found

    def _module(self) -> torch.nn.Module:
        return self._sharded.model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole parameters and buffers as they compute, on the CPU of rank 0; None on other ranks. Collective.

        Raises:
            ValueError: the stage is not 3.
        """
        if self._sharded.policy.stage != 3:
            raise ValueError(
                "this function requires ZeRO-3 mode: parameters are spread over ranks at stage 3 alone; call "
                "engine.full_state_dict() at any stage"
            )
        found = self.full_state_dict()
        if self._sharded.mesh.world.index:
            return None
        left_out = _frozen_names(self._module()) if exclude_frozen_parameters else set()
        return OrderedDict((name, value) for name, value in found.items() if name not in left_out)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """As `_zero3_consolidated_16bit_state_dict`."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def load_universal_checkpoint(self) -> bool:
        """Whether the configuration says `checkpoint.load_universal`; any checkpoint here loads in any layout."""
        return self._config.checkpoint.load_universal

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """`save_16bit_model`, by its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Whole parameters and buffers as they compute, in one file, one unit in memory at a time. Collective.

        Args:
            save_filename: one that ends in `.safetensors` is such a file; any other is for `torch.load`.

        Returns:
            True; False, with a warning, where nothing was written: at stage 3 if the configuration sets
            `stage3_gather_16bit_weights_on_model_save` to false.
        """
        zero = self._config.zero_optimization
        refused = "stage3_gather_16bit_weights_on_model_save" in zero.model_fields_set
        if self._sharded.policy.stage == 3 and refused and not zero.stage3_gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model wrote nothing: zero_optimization.stage3_gather_16bit_weights_on_model_save is false"
            )
            return False
        self._require_ready("save_16bit_model")
        self._sharded.scheduler.sync("the reading of parameters or states")
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
        """Write everything that training needs to go on. Collective.

        Args:
            tag: the folder inside `save_dir`, a text or a number; `global_stepN` by default.
            client_state: plain data of the caller's, given back by `load_checkpoint`.
            save_latest: `latest` names this tag.
            exclude_frozen_parameters: leave out parameters that are not trained, and keep a hash of each, by which a
                load knows a changed base. None: where at most a tenth of all elements is trained (adapters).
            blocking: return when it is written; else once a copy is taken, and write while training goes on. One such
                save is under way at a time: the next one, `load_checkpoint` and `destroy` wait for it, and if it
                failed, they or the step that comes first raise that, after what they do (a step) or before it (the
                others). None: what the configuration says (`checkpoint.async_save`).

        Raises:
            ValueError: `save_dir` is empty.
            CheckpointError: it could not be written, or there is no state to save since a step was made in part (see
                `step`); what was there before is whole.
            StorageError: what rests on disk can't be read.
        """
        if not str(save_dir):
            raise ValueError("save_checkpoint: save_dir is empty; give the directory that checkpoints go to")
        self._require_ready("save_checkpoint")
        self._sharded.scheduler.sync("a checkpoint")
        at_once = not self._config.checkpoint.async_save if blocking is None else blocking
        engine = cast("Engine", self)
        name = None if tag is None else str(tag)  # scripts number their tags
        return save_engine(engine, save_dir, name, client_state or {}, save_latest, exclude_frozen_parameters, at_once)

    def finish_checkpoint(self) -> None:
        """Wait until the save under way is written, if there is one (see `save_checkpoint`). Collective.

        Raises:
            CheckpointError: it was not written; on all ranks. What was there before is whole.
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
        """Go on from a checkpoint, saved on any number of ranks, at any stage, from any homes. Collective.

        What matched, is missing and is unexpected is logged. See docs/checkpoints.md.

        Gradients of a step that has begun are dropped, unless `load_module_only`: what comes begins a step.

        Args:
            tag: by default the one that `latest` names.
            custom_load_fn: takes parameters and buffers over, as `custom_load_fn(src=state_dict, dst=module)` on every
                rank, with the whole saved state dictionary and all parameters gathered; what it changes on rank 0 is
                kept. Each rank needs memory for the model.
            load_module_strict: parameters and buffers are the saved ones; else those of the same name are loaded, and
                others stay as they are.
            load_optimizer_states: optimizer states and hyper-parameters too.
            load_lr_scheduler_states: the schedule too.
            load_module_only: parameters and buffers, and nothing else: no states, counters, loss scale, schedule,
                random states or place in the data.
            load_optimizer_strict: the optimizer has the saved groups; else what matches by name is loaded.
            load_data_position: `training_dataloader` goes on where the saved one stood.

        Returns:
            Its path and the `client_state` that was saved; `(None, None)` with a warning where there is none.

        Raises:
            CheckpointError: it is damaged, or does not fit.
        """
        self._require_ready("load_checkpoint")
        self._sharded.scheduler.sync("a checkpoint")
        wanted = LoadOptions(
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states and not load_module_only,
            load_optimizer_strict=load_optimizer_strict,
            load_lr_scheduler_states=load_lr_scheduler_states and not load_module_only,
            load_data_position=load_data_position and not load_module_only,
            load_progress=not load_module_only,
            custom_load_fn=custom_load_fn,
        )
        return load_engine(cast("Engine", self), load_dir, None if tag is None else str(tag), wanted)


def _frozen_names(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
