"""Sequences cut over ranks, and long ones on few.

Reading order: cut, sight, tiles (arithmetic); dropout, share, heads, passing, block, ring, attention (what is
computed); batch, seam, refusals, routers, apply, loader (an unmodified model); surroundings, tiled, tiled_mlp,
tiled_loss, long_context (computations in parts); ulysses_sp, distributed_attention, tiled_compute (DeepSpeed's
names).
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
