"""What clients of the stand-in have to be told, since they only know GPUs."""

from __future__ import annotations

import sys

import torch.distributed as dist


def tell_accelerate() -> None:
    """Name the back end to accelerate's state where that is asking DeepSpeed to choose it.

    Without a GPU accelerate leaves the choice to DeepSpeed, and then takes "no name" for "one process". Its state is
    being made while `init_distributed` runs, and reads its own attribute afterwards.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is None or not dist.is_initialized():
        return
    shared = state._shared_state
    if shared.get("backend", "") is None and "num_processes" not in shared:
        shared["backend"] = "gloo"
