"""Import of transformers, an optional dependency."""

from __future__ import annotations

import logging
from typing import Any

from windlass.base.errors import ModelError


def import_transformers(purpose: str, *, quiet: bool = False) -> Any:
    """Return the module transformers.

    Args:
        purpose: plural noun for the features that need transformers, for the error.
        quiet: Show only errors: no progress bars, and no log line of each attempt to reach the hub.

    Raises:
        ModelError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"{purpose} need transformers: pip install 'windlass[hf]'") from error
    if quiet:
        transformers_logging: Any = transformers.logging
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        # huggingface_hub logs each attempt to reach the hub; the ModelError that follows is enough
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return transformers
