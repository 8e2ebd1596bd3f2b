"""Placement of parameters on the model-parallel axes, losses over sharded tokens and over routers, and storage
of the activations that a forward saves for its backward.

Reading order: placement, parameter_values, narrow_to_ranges, full_parameters, autograd_collectives, router_loss,
sequence_loss, hidden_states; tensor_geometry, device_copies, activation_buffer, activation_store,
nvme_activation_store, sharded_activation_store, saved_tensor_offload, rng_tracker, checkpoint_profiler, recompute,
activation_checkpoint_api, model_checkpointing; model_shape, comm_volumes. For layers that a script shards itself:
script_ranks, megatron_flags.
Then the packages tensor, sequence, experts and pipeline.
"""
