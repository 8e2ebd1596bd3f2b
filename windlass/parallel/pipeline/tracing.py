"""How a model's own forward uses its layers: which list they are in, what comes before, what behind.

[Note: tracing by absence] The forward runs once, on two rows of three tokens, with nothing in place of each layer. So
it costs no more than an embedding and a head, works on the meta device, and tells apart what lies before the layers and
behind them whatever order modules were registered in. It shows three things that a cut relies on: layers are called one
after the other, each gets as hidden states exactly what the one before returned, and nothing else that they get depends
on parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.pipeline.absent import Form, Rule, first_tensor, formed, hidden_of
from windlass.parallel.pipeline.routers import Heard, hearing, listen

_ROWS, _TOKENS = 2, 3


@dataclass
class Plan:
    """What a model's forward does.

    Attributes:
        path: of the list of layers, in the model.
        layers: how many are in it.
        form: what a layer returns.
        before: modules with parameters of their own that are called before the layers, and the shapes they return.
        behind: those called behind them.
        everywhere: those that are not called; whoever wants their parameters may want them on any stage.
        arguments: with which the forward was looked at.
        hidden: what the first layer was given then.
        routers: whose logits a loss may be over.
    """

    path: str
    layers: int
    form: Form = "tensor"
    before: dict[str, Rule] = field(default_factory=dict)
    behind: list[str] = field(default_factory=list)
    everywhere: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    routers: int = 0


class _Impossible(Exception):
    """Why a list can't be cut; the text is part of a sentence."""


class _Probe(nn.Module):
    """In a layer's place: notes down how it is called."""

    def __init__(self, number: int, calls: list[_Call], form: Form, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float, bool)) and name not in vars(self):
                setattr(self, name, value)
        self.number, self.calls, self.form = number, calls, form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        returned = hidden + 0
        named = [*enumerate(args), *kwargs.items()]
        learns = [str(name) for name, value in named if value is not hidden and _learns(value)]
        self.calls.append(_Call(self.number, hidden, returned, learns))
        return formed(returned, self.form)


@dataclass
class _Call:
    number: int
    hidden: torch.Tensor
    returned: torch.Tensor
    learns: list[str]


def plan_of(model: nn.Module, sample: Mapping[str, Any] | None = None) -> Plan:
    """Find the layers of `model` and what lies around them.

    Args:
        model: with values or on the meta device; it is as it was afterwards.
        sample: keyword arguments of a forward; by default `input_ids` alone.

    Raises:
        ModelError: no list of layers can be cut; the text names those that were looked at, and why not.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(_refusal(model, {}, "it has an encoder and a decoder, which are two rows of layers"))
    for name in ("layerdrop", "layer_drop"):
        if getattr(config, name, 0):
            raise ModelError(_refusal(model, {}, f"config.{name} leaves layers out by chance; set it 0"))
    for path, module in model.named_modules():
        if getattr(module, "is_kv_shared_layer", False):
            reason = f"{path} computes with keys and values that an earlier layer left, which may be on another stage"
            raise ModelError(_refusal(model, {}, reason))
    routers = listen(model)
    reasons: dict[str, str] = {}
    for path, layers in _candidates(model):
        try:
            return replace(_traced(model, path, layers, sample), routers=routers)
        except _Impossible as reason:
            reasons[f"{path} ({len(layers._modules)} of {type(next(layers.children())).__name__})"] = str(reason)
    raise ModelError(_refusal(model, reasons, "" if reasons else "it has none"))


def _refusal(model: nn.Module, reasons: dict[str, str], more: str) -> str:
    looked = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
    return (
        f"{type(model).__name__} can't be cut into stages: looked for a list of layers (nn.ModuleList) that its "
        f"forward calls one after the other, each with the hidden states that the one before returned: {looked or more}"
        ". Write it as a PipelineModule, or train it without pp"
    )


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Lists of modules that lie in no other such list, those with the most parameters first."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        rows = path and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        if rows and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in found.items()}
    for path in sorted(found, key=lambda path: -sizes[path]):
        if sizes[path]:
            yield path, found[path]


def _traced(model: nn.Module, path: str, layers: nn.Module, sample: Mapping[str, Any] | None) -> Plan:
    """The first way of calling the model that works tells; else the first reason why none does."""
    reasons: list[str] = []
    for form in ("tensor", "tuple"):
        for arguments in arguments_of(model, sample):
            try:
                return _try(model, path, layers, form, arguments)
            except _Impossible as reason:
                reasons.append(str(reason))
    raise _Impossible(next((one for one in reasons if not one.startswith("its forward")), reasons[0]))


def arguments_of(model: nn.Module, sample: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Keyword arguments for a trial. On the meta device models can't look at values of masks, so one of them is given
    as models take it without looking, or made from ones."""
    if sample is not None:
        yield dict(sample)
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


def _try(model: nn.Module, path: str, layers: nn.Module, form: Form, arguments: dict[str, Any]) -> Plan:
    calls: list[_Call] = []
    order: dict[str, tuple[set[int], Rule | None]] = {}  # how many layers were called before each call of a module
    outer = _around(model, path)
    handles = [
        module.register_forward_hook(_noting(name, calls, order), with_kwargs=True) for name, module in outer.items()
    ]
    real = dict(layers._modules)
    try:
        for number, (name, layer) in enumerate(real.items()):
            assert layer is not None
            layers._modules[name] = _Probe(number, calls, form, layer)
        with undisturbed(model, list(outer.values())):
            model(**arguments)
    except Exception as error:
        raise _Impossible(f"its forward fails without layers ({type(error).__name__}: {_short(error)})") from error
    finally:
        layers._modules.update(real)
        for handle in handles:
            handle.remove()
    _check(calls, len(real))
    plan = Plan(path, len(real), form, arguments=arguments, hidden=calls[0].hidden.detach())
    for name in outer:
        _sort_in(plan, name, *order.get(name, (set(), None)))
    return plan


def _around(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Modules with parameters of their own outside the layers, and what lies in them; not what the layers lie in."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        around = not name or path.startswith(f"{name}.")
        within = any(f"{name}.".startswith(f"{other}.") for other in (path, *found))
        if not around and not within and next(module.parameters(recurse=False), None) is not None:
            found[name] = module
    return found


def _check(calls: list[_Call], layers: int) -> None:
    called = [call.number for call in calls]
    if called != list(range(layers)):
        raise _Impossible(f"its layers are called in the order {called}")
    for before, after in zip(calls, calls[1:], strict=False):
        if after.hidden is not before.returned:
            raise _Impossible(f"layer {after.number} gets other hidden states than layer {before.number} returned")
    for call in calls:
        if call.learns:
            raise _Impossible(
                f"layer {call.number} gets {', '.join(call.learns)} besides hidden states, which depends on "
                "parameters of another stage"
            )


def _sort_in(plan: Plan, name: str, when: set[int], rule: Rule | None) -> None:
    if not when:
        plan.everywhere.append(name)
    if 0 in when:
        if rule is None:
            raise _Impossible(f"{name} returns what no shape can be told of beforehand")
        plan.before[name] = rule
    if plan.layers in when:
        plan.behind.append(name)
    if when - {0, plan.layers}:
        raise _Impossible(f"{name} is called between layers")


def _noting(name: str, calls: list[_Call], order: dict[str, tuple[set[int], Rule | None]]) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        when, rule = order.get(name, (set(), None))
        order[name] = when | {len(calls)}, rule or _rule(args, kwargs, output)

    return note


def _rule(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rule | None:
    if not isinstance(output, torch.Tensor) or not output.dim():
        return None
    given, made = first_tensor(args, kwargs).shape, output.shape
    if made[:-1] == given:
        return Rule(made[-1], more=True)
    return Rule(made[-1], more=False) if made[:-1] == given[:-1] else None


@contextmanager
def undisturbed(model: nn.Module, learning: list[nn.Module]) -> Iterator[None]:
    """For a forward that leaves no traces: in evaluation mode, with random numbers put back and no loss over routers.
    Parameters of `learning` need gradients meanwhile, so that it shows what depends on them."""
    modes = [(module, module.training) for module in model.modules()]
    own = [p for module in learning for p in module.parameters(recurse=False)]
    frozen = [p for p in own if p.is_floating_point() and not p.requires_grad]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.random.fork_rng(devices), torch.enable_grad(), hearing(Heard()):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, mode in modes:
            module.training = mode


def _learns(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_learns(item) for item in value)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]
