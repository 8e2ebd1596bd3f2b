"""Import this first, and `import deepspeed` is windlass: in this process, and in those that it starts."""

from windlass.compat.place import take_first_place

take_first_place()
import deepspeed  # type: ignore[import-not-found]  # noqa: E402, F401
