"""Folder with the stand-in for DeepSpeed: it makes `import deepspeed` and its package metadata resolve to windlass."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from windlass.base.log import logger

STAND_IN_FOLDER = Path(__file__).parent / "path"
"""Folder with minimal packages `deepspeed` and `mii`, and the metadata of a distribution `deepspeed`."""


def stand_in_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set so that Python processes started with `variables` import the stand-in first."""
    before = [
        part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(STAND_IN_FOLDER)
    ]
    return {"PYTHONPATH": os.pathsep.join([str(STAND_IN_FOLDER), *before])}


def prepend_stand_in_path() -> None:
    """Put `STAND_IN_FOLDER` first on `sys.path`, in this process and in its child processes.

    Raises:
        ImportError: the real DeepSpeed is already imported.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not is_stand_in_file(loaded.__file__):
        raise ImportError(
            f"deepspeed was imported already, from {loaded.__file__}: import windlass.compat.deepspeed before anything "
            "that imports it"
        )
    if str(STAND_IN_FOLDER) in sys.path:
        sys.path.remove(str(STAND_IN_FOLDER))
    sys.path.insert(0, str(STAND_IN_FOLDER))
    os.environ.update(stand_in_environment(os.environ))


def is_stand_in_file(file: str | None) -> bool:
    """Return True if a module's file is in `STAND_IN_FOLDER`."""
    return file is not None and Path(file).resolve().is_relative_to(STAND_IN_FOLDER.resolve())


def log_hidden_deepspeed() -> None:
    """Log that the stand-in hides an installed DeepSpeed, unless this or a parent process has logged it."""
    if (real := find_hidden_deepspeed()) is not None and "WINDLASS_STANDS_IN" not in os.environ:
        os.environ["WINDLASS_STANDS_IN"] = "said"
        logger.info(f"windlass stands in for the DeepSpeed that is installed in {real}")


def find_hidden_deepspeed() -> Path | None:
    """Return the folder of an installed real DeepSpeed that the stand-in hides; None if there is none."""
    for entry in sys.path:
        place = Path(entry or os.curdir, "deepspeed", "__init__.py")
        if place.exists() and not is_stand_in_file(str(place)):
            return place.parent
    return None
