"""What a forward keeps for its backward. Reading order: geometry, copies, buffer, places, disk, partition, kept, rng,
profile, recompute, activations."""
