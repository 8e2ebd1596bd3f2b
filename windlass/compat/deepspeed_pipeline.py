"""DeepSpeed's pipelines: a module that provides its process groups, and an engine with DeepSpeed's methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from windlass.base.errors import ModelError
from windlass.compat import activation_names
from windlass.compat.deepspeed_data_loader import DeepSpeedDataLoader, make_engine_loader
from windlass.compat.deepspeed_engine import DeepSpeedEngine
from windlass.compat.pipeline_grid import PipelineParallelGrid
from windlass.compat.process_topology import PipeDataParallelTopology, topology_of
from windlass.engine.pipeline_engine import PipelineEngine
from windlass.parallel.activation_checkpoint_api import checkpoint
from windlass.parallel.pipeline import pipeline_sequential
from windlass.parallel.pipeline.layer_partition import compute_layer_weights
from windlass.parallel.pipeline.layer_sequence import is_checkpointed
from windlass.parallel.pipeline.layer_specs import LayerLike, count_layer_parameters, get_layer_name


class PipelineModule(pipeline_sequential.PipelineSequential):
    """Pipeline module like `windlass.PipelineModule`, with the groups and queries of DeepSpeed's class."""

    _layer_specs: list[LayerLike]  # attribute of the base class, as is `_topology`
    _topology: Any
    _grid: PipelineParallelGrid | None = None
    _stage_bounds: tuple[int, int] | None = None  # layers of this rank's stage, as `_partition_layers` has set them

    @wraps(pipeline_sequential.PipelineSequential.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.activation_checkpoint_func is checkpoint:  # the default
            self.activation_checkpoint_func = activation_names.checkpoint

    @property
    def _topo(self) -> Any:
        """Topology, under the name that subclasses of DeepSpeed's class read."""
        return self.topology()

    @property
    def global_rank(self) -> int:
        """Rank of this process in the world."""
        return dist.get_rank()

    def split_layers(self, ranks: int, virtual_stages: int, names: list[str], sizes: list[int]) -> list[int]:
        """Split by `_partition_layers`, if a subclass overrides it.

        Raises:
            ModelError: the override left no bounds of all stages in `self.parts`.
        """
        if type(self)._partition_layers is PipelineModule._partition_layers:
            return super().split_layers(ranks, virtual_stages, names, sizes)
        own = ("num_stages", "virtual_stages", "partition_method", "parts")
        held = {name: value for name, value in vars(self).items() if name in own}
        self.num_stages, self.virtual_stages, self.parts, self._stage_bounds = ranks, virtual_stages, [], None
        try:
            self._partition_layers(method=self.partition_method)
            bounds, requested = list(self.parts), self._stage_bounds
            stage = 0 if requested is None else self._topo.get_coord(self.global_rank).pipe
        finally:
            vars(self).update(held)  # the caller sets them if it accepts the split
        stages, count, name = ranks * virtual_stages, len(names), f"{type(self).__name__}._partition_layers"
        if len(bounds) != stages + 1 or (bounds[0], bounds[-1]) != (0, count) or bounds != sorted(set(bounds)):
            raise ModelError(
                f"{name} left {bounds} in self.parts; for {stages} stages of {count} layers it has {stages + 1} "
                f"increasing numbers from 0 to {count}"
            )
        if virtual_stages == 1 and requested not in (None, (bounds[stage], bounds[stage + 1])):
            raise ModelError(
                f"{name} called _set_bounds{requested} for stage {stage}, to which self.parts gives the layers "
                f"{bounds[stage]} to {bounds[stage + 1] - 1}; set self.parts to the bounds of all stages, which all "
                "ranks follow"
            )
        return bounds

    def _partition_layers(self, method: Any = "uniform") -> None:
        """Store the split by `method` in `self.parts`; subclasses may override this."""
        names, sizes = [get_layer_name(layer) for layer in self._layer_specs], count_layer_parameters(self._layer_specs)
        self.partition_method = method
        self.parts = super().split_layers(self.num_stages, self.virtual_stages, names, sizes)

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        """Record the layers of this rank's stage, which `split_layers` compares with `self.parts`."""
        self._stage_bounds = (start or 0, len(self._layer_specs) if stop is None else stop)

    def _count_layer_params(self) -> list[int]:
        """Return the number of parameter elements of each layer; subclasses of DeepSpeed's class read it."""
        return count_layer_parameters(self._layer_specs)

    def _find_layer_type(self, layername: str) -> list[int]:
        """Return the indices of the layers with a class name in which the regular expression `layername` matches.

        Raises:
            ConfigError: no layer matches, or the expression is invalid.
        """
        names = [get_layer_name(layer) for layer in self._layer_specs]
        weights = compute_layer_weights(f"type:{layername}", names, list)
        return [number for number, weight in enumerate(weights) if weight]

    def topology(self) -> Any:
        """Return the configured topology; by default, one of stages and data-parallel replicas."""
        if self._topology is not None:
            return self._topology
        # Make the topology at each call, because `keep_stages` may change the number of stages.
        return PipeDataParallelTopology(num_pp=self.num_stages, num_dp=dist.get_world_size() // self.num_stages)

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of the topology. The first call is collective over all ranks."""
        if self._grid is None:
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of ranks in the pipeline."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Save only the inputs of every `interval` layers and recompute the rest; 0 saves all activations."""
        self.set_activation_checkpoint_interval(interval)

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """For each segment of this rank's layers, True if the backward recomputes it. Empty without an interval."""
        functions, interval = self.forward_funcs, self.activation_checkpoint_interval
        starts = range(0, len(functions), interval) if interval > 0 else ()
        return [is_checkpointed(functions[start : start + interval], self.checkpointable_layers) for start in starts]

    def _precompute_checkpointable_values(self) -> None:
        """Do nothing: `is_checkpointable_results` is computed on access."""


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """Engine like windlass's `PipelineEngine`, with DeepSpeed's methods."""

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
        """Return True if activation checkpointing is on and counts as reentrant.

        windlass's own checkpoint function, which is never reentrant, replaces both of DeepSpeed's; it counts as
        reentrant if the configuration sets `pipeline.use_reentrant`. Any other function counts as reentrant.
        """
        stages: Any = self.module
        if stages.activation_checkpoint_interval < 1:
            return False
        own = stages.activation_checkpoint_func in (checkpoint, activation_names.checkpoint)
        return not own or self._config.pipeline.use_reentrant

    def _run_backward(self, run: Callable[[], None], is_last: bool) -> None:
        with self._allow_backward():
            super()._run_backward(run, is_last)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Run `PipelineEngine.train_batch`, and store its result in `agg_train_loss`."""
        self.agg_train_loss = super().train_batch(data_iter)
        return self.agg_train_loss

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def set_has_attention_mask(self, value: bool) -> None:
        """Accept and ignore the argument: stages exchange the layouts of their outputs themselves."""

    def get_additional_losses(self) -> None:
        """Return None: a pipeline has only the loss of its loss function."""

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> DeepSpeedDataLoader:
        """Create a loader like `DeepSpeedEngine.deepspeed_io`, but in dataset order, as DeepSpeed's pipelines read."""
        if kwargs.get("data_sampler") is None and not isinstance(dataset, IterableDataset):
            ranks, rank = self.data_loading_ranks
            kwargs["data_sampler"] = DistributedSampler(dataset, ranks, rank, shuffle=False)
        return make_engine_loader(self, dataset, *args, **kwargs)
