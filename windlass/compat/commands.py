"""The commands `deepspeed` and `ds_report`: windlass's, unless the real ones are installed and nobody asked for us."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from windlass.compat.place import FOLDER, environment, hidden


def deepspeed() -> Any:
    """Start a script as the `deepspeed` command does; in it `import deepspeed` is windlass."""
    if (real := _real("deepspeed.launcher.runner", "main")) is not None:
        return real()
    os.environ.update(environment(os.environ))
    from windlass.launch.deepspeed_command import main

    return main()


def ds_report() -> Any:
    """What is known of this machine, in the lines of that command."""
    if (real := _real("deepspeed.env_report", "cli_main")) is not None:
        return real()
    return importlib.import_module("windlass.cli.environment.ds_report").cli_main()


def _real(module: str, name: str) -> Any:
    """The real DeepSpeed's function, where that is installed and the stand-in's folder is not on the path."""
    asked = str(FOLDER) in (sys.path + os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return None if asked or hidden() is None else getattr(importlib.import_module(module), name)
