"""The loss with which transformers' routers are balanced, where their layers lie on several stages.

[Note: routers of all layers] That loss is a product of two means over all layers, so no stage can compute its part of
it. The logits of a stage's routers, `[tokens, experts]` of each, go to the next stage together with its hidden states,
and on from there: the last stage hands those of all layers to the model's own function, and their gradients come back
the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.router_loss import NAME, Logits, router_loss_of

_KEY = "router_logits"
_RECORDS = "_can_record_outputs"  # what a class of transformers says of itself


@dataclass
class Heard:
    """The forward of one stage.

    Attributes:
        before: logits that came with its hidden states.
        routers: of the whole model, on the last stage; 0: the loss is computed elsewhere.
        logits: those of this stage and of all before, once its forward asked for the loss.
    """

    before: Logits = ()
    routers: int = 0
    logits: Logits = ()

    def collect(self, own: Logits) -> Logits | None:
        """See `router_loss.Collected`.

        Raises:
            ModelError: of some layers there are none.
        """
        self.logits = (*self.before, *own)
        if not self.routers:
            return None
        if len(self.logits) != self.routers:
            raise ModelError(
                f"the loss that balances routers is over {self.routers} of them, and the logits of {len(self.logits)} "
                "came to the last stage; set output_router_logits to False"
            )
        return self.logits


_now: ContextVar[Heard | None] = ContextVar("windlass_routers_heard", default=None)


@contextmanager
def hearing(heard: Heard) -> Iterator[Heard]:
    """While one stage's forward runs."""
    token = _now.set(heard)
    try:
        yield heard
    finally:
        _now.reset(token)


def _collect(own: Logits) -> Logits | None:
    heard = _now.get()
    return own if heard is None else heard.collect(own)


def listen(model: nn.Module) -> int:
    """Have the model's logits noted down, and its loss over them computed from those that were collected.

    transformers records what modules return by hooks that it puts in place when they are first wanted, which would be
    when other stages' layers are gone: they are put in place now.

    Returns:
        How many routers are recorded; 0 where the model has no loss over them.

    Raises:
        ModelError: its configuration asks for that loss, and how it is computed is not known.
    """
    inner = _inner(model)
    loss = None if inner is None else router_loss_of(inner)
    routers = 0 if inner is None else _recorded(inner)
    if loss is None or not routers:
        if _asked(model):
            raise ModelError(
                f"{type(model).__name__} can't be cut into stages: config.output_router_logits asks for a loss over "
                f"the routers of all layers, and it has no {NAME} over {_KEY} that transformers records; set it False"
            )
        return 0
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if not any(getattr(module, "_output_capturing_hooks_installed", False) for module in inner.modules()):
        maybe_install_capturing_hooks(inner)  # once: it does not look whether those of models within are there
    loss.collect = _collect
    return routers


def _asked(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "output_router_logits", False) or getattr(text, "output_router_logits", False))


def _inner(model: nn.Module) -> Any:
    """The outermost model of transformers in it."""
    return next((module for module in model.modules() if hasattr(type(module), _RECORDS)), None)


def _recorded(model: nn.Module) -> int:
    """How many modules transformers records logits of; each belongs to the innermost model of its own around it."""
    found = 0
    owners = {path: module for path, module in model.named_modules() if hasattr(type(module), _RECORDS)}
    for path, module in model.named_modules():
        owner = max((one for one in owners if not one or f"{path}.".startswith(f"{one}.")), key=len)
        recorders = (owners[owner]._can_record_outputs or {}).get(_KEY, ())
        for recorder in recorders if isinstance(recorders, (list, tuple)) else (recorders,):
            found += _matches(recorder, path, module)
    return found


def _matches(recorder: Any, path: str, module: nn.Module) -> bool:
    """As transformers' OutputRecorder means it; a class or its name may stand for one."""
    kind = getattr(recorder, "target_class", recorder if isinstance(recorder, type) else None)
    name = getattr(recorder, "class_name", recorder if isinstance(recorder, str) else None)
    layer = getattr(recorder, "layer_name", None)
    fits = (kind is not None and isinstance(module, kind)) or (name is not None and path.endswith(name))
    return fits and (layer is None or f".{layer.strip('.')}." in f"{path}.")
