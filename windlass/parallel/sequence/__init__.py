"""Sequence parallelism, and long sequences on few devices.

Reading order: sequence_sharding, visible_ranges, attention_tiles (arithmetic); attention_dropout, sequence_shard,
ulysses_heads, tile_kernels, ring_attention, sequence_attention (the computation); sequence_backend (attention
backends); batch_sharding, position_ids, sequence_support, sequence_router_loss, apply_sequence_parallel,
sequence_sharded_loader (an unmodified model); tiled_function, tiled_mlp, tiled_loss, long_context (tiled computations).
"""

from windlass.parallel.sequence.apply_sequence_parallel import SequenceParallel as SequenceParallel
from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel as apply_sequence_parallel
from windlass.parallel.sequence.apply_sequence_parallel import sequence_parallel_of as sequence_parallel_of
from windlass.parallel.sequence.long_context import apply_long_context as apply_long_context
from windlass.parallel.sequence.sequence_attention import SequenceMask as SequenceMask
from windlass.parallel.sequence.sequence_attention import sequence_attention as sequence_attention
from windlass.parallel.sequence.sequence_backend import use_shard as use_shard
from windlass.parallel.sequence.sequence_sharded_loader import SequenceShardedLoader as SequenceShardedLoader
from windlass.parallel.sequence.tiled_loss import tiled_loss as tiled_loss
from windlass.parallel.sequence.tiled_mlp import install_tiled_mlp as install_tiled_mlp
