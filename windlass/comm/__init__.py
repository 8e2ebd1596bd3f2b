"""How ranks talk, in reading order: slurm, launchers, bootstrap, groups, traffic, ordered_sum, shared_memory, pages,
transport, windows, shm, wire, choose; the mesh: grid, exchange, axis, mesh; topology, pipeline_grid, mpu."""
