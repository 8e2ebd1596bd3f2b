"""The package's logger: rank 0 speaks, the others only warn."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("windlass")


def _rank() -> int:
    return int(os.environ.get("RANK", "0") or 0)


class _RankFilter(logging.Filter):
    """Lets rank 0 say everything and the others only what is wrong, so that N ranks do not print N copies."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _rank() == 0:
            return True
        record.msg = f"[rank {_rank()}] {record.msg}"
        return record.levelno > logging.WARNING


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("windlass: %(message)s"))
    handler.addFilter(_RankFilter())
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("WINDLASS_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


_configure()
