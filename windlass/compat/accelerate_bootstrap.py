"""Start of the process group for accelerate. On CPU, the backend name in accelerate's state is also set."""

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
    """Set the backend name in accelerate's state, and return True if a process group is initialized."""
    _set_accelerate_backend()
    return dist.is_initialized()


def _set_accelerate_backend() -> None:
    """Set the backend name in accelerate's state, if accelerate leaves it to DeepSpeed.

    Without a GPU, accelerate leaves its backend name unset and then treats a missing name as a single process, so each
    rank on CPU would get a wrong world size. accelerate calls this module while it constructs its state, and reads the
    state's attribute afterwards.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is None or not dist.is_initialized():
        return
    shared = state._shared_state
    if shared.get("backend", "") is None and "num_processes" not in shared:
        shared["backend"] = "gloo"
