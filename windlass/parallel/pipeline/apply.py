"""Leaves a rank its stages of a model, whether that was written as a row of layers or is cut as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.comm.axis import Axis
from windlass.parallel.activations import checkpoint
from windlass.parallel.pipeline.cut import CutModel, cut_model
from windlass.parallel.pipeline.module import PipelineModule
from windlass.parallel.pipeline.stage import Stages
from windlass.parallel.placement import place, placement_of

_STAGES = "_windlass_stages"  # of the model: what is kept in a table beside it would keep it for ever


def apply_pipeline_parallel(
    model: nn.Module,
    axis: Axis,
    *,
    each: int = 1,
    method: str | Sequence[float] = "parameters",
    interval: int = 0,
    sample: Mapping[str, Any] | None = None,
) -> Stages:
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
    stages: Stages
    if isinstance(model, PipelineModule):
        model.take(axis.index, axis.size, each)
        if interval:
            model.set_checkpoint_interval(interval)
        stages = model
    else:
        if interval > 1:
            raise ConfigError(
                f"pipeline.activation_checkpoint_interval = {interval}: a model that is cut keeps the inputs of every "
                "layer, or all; write 1 or 0, or write the model as a PipelineModule"
            )
        found = cut_model(model, axis.index, axis.size, each=each, method=method, sample=sample)
        for layer in found.layers if interval else ():
            layer.forward = partial(checkpoint, layer.forward)
        setattr(model, _STAGES, found)
        stages = found
    for name, ranks in stages.tied.items():
        parameter = model.get_parameter(name)
        place(parameter, replace(placement_of(parameter), stages=ranks))
    return stages


def stages_of(model: nn.Module) -> Stages | None:
    """The stages that this rank has of a model; None of one that is no part of a pipeline."""
    if isinstance(model, PipelineModule):
        return model
    found = getattr(model, _STAGES, None)
    return found if isinstance(found, CutModel) else None
