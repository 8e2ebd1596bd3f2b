"""Module to import first, so that `import deepspeed` imports windlass in this process and its children."""

from windlass.compat.stand_in_path import prepend_stand_in_path

prepend_stand_in_path()
import deepspeed  # type: ignore[import-not-found]  # noqa: E402, F401
