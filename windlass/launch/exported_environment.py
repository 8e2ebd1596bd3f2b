"""Environment variables that are exported to other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.base.log import logger
from windlass.launch.launch_errors import LaunchError
from windlass.launch.shell_quoting import check_variable_name

ENVIRONMENT_FILE_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""Name of the file of `KEY=VALUE` lines that is read from the home directory and then from the working directory."""

EXPORTED_PREFIXES = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "WINDLASS", "TORCH_NCCL", "GLOO", "OMP_NUM_THREADS"]
"""Prefixes of the names of exported variables. Scripts that call the launcher may append to this list."""
# {variable that identifies a service: variables that the service sets differently on each host; not exported}
_HOST_SPECIFIC_VARIABLES = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}
# Variables that are specific to this process, which are not exported.
_PROCESS_VARIABLES = ("WINDLASS_RESTARTS", "WINDLASS_CORES")


def exported_environment(
    environ: Mapping[str, str], cwd: str, folders: Sequence[str | Path] | None = None
) -> dict[str, str]:
    """Return the variables for all hosts: those of `environ` with a known prefix, then those of the environment files.

    PYTHONPATH begins with `cwd`, so that a script can import its own modules, unless an environment file sets it.

    Args:
        folders: folders of the environment files, where later ones override earlier ones; by default the home directory
            and `cwd`.

    Raises:
        LaunchError: a file cannot be read or is not UTF-8 text, or a line is not `KEY=VALUE`.
    """
    excluded = {
        *_PROCESS_VARIABLES,
        *(name for key, names in _HOST_SPECIFIC_VARIABLES.items() if key in environ for name in names),
    }
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(tuple(EXPORTED_PREFIXES)) and name not in excluded
    }
    found["PYTHONPATH"] = os.pathsep.join(path for path in (cwd, environ.get("PYTHONPATH", "")) if path)
    name = environ.get("DS_ENV_FILE") or ENVIRONMENT_FILE_NAME
    places = [Path(environ.get("HOME") or Path.home()), Path(cwd)] if folders is None else list(map(Path, folders))
    # with an absolute name, all folders give the same file
    for path in dict.fromkeys(place / name for place in places):
        if path.is_file():
            logger.info("the variables of %s are exported to every host", path)
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise LaunchError(f"cannot read {path}: {error.strerror}; make it readable or remove it") from None
            except UnicodeDecodeError as error:
                raise LaunchError(f"{path} is not UTF-8 text: {error}; write KEY=VALUE lines in UTF-8") from None
            found.update(parse_environment_file(text, str(path)))
    return found


def parse_environment_file(text: str, source: str) -> dict[str, str]:
    """Parse `KEY=VALUE` or `export KEY=VALUE` lines. Skip empty lines and comments (`#`). Remove quotes around VALUE.

    Raises:
        LaunchError: a line has another form.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals:
            raise LaunchError(f"{source}, line {number}: {line!r} has no '='; write KEY=VALUE")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        try:
            found[check_variable_name(name.strip())] = value
        except LaunchError as error:
            raise LaunchError(f"{source}, line {number}: {error}") from None
    return found
