"""What `windlass env` and `ds_report` tell of a machine. Reading order: fact, versions, hardware, topology, network,
settings, backends, disks, collect (all of it, as plain data), lines (the same to read), ds_report."""
