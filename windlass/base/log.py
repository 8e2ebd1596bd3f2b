"""Logger of the package: rank 0 logs everything, other ranks only errors."""

from __future__ import annotations

import logging
import os

from windlass.base.errors import ConfigError
from windlass.base.text import escape_unprintable

LOG_LEVEL_VARIABLE = "WINDLASS_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("windlass")


def set_log_level(name: str, source: str) -> None:
    """Set the level below which nothing is logged.

    Args:
        name: one of `LOG_LEVELS`, in any case.
        source: name of the setting, for the error.

    Raises:
        ConfigError: the level is unknown.
    """
    level = name.strip().upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"{source} = {name!r} is not a log level; write one of {', '.join(LOG_LEVELS)}")
    logger.setLevel(level)


def set_config_log_level(name: str | None) -> None:
    """Set the configured `log_level`, unless it is None or `WINDLASS_LOG_LEVEL` is set."""
    if name is not None and not os.environ.get(LOG_LEVEL_VARIABLE):
        set_log_level(name, "log_level")


def _rank() -> int:
    return int(os.environ.get("RANK", "0") or 0)


def _is_logged_here(record: logging.LogRecord) -> bool:
    """Return True if this rank logs the record: rank 0 logs all records, other ranks only errors."""
    return _rank() == 0 or record.levelno >= logging.ERROR


class _RankFormatter(logging.Formatter):
    """Formatter that adds the rank if it is not 0 and escapes unprintable characters."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"[rank {_rank()}] " if _rank() else ""
        return f"windlass: {prefix}{escape_unprintable(super().format(record))}"


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
