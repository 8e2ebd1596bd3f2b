"""Load-balancing loss of transformers' routers, for a model whose layers are on several stages.

[Note: routers of all layers] The loss is a product of two means over all layers, not a sum of parts that each stage
could compute. Each stage sends the logits of its routers, `[tokens, experts]` each, to the next stage together with its
hidden states and the logits that it received. The last stage passes the logits of all layers to the model's own loss
function. The gradients of the logits return along the same path.
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
_RECORDS = "_can_record_outputs"  # class attribute of a transformers model that lists the outputs it records


@dataclass
class RouterLogitsCollector:
    """Router logits in the forward of one stage.

    Attributes:
        previous_logits: logits that the stage received with its hidden states.
        num_routers: number of routers in the full model, on the last stage; 0 on other stages, which compute no loss.
        logits: logits of this stage and all previous stages, set when the forward calls its router loss function.
    """

    previous_logits: RouterLogits = ()
    num_routers: int = 0
    logits: RouterLogits = ()

    def collect(self, local_logits: RouterLogits) -> RouterLogits | None:
        """Add this stage's logits. Return the logits of all layers on the last stage, None on others.

        This method has the signature of `RouterLoss.collect_logits`.

        Raises:
            ModelError: the logits of some layers are missing.
        """
        self.logits = (*self.previous_logits, *local_logits)
        if not self.num_routers:
            return None
        if len(self.logits) != self.num_routers:
            raise ModelError(
                f"the router loss needs the logits of {self.num_routers} routers, and the last stage received those of "
                f"{len(self.logits)}; set output_router_logits to False"
            )
        return self.logits


_current_collector: ContextVar[RouterLogitsCollector | None] = ContextVar("windlass_routers_heard", default=None)


@contextmanager
def collecting_router_logits(collector: RouterLogitsCollector) -> Iterator[RouterLogitsCollector]:
    """Use `collector` for the logits of the forward inside the context."""
    token = _current_collector.set(collector)
    try:
        yield collector
    finally:
        _current_collector.reset(token)


def _collect(local_logits: RouterLogits) -> RouterLogits | None:
    active_collector = _current_collector.get()
    return local_logits if active_collector is None else active_collector.collect(local_logits)


def record_router_logits(model: nn.Module) -> int:
    """Make the model record its router logits, and compute its loss over the logits that the stages collected.

    transformers installs the recording hooks at first use, when the layers of other stages are already gone. So this
    function installs them before the split.

    Returns:
        The number of recorded routers; 0 if the model has no loss over them.

    Raises:
        ModelError: the model's configuration requests that loss, but the model computes it in no supported way.
    """
    inner = _find_transformers_model(model)
    loss = None if inner is None else install_router_loss(inner)
    routers = 0 if inner is None else _count_recorded_routers(inner)
    if loss is None or not routers:
        if _wants_router_loss(model):
            raise ModelError(
                f"{type(model).__name__} can't be split into stages: config.output_router_logits requests a loss over "
                f"the routers of all layers, but the model has no {FUNCTION_NAME}, or transformers records no {_KEY} "
                "in it; set config.output_router_logits to False"
            )
        return 0
    loss.collect_logits = _collect
    _install_recording_hooks(inner)
    return routers


def _install_recording_hooks(model: Any) -> None:
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ModuleNotFoundError:  # transformers 5.0 and older install no hooks: each forward finds the modules to record
        return
    if not any(getattr(module, "_output_capturing_hooks_installed", False) for module in model.modules()):
        maybe_install_capturing_hooks(model)  # once: a second call would install the hooks of nested models again


def _wants_router_loss(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "output_router_logits", False) or getattr(text, "output_router_logits", False))


def _find_transformers_model(model: nn.Module) -> Any:
    """Return the outermost transformers model inside `model`, or None."""
    return next((module for module in model.modules() if hasattr(type(module), _RECORDS)), None)


def _count_recorded_routers(model: nn.Module) -> int:
    """Count the modules whose logits transformers records.

    The innermost transformers model that contains a module decides whether the module is recorded.
    """
    found = 0
    owners = {path: module for path, module in model.named_modules() if hasattr(type(module), _RECORDS)}
    for path, module in model.named_modules():
        owner = max((one for one in owners if not one or f"{path}.".startswith(f"{one}.")), key=len)
        recorders = (owners[owner]._can_record_outputs or {}).get(_KEY, ())
        for recorder in recorders if isinstance(recorders, (list, tuple)) else (recorders,):
            found += _is_recorded_by(recorder, path, module)
    return found


def _is_recorded_by(recorder: Any, path: str, module: nn.Module) -> bool:
    """Return True if a recorder of transformers records this module.

    A recorder is an OutputRecorder, a class or a class name.
    """
    kind = getattr(recorder, "target_class", recorder if isinstance(recorder, type) else None)
    name = getattr(recorder, "class_name", recorder if isinstance(recorder, str) else None)
    layer = getattr(recorder, "layer_name", None)
    fits = (kind is not None and isinstance(module, kind)) or (name is not None and path.endswith(name))
    return fits and (layer is None or f".{layer.strip('.')}." in f"{path}.")
