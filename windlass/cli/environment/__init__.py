"""Facts of a machine for `windlass env` and `ds_report`. Reading order: try_fact, version_facts, hardware_facts,
gpu_topology, network_facts, costly_settings, backend_support, disk_facts, collect_facts (all facts as plain data),
format_facts (the same as text), ds_report."""
