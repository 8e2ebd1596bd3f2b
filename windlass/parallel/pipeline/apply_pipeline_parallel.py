"""Application of pipeline parallelism to a model, either a `PipelineSequential` or an unmodified model."""

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

_STAGES_ATTRIBUTE = "_windlass_stages"  # set on the model, since a global table would keep models alive


def apply_pipeline_parallel(
    model: nn.Module,
    axis: MeshAxis,
    *,
    virtual_stages: int = 1,
    partition_method: str | Sequence[float] = "parameters",
    activation_checkpoint_interval: int = 0,
    example_kwargs: Mapping[str, Any] | None = None,
) -> PipelineStages:
    """Keep only this rank's stages of a model, in place, before the model is sharded along any other axis.

    Each parameter that several ranks hold is marked with their positions along the axis
    (`get_placement(parameter).shared_stages`). The call is not collective. Returns this rank's stages.

    Args:
        model: a `PipelineSequential`, built in stages or with all layers, or a causal language model, with values or on
            the meta device.
        axis: the mesh axis `pp`.
        virtual_stages: stages on each rank.
        partition_method: weight of each layer of an unmodified model, or the rule for these weights
            (`layer_partition.compute_layer_weights`). A `PipelineSequential` uses its own `partition_method`.
        activation_checkpoint_interval: number of layers in one checkpointed call, at most 1 for an unmodified model. 0:
            no checkpointing, or the interval that the `PipelineSequential` was built with.
        example_kwargs: keyword arguments of a forward, for a model that takes other arguments than `input_ids`.

    Raises:
        ConfigError: there are fewer layers than stages, the module was built for other stages, or
            `activation_checkpoint_interval` is above 1 for an unmodified model.
        ModelError: the model can't be split.
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
                f"pipeline.activation_checkpoint_interval = {activation_checkpoint_interval}: a model that is not a "
                "PipelineModule checkpoints each layer or none; write 1 or 0, or write the model as a PipelineModule"
            )
        found = split_into_stages(
            model,
            axis.index,
            axis.size,
            virtual_stages=virtual_stages,
            partition_method=partition_method,
            example_kwargs=example_kwargs,
        )
        for layer in dict.fromkeys(found.layers) if activation_checkpoint_interval else ():
            layer.forward = partial(checkpoint, layer.forward)
        setattr(model, _STAGES_ATTRIBUTE, found)
        stages = found
    for name, ranks in stages.shared_parameters.items():
        parameter = model.get_parameter(name)
        set_placement(parameter, replace(get_placement(parameter), shared_stages=ranks))
    return stages


def get_pipeline_stages(model: nn.Module) -> PipelineStages | None:
    """Return this rank's stages of a model, or None if the model is not part of a pipeline."""
    if isinstance(model, PipelineSequential):
        return model
    found = getattr(model, _STAGES_ATTRIBUTE, None)
    return found if isinstance(found, StagedModel) else None
