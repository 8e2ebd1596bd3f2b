"""`deepspeed.accelerator`: the device, by the names that scripts ask."""

from windlass.compat.entry import Entry

TABLE: dict[str, Entry] = {}
