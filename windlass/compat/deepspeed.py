"""Importing this module first makes `import deepspeed` import windlass, in this process and its child processes."""

from windlass.compat.stand_in_path import prepend_stand_in_path

prepend_stand_in_path()
import deepspeed  # type: ignore[import-not-found]  # noqa: E402, F401
