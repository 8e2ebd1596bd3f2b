"""Tracing of a model's forward: the list of its layers, and the modules called before and after them.

[Note: tracing by absence] A trial runs the forward once, by default on two rows of three tokens, with an empty probe in
place of each layer. The run costs no more than an embedding and a head and works on the meta device. The trace
separates the modules called before the layers from the modules called after the layers, in any order of registration.
It also checks four properties that a split relies on: the layers are called in the order of the list; a layer receives
exactly the hidden states that the previous layer returned; no other argument of a layer depends on parameters; and the
result of the forward uses neither hidden states before the last layer nor outputs of the modules before the layers.
If the forward takes labels, a second trial with labels shows the modules that only the loss uses, such as heads that
predict further tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from windlass.base.errors import ModelError
from windlass.base.module_modes import evaluating
from windlass.base.tensor_tree import iterate_tensors
from windlass.parallel.hidden_states import get_hidden_states
from windlass.parallel.pipeline.pipeline_router_loss import (
    RouterLogitsCollector,
    collecting_router_logits,
    record_router_logits,
)
from windlass.parallel.pipeline.stub_modules import (
    OutputForm,
    OutputShapeRule,
    first_tensor,
    wrap_hidden_states,
)

_ROWS, _TOKENS = 2, 3
_FAILS = "its forward fails without layers"


@dataclass
class ForwardTrace:
    """Structure of a model's forward.

    Attributes:
        layers_path: path of the list of layers in the model.
        num_layers: number of layers in that list.
        output_form: form of a layer's return value.
        input_modules: paths of modules with parameters of their own that are called before the layers, each with the
            rule for its output shape.
        output_modules: paths of modules with parameters of their own that are called after the layers.
        uncalled_modules: paths of modules that the forward does not call. Any stage may use their parameters.
        example_kwargs: arguments of the traced forward.
        example_hidden: hidden states that the first layer received in the traced forward.
        num_routers: number of routers whose logits may enter a loss.
        loss_problem: the reason why stages cannot compute the loss, although they can compute the logits; "" if none.
    """

    layers_path: str
    num_layers: int
    output_form: OutputForm = "tensor"
    input_modules: dict[str, OutputShapeRule] = field(default_factory=dict)
    output_modules: list[str] = field(default_factory=list)
    uncalled_modules: list[str] = field(default_factory=list)
    example_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    example_hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    num_routers: int = 0
    loss_problem: str = ""

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers in the order of their calls. A module that is in the list twice is returned twice
        (`children()` would return it once)."""
        return [layer for layer in model.get_submodule(self.layers_path)._modules.values() if layer is not None]


class _CannotSplit(Exception):
    """Error for a list of layers that can't be split. Its text is the reason, which completes an error message."""


class _ProbeLayer(nn.Module):
    """Replacement of a layer during tracing. It records its calls."""

    def __init__(self, index: int, calls: list[_LayerCall], output_form: OutputForm, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float, bool)) and name not in vars(self):
                setattr(self, name, value)
        self.index, self.calls, self.output_form = index, calls, output_form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = get_hidden_states(args, kwargs)
        # Detach the output, so that the graph of the result shows which hidden states the model uses in another way.
        returned = (hidden.detach().requires_grad_() if hidden.requires_grad else hidden) + 0
        named = [*enumerate(args), *kwargs.items()]
        learns = [str(name) for name, value in named if value is not hidden and _requires_grad(value)]
        self.calls.append(_LayerCall(self.index, hidden, returned, learns))
        return wrap_hidden_states(returned, self.output_form)


@dataclass
class _LayerCall:
    index: int
    hidden: torch.Tensor
    returned: torch.Tensor
    differentiable_arguments: list[str]


def trace_forward(model: nn.Module, example_kwargs: Mapping[str, Any] | None = None) -> ForwardTrace:
    """Find the layers of `model` and the modules around them.

    Args:
        model: a model with values or on the meta device. Its modules and parameters are unchanged afterwards, but its
            router loss is replaced (`record_router_logits`).
        example_kwargs: keyword arguments of a forward; by default only `input_ids`.

    Raises:
        ModelError: no list of layers can be split, or the model has an encoder, random layer drop or shared keys and
            values. The text names each list that was tried and the reason it was rejected.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(_cannot_split_text(model, {}, "it has an encoder and a decoder, hence two lists of layers"))
    for name in ("layerdrop", "layer_drop"):
        if getattr(config, name, 0):
            raise ModelError(_cannot_split_text(model, {}, f"config.{name} skips layers at random; set it to 0"))
    for path, module in model.named_modules():
        if getattr(module, "is_kv_shared_layer", False):
            reason = f"{path} uses keys and values of an earlier layer, which may be on another stage"
            raise ModelError(_cannot_split_text(model, {}, reason))
    routers = record_router_logits(model)
    reasons: dict[str, str] = {}
    for path, layers in _candidate_lists(model):
        try:
            return replace(_trace_list(model, path, layers, example_kwargs), num_routers=routers)
        except _CannotSplit as reason:
            reasons[f"{path} ({len(layers._modules)} of {type(next(layers.children())).__name__})"] = str(reason)
    raise ModelError(_cannot_split_text(model, reasons, "" if reasons else "it has none"))


def _cannot_split_text(model: nn.Module, reasons: dict[str, str], more: str) -> str:
    looked = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
    return (
        f"{type(model).__name__} can't be split into stages, which need a list of layers (nn.ModuleList) that its "
        f"forward calls in order, each with the hidden states of the previous one: {looked or more}. Write it as a "
        "PipelineModule, or train it without pp"
    )


def _candidate_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost module lists of the model with their paths, those with the most parameters first."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        rows = path and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        if rows and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in found.items()}
    for path in sorted(found, key=lambda path: -sizes[path]):
        if sizes[path]:
            yield path, found[path]


def _trace_list(
    model: nn.Module, path: str, layers: nn.Module, example_kwargs: Mapping[str, Any] | None
) -> ForwardTrace:
    """Trace with each output form and each set of arguments, and return the first trace that succeeds.

    Raises:
        _CannotSplit: no trial succeeded. The text is the first reason, preferably one other than a failing forward.
    """
    reasons: list[str] = []
    for form in ("tensor", "tuple"):
        for arguments in make_trial_kwargs(model, example_kwargs):
            try:
                found = _trace_once(model, path, layers, form, arguments)
            except _CannotSplit as reason:
                reasons.append(str(reason))
                continue
            return _add_modules_of_loss(found, model, layers)
    raise _CannotSplit(next((one for one in reasons if not one.startswith(_FAILS)), reasons[0]))


def _add_modules_of_loss(plan: ForwardTrace, model: nn.Module, layers: nn.Module) -> ForwardTrace:
    """Trace the forward with labels too, and add the modules that only this forward calls.

    The meaning of the labels is unknown: if the forward fails with zeros of the shape of the ids, `plan` is returned
    unchanged.
    """
    ids = plan.example_kwargs.get("input_ids")
    if ids is None or "labels" in plan.example_kwargs or "labels" not in inspect.signature(model.forward).parameters:
        return plan
    arguments = {**plan.example_kwargs, "labels": torch.zeros_like(ids)}
    try:
        found = _trace_once(model, plan.layers_path, layers, plan.output_form, arguments)
    except _CannotSplit as reason:
        return plan if str(reason).startswith(_FAILS) else replace(plan, loss_problem=str(reason))
    return replace(
        plan,
        input_modules={**found.input_modules, **plan.input_modules},
        output_modules=list(dict.fromkeys([*plan.output_modules, *found.output_modules])),
        uncalled_modules=[name for name in plan.uncalled_modules if name in found.uncalled_modules],
    )


def make_trial_kwargs(model: nn.Module, example_kwargs: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments for trial forwards: without a mask, with a 4-dimensional mask, with a mask of ones.

    On the meta device a model can't read the values of a mask, and models do not read those of a 4-dimensional mask. If
    `example_kwargs` is not None, only a copy of it is yielded.
    """
    if example_kwargs is not None:
        yield dict(example_kwargs)
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    config = getattr(model, "config", None)
    token = 1 if getattr(config, "pad_token_id", None) == 0 else 0
    plain: dict[str, Any] = {"input_ids": torch.full((_ROWS, _TOKENS), token, device=device)}
    if config is not None and hasattr(config, "use_cache"):
        plain["use_cache"] = False
    yield plain
    yield {**plain, "attention_mask": torch.zeros(_ROWS, 1, _TOKENS, _TOKENS, device=device)}
    yield {**plain, "attention_mask": torch.ones(_ROWS, _TOKENS, device=device, dtype=torch.int64)}


def _trace_once(
    model: nn.Module, path: str, layers: nn.Module, output_form: OutputForm, kwargs: dict[str, Any]
) -> ForwardTrace:
    calls: list[_LayerCall] = []
    # For each module: how many layers had been called at each of its calls, and the rule for its output shape.
    order: dict[str, tuple[set[int], OutputShapeRule | None]] = {}
    early_nodes: dict[Node, str] = {}  # for each output before the layers: its autograd node, and its module's name
    outer = _outer_modules(model, path)
    handles = [
        module.register_forward_hook(_make_call_recorder(name, calls, order, early_nodes), with_kwargs=True)
        for name, module in outer.items()
    ]
    real = dict(layers._modules)
    try:
        for number, (name, layer) in enumerate(real.items()):
            assert layer is not None
            layers._modules[name] = _ProbeLayer(number, calls, output_form, layer)
        with trial_mode(model, list(outer.values())):
            result = model(**kwargs)
    except Exception as error:
        raise _CannotSplit(f"{_FAILS} ({type(error).__name__}: {_first_line(error)})") from error
    finally:
        layers._modules.update(real)
        for handle in handles:
            handle.remove()
    _check_calls(calls, len(real))
    # The result may use an early output of a module that is called after the layers too: the last stage has the module.
    _check_result(result, calls, {node: name for node, name in early_nodes.items() if len(real) not in order[name][0]})
    plan = ForwardTrace(path, len(real), output_form, example_kwargs=kwargs, example_hidden=calls[0].hidden.detach())
    for name in outer:
        _classify_module(plan, name, *order.get(name, (set(), None)))
    return plan


def _outer_modules(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the outermost modules that have parameters of their own and are not part of a layer.

    Modules that contain the layers are excluded.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        around = not name or path.startswith(f"{name}.")
        within = any(f"{name}.".startswith(f"{other}.") for other in (path, *found))
        if not around and not within and next(module.parameters(recurse=False), None) is not None:
            found[name] = module
    return found


def _check_calls(calls: list[_LayerCall], num_layers: int) -> None:
    called = [call.index for call in calls]
    if called != list(range(num_layers)):
        raise _CannotSplit(f"its layers are called in the order {called}")
    for before, after in zip(calls, calls[1:], strict=False):
        if after.hidden is not before.returned:
            raise _CannotSplit(f"layer {after.index} gets other hidden states than layer {before.index} returned")
    for call in calls:
        if call.differentiable_arguments:
            raise _CannotSplit(
                f"layer {call.index} gets {', '.join(call.differentiable_arguments)} besides hidden states, which "
                "depends on parameters of another stage"
            )


def _check_result(result: Any, calls: list[_LayerCall], early_nodes: dict[Node, str]) -> None:
    """Check that the model's result depends on the layers only by the hidden states that the last layer returned.

    On the last stage all earlier hidden states, and the outputs of modules before the layers, are those of stubs.
    """
    elsewhere = {node: f"the output of {name}" for node, name in early_nodes.items()}
    for call in calls[:-1]:
        if call.returned.grad_fn is not None:
            elsewhere[call.returned.grad_fn] = f"the hidden states that layer {call.index} returned"
    reasons = [_find_use(tensor, elsewhere) for tensor in _main_tensors(result)]
    if reasons and all(reasons):  # other results, such as the hidden states of all layers, are for inspection only
        raise _CannotSplit(f"after its last layer it uses {reasons[0]}, which another stage computes")


def _find_use(tensor: torch.Tensor, elsewhere: Mapping[Node, str]) -> str | None:
    """Return the value of a node in `elsewhere` on which `tensor` depends; None: there is none."""
    left = [tensor.grad_fn]
    seen: set[Node | None] = {None}
    while left:
        node = left.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if node in elsewhere:
            return elsewhere[node]
        left += [before for before, _ in node.next_functions]
    return None


def _main_tensors(result: Any) -> list[torch.Tensor]:
    """Return the loss or the logits of a model's result; without these, all its tensors that depend on parameters."""
    for name in ("loss", "logits"):
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(value, torch.Tensor):
            return [value]
    if isinstance(result, (tuple, list)) and result and _is_loss(result[0]):
        return [result[0]]
    return [tensor for tensor in iterate_tensors(result) if tensor.grad_fn is not None]


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _classify_module(trace: ForwardTrace, name: str, when: set[int], shape_rule: OutputShapeRule | None) -> None:
    if not when:
        trace.uncalled_modules.append(name)
    if 0 in when:
        if shape_rule is None:
            raise _CannotSplit(f"{name} returns a value whose shape does not follow from its input")
        trace.input_modules[name] = shape_rule
    if trace.num_layers in when:
        trace.output_modules.append(name)
    if when - {0, trace.num_layers}:
        raise _CannotSplit(f"{name} is called between layers")


def _make_call_recorder(
    name: str,
    calls: list[_LayerCall],
    order: dict[str, tuple[set[int], OutputShapeRule | None]],
    early_nodes: dict[Node, str],
) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        when, rule = order.get(name, (set(), None))
        order[name] = when | {len(calls)}, rule or _infer_shape_rule(args, kwargs, output)
        if not calls and isinstance(output, torch.Tensor) and output.grad_fn is not None:
            early_nodes[output.grad_fn] = name

    return note


def _infer_shape_rule(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OutputShapeRule | None:
    if not isinstance(output, torch.Tensor) or not output.dim():
        return None
    given, made = first_tensor(args, kwargs).shape, output.shape
    if made[:-1] == given:
        return OutputShapeRule(made[-1], adds_dim=True)
    return OutputShapeRule(made[-1], adds_dim=False) if made[:-1] == given[:-1] else None


@contextmanager
def trial_mode(model: nn.Module, trainable_modules: list[nn.Module]) -> Iterator[None]:
    """Run a forward without side effects: in evaluation mode, with restored random state and configurations, and
    without router loss.

    Inside the context, the parameters that belong directly to `trainable_modules` require gradients, so that the trace
    shows which values depend on them.
    """
    own = [p for module in trainable_modules for p in module.parameters(recurse=False)]
    frozen = [p for p in own if p.is_floating_point() and not p.requires_grad]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    collecting = collecting_router_logits(RouterLogitsCollector())
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    # A loss of transformers writes its guess of the problem's type into the configuration.
    before = [(vars(config), dict(vars(config))) for config in configs.values() if hasattr(config, "__dict__")]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with evaluating(model), torch.random.fork_rng(devices), torch.enable_grad(), collecting:
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for values, kept in before:
            values.clear()
            values.update(kept)


def _requires_grad(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_requires_grad(item) for item in value)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]
