"""Where the values of a parameter are, and what sort it is, in DeepSpeed's words."""

from __future__ import annotations

import enum


class ZeroParamStatus(enum.Enum):
    """Where the values of a parameter are."""

    AVAILABLE = 1  # whole, on this rank
    NOT_AVAILABLE = 2  # spread over the ranks
    INFLIGHT = 3  # being gathered


class ZeroParamType(enum.Enum):
    """What sort of parameter it is."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3
