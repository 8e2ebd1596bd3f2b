"""The start of the process group, and what clients have to be told at it, since they only know GPUs."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch.distributed as dist

from windlass.compat import collectives


@wraps(collectives.init_distributed)
def init_distributed(*args: Any, **kwargs: Any) -> None:
    collectives.init_distributed(*args, **kwargs)
    _set_accelerate_backend()


def is_initialized() -> bool:
    """Whether there is a process group."""
    _set_accelerate_backend()
    return dist.is_initialized()


def _set_accelerate_backend() -> None:
    """Name the back end to accelerate's state where that leaves it to DeepSpeed.

    Without a GPU accelerate does so, and then takes "no name" for "one process", so that ranks on CPU would be told
    different sizes of the world. Its state is being made while it asks us, and reads its own attribute afterwards.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is None or not dist.is_initialized():
        return
    shared = state._shared_state
    if shared.get("backend", "") is None and "num_processes" not in shared:
        shared["backend"] = "gloo"
