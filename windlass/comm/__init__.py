"""How ranks talk, in reading order: bootstrap, groups, traffic, ordered_sum, shared_memory, transport, shm, wire,
choose."""
