"""Two scripts that are written next to checkpoints, as DeepSpeed does: each extracts weights in one command."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from windlass.base.atomic_file import write_atomically
from windlass.base.regular_file import read_regular
from windlass.checkpoint.checkpoint_directory import disk_errors

_SCRIPT = '''#!/usr/bin/env python
"""Write the full weights of the checkpoints beside this file{what}: python {name}.py . OUT{more}; see --help."""

import sys

try:
    import windlass.compat.checkpoint.consolidated as consolidated
except ModuleNotFoundError as error:
    if error.name != "windlass":
        raise
    sys.exit("{name}.py: windlass wrote these checkpoints, but is not installed here; pip install windlass, or run "
             "this script with the Python of the training job")

if __name__ == "__main__":
    sys.exit(consolidated.{name}(sys.argv[1:], "{name}.py"))
'''
SCRIPTS = {
    "zero_to_fp32.py": _SCRIPT.format(name="zero_to_fp32", what=", in float32", more=""),
    "zero_to_torch.py": _SCRIPT.format(name="zero_to_torch", what="", more=" --dtype bf16"),
}


def write_recovery_scripts(directory: Path) -> None:
    """Write the scripts to `directory`, unless files with the same contents are there.

    Raises:
        CheckpointError: the scripts cannot be written.
    """
    for name, text in SCRIPTS.items():
        path = directory / name
        with suppress(OSError):
            if read_regular(path, directory) == text.encode():
                continue
        with disk_errors(path, len(text)):
            write_atomically(
                path, text, mode=0o775
            )  # some file shares have no execute bit: `python FILE` runs the script there
