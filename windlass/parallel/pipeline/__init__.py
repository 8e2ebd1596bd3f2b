"""Pipeline parallelism: layers are distributed over the ranks of the mesh axis `pp`.

Reading order:

1. Schedules, without tensors: pipeline_action, pipeline_schedules, schedule_simulation, transfer_order,
   layer_partition.
2. The stages of a rank: pipeline_stages, local_stage, layer_specs, layer_sequence, pipeline_sequential; for unmodified
   models stub_modules, pipeline_router_loss, running_stage, forward_tracing, layer_timing, staged_model; then
   remote_parameters and apply_pipeline_parallel.
3. Execution: stage_message, stage_transfers, split_backward, schedule_executor; for plans planned_transfers.
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
