"""Anonymous file (memfd) in which the replicas of a server share packed weights: see [Note: shared weights]."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLE = "WINDLASS_SHARED_WEIGHTS"


def create_shared_weights() -> int | None:
    """Return the descriptor of an empty file in memory; None if the system has no memfd."""
    return os.memfd_create("windlass-weights") if hasattr(os, "memfd_create") else None


def shared_weights_environment(file: int | None) -> dict[str, str]:
    """Return the environment variables for a process that inherits the descriptor `file`; empty if `file` is None."""
    return {} if file is None else {_VARIABLE: str(file)}


def shared_descriptors(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors that a process with this environment inherits: one or none."""
    text = environment.get(_VARIABLE)
    return (int(text),) if text else ()


def inherited_shared_weights() -> int | None:
    """Return the descriptor of shared weights that this process has inherited, or None."""
    return next(iter(shared_descriptors(os.environ)), None)
