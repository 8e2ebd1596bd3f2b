"""PYTHONPATH of windlass' own processes."""

from __future__ import annotations

import os
from pathlib import Path

import windlass


def source_pythonpath(path: str) -> str:
    """Return `path`, a PYTHONPATH, with the folder of this windlass added if it runs from a source tree.

    With this path, a process can import windlass on another host, or without its working directory (`python -P`).
    """
    source_dir = str(Path(windlass.__file__).parents[1])
    installed = Path(source_dir).name in ("site-packages", "dist-packages")
    known = [*filter(None, path.split(os.pathsep)), *([] if installed else [source_dir])]
    return os.pathsep.join(dict.fromkeys(known))
