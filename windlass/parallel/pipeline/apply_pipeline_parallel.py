"""Leaves a rank its stages of a model, whether that was written as a row of layers or is cut as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.activation_checkpoint_api import checkpoint
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.pipeline.pipeline_stages import PipelineStages
from windlass.parallel.pipeline.staged_model import StagedModel, split_into_stages
from windlass.parallel.placement import get_placement, set_placement

_STAGES_ATTRIBUTE = "_windlass_stages"  # of the model: what is kept in a table beside it would keep it for ever


def apply_pipeline_parallel(
    model: nn.Module,
    axis: MeshAxis,
    *,
    virtual_stages: int = 1,
    partition_method: str | Sequence[float] = "parameters",
    activation_checkpoint_interval: int = 0,
    example_kwargs: Mapping[str, Any] | None = None,
) -> PipelineStages:
    """Keep only this rank's stages, in place, and say of each parameter that other stages have too which these are
    (`placement_of(parameter).stages`). Not collective, unless layers are to be timed; the first of all cuts.

    Args:
        model: a `PipelineModule`, which was built in stages or whole, or a causal language model, with values or on the
            meta device.
        axis: pp.
        each: stages on each rank.
        method: how layers weigh, of a model that is cut; a `PipelineModule` has a `partition_method` of its own.
        interval: so many layers at a time are computed again in the backward; 0: none, or as the module says.
        sample: keyword arguments of a forward, for a model that takes other things than `input_ids`.

    Raises:
        ConfigError: there are fewer layers than stages, or the module was built for others.
        ModelError: the model can't be cut.
    """
    stages: PipelineStages
    if isinstance(model, PipelineSequential):
        model.keep_stages(axis.index, axis.size, virtual_stages)
        if activation_checkpoint_interval:
            model.set_activation_checkpoint_interval(activation_checkpoint_interval)
        stages = model
    else:
        if activation_checkpoint_interval > 1:
            raise ConfigError(
                f"pipeline.activation_checkpoint_interval = {activation_checkpoint_interval}: a model that is cut keeps the inputs of every "
                "layer, or all; write 1 or 0, or write the model as a PipelineModule"
            )
        found = split_into_stages(
            model,
            axis.index,
            axis.size,
            virtual_stages=virtual_stages,
            partition_method=partition_method,
            example_kwargs=example_kwargs,
        )
        for layer in found.layers if activation_checkpoint_interval else ():
            layer.forward = partial(checkpoint, layer.forward)
        setattr(model, _STAGES_ATTRIBUTE, found)
        stages = found
    for name, ranks in stages.shared_parameters.items():
        parameter = model.get_parameter(name)
        set_placement(parameter, replace(get_placement(parameter), shared_stages=ranks))
    return stages


def get_pipeline_stages(model: nn.Module) -> PipelineStages | None:
    """The stages that this rank has of a model; None of one that is no part of a pipeline."""
    if isinstance(model, PipelineSequential):
        return model
    found = getattr(model, _STAGES_ATTRIBUTE, None)
    return found if isinstance(found, StagedModel) else None
