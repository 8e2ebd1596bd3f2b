"""Console commands of DeepSpeed: `deepspeed`, `ds_report`, `ds_bench`, `ds_io`, `ds_nvme_tune`, `ds_elastic`, `ds_ssh`.

Aliases are DeepSpeed's: `ds` and `deepspeed.pt` for `deepspeed`, and `dsr` for `ds_report`. The commands run windlass.
If the real DeepSpeed is installed and windlass's package `deepspeed` is not on the path, `deepspeed`, `ds_report` and
`ds_io` run DeepSpeed's commands instead.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from windlass.compat.stand_in_path import STAND_IN_FOLDER, find_hidden_deepspeed, stand_in_environment


def deepspeed() -> Any:
    """Start a script as the `deepspeed` command does. In the script, `import deepspeed` imports windlass."""
    if (real := _real_command("deepspeed.launcher.runner", "main")) is not None:
        return real()
    os.environ.update(stand_in_environment(os.environ))
    from windlass.compat.deepspeed_command import main

    return main()


def ds_report() -> Any:
    """Print the environment report, in the format of DeepSpeed's `ds_report`."""
    if (real := _real_command("deepspeed.env_report", "cli_main")) is not None:
        return real()
    return importlib.import_module("windlass.compat.ds_report").cli_main()


def ds_io() -> Any:
    """Measure reads or writes of one disk setting, with the arguments of DeepSpeed's `ds_io`."""
    if (real := _real_command("deepspeed.nvme", "ds_io_main")) is not None:
        return real()
    return importlib.import_module("windlass.compat.ds_io").io_main()


def ds_nvme_tune() -> Any:
    """Print the fastest `aio` section of a disk, with the arguments of DeepSpeed's `ds_nvme_tune`."""
    return importlib.import_module("windlass.compat.ds_io").tune_main()


def ds_bench() -> Any:
    """Measure collectives between ranks, with the arguments of DeepSpeed's `ds_bench`."""
    return importlib.import_module("windlass.compat.ds_bench").main()


def ds_elastic() -> Any:
    """Print the batch size of an elastic configuration, with the arguments of DeepSpeed's `ds_elastic`."""
    return importlib.import_module("windlass.compat.ds_elastic").main()


def ds_ssh() -> Any:
    """Run a command on every host of a hostfile, with the arguments of DeepSpeed's `ds_ssh`."""
    return importlib.import_module("windlass.compat.ds_ssh").main()


def _real_command(module: str, name: str) -> Any:
    """Return the real DeepSpeed's function; None if it is not installed, or windlass's `deepspeed` is on the path."""
    asked = str(STAND_IN_FOLDER) in (sys.path + os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return None if asked or find_hidden_deepspeed() is None else getattr(importlib.import_module(module), name)
