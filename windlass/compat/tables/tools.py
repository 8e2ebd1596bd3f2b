"""`deepspeed.utils`, `deepspeed.runtime.utils`, timers, constants, files: the tools around training."""

from windlass.compat.entry import Entry

TABLE: dict[str, Entry] = {}
