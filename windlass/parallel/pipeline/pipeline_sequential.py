"""Sequential model for pipelines. Each rank keeps only its own stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.activation_checkpoint_api import checkpoint
from windlass.parallel.pipeline.layer_partition import compute_layer_weights, partition_layers
from windlass.parallel.pipeline.layer_sequence import LayerFunction, run_layers, run_layers_checkpointed
from windlass.parallel.pipeline.layer_specs import (
    LayerLike,
    LayerSpec,
    TiedLayerSpec,
    count_layer_parameters,
    get_layer_name,
)
from windlass.parallel.pipeline.local_stage import find_local_stage
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult


class PipelineSequential(nn.Module):
    """Sequence of layers that is partitioned into stages.

    Each layer receives the previous layer's output as one argument.

    A rank keeps the layers of its own stages. Parameters have the names of the full model: the layer's number, or
    `tied_modules.KEY`.

    [Note: values of layers under sharded init] Without `seed_layers`, every rank gets the initial values that a plain
    `nn.Sequential` of the same layers gets under the same seed. The random numbers of a layer begin where those of the
    previous layer end, so every rank builds all layers, one at a time, and frees those of other ranks. With
    `seed_layers` each layer draws from its own seed, so a rank skips the layers of other ranks.

    Args:
        layers: specs, modules, or functions.
        num_stages: ranks of the pipeline. If this and `topology` are None, all layers are built, and `keep_stages`
            partitions them later.
        topology: object with the number of ranks of the pipeline, `get_dim("pipe")`, and the position of each rank
            along it, `get_coord(rank).pipe`.
        loss_fn: called with the last layer's output and the labels. Without it the last layer returns the loss.
        seed_layers, base_seed, seed_fn: layer `i` is built after `seed_fn(base_seed + i)`; `seed_fn` is
            `torch.manual_seed` by default.
        partition_method: "parameters", "uniform", "type:REGEX", or one number for each layer: see
            `layer_partition.compute_layer_weights`.
        activation_checkpoint_interval: number of layers in one checkpointed call; 0: no activation checkpointing.
        activation_checkpoint_func: checkpointing function, called with a function and its arguments.
        checkpointable_layers: names of the classes that may be checkpointed; by default all layers with parameters.
        dynamic_shape: True if the shapes of activations do not follow from those of the micro-batch.
        virtual_stages: stages on each rank, for interleaved schedules.

    Raises:
        ConfigError: the ranks or layers can't be divided into this number of stages.
        ModelError: an item of `layers` is of another type, a stage has no parameters, or layers on different ranks
            share a parameter without a `TiedLayerSpec`.
    """

    def __init__(
        self,
        layers: Iterable[LayerLike],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        virtual_stages: int = 1,
    ) -> None:
        super().__init__()
        self._layer_specs, self._topology = list(layers), topology
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.has_dynamic_shapes = dynamic_shape
        # Do not register a submodule here: `_bind_stages` registers a loss module on the rank of the last stage.
        self.__dict__["loss_fn"] = loss_fn
        self.tied_modules = nn.ModuleDict()
        self.shared_parameters: dict[str, tuple[int, ...]] = {}
        for layer in self._layer_specs:
            if not isinstance(layer, LayerSpec) and not callable(layer):
                raise ModelError(
                    f"a layer is a LayerSpec, a module or a function, not {layer!r}; pass one of these in layers"
                )
        stage, stages = find_local_stage(num_stages, topology)
        self._partition(stage, stages, virtual_stages)
        self._build()

    def keep_stages(self, stage: int, stages: int, virtual_stages: int = 1) -> None:
        """Keep only the layers of pipeline rank `stage` of `stages` ranks, for a module that was built with all layers.

        Raises:
            ConfigError: the module was already built for other stages, or there are fewer layers than stages.
            ModelError: a stage has no parameters, or layers on different ranks share a parameter without a
                `TiedLayerSpec`.
        """
        if (stage, stages, virtual_stages) == (self.stage_id, self.num_stages, self.virtual_stages):
            return
        if self.num_stages > 1 or self.virtual_stages > 1:
            raise ConfigError(
                f"this PipelineModule was built as stage {self.stage_id} of {self.num_stages} with "
                f"{self.virtual_stages} parts on each rank; the configuration requires stage {stage} of {stages} with "
                f"{virtual_stages}: write the same numbers there and in PipelineModule(num_stages=..., "
                "virtual_stages=...)"
            )
        self._partition(stage, stages, virtual_stages)
        local = self._local_layer_numbers()
        for number in range(len(self._layer_specs)):
            if number not in local:
                self._modules.pop(str(number), None)
        for key in [key for key in self.tied_modules if key not in {self._tied_key(number) for number in local}]:
            del self.tied_modules[key]
        self._bind_stages()

    # Partition

    @property
    def total_stages(self) -> int:
        """Number of stages of the pipeline, over all ranks."""
        return self.num_stages * self.virtual_stages

    @property
    def stages(self) -> list[int]:
        """Indices of this rank's stages among all stages of the pipeline."""
        return list(range(self.stage_id, self.total_stages, self.num_stages))

    def topology(self) -> Any:
        """Return the `topology` that the constructor received."""
        return self._topology

    def set_activation_checkpoint_interval(self, interval: int) -> None:
        """Set the number of layers in one checkpointed call; 0: no activation checkpointing."""
        self.activation_checkpoint_interval = interval

    def split_layers(self, ranks: int, virtual_stages: int, names: list[str], sizes: list[int]) -> list[int]:
        """Return the index of each stage's first layer, and the number of layers at the end.

        Args:
            ranks: ranks of the pipeline.
            virtual_stages: stages on each rank.
            names: name of each layer.
            sizes: number of parameters of each layer.
        """
        weights = compute_layer_weights(self.partition_method, names, lambda: sizes)
        return partition_layers(weights, ranks * virtual_stages)

    def _partition(self, stage: int, stages: int, virtual_stages: int) -> None:
        names = [get_layer_name(layer) for layer in self._layer_specs]
        if len(names) < stages * virtual_stages:
            raise ConfigError(
                f"{len(names)} layers can't be split into {stages * virtual_stages} stages ({stages} ranks, "
                f"{virtual_stages} on each) of at least one layer; use fewer stages"
            )
        sizes = count_layer_parameters(self._layer_specs)
        bounds = self.split_layers(stages, virtual_stages, names, sizes)
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if not sum(sizes[start:stop]):
                raise ModelError(
                    f"stage {number} of {stages * virtual_stages} has no parameters: layers {start} to {stop - 1} "
                    f"({', '.join(names[start:stop])}), split by {self.partition_method!r}; use fewer stages or "
                    "another partition_method"
                )
        self.stage_id, self.num_stages, self.virtual_stages, self.parts = stage, stages, virtual_stages, bounds
        self._check_shared_parameters()

    def _stage_of(self, number: int) -> int:
        return next(stage for stage, stop in enumerate(self.parts[1:]) if number < stop)

    def _local_layer_numbers(self) -> list[int]:
        """Return the indices of this rank's layers in the full model."""
        return [number for stage in self.stages for number in range(self.parts[stage], self.parts[stage + 1])]

    def _tied_key(self, number: int) -> str | None:
        layer = self._layer_specs[number]
        return layer.key if isinstance(layer, TiedLayerSpec) else None

    def _check_shared_parameters(self) -> None:
        """Raise ModelError if two ranks share a parameter without a `TiedLayerSpec`, since its copies would diverge."""
        seen: dict[int, int] = {}
        for number, layer in enumerate(self._layer_specs):
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                first = seen.setdefault(id(parameter), number)
                if self._stage_of(first) % self.num_stages != self._stage_of(number) % self.num_stages:
                    raise ModelError(
                        f"layers {first} and {number} ({get_layer_name(layer)}) share a parameter and lie on different "
                        "ranks; write both as TiedLayerSpec with one key"
                    )

    # Construction

    def _build(self) -> None:
        local = set(self._local_layer_numbers())
        kept = {self._tied_key(number) for number in local} - {None}
        built: set[str] = set()
        if self.seed_layers:
            with torch.random.fork_rng():
                self._build_layers(local, kept, built)
        else:
            self._build_layers(local, kept, built)
        self._bind_stages()

    def _build_layers(self, mine: set[int], local_tied_keys: set[str | None], built: set[str]) -> None:
        for number, layer in enumerate(self._layer_specs):
            key = self._tied_key(number)
            requested = number in mine if key is None else key in local_tied_keys
            if isinstance(layer, nn.Module):
                if requested:
                    self.add_module(str(number), layer)
            elif isinstance(layer, LayerSpec) and key not in built and (requested or not self.seed_layers):
                if self.seed_layers:
                    (self.seed_fn or torch.manual_seed)(self.base_seed + number)
                module = layer.build()
                if key is not None:
                    built.add(key)
                if requested:
                    (self if key is None else self.tied_modules).add_module(str(number) if key is None else key, module)

    def _bind_stages(self) -> None:
        """Collect the functions of this rank's stages and its shared parameters, and drop modules of other ranks."""
        local = set(self._local_layer_numbers())
        for number, layer in enumerate(self._layer_specs):
            if number not in local and isinstance(layer, nn.Module):
                self._layer_specs[number] = nn.Identity()
        self._stage_functions = {
            s: [self._layer_function(n) for n in range(self.parts[s], self.parts[s + 1])] for s in self.stages
        }
        self.forward_funcs = [function for stage in self.stages for function in self._stage_functions[stage]]
        holders: dict[str, set[int]] = {}
        for number in range(len(self._layer_specs)):
            if (key := self._tied_key(number)) is not None:
                holders.setdefault(key, set()).add(self._stage_of(number) % self.num_stages)
        shared = {key: tuple(sorted(ranks)) for key, ranks in holders.items() if len(ranks) > 1}
        names = [name for name, _ in self.named_parameters() if name.startswith("tied_modules.")]
        self.shared_parameters = {name: shared[key] for name in names if (key := name.split(".")[1]) in shared}
        loss_fn = self.loss_fn
        if isinstance(loss_fn, nn.Module):
            is_last = self.total_stages - 1 in self.stages
            self.__dict__.pop("loss_fn", None)
            self._modules.pop("loss_fn", None)
            if is_last:
                self.add_module("loss_fn", loss_fn)
            else:
                self.__dict__["loss_fn"] = loss_fn

    def _layer_function(self, number: int) -> LayerFunction:
        layer = self._layer_specs[number]
        if isinstance(layer, TiedLayerSpec):
            module = self.tied_modules[layer.key]
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        if isinstance(layer, (LayerSpec, nn.Module)):
            return self.get_submodule(str(number))
        return layer

    # Execution

    loss_fn: Callable[..., Any] | None

    def forward(self, inputs: Any, stage: int | None = None, labels: Any = None, compute_loss: bool = False) -> Any:
        """Run the layers of one stage, or of all stages of this rank.

        Args:
            inputs: input of the first layer.
            stage: index of the stage; by default all stages of this rank, in order.
            labels: second argument of `loss_fn`.
            compute_loss: compute the loss and return a `MicroBatchResult`.
        """
        for number in self.stages if stage is None else [stage]:
            inputs = self._run_layers(self._stage_functions[number], inputs)
        if not compute_loss:
            return inputs
        return MicroBatchResult(inputs if self.loss_fn is None else self.loss_fn(inputs, labels), inputs)

    def check_batch(self, batch: Any, *, compute_loss: bool = True) -> None:
        """Check a micro-batch; see `PipelineStages.check_batch`."""
        if self.loss_fn is not None and not _is_pair(batch):
            raise ModelError(
                "a micro-batch of a PipelineModule with loss_fn is a pair (inputs, labels), not "
                f"{_describe_batch(batch)}; make one with engine.set_batch_fn(lambda batch: (inputs, labels))"
            )

    def run_stage(
        self, call_module: Callable[..., Any], stage: int, stage_input: Any, batch: Any, *, compute_loss: bool = True
    ) -> Any:
        """Run one stage; see `PipelineStages.run_stage`.

        A batch is a pair of inputs and labels; without `loss_fn` it may be only inputs.
        """
        inputs, labels = batch if _is_pair(batch) else (batch, None)
        inputs = stage_input if stage else inputs
        if stage < self.total_stages - 1:
            return call_module(inputs, stage=stage)
        if compute_loss:
            return call_module(inputs, stage=stage, labels=labels, compute_loss=True)
        return MicroBatchResult(None, call_module(inputs, stage=stage))

    def _run_layers(self, functions: list[LayerFunction], inputs: Any) -> Any:
        interval = self.activation_checkpoint_interval
        if interval < 1 or not torch.is_grad_enabled():
            return run_layers(functions, inputs)
        return run_layers_checkpointed(
            functions, inputs, interval, self.activation_checkpoint_func, class_names=self.checkpointable_layers
        )


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _describe_batch(batch: Any) -> str:
    kind = type(batch).__name__
    return f"a {kind} of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else f"a {kind}"
