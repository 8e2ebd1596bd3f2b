"""Split of an unmodified causal language model into stages.

Each rank keeps its layers and runs the model's own forward.

[Note: one forward on every stage] Masks, positions and rotary embeddings are computed on every stage from the
micro-batch, which all ranks of a pipeline have. Stages send only hidden states, router logits if the loss uses the
logits of all layers (`pipeline_router_loss`), and terms that hooks add to the loss (`running_stage`). A stub without
parameters of its own replaces each module of another stage (`stub_modules`). The first stage has the embedding, the
last stage has norm, head and loss. Names in the state dict are those of the full model: an embedding that is tied to
the head has both names on the first stage and on the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.pipeline.forward_tracing import ForwardTrace, trace_forward, trial_mode
from windlass.parallel.pipeline.layer_partition import compute_layer_weights, partition_layers
from windlass.parallel.pipeline.pipeline_router_loss import RouterLogitsCollector, collecting_router_logits
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult
from windlass.parallel.pipeline.running_stage import RunningStage, running_stage
from windlass.parallel.pipeline.stub_modules import StageForwardState, StubInput, StubLayer, StubOutput, register_alias
from windlass.parallel.sequence.apply_sequence_parallel import sequence_parallel_of
from windlass.parallel.sequence.batch_sharding import SHARD_KEY


class StagedModel:
    """Stages of one rank in a model that was split in place; see `PipelineStages`.

    Attributes:
        trace: structure of the model's forward.
        stage_bounds: stage `s` has the layers `[stage_bounds[s], stage_bounds[s + 1])`.
        stages: numbers of this rank's stages.
    """

    has_dynamic_shapes = False

    def __init__(self, model: nn.Module, trace: ForwardTrace, stage_bounds: list[int], rank: int, ranks: int) -> None:
        self.model, self.trace, self.stage_bounds = model, trace, stage_bounds
        self.total_stages = len(stage_bounds) - 1
        self.stages = list(range(rank, self.total_stages, ranks))
        self.shared_parameters: dict[str, tuple[int, ...]] = {}
        self._rank, self._ranks = rank, ranks
        self._forward_state = StageForwardState()
        self._stubs: dict[str, nn.Module] = {}  # stub for each module that some stage of this rank lacks
        self._local_modules: dict[str, nn.Module] = {}
        self._stages_by_module: dict[str, set[int]] = {}  # numbers of the stages that run each module
        self._local_layers: list[str] = []  # paths of this rank's layers
        self._positional = list(inspect.signature(model.forward).parameters)

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of this rank."""
        return [self._local_modules[path] for path in self._local_layers]

    def check_batch(self, batch: Any, *, compute_loss: bool = True) -> None:
        """Check a micro-batch; see `PipelineStages.check_batch`."""
        labelled = not isinstance(batch, Mapping) or not {"labels", "shift_labels"}.isdisjoint(batch)
        if compute_loss and "labels" in self._positional and not labelled:
            raise ModelError(_missing_loss_text(batch))
        if compute_loss and labelled and self.trace.loss_problem:
            raise ModelError(
                f"the stages of {type(self.model).__name__} can't compute its loss: {self.trace.loss_problem}. Write "
                "it as a PipelineModule, or train it without pp"
            )

    def run_stage(
        self, call_module: Callable[..., Any], stage: int, stage_input: Any, batch: Any, *, compute_loss: bool = True
    ) -> Any:
        """Run one stage; see `PipelineStages.run_stage`.

        The batch has the model's arguments: a mapping of keywords, a tuple of arguments, or one argument.
        """
        given = self.named_arguments(batch)
        arguments = dict(given)
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            arguments.setdefault("use_cache", False)
        last = stage == self.total_stages - 1
        hidden, before, terms = stage_input if isinstance(stage_input, tuple) else (stage_input, (), None)
        running = RunningStage(stage, last, given, terms)
        if not (last and compute_loss):
            arguments.pop("labels", None)
        with (
            self._stage_installed(stage, hidden),
            collecting_router_logits(RouterLogitsCollector(before, self.trace.num_routers if last else 0)) as collector,
            running_stage(running),
        ):
            output = call_module(**self._shard_sequences(arguments, last))
            passed = self._forward_state.stage_output
        if not last:
            if passed is None:
                raise ModelError(_incomplete_stage_text(stage, self.stage_bounds))
            has_more = bool(collector.logits) or running.terms is not None
            return (passed, collector.logits, running.terms) if has_more else passed
        return MicroBatchResult(_output_loss(output, batch) if compute_loss else None, output)

    def run_stage_forward(
        self, call: Callable[..., Any], stage: int, stage_input: torch.Tensor | None, arguments: Mapping[str, Any]
    ) -> Any:
        """Run one stage without a loss, for inference.

        Args:
            call: calls the model, or a module of it that contains the layers.
            stage: number of the stage.
            stage_input: hidden states of the previous stage; None for the first stage.
            arguments: keyword arguments of `call`.

        Returns:
            The hidden states for the next stage; on the last stage the return value of `call`.

        Raises:
            ModelError: the forward ended before it called the first layer after the stage.
        """
        with self._stage_installed(stage, stage_input), collecting_router_logits(RouterLogitsCollector()):
            output = call(**arguments)
            passed = self._forward_state.stage_output
        if stage == self.total_stages - 1:
            return output
        if passed is None:
            raise ModelError(_incomplete_stage_text(stage, self.stage_bounds))
        return passed

    def _shard_sequences(self, arguments: dict[str, Any], is_last: bool) -> dict[str, Any]:
        """Shard the sequences of the arguments under sequence parallelism, without a gather of the stage's output.

        The arguments of the last stage are returned unchanged: the hooks of the model shard them and gather the output.
        """
        sequence = sequence_parallel_of(self.model)
        if sequence is None or is_last:
            return arguments
        local = sequence.shard_batch(arguments)
        local[SHARD_KEY].gathers_outputs = False
        return local

    def named_arguments(self, batch: Any) -> dict[str, Any]:
        """Return the model's arguments in a micro-batch by name."""
        if isinstance(batch, Mapping):
            return dict(batch)
        given = batch if isinstance(batch, (tuple, list)) else (batch,)
        return dict(zip(self._positional, given, strict=False))

    # Stubs

    def install_stubs(self) -> None:
        """Replace the modules that no stage of this rank runs by stubs."""
        layers = [
            f"{self.trace.layers_path}.{name}" for name in self.model.get_submodule(self.trace.layers_path)._modules
        ]
        spans = list(pairwise(self.stage_bounds))
        self._stages_by_module = {
            path: {stage for stage, (start, stop) in enumerate(spans) if start <= number < stop}
            for number, path in enumerate(layers)
        }
        for path in (*self.trace.input_modules, *self.trace.output_modules):
            self._stages_by_module[path] = ({0} if path in self.trace.input_modules else set()) | (
                {self.total_stages - 1} if path in self.trace.output_modules else set()
            )
        elsewhere = self._find_shared_parameters()
        for path, where in self._stages_by_module.items():
            real = self.model.get_submodule(path)
            if any(stage not in where for stage in self.stages):
                self._stubs[path] = self._make_stub(path, layers, real)
            if any(stage in where for stage in self.stages):
                self._local_modules[path] = real
        for path in self._stages_by_module.keys() - self._local_modules.keys():
            replace_module(self.model, path, self._stubs[path])
        for name, parameter in elsewhere.items():
            register_alias(self.model, name, parameter)
        self._local_layers = [path for path in layers if path in self._local_modules]

    def _make_stub(self, path: str, layers: list[str], real: nn.Module) -> nn.Module:
        if path in layers:
            return StubLayer(layers.index(path), self._forward_state, self.trace.output_form, real)
        rule = self.trace.input_modules.get(path)
        return StubOutput(real) if rule is None else StubInput(path, rule, self._forward_state, real)

    def _find_shared_parameters(self) -> dict[str, nn.Parameter]:
        """Set `shared_parameters`: names of the parameters that several ranks hold, with these ranks.

        A module that is never called is on all ranks.

        Returns:
            Parameters of this rank under the additional names that they have in modules of other ranks.
        """
        ranks: dict[int, set[int]] = {}
        names: dict[int, list[str]] = {}
        here: dict[str, bool] = {}
        parameters = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            path = next((path for path in self._stages_by_module if name.startswith(f"{path}.")), None)
            where = (
                set(range(self._ranks))
                if path is None
                else {stage % self._ranks for stage in self._stages_by_module[path]}
            )
            ranks.setdefault(id(parameter), set()).update(where)
            names.setdefault(id(parameter), []).append(name)
            here[name], parameters[id(parameter)] = self._rank in where, parameter
        local = [key for key in names if any(here[name] for name in names[key])]
        self.shared_parameters = {names[key][0]: tuple(sorted(ranks[key])) for key in local if len(ranks[key]) > 1}
        return {name: parameters[key] for key in local for name in names[key] if not here[name]}

    def check_stages(self) -> None:
        """Run the modules around the layers on each of this rank's stages, so that a model that needs a missing module
        fails now.

        Raises:
            ModelError: the forward fails without the modules of other stages.
        """
        plan, modules = self.trace, {path: self.model.get_submodule(path) for path in self._local_layers}
        numbers = {path: number for number, path in enumerate(self._stages_by_module)}
        try:
            for path, real in modules.items():
                replace_module(self.model, path, StubLayer(numbers[path], self._forward_state, plan.output_form, real))
            for stage in self.stages:
                given = None if stage == 0 else torch.zeros_like(plan.example_hidden)
                with trial_mode(self.model, []), torch.no_grad(), self._stage_installed(stage, given, trial=True):
                    self.model(**plan.example_kwargs)
        except Exception as error:
            raise ModelError(
                f"{type(self.model).__name__} can't be split into stages: without the modules of other stages its "
                f"forward fails ({type(error).__name__}: {error}); write it as a PipelineModule"
            ) from error
        finally:
            for path, real in modules.items():
                replace_module(self.model, path, real)

    @contextmanager
    def _stage_installed(self, stage: int, stage_input: torch.Tensor | None, *, trial: bool = False) -> Iterator[None]:
        """Install only this stage's modules in the model. In a trial all layers are already replaced by stubs."""
        swapped = [path for path in self._local_modules if stage not in self._stages_by_module[path]]
        if trial:
            swapped = [path for path in swapped if path not in self._local_layers]
        now = self._forward_state
        now.stage_input, now.first_layer, now.end_layer, now.stage_output = (
            stage_input,
            self.stage_bounds[stage],
            self.stage_bounds[stage + 1],
            None,
        )
        now.has_passed_layers = False
        for path in swapped:
            replace_module(self.model, path, self._stubs[path])
        try:
            yield
        finally:
            for path in swapped:
                replace_module(self.model, path, self._local_modules[path])
            now.stage_input = now.stage_output = None


def split_into_stages(
    model: nn.Module,
    rank: int,
    ranks: int,
    *,
    virtual_stages: int = 1,
    partition_method: str | Sequence[float] = "parameters",
    example_kwargs: Mapping[str, Any] | None = None,
) -> StagedModel:
    """Split a model in place into stages. The model has values or is on the meta device.

    Args:
        rank: this rank's position along the pipeline.
        ranks: number of ranks of the pipeline.
        virtual_stages: number of stages on each rank.
        partition_method: weights of the layers (`layer_partition.compute_layer_weights`). With `"parameters"`, modules
            before the layers count for the first layer, modules after the layers for the last.
        example_kwargs: keyword arguments of a trial forward, for a model that takes other arguments than `input_ids`.

    Raises:
        ConfigError: there are fewer layers than stages.
        ModelError: the model can't be split.
    """
    plan = trace_forward(model, example_kwargs)
    count = ranks * virtual_stages
    if plan.num_layers < count:
        raise ConfigError(
            f"{type(model).__name__} has {plan.num_layers} layers ({plan.layers_path}) for {count} stages ({ranks} "
            f"ranks, {virtual_stages} on each); every stage needs a layer: write pp of at most "
            f"{plan.num_layers // virtual_stages}"
        )
    found = StagedModel(
        model, plan, partition_layers(_compute_layer_weights(model, plan, partition_method), count), rank, ranks
    )
    found.install_stubs()
    found.check_stages()
    return found


def _compute_layer_weights(
    model: nn.Module, trace: ForwardTrace, partition_method: str | Sequence[float]
) -> list[float]:
    layers = trace.layers_of(model)
    sizes = [_num_parameters(layer) for layer in layers]
    weights = compute_layer_weights(partition_method, [type(layer).__name__ for layer in layers], lambda: sizes)
    if isinstance(partition_method, str) and partition_method.lower() in ("parameters", "best"):
        weights[0] += sum(_num_parameters(model.get_submodule(path)) for path in trace.input_modules)
        weights[-1] += sum(_num_parameters(model.get_submodule(path)) for path in trace.output_modules)
    return weights


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Set the module at `path` of the model."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _output_loss(output: Any, batch: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0]
    else:
        found = getattr(output, "loss", output)
    if isinstance(found, torch.Tensor):
        return found
    raise ModelError(_missing_loss_text(batch))


def _incomplete_stage_text(stage: int, bounds: Sequence[int]) -> str:
    return f"the forward of stage {stage} ended without a call of layer {bounds[stage + 1]}; call every layer"


def _missing_loss_text(batch: Any) -> str:
    keys = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    return f"there is no loss for a micro-batch of {keys}; add labels to it"
