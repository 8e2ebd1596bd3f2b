"""Import this first, and `import deepspeed` is windlass: in this process, and in those that it starts."""

from windlass.compat.stand_in_path import prepend_stand_in_path

prepend_stand_in_path()
import deepspeed  # type: ignore[import-not-found]  # noqa: E402, F401
