"""`deepspeed.ops`: optimizers, and builders of what is built already."""

from windlass.compat.entry import Entry

TABLE: dict[str, Entry] = {}
