"""Layers spread over the ranks along pp.

Reading order. Arithmetic alone: action, schedule, simulation, programs, balance. A rank's stages: stage; here, specs,
row, module; absent, routers, tracing, timing, cut; leftovers, apply. What runs: parcel, passing, split, run, shared.
"""

from windlass.parallel.pipeline.apply import apply_pipeline_parallel, stages_of
from windlass.parallel.pipeline.balance import measured
from windlass.parallel.pipeline.module import PipelineModule
from windlass.parallel.pipeline.schedule import SCHEDULES, orders
from windlass.parallel.pipeline.simulation import Costs, bubble, play
from windlass.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from windlass.parallel.pipeline.stage import Ended, Stages
from windlass.parallel.pipeline.timing import timed

__all__ = [
    "SCHEDULES",
    "Costs",
    "Ended",
    "LayerSpec",
    "PipelineModule",
    "Stages",
    "TiedLayerSpec",
    "apply_pipeline_parallel",
    "bubble",
    "measured",
    "orders",
    "play",
    "stages_of",
    "timed",
]
