"""Messages that the command line prints for expected errors instead of a traceback."""

from __future__ import annotations

import errno

from windlass.base.errors import WindlassError

# Top-level packages that an extra installs, so that the message for a missing package names the extra.
_EXTRA_OF_PACKAGE = {
    "transformers": "hf",
    "tokenizers": "hf",
    "datasets": "hf",
    "pyarrow": "hf",
    "tensorboard": "monitor",
    "wandb": "monitor",
    "matplotlib": "plot",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "jinja2": "serve",
}


def describe_expected_error(error: BaseException) -> str | None:
    """Return a message with the problem, its place and the fix; None for an unexpected error, which is a bug."""
    if isinstance(error, WindlassError):
        return with_notes(str(error), error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRA_OF_PACKAGE:
        package = (error.name or "").split(".")[0]
        return f"this needs {package}, which is not installed: pip install 'windlass[{_EXTRA_OF_PACKAGE[package]}]'"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full{_filename_suffix(error)}; free some space or write elsewhere"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}{_filename_suffix(error)}; check that it exists and that you may use it"
    return None


def with_notes(message: str, error: BaseException) -> str:
    """Return the message with each note of the error on a separate line."""
    return "\n".join([message, *getattr(error, "__notes__", ())])


def _filename_suffix(error: OSError) -> str:
    return f": {error.filename}" if error.filename is not None else ""
