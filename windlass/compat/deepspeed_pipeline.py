"""DeepSpeed's pipelines: a module that knows its groups, and an engine that answers its scripts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from windlass.comm.pipeline_grid import PipelineParallelGrid
from windlass.comm.topology import PipeDataParallelTopology, topology_of
from windlass.compat.deepspeed_data_loader import DeepSpeedDataLoader, make_engine_loader
from windlass.compat.deepspeed_engine import DeepSpeedEngine
from windlass.engine.pipeline_engine import PipelineEngine
from windlass.parallel.activation_checkpoint_api import checkpoint
from windlass.parallel.pipeline import pipeline_sequential
from windlass.parallel.pipeline.layer_sequence import worth_it


class PipelineModule(pipeline_sequential.PipelineSequential):
    """As `windlass.PipelineModule`, with the groups that DeepSpeed's has."""

    _grid: PipelineParallelGrid | None = None

    def topology(self) -> Any:
        """The one that was given, or stages and copies of them."""
        if self._topology is None:
            stages = self.num_stages
            self._topology = PipeDataParallelTopology(num_pp=stages, num_dp=dist.get_world_size() // stages)
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """The groups of the topology. Collective over all ranks when it is asked first."""
        if self._grid is None:
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Ranks of the pipeline."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Keep only the inputs of every `interval` layers; 0 keeps all activations."""
        self.set_activation_checkpoint_interval(interval)

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """Whether each segment of this rank's layers is computed again in the backward; empty without an interval."""
        functions, interval = self.forward_funcs, self.activation_checkpoint_interval
        starts = range(0, len(functions), interval) if interval > 0 else ()
        return [worth_it(functions[start : start + interval], self.checkpointable_layers) for start in starts]

    def _precompute_checkpointable_values(self) -> None:
        """Nothing: `is_checkpointable_results` is computed when it is asked for."""


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """As `windlass`'s engine of pipelines, with DeepSpeed's questions."""

    pipeline_parallelism = True
    grid: PipelineParallelGrid
    agg_train_loss: torch.Tensor | None = None

    def record_arguments(self, *given_config: Any) -> None:
        super().record_arguments(*given_config)
        own = self.module.mpu() if isinstance(self.module, PipelineModule) and self.module.num_stages > 1 else None
        self.grid = own if own is not None else PipelineParallelGrid(topology_of(self.mesh.grid))
        self.mpu = self.grid
        self._publish_groups()
        self.is_pipe_parallel = self.grid.pipe_parallel_size > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1

    def _reentrant_activation_checkpointing(self) -> bool:
        """Return whether layers are computed again, and that in the reentrant way as far as was asked: windlass's own
        function, which is never reentrant, stands for both of DeepSpeed's."""
        stages: Any = self.module
        if stages.activation_checkpoint_interval < 1:
            return False
        own = stages.activation_checkpoint_func is checkpoint
        return not own or self._config.pipeline.use_reentrant

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """See `PipelineEngine.train_batch`; its result stays in `agg_train_loss`."""
        self.agg_train_loss = super().train_batch(data_iter)
        return self.agg_train_loss

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def get_additional_losses(self) -> None:
        """None: a pipeline has the loss of its loss function."""

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> DeepSpeedDataLoader:
        """As `DeepSpeedEngine.deepspeed_io`, in the dataset's order, as DeepSpeed's pipelines read."""
        if kwargs.get("data_sampler") is None and not isinstance(dataset, IterableDataset):
            ranks, rank = self.data_loading_ranks
            kwargs["data_sampler"] = DistributedSampler(dataset, ranks, rank, shuffle=False)
        return make_engine_loader(self, dataset, *args, **kwargs)
