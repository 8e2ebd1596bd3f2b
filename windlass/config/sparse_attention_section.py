"""The `sparse_attention` section: block-sparse attention."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Count, Int, Positive
from windlass.config.key_status import refused


class SparseAttention(ConfigSection):
    """Choice of the blocks of the attention matrix that are computed. The section's presence enables it, unless the
    mode is dense."""

    refusal = 'not yet built: block-sparse attention; write "dense" or delete the section'

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = refused("fixed", "")
    block: Positive = refused(16, "")
    different_layout_per_head: bool = refused(False, "")
    num_local_blocks: Positive = refused(4, "")
    num_global_blocks: Count = refused(1, "")
    attention: Literal["bidirectional", "unidirectional"] = refused("bidirectional", "")
    horizontal_global_attention: bool = refused(False, "")
    num_different_global_patterns: Positive = refused(1, "")
    num_random_blocks: Count = refused(0, "")
    local_window_blocks: list[Int] = refused([4], "")
    global_block_indices: list[Int] = refused([0], "")
    global_block_end_indices: list[Int] | None = refused(None, "")
    num_sliding_window_blocks: Positive = refused(3, "")

    def requested_key(self) -> str | None:
        return None if self.mode == "dense" else "mode"
