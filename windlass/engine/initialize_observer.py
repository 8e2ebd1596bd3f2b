"""What a tool that looks at training puts in the way of `initialize`; nothing, unless one is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.config import Config

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine


class InitializeObserver:
    """Sees every model before it is sharded, and every engine when it is made. This one looks away.

    Attributes:
        config: goes before the configuration that a script passes; None: the script's own.
    """

    config_override: Any = None

    def before_sharding(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        """`model` is about to be sharded; `optimizer` steps its parameters. Called on every rank."""

    def after_initialize(self, engine: Engine) -> None:
        """The engine of the model that `before` saw is made. Called on every rank."""


_observer = InitializeObserver()


def install_observer(observer: InitializeObserver) -> InitializeObserver:
    """Let `watch` see what `initialize` makes from now on; returns the one that saw it so far."""
    global _observer
    before, _observer = _observer, observer
    return before


def current_observer() -> InitializeObserver:
    """The one that sees what `initialize` makes."""
    return _observer
