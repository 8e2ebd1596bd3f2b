"""Mixin with the engine's methods that return or save full 16-bit weights under DeepSpeed's names."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


class FullStateDicts:
    """Methods by which accelerate and transformers read full weights from a DeepSpeed engine."""

    def _zero3_consolidated_16bit_state_dict(
        self: Any, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return full parameters (in the compute dtype), buffers and extra states on the CPU of rank 0; None elsewhere.

        Collective.

        Raises:
            ValueError: the stage is not 3.
        """
        if self.zero_optimization_stage() != 3:
            raise ValueError(
                "this function requires ZeRO-3 mode: parameters are sharded at stage 3 only; call "
                "engine.full_state_dict() at any stage"
            )
        return _gather_on_first_rank(self, exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self: Any, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the result of `_zero3_consolidated_16bit_state_dict`. Under tensor parallelism, any stage is allowed.

        Collective.

        Raises:
            ValueError: every rank holds all values: the stage is below 3 and there is no tensor parallelism.
        """
        if self.mesh.tp.size == 1:
            weights: dict[str, torch.Tensor] | None = self._zero3_consolidated_16bit_state_dict(
                exclude_frozen_parameters
            )
            return weights
        return _gather_on_first_rank(self, exclude_frozen_parameters)

    def save_fp16_model(self: Any, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Call `save_16bit_model` (older name)."""
        written: bool = self.save_16bit_model(save_dir, save_filename)
        return written


def _gather_on_first_rank(engine: Any, exclude_frozen_parameters: bool) -> dict[str, torch.Tensor] | None:
    weights = engine.full_state_dict()
    if engine.mesh.world.index:
        return None
    named = engine.module.named_parameters(remove_duplicate=False) if exclude_frozen_parameters else ()
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    return OrderedDict((name, value) for name, value in weights.items() if name not in frozen)
