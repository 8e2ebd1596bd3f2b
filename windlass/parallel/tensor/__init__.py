"""Tensor parallelism: single layers are cut over ranks that compute the same samples.

What is cut, arithmetic and names alone; reading order: shares, heads; inner, linear_layers, plan, wishes, table,
experts_layout, declared, heads_found, fused, tracing, vocabulary; attention_shares, attention_parameters, chains,
build. How it computes: owned, cutting, draws, entrance, row_product, linear_cut; attention_cut, embedding_cut,
cross_entropy, head, experts_cut; sequence_cut, sequence_norms; apply. Beside it: whole, volume.
"""

from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel
from windlass.parallel.tensor.gather_full_tensor import gather_full_tensor
from windlass.parallel.tensor.local_rng import seed_rng_tracker, sync_rng_states
from windlass.parallel.tensor.output_head_sharding import ShardedVocabulary, get_sharded_vocabulary, keep_logits_sharded
from windlass.parallel.tensor.plan_builder import build_tensor_parallel_plan
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, TensorParallelPlan
from windlass.parallel.tensor.tensor_parallel_volume import count_step_bytes
from windlass.parallel.tensor.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy

__all__ = [
    "ModuleShard",
    "ShardedVocabulary",
    "TensorParallelPlan",
    "ShardStyle",
    "sync_rng_states",
    "apply_tensor_parallel",
    "gather_full_tensor",
    "build_tensor_parallel_plan",
    "keep_logits_sharded",
    "seed_rng_tracker",
    "count_step_bytes",
    "vocab_parallel_cross_entropy",
    "get_sharded_vocabulary",
]
