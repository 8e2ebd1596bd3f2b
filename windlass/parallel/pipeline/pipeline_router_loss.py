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
from windlass.parallel.router_loss import FUNCTION_NAME, RouterLogits, install_router_loss

_KEY = "router_logits"
_RECORDS = "_can_record_outputs"  # what a class of transformers says of itself


@dataclass
class RouterLogitsCollector:
    """The forward of one stage.

    Attributes:
        before: logits that came with its hidden states.
        routers: of the whole model, on the last stage; 0: the loss is computed elsewhere.
        logits: those of this stage and of all before, once its forward asked for the loss.
    """

    previous_logits: RouterLogits = ()
    num_routers: int = 0
    logits: RouterLogits = ()

    def collect(self, local_logits: RouterLogits) -> RouterLogits | None:
        """See `router_loss.Collected`.

        Raises:
            ModelError: of some layers there are none.
        """
        self.logits = (*self.previous_logits, *local_logits)
        if not self.num_routers:
            return None
        if len(self.logits) != self.num_routers:
            raise ModelError(
                f"the loss that balances routers is over {self.num_routers} of them, and the logits of {len(self.logits)} "
                "came to the last stage; set output_router_logits to False"
            )
        return self.logits


_current_collector: ContextVar[RouterLogitsCollector | None] = ContextVar("windlass_routers_heard", default=None)


@contextmanager
def collecting_router_logits(collector: RouterLogitsCollector) -> Iterator[RouterLogitsCollector]:
    """While one stage's forward runs."""
    token = _current_collector.set(collector)
    try:
        yield collector
    finally:
        _current_collector.reset(token)


def _collect(local_logits: RouterLogits) -> RouterLogits | None:
    heard = _current_collector.get()
    return local_logits if heard is None else heard.collect(local_logits)


def record_router_logits(model: nn.Module) -> int:
    """Have the model's logits noted down, and its loss over them computed from those that were collected.

    transformers records what modules return by hooks that it puts in place when they are first wanted, which would be
    when other stages' layers are gone: they are put in place now.

    Returns:
        How many routers are recorded; 0 where the model has no loss over them.

    Raises:
        ModelError: its configuration asks for that loss, and how it is computed is not known.
    """
    inner = _find_transformers_model(model)
    loss = None if inner is None else install_router_loss(inner)
    routers = 0 if inner is None else _count_recorded_routers(inner)
    if loss is None or not routers:
        if _wants_router_loss(model):
            raise ModelError(
                f"{type(model).__name__} can't be cut into stages: config.output_router_logits asks for a loss over "
                f"the routers of all layers, and it has no {FUNCTION_NAME} over {_KEY} that transformers records; set it False"
            )
        return 0
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if not any(getattr(module, "_output_capturing_hooks_installed", False) for module in inner.modules()):
        maybe_install_capturing_hooks(inner)  # once: it does not look whether those of models within are there
    loss.collect_logits = _collect
    return routers


def _wants_router_loss(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "output_router_logits", False) or getattr(text, "output_router_logits", False))


def _find_transformers_model(model: nn.Module) -> Any:
    """The outermost model of transformers in it."""
    return next((module for module in model.modules() if hasattr(type(module), _RECORDS)), None)


def _count_recorded_routers(model: nn.Module) -> int:
    """How many modules transformers records logits of; each belongs to the innermost model of its own around it."""
    found = 0
    owners = {path: module for path, module in model.named_modules() if hasattr(type(module), _RECORDS)}
    for path, module in model.named_modules():
        owner = max((one for one in owners if not one or f"{path}.".startswith(f"{one}.")), key=len)
        recorders = (owners[owner]._can_record_outputs or {}).get(_KEY, ())
        for recorder in recorders if isinstance(recorders, (list, tuple)) else (recorders,):
            found += _is_recorded_by(recorder, path, module)
    return found


def _is_recorded_by(recorder: Any, path: str, module: nn.Module) -> bool:
    """As transformers' OutputRecorder means it; a class or its name may stand for one."""
    kind = getattr(recorder, "target_class", recorder if isinstance(recorder, type) else None)
    name = getattr(recorder, "class_name", recorder if isinstance(recorder, str) else None)
    layer = getattr(recorder, "layer_name", None)
    fits = (kind is not None and isinstance(module, kind)) or (name is not None and path.endswith(name))
    return fits and (layer is None or f".{layer.strip('.')}." in f"{path}.")
