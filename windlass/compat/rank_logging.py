"""Module `deepspeed.utils.logging`: the shared logger, and log functions for selected ranks."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.atomic_file import open_new
from windlass.base.log import logger as own_logger

log_levels: dict[str, int] = {
    name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}


class SharedLogger(logging.Logger):
    """Logger whose level also applies to windlass's own logger, because scripts use it to silence all messages."""

    def setLevel(self, level: int | str) -> None:
        """Set the level of this logger and of windlass's logger."""
        super().setLevel(level)
        own_logger.setLevel(level)

    def warning_once(self, message: object, *args: Hashable) -> None:
        """Log a warning; repetitions of the same warning are dropped."""
        warning_once(message, *args)

    def log_dist_once(self, message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
        """Log once on the given ranks; see the function `log_dist_once`."""
        log_dist_once(message, ranks, level)


class LoggerFactory:
    """Factory of loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Create a logger whose lines show time, level and source location.

        Raises:
            ValueError: `name` is None.
        """
        if name is None:
            raise ValueError("create_logger: name is None; pass a name for the logger")
        made = logging.getLogger(name)
        made.propagate = False
        logging.Logger.setLevel(made, level)
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
        )
        made.addHandler(handler)
        return made


def _make_shared_logger() -> SharedLogger:
    made = LoggerFactory.create_logger("DeepSpeed")
    made.__class__ = SharedLogger
    assert isinstance(made, SharedLogger)
    return made


logger = _make_shared_logger()


@functools.cache
def warning_once(message: object, *args: Hashable) -> None:
    """Log a warning; repetitions of the same warning are dropped."""
    logger.warning(message, *args)


def _is_chosen_rank(ranks: Sequence[int] | None) -> bool:
    """Return True if this rank logs: before initialization every rank, then those in `ranks`; `[-1]` means all."""
    if not dist.is_initialized():
        return True
    return bool(ranks) and (ranks is not None) and (ranks[0] == -1 or dist.get_rank() in ranks)


def get_dist_msg(message: object, ranks: Sequence[int] | None = None) -> str | None:
    """Return `message` with a rank prefix; None if this rank does not log it."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    return f"[Rank {rank}] {message}" if _is_chosen_rank(ranks) else None


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the ranks in `ranks`. `[-1]` means all ranks; None means none once a process group is initialized."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


def log_dist_once(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log like `log_dist`; repetitions of the same message are dropped."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: object, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def print_dist(message: object, ranks: Sequence[int] | None = None) -> None:
    """Print `message` on the ranks on which `log_dist` would log it, whatever the logger's level."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None
) -> None:
    """Write `message`, with the rank added, to `path` as JSON, on the ranks in `ranks`.

    Raises:
        ValueError: `path` is None.
    """
    if not _is_chosen_rank(ranks):
        return
    if path is None:
        raise ValueError("print_json_dist: path is None; name a file")
    message["rank"] = dist.get_rank() if dist.is_initialized() else -1
    with open_new(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(message))


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of an object, one per line."""
    logger.info(f"{name}:")
    for key, value in sorted(vars(args).items()):
        logger.info(f"  {key} {'.' * (29 - len(key))} {value}")


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the numeric logging level of a name such as `info`.

    Raises:
        ValueError: the level is unknown.
    """
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str!r} is not a log level; use one of {', '.join(log_levels)}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger and its handlers by name.

    Raises:
        ValueError: see `get_log_level_from_string`.
    """
    level, target = get_log_level_from_string(log_level_str), custom_logger or logger
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the logger's effective level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return True if the current level is at or below the given one.

    Raises:
        ValueError: the argument is not a string, or the level is unknown.
    """
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"{max_log_level_str!r} is not a log level; use one of {', '.join(log_levels)}")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function `frame` levels up the call stack."""
    return sys._getframe(frame).f_code.co_name


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return True if torch's version is within both bounds; only major and minor numbers are compared.

    Raises:
        ValueError: neither bound is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version or max_version")

    def pair(version: object) -> tuple[int, int]:
        major, _, rest = str(version).partition(".")
        return int(major), int(rest.split(".")[0] or 0)

    here = pair(torch.__version__)
    return (min_version is None or here >= pair(min_version)) and (max_version is None or here <= pair(max_version))
