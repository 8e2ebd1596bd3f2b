"""A model written as a row of layers, of which each rank of a pipeline builds its stages."""

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
    """A row of layers, cut into stages. Each layer takes what the one before returned, as one argument.

    A rank builds the layers of its own stages. Parameters are named as in the whole model: by the layer's number, or
    `tied_modules.KEY`.

    [Note: values of layers built apart] Every rank ends up with the values that a plain `nn.Sequential` of the same
    layers has, built under the same seed. With `seed_layers` each layer draws from a seed of its own, and nobody builds
    another's. Without, the random numbers of a layer begin where those of the layer before ended, so every rank builds
    all layers, one at a time, and lets go of those that are not its own.

    Args:
        layers: specs, modules, or functions.
        num_stages: ranks of the pipeline. None, and no topology: all layers are built, and `take` cuts them later.
        topology: tells the number of stages, and of this rank which (`get_dim("pipe")`, `get_coord(rank).pipe`).
        loss_fn: called with the last layer's output and the labels; without one the last layer returns the loss.
        seed_layers, base_seed, seed_fn: layer `i` is built after `seed_fn(base_seed + i)`, `torch.manual_seed` by
            default.
        partition_method: "parameters", "uniform", "type:REGEX", or one number a layer: see `balance.weights_of`.
        activation_checkpoint_interval: so many layers at a time are computed again in the backward; 0: none.
        activation_checkpoint_func: called with a function and its arguments.
        checkpointable_layers: names of the classes that may be; by default whatever has parameters.
        dynamic_shape: the shapes of activations don't follow from those of the micro-batch.
        virtual_stages: stages on each rank, for interleaved schedules.

    Raises:
        ConfigError: ranks or layers can't be cut into so many stages.
        ModelError: a stage has no parameters, or two stages share some without a `TiedLayerSpec`.
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
        self.__dict__["loss_fn"] = loss_fn  # a module only becomes part of this one on the last stage
        self.tied_modules = nn.ModuleDict()
        self.shared_parameters: dict[str, tuple[int, ...]] = {}
        for layer in self._layer_specs:
            if not isinstance(layer, LayerSpec) and not callable(layer):
                raise ModelError(f"a layer is a LayerSpec, a module or a function, not {layer!r}")
        stage, stages = find_local_stage(num_stages, topology)
        self._partition(stage, stages, virtual_stages)
        self._build()

    def keep_stages(self, stage: int, stages: int, virtual_stages: int = 1) -> None:
        """Keep only what rank `stage` of `stages` needs; for a module that was built whole.

        Raises:
            ConfigError: it was built for other stages already, or there are too few layers.
            ModelError: a stage has no parameters.
        """
        if (stage, stages, virtual_stages) == (self.stage_id, self.num_stages, self.virtual_stages):
            return
        if self.num_stages > 1 or self.virtual_stages > 1:
            raise ConfigError(
                f"this PipelineModule was built as stage {self.stage_id} of {self.num_stages} with "
                f"{self.virtual_stages} parts on each rank; the configuration asks for stage {stage} of {stages} with "
                f"{virtual_stages}: write the same numbers there and in PipelineModule(num_stages=..., virtual_stages=...)"
            )
        self._partition(stage, stages, virtual_stages)
        mine = self._local_layer_numbers()
        for number in range(len(self._layer_specs)):
            if number not in mine:
                self._modules.pop(str(number), None)
        for key in [key for key in self.tied_modules if key not in {self._tied_key(number) for number in mine}]:
            del self.tied_modules[key]
        self._bind_stages()

    # what is where

    @property
    def total_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_stages * self.virtual_stages

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        return list(range(self.stage_id, self.total_stages, self.num_stages))

    def topology(self) -> Any:
        """As it was given."""
        return self._topology

    def set_activation_checkpoint_interval(self, interval: int) -> None:
        """Compute so many layers at a time again in the backward; 0: none."""
        self.activation_checkpoint_interval = interval

    def _partition(self, stage: int, stages: int, virtual_stages: int) -> None:
        names = [get_layer_name(layer) for layer in self._layer_specs]
        if len(names) < stages * virtual_stages:
            raise ConfigError(
                f"{len(names)} layers can't be cut into {stages * virtual_stages} stages ({stages} ranks, {virtual_stages} on each), of at "
                "least one layer"
            )
        sizes = count_layer_parameters(self._layer_specs)
        bounds = partition_layers(
            compute_layer_weights(self.partition_method, names, lambda: sizes), stages * virtual_stages
        )
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if not sum(sizes[start:stop]):
                raise ModelError(
                    f"stage {number} of {stages * virtual_stages} has no parameters: layers {start} to {stop - 1} "
                    f"({', '.join(names[start:stop])}), cut by {self.partition_method!r}; have fewer stages, or "
                    "another partition_method"
                )
        self.stage_id, self.num_stages, self.virtual_stages, self.parts = stage, stages, virtual_stages, bounds
        self._check_shared_parameters()

    def _stage_of(self, number: int) -> int:
        return next(stage for stage, stop in enumerate(self.parts[1:]) if number < stop)

    def _local_layer_numbers(self) -> list[int]:
        """Numbers of the layers of this rank."""
        return [number for stage in self.stages for number in range(self.parts[stage], self.parts[stage + 1])]

    def _tied_key(self, number: int) -> str | None:
        layer = self._layer_specs[number]
        return layer.key if isinstance(layer, TiedLayerSpec) else None

    def _check_shared_parameters(self) -> None:
        """A parameter that two ranks have without knowing would be trained apart."""
        seen: dict[int, int] = {}
        for number, layer in enumerate(self._layer_specs):
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                first = seen.setdefault(id(parameter), number)
                if self._stage_of(first) % self.num_stages != self._stage_of(number) % self.num_stages:
                    raise ModelError(
                        f"layers {first} and {number} ({get_layer_name(layer)}) share a parameter and lie on different ranks; "
                        "write both as TiedLayerSpec with one key"
                    )

    # building

    def _build(self) -> None:
        mine = set(self._local_layer_numbers())
        kept = {self._tied_key(number) for number in mine} - {None}
        built: set[str] = set()
        if self.seed_layers:
            with torch.random.fork_rng():
                self._build_layers(mine, kept, built)
        else:
            self._build_layers(mine, kept, built)
        self._bind_stages()

    def _build_layers(self, mine: set[int], local_tied_keys: set[str | None], built: set[str]) -> None:
        for number, layer in enumerate(self._layer_specs):
            key = self._tied_key(number)
            wanted = number in mine if key is None else key in local_tied_keys
            if isinstance(layer, nn.Module):
                if wanted:
                    self.add_module(str(number), layer)
            elif isinstance(layer, LayerSpec) and key not in built and (wanted or not self.seed_layers):
                if self.seed_layers:
                    (self.seed_fn or torch.manual_seed)(self.base_seed + number)
                module = layer.build()
                if key is not None:
                    built.add(key)
                if wanted:
                    (self if key is None else self.tied_modules).add_module(str(number) if key is None else key, module)

    def _bind_stages(self) -> None:
        """What each stage of this rank runs, and what it shares with others; modules of other ranks go."""
        mine = set(self._local_layer_numbers())
        for number, layer in enumerate(self._layer_specs):
            if number not in mine and isinstance(layer, nn.Module):
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

    # running

    loss_fn: Callable[..., Any] | None

    def forward(self, inputs: Any, stage: int | None = None, labels: Any = None, compute_loss: bool = False) -> Any:
        """Run the layers of one stage.

        Args:
            inputs: what the first of them takes.
            stage: which; by default all of this rank's, one after the other.
            labels: for the loss.
            loss: come to a loss, and return an `Ended`.
        """
        for number in self.stages if stage is None else [stage]:
            inputs = self._run_layers(self._stage_functions[number], inputs)
        if not compute_loss:
            return inputs
        return MicroBatchResult(inputs if self.loss_fn is None else self.loss_fn(inputs, labels), inputs)

    def check_batch(self, batch: Any, *, compute_loss: bool = True) -> None:
        """See `stage.Stages`."""
        if self.loss_fn is not None and not _is_pair(batch):
            raise ModelError(
                f"a micro-batch of a PipelineModule with loss_fn is a pair (inputs, labels), not {_describe_batch(batch)}; make "
                "one by engine.set_batch_fn(lambda batch: (inputs, labels))"
            )

    def run_stage(
        self, call_module: Callable[..., Any], stage: int, stage_input: Any, batch: Any, *, compute_loss: bool = True
    ) -> Any:
        """See `stage.Stages`. A batch is a pair of inputs and labels; without `loss_fn` it may be inputs alone."""
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
