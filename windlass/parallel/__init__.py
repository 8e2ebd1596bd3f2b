"""Placement of parameters on the model-parallel axes, and storage of the activations that a forward saves for its
backward.

Reading order: placement, narrow_to_ranges, full_parameters, autograd_collectives, router_loss; tensor_geometry,
device_copies, activation_buffer, activation_store, nvme_activation_store, sharded_activation_store,
saved_tensor_offload, rng_tracker, checkpoint_profiler, recompute, activation_checkpoint_api. For layers that a script
shards itself: script_ranks, megatron_flags.
"""
