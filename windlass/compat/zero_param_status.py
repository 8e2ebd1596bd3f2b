"""DeepSpeed's enums of a parameter's sharding status and type."""

from __future__ import annotations

import enum


class ZeroParamStatus(enum.Enum):
    """Availability of a parameter's values."""

    AVAILABLE = 1  # full parameter on this rank
    NOT_AVAILABLE = 2  # sharded over the ranks
    INFLIGHT = 3  # being gathered


class ZeroParamType(enum.Enum):
    """Type of a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3
