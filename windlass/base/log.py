"""The package's logger: rank 0 says everything, the others only errors."""

from __future__ import annotations

import logging
import os

from windlass.base.errors import ConfigError
from windlass.base.text import escape_unprintable

LOG_LEVEL_VARIABLE = "WINDLASS_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("windlass")


def set_log_level(name: str, source: str) -> None:
    """Say nothing below this level from now on.

    Args:
        name: one of `LEVELS`, in any case.
        source: who asks for it, for the error.

    Raises:
        ConfigError: there is no such level.
    """
    level = name.strip().upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"{source} = {name!r} is no level; write one of {', '.join(LOG_LEVELS)}")
    logger.setLevel(level)


def set_config_log_level(name: str | None) -> None:
    """As `set_level` for a configuration's `log_level`, which the environment's variable goes before."""
    if name is not None and not os.environ.get(LOG_LEVEL_VARIABLE):
        set_log_level(name, "log_level")


def _rank() -> int:
    return int(os.environ.get("RANK", "0") or 0)


def _is_logged_here(record: logging.LogRecord) -> bool:
    """What N ranks would say N times, warnings included, rank 0 says for all; an error may be one rank's own."""
    return _rank() == 0 or record.levelno >= logging.ERROR


class _RankFormatter(logging.Formatter):
    """Names the rank where it is not 0, and makes messages printable."""

    def format(self, record: logging.LogRecord) -> str:
        who = f"[rank {_rank()}] " if _rank() else ""
        return f"windlass: {who}{escape_unprintable(super().format(record))}"


def _configure_logger() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_RankFormatter("%(message)s"))
    handler.addFilter(_is_logged_here)
    logger.addHandler(handler)
    set_log_level(os.environ.get(LOG_LEVEL_VARIABLE) or "INFO", LOG_LEVEL_VARIABLE)
    logger.propagate = False


_configure_logger()
