"""Tensor parallelism: layers sharded over ranks that compute the same samples.

Reading order. Planning, by arithmetic and names only: rank_ranges, head_partition; find_language_model, linear_layers,
tensor_parallel_plan, plan_entry, tensor_table, fused_experts_layout, model_tp_plan, head_counts, fused_qkv,
block_tracing, vocabulary_modules; attention_sharding, attention_parameters, dependency_chains, plan_builder.
Computation: contiguous_non_view, parameter_sharding, packed_sharding, local_rng, input_hooks, linear_sharding,
lora_sharding; local_attention_heads, embedding_sharding, output_head_sharding, experts_sharding; layer_stacks,
stack_sequence_sharding; apply_tensor_parallel.
"""

from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel
from windlass.parallel.tensor.local_rng import seed_rng_tracker, sync_rng_states
from windlass.parallel.tensor.output_head_sharding import (
    ShardedVocabulary,
    get_sharded_vocabulary,
    vocab_parallel_cross_entropy,
)
from windlass.parallel.tensor.plan_builder import build_tensor_parallel_plan
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, TensorParallelPlan

__all__ = [
    "ModuleShard",
    "ShardedVocabulary",
    "TensorParallelPlan",
    "ShardStyle",
    "sync_rng_states",
    "apply_tensor_parallel",
    "build_tensor_parallel_plan",
    "seed_rng_tracker",
    "vocab_parallel_cross_entropy",
    "get_sharded_vocabulary",
]
