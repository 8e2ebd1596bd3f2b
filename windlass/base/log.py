"""The package's logger: rank 0 says everything, the others only errors."""

from __future__ import annotations

import logging
import os

from windlass.base.errors import ConfigError
from windlass.base.text import printable

VARIABLE = "WINDLASS_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("windlass")


def set_level(name: str, source: str) -> None:
    """Say nothing below this level from now on.

    Args:
        name: one of `LEVELS`, in any case.
        source: who asks for it, for the error.

    Raises:
        ConfigError: there is no such level.
    """
    level = name.strip().upper()
    if level not in LEVELS:
        raise ConfigError(f"{source} = {name!r} is no level; write one of {', '.join(LEVELS)}")
    logger.setLevel(level)


def set_level_of_config(name: str | None) -> None:
    """As `set_level` for a configuration's `log_level`, which the environment's variable goes before."""
    if name is not None and not os.environ.get(VARIABLE):
        set_level(name, "log_level")


def _rank() -> int:
    return int(os.environ.get("RANK", "0") or 0)


def _may_speak(record: logging.LogRecord) -> bool:
    """What N ranks would say N times, warnings included, rank 0 says for all; an error may be one rank's own."""
    return _rank() == 0 or record.levelno >= logging.ERROR


class _Formatter(logging.Formatter):
    """Names the rank where it is not 0, and makes messages printable."""

    def format(self, record: logging.LogRecord) -> str:
        who = f"[rank {_rank()}] " if _rank() else ""
        return f"windlass: {who}{printable(super().format(record))}"


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(message)s"))
    handler.addFilter(_may_speak)
    logger.addHandler(handler)
    set_level(os.environ.get(VARIABLE) or "INFO", VARIABLE)
    logger.propagate = False


_configure()
