"""Cuts an unmodified causal language model into stages: each keeps its layers, and its own forward runs on every rank.

[Note: one forward on every stage] Masks, positions and rotary embeddings are computed on every stage, from the
micro-batch that all ranks of a pipeline read alike; only hidden states cross a cut, and logits of routers where a loss
is over those of all layers (`routers`). Where a module of another stage would be, something stands that has no
parameters (`absent`). The first stage looks tokens up, the last one has norm, head and loss. Names in the state dict
are those of the whole model: an embedding that is also the head has both of them in the first stage and in the last.
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
from windlass.parallel.pipeline.absent import AbsentInput, AbsentLayer, AbsentOutput, Now, name_too
from windlass.parallel.pipeline.balance import cut, weights_of
from windlass.parallel.pipeline.routers import Heard, hearing
from windlass.parallel.pipeline.stage import Ended
from windlass.parallel.pipeline.tracing import Plan, plan_of, undisturbed
from windlass.parallel.sequence.apply import sequence_parallel_of
from windlass.parallel.sequence.batch import MARK


class CutModel:
    """The stages of one rank in a model that was cut in place; see `stage.Stages`.

    Attributes:
        plan: what the model's forward does.
        bounds: stage `s` has the layers from `bounds[s]` to `bounds[s + 1]`.
        stages: those of this rank.
    """

    dynamic = False

    def __init__(self, model: nn.Module, plan: Plan, bounds: list[int], rank: int, ranks: int) -> None:
        self.model, self.plan, self.bounds = model, plan, bounds
        self.count = len(bounds) - 1
        self.stages = list(range(rank, self.count, ranks))
        self.tied: dict[str, tuple[int, ...]] = {}
        self._rank, self._ranks = rank, ranks
        self._now = Now()
        self._absent: dict[str, nn.Module] = {}  # for every module that some stage of this rank lacks
        self._real: dict[str, nn.Module] = {}
        self._where: dict[str, set[int]] = {}  # the stages that run each module
        self._layers: list[str] = []  # of this rank
        self._positional = list(inspect.signature(model.forward).parameters)

    @property
    def layers(self) -> list[nn.Module]:
        """Those of this rank."""
        return [self._real[path] for path in self._layers]

    def check(self, batch: Any, *, loss: bool = True) -> None:
        """See `stage.Stages`."""
        labelled = not isinstance(batch, Mapping) or not {"labels", "shift_labels"}.isdisjoint(batch)
        if loss and "labels" in self._positional and not labelled:
            raise ModelError(_without_loss(batch))

    def run(self, call: Callable[..., Any], stage: int, given: Any, batch: Any, *, loss: bool = True) -> Any:
        """See `stage.Stages`. The batch is what the model takes: a mapping of keywords, a tuple of arguments, one."""
        arguments = self._arguments(batch)
        last = stage == self.count - 1
        if not (last and loss):
            arguments.pop("labels", None)
        hidden, before = given if isinstance(given, tuple) else (given, ())
        with self._arranged(stage, hidden), hearing(Heard(before, self.plan.routers if last else 0)) as heard:
            output = call(**self._own_share(arguments, last))
            passed = self._now.passed
        if not last:
            if passed is None:
                raise ModelError(f"the forward of stage {stage} ended without a call of layer {self.bounds[stage + 1]}")
            return (passed, heard.logits) if heard.logits else passed
        return Ended(_loss_of(output, batch) if loss else None, output)

    def _own_share(self, arguments: dict[str, Any], last: bool) -> dict[str, Any]:
        """Where sequences are cut as well: what a stage before the last returns is not put together to whole ones."""
        sequence = sequence_parallel_of(self.model)
        if sequence is None or last:
            return arguments
        local = sequence.share(arguments)
        local[MARK].whole = False
        return local

    def _arguments(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            arguments = dict(batch)
        else:
            given = batch if isinstance(batch, (tuple, list)) else (batch,)
            arguments = dict(zip(self._positional, given, strict=False))
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            arguments.setdefault("use_cache", False)
        return arguments

    # what stands where

    def lay_out(self) -> None:
        """Take out of the model what no stage of this rank needs."""
        layers = [f"{self.plan.path}.{name}" for name in self.model.get_submodule(self.plan.path)._modules]
        spans = list(pairwise(self.bounds))
        self._where = {
            path: {stage for stage, (start, stop) in enumerate(spans) if start <= number < stop}
            for number, path in enumerate(layers)
        }
        for path in (*self.plan.before, *self.plan.behind):
            self._where[path] = ({0} if path in self.plan.before else set()) | (
                {self.count - 1} if path in self.plan.behind else set()
            )
        elsewhere = self._find_shared()
        for path, where in self._where.items():
            real = self.model.get_submodule(path)
            if any(stage not in where for stage in self.stages):
                self._absent[path] = self._stand_in(path, layers, real)
            if any(stage in where for stage in self.stages):
                self._real[path] = real
        for path in self._where.keys() - self._real.keys():
            put(self.model, path, self._absent[path])
        for name, parameter in elsewhere.items():
            name_too(self.model, name, parameter)
        self._layers = [path for path in layers if path in self._real]

    def _stand_in(self, path: str, layers: list[str], real: nn.Module) -> nn.Module:
        if path in layers:
            return AbsentLayer(layers.index(path), self._now, self.plan.form, real)
        rule = self.plan.before.get(path)
        return AbsentOutput(real) if rule is None else AbsentInput(rule, self._now, real)

    def _find_shared(self) -> dict[str, nn.Parameter]:
        """Note down which parameters lie on several ranks; what is not called lies on all of them.

        Returns:
            Of the parameters that stay here, those names under which others have them.
        """
        ranks: dict[int, set[int]] = {}
        names: dict[int, list[str]] = {}
        here: dict[str, bool] = {}
        parameters = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            path = next((path for path in self._where if name.startswith(f"{path}.")), None)
            where = set(range(self._ranks)) if path is None else {stage % self._ranks for stage in self._where[path]}
            ranks.setdefault(id(parameter), set()).update(where)
            names.setdefault(id(parameter), []).append(name)
            here[name], parameters[id(parameter)] = self._rank in where, parameter
        mine = [key for key in names if any(here[name] for name in names[key])]
        self.tied = {names[key][0]: tuple(sorted(ranks[key])) for key in mine if len(ranks[key]) > 1}
        return {name: parameters[key] for key in mine for name in names[key] if not here[name]}

    def try_out(self) -> None:
        """Run what surrounds the layers on each of this rank's stages, so that a model that needs what is not there
        says so now.

        Raises:
            ModelError: it does.
        """
        plan, modules = self.plan, {path: self.model.get_submodule(path) for path in self._layers}
        numbers = {path: number for number, path in enumerate(self._where)}
        try:
            for path, real in modules.items():
                put(self.model, path, AbsentLayer(numbers[path], self._now, plan.form, real))
            for stage in self.stages:
                given = None if stage == 0 else torch.zeros_like(plan.hidden)
                with undisturbed(self.model, []), torch.no_grad(), self._arranged(stage, given, trial=True):
                    self.model(**plan.arguments)
        except Exception as error:
            raise ModelError(
                f"{type(self.model).__name__} can't be cut into stages: without the modules of other stages its "
                f"forward fails ({type(error).__name__}: {error})"
            ) from error
        finally:
            for path, real in modules.items():
                put(self.model, path, real)

    @contextmanager
    def _arranged(self, stage: int, given: torch.Tensor | None, *, trial: bool = False) -> Iterator[None]:
        """The model with only this stage's modules in it; in a trial there are no layers in it to begin with."""
        swapped = [path for path in self._real if stage not in self._where[path]]
        if trial:
            swapped = [path for path in swapped if path not in self._layers]
        now = self._now
        now.given, now.start, now.stop, now.passed = given, self.bounds[stage], self.bounds[stage + 1], None
        for path in swapped:
            put(self.model, path, self._absent[path])
        try:
            yield
        finally:
            for path in swapped:
                put(self.model, path, self._real[path])
            now.given = now.passed = None


def cut_model(
    model: nn.Module,
    rank: int,
    ranks: int,
    *,
    each: int = 1,
    method: str | Sequence[float] = "parameters",
    sample: Mapping[str, Any] | None = None,
) -> CutModel:
    """Cut a model in place, with values or on the meta device.

    Args:
        rank: this rank's place along the pipeline.
        ranks: of the pipeline.
        each: stages on each rank.
        method: how layers weigh (`balance.weights_of`); what comes before or behind them goes with the first or last.
        sample: keyword arguments of a forward to look at, for a model that takes other things than `input_ids`.

    Raises:
        ConfigError: there are fewer layers than stages.
        ModelError: the model can't be cut.
    """
    plan = plan_of(model, sample)
    count = ranks * each
    if plan.layers < count:
        raise ConfigError(
            f"{type(model).__name__} has {plan.layers} layers ({plan.path}) for {count} stages ({ranks} ranks, {each} "
            f"on each); every stage needs a layer: write pp of at most {plan.layers // each}"
        )
    found = CutModel(model, plan, cut(_weights(model, plan, method), count), rank, ranks)
    found.lay_out()
    found.try_out()
    return found


def _weights(model: nn.Module, plan: Plan, method: str | Sequence[float]) -> list[float]:
    layers = [layer for layer in model.get_submodule(plan.path).children()]
    sizes = [_size(layer) for layer in layers]
    weights = weights_of(method, [type(layer).__name__ for layer in layers], lambda: sizes)
    if isinstance(method, str) and method in ("parameters", "best"):
        weights[0] += sum(_size(model.get_submodule(path)) for path in plan.before)
        weights[-1] += sum(_size(model.get_submodule(path)) for path in plan.behind)
    return weights


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Have `module` at this place of the model."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _loss_of(output: Any, batch: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0]
    else:
        found = getattr(output, "loss", output)
    if isinstance(found, torch.Tensor):
        return found
    raise ModelError(_without_loss(batch))


def _without_loss(batch: Any) -> str:
    keys = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    return f"there is no loss for a micro-batch of {keys}; have labels in it"
