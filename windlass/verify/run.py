"""Starts the ranks of a verification, and brings back what rank 0 found."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from windlass.base.errors import WindlassError
from windlass.base.text import plural
from windlass.launch.run import start
from windlass.verify.order import Order
from windlass.verify.verdict import Verdict


class RunFailed(WindlassError, RuntimeError):
    """The run ended before there was anything to compare."""


def verify(order: Order, ranks: int) -> list[Verdict]:
    """Run what `order` says on `ranks` ranks of this machine; the verdict of each engine, the first one's first.

    Raises:
        RunFailed: a rank failed; the text is its own.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-verify-") as folder:
        order = replace(order, folder=folder)
        here = os.pathsep.join(path for path in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if path)
        outcome = start(["-m", "windlass.verify.rank", str(order.write())], ranks, env={"PYTHONPATH": here})
        if outcome.interrupted_by is not None:
            raise RunFailed("interrupted before the verdict")
        if order.failure.exists():
            raise RunFailed(
                f"the run on {plural(ranks, 'rank')} failed, so there is nothing to compare:\n{_read(order.failure)}"
            )
        if not order.result.exists():
            told = "; ".join(str(failure) for failure in outcome.failures) or "no rank says why"
            raise RunFailed(f"the run on {plural(ranks, 'rank')} left no verdict: {told}; see the output above")
        return [Verdict.read(one) for one in json.loads(_read(order.result))]


def _read(path: Path) -> str:
    return path.read_text()
