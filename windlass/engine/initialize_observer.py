"""Hook of `initialize` for tools that observe training. The hook does nothing unless a tool installs an observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.config import Config

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine


class InitializeObserver:
    """Observer that `initialize` calls with every model before it is sharded, and with every engine that is built.

    This base class does nothing.

    Attributes:
        config_override: configuration used in place of the one that a script passes; None: the script's own.
    """

    config_override: Any = None

    def change_config(self, source: Any) -> Any:
        """Return the configuration to use in place of `source`; None: keep `source`.

        `source` is `config_override` if that is set, else the script's configuration.
        """

    def before_sharding(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        """Observe a model before it is sharded, and its optimizer, if it has one. Called on every rank."""

    def after_initialize(self, engine: Engine) -> None:
        """Observe the engine of the model that `before_sharding` observed. Called on every rank."""


_observer = InitializeObserver()


def install_observer(observer: InitializeObserver) -> InitializeObserver:
    """Install `observer` for later calls of `initialize`. Return the previous observer."""
    global _observer
    before, _observer = _observer, observer
    return before


def current_observer() -> InitializeObserver:
    """Return the installed observer."""
    return _observer
