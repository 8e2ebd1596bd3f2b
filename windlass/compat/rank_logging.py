"""`deepspeed.utils.logging`: the logger that scripts hold, and lines that chosen ranks write."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.log import logger as own_logger

log_levels: dict[str, int] = {
    name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}


class SharedLogger(logging.Logger):
    """A logger whose level is windlass' own too: who tells DeepSpeed to be quiet means all of it."""

    def setLevel(self, level: int | str) -> None:
        """Say nothing below `level` from now on."""
        super().setLevel(level)
        own_logger.setLevel(level)

    def warning_once(self, message: object, *args: Hashable) -> None:
        """Warn, and of the same thing no second time."""
        warning_once(message, *args)

    def log_dist_once(self, message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
        """See `log_dist_once`."""
        log_dist_once(message, ranks, level)


class LoggerFactory:
    """Makes loggers that write to the standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger of that name, with a line's time, level and place.

        Raises:
            ValueError: there is no name.
        """
        if name is None:
            raise ValueError("create_logger: name is None; give the logger a name")
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
    """Warn, and of the same thing no second time."""
    logger.warning(message, *args)


def _is_chosen_rank(ranks: Sequence[int] | None) -> bool:
    """Whether this rank is to speak: each before ranks know each other, then those in `ranks`; -1 means all."""
    if not dist.is_initialized():
        return True
    return bool(ranks) and (ranks is not None) and (ranks[0] == -1 or dist.get_rank() in ranks)


def get_dist_msg(message: object, ranks: Sequence[int] | None = None) -> str | None:
    """`message` with this rank before it; None where this rank is not to say it."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    return f"[Rank {rank}] {message}" if _is_chosen_rank(ranks) else None


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the ranks in `ranks`; `[-1]` means all, None nobody once ranks know each other."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


def log_dist_once(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, and the same thing no second time."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: object, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def print_dist(message: object, ranks: Sequence[int] | None = None) -> None:
    """As `log_dist`, whatever the level of the logger is."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None
) -> None:
    """Write `message`, with its rank, to `path` as JSON, on the ranks in `ranks`.

    Raises:
        ValueError: there is no path.
    """
    if not _is_chosen_rank(ranks):
        return
    if path is None:
        raise ValueError("print_json_dist: path is None; name a file")
    message["rank"] = dist.get_rank() if dist.is_initialized() else -1
    Path(path).write_text(json.dumps(message), "utf-8")


def print_configuration(args: Any, name: str) -> None:
    """Log what an object of arguments holds, one a line."""
    logger.info(f"{name}:")
    for key, value in sorted(vars(args).items()):
        logger.info(f"  {key} {'.' * (29 - len(key))} {value}")


def get_log_level_from_string(log_level_str: str) -> int:
    """`info` as the number that logging uses.

    Raises:
        ValueError: there is no such level.
    """
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str!r} is no level; write one of {', '.join(log_levels)}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Say nothing below a level, given as text, from now on.

    Raises:
        ValueError: as `get_log_level_from_string`.
    """
    level, target = get_log_level_from_string(log_level_str), custom_logger or logger
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """The level below which nothing is said."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the level is this one or lower.

    Raises:
        ValueError: it is no text, or no level.
    """
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"{max_log_level_str!r} is no level; write one of {', '.join(log_levels)}")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def get_caller_func(frame: int = 3) -> str:
    """The name of the function that is `frame` calls above this one."""
    return sys._getframe(frame).f_code.co_name


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least the one version and at most the other, by major and minor number.

    Raises:
        ValueError: neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version or max_version")

    def pair(version: object) -> tuple[int, int]:
        major, _, rest = str(version).partition(".")
        return int(major), int(rest.split(".")[0] or 0)

    here = pair(torch.__version__)
    return (min_version is None or here >= pair(min_version)) and (max_version is None or here <= pair(max_version))
