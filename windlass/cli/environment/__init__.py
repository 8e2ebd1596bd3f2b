"""Information about a machine for `windlass env`: collect_facts (as plain data), format_facts (the same as text)."""
