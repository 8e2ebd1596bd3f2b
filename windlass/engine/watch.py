"""What a tool that looks at training puts in the way of `initialize`; nothing, unless one is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.config import Config

if TYPE_CHECKING:
    from windlass.engine.train import Engine


class Watch:
    """Sees every model before it is sharded, and every engine when it is made. This one looks away.

    Attributes:
        config: goes before the configuration that a script passes; None: the script's own.
    """

    config: Any = None

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        """`model` is about to be sharded; `optimizer` steps its parameters. Called on every rank."""

    def after(self, engine: Engine) -> None:
        """The engine of the model that `before` saw is made. Called on every rank."""


_installed = Watch()


def install(watch: Watch) -> Watch:
    """Let `watch` see what `initialize` makes from now on; returns the one that saw it so far."""
    global _installed
    before, _installed = _installed, watch
    return before


def installed() -> Watch:
    """The one that sees what `initialize` makes."""
    return _installed
