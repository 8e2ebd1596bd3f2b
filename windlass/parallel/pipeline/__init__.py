"""Layers spread over the ranks along pp.

Reading order. Arithmetic alone: action, schedule, simulation, programs, balance. A rank's stages: stage; here, specs,
row, module; absent, routers, tracing, timing, cut; leftovers, apply. What runs: parcel, passing, split, run, shared.
"""

from windlass.parallel.pipeline.apply_pipeline_parallel import apply_pipeline_parallel, get_pipeline_stages
from windlass.parallel.pipeline.layer_partition import measure_layer_times
from windlass.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from windlass.parallel.pipeline.layer_timing import measure_model_layer_times
from windlass.parallel.pipeline.pipeline_schedules import SCHEDULES, build_schedule
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult, PipelineStages
from windlass.parallel.pipeline.schedule_simulation import ActionCosts, compute_bubble_fraction, simulate_schedule

__all__ = [
    "SCHEDULES",
    "ActionCosts",
    "MicroBatchResult",
    "LayerSpec",
    "PipelineSequential",
    "PipelineStages",
    "TiedLayerSpec",
    "apply_pipeline_parallel",
    "compute_bubble_fraction",
    "measure_layer_times",
    "build_schedule",
    "simulate_schedule",
    "get_pipeline_stages",
    "measure_model_layer_times",
]
