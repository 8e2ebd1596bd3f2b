"""Sees engines being made, has each of their steps compared, and says when it is enough."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.device import local_device
from windlass.base.dtypes import parse_dtype
from windlass.config import Config
from windlass.engine.train import Engine
from windlass.engine.watch import Watch
from windlass.verify.alone import Alone
from windlass.verify.order import Order
from windlass.verify.plain import Plain
from windlass.verify.watched import Watched
from windlass.zero import GatheredParameters, born


class Finished(SystemExit):
    """Enough steps were compared: the script ends here, on all ranks."""


class Session(Watch):
    """All engines of a verification; the first one with an optimizer says when it is over."""

    def __init__(self, order: Order) -> None:
        self.order, self.config = order, order.config
        self.engines: list[Watched] = []
        self._copy: Plain | None = None
        self._second: Plain | None = None
        self._coming: tuple[torch.optim.Optimizer | None, Config | None] = None, None

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        """Copy the model while it is whole; on rank 0, whose values count."""
        self._copy, self._coming = None, (optimizer, config)
        if optimizer is None:
            return
        mixed = config.fp16.enabled or config.bf16.enabled
        table = config.dtype_table()
        compute = parse_dtype(table.parameter) if mixed else None
        masters = (parse_dtype(table.master), parse_dtype(table.state)) if table.master != "fp32" else None
        sharded = [p for p in model.parameters() if born.find(p) is not None]
        whole: AbstractContextManager[Any] = GatheredParameters(sharded) if sharded else nullcontext()
        with whole:
            if dist.get_rank() == 0:
                self._copy = Plain(model, optimizer, compute, local_device(), masters)
                if self.order.alone:
                    self._second = Plain(model, optimizer, compute, local_device(), masters)

    def after(self, engine: Engine) -> None:
        """Watch the engine from now on."""
        optimizer, config = self._coming
        if optimizer is None or config is None:
            return
        alone = Alone(self._second, config.gradient_clipping) if self._second is not None else None
        watched = Watched(engine, self._copy, alone, config, self.looked_at)
        self._copy = self._second = None
        self.engines.append(watched)
        watched.start()
        self.looked_at(watched)

    def write(self) -> None:
        """Leave the verdicts where the order says; only rank 0 has them."""
        if any(watched.plain is not None for watched in self.engines):
            found = [watched.verdict.as_json() for watched in self.engines]
            self.order.result.write_text(json.dumps(found))

    def ended_early(self) -> None:
        """The script ended by itself, before as many steps as were asked for."""
        first = self.engines[0]
        if first.steps < self.order.steps:
            first.verdict.notes.append(f"the script ended after {first.steps} of {self.order.steps} steps")

    def looked_at(self, watched: Watched) -> None:
        """An engine was compared once more: go on, or end the script on all ranks.

        Raises:
            Finished: it is over.
        """
        over = watched.deviated or (watched is self.engines[0] and watched.steps == self.order.steps)
        if over:
            self.write()
            raise Finished(0)
