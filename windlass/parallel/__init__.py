"""Axes beside the data axes, and what a forward keeps for its backward. Reading order: placement, narrowing, exchanges,
router_loss; geometry, copies, buffer, places, disk, partition, kept, rng, profile, recompute, activations."""
