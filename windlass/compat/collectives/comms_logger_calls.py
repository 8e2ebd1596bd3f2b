"""DeepSpeed's functions that configure, print, query and clear the `comms_logger`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from windlass.comm.comms_logger import comms_logger


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure `comms_logger` from a configuration, then from the single settings that are not None."""
    if deepspeed_config is not None:
        comms_logger.configure(deepspeed_config)
    given = {"prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug, "enabled": enabled}
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, list(prof_ops or ()) if name == "prof_ops" else value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the recorded operations on rank 0. Collective.

    Args:
        show_straggler: also print the time that rank 0 waited for later ranks in each operation.
        return_dict: return the records of this rank; see `CommsLogger.log_all`.
    """
    if not dist.is_initialized():
        return comms_logger.log_all(show_straggler=show_straggler, return_dict=return_dict)
    dist.barrier()
    result = comms_logger.log_all(dist.get_rank() == 0, show_straggler, return_dict)
    dist.barrier()
    return result


def reset_log() -> None:
    """Delete all records."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Return True if any operation is recorded."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Return the number of recorded operations."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Return the names of the recorded operations."""
    return comms_logger.get_operation_names()
