"""What is not built in windlass: importable, and one sentence where it is used."""

from windlass.compat.entry import Entry

TABLE: dict[str, Entry] = {}
