"""The root, the engine, the configuration and ZeRO."""

from windlass.compat.entry import Entry, works

TABLE: dict[str, Entry] = {
    "deepspeed.__version__": works("windlass.compat.version:VERSION"),
    "deepspeed.initialize": works("windlass.initialize:initialize"),
}
