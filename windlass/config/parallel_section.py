"""The `parallel` section: number of ranks along each axis, and sharding of matrices and sequences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from windlass.config.config_section import NUMBER, ConfigSection, Positive
from windlass.config.key_status import honoured
from windlass.config.regex_pattern import check_pattern

SHARDING_STYLES = ("column", "row", "vocabulary", "partial", "replicated")


def _check_sharding_style(value: str) -> str:
    if not value.strip().startswith(SHARDING_STYLES):
        raise PydanticCustomError(
            "cut", "Input should begin with one of {words}", {"words": ", ".join(SHARDING_STYLES)}
        )
    return value


Rate = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Pattern = Annotated[str, AfterValidator(check_pattern)]
ShardingStyle = Annotated[str, AfterValidator(_check_sharding_style)]


class ParallelConfig(ConfigSection):
    """Number of ranks along each axis. The remaining ranks form the axis dp_shard, along which ZeRO shards.

    The world size is pp x dp_replicate x dp_shard x ep x sp x tp. Ranks are numbered row-major over these axes: tp
    varies fastest.
    """

    pp: Positive = honoured(1, windlass_only=True)
    """Number of pipeline stages, each with some of the layers. Stages exchange only activations and their gradients, so
    they may be on different nodes."""
    dp_replicate: Positive = honoured(1, windlass_only=True)
    """Number of groups of data ranks. Each group has a full copy of the states, sharded over its ranks (HSDP, MiCS)."""
    ep: Positive = honoured(1, windlass_only=True)
    """Number of data ranks over which the experts of each layer are distributed. Gradients of dense parameters are
    reduced over these ranks as over other data ranks."""
    expert_bias_update_rate: Rate = honoured(0.0, windlass_only=True)
    """Step size with which the biases of transformers' mixture routers (`e_score_correction_bias`), which balance
    experts without a loss, are moved against each expert's load; DeepSeek-V3 used 0.001. 0: no change."""
    sp: Positive = honoured(1, windlass_only=True)
    """Number of ranks that process different parts of the same sequences."""
    tp: Positive = honoured(1, windlass_only=True)
    """Number of ranks over which matrices are sharded. They communicate in every layer: keep them inside a node."""
    tp_overlap_chunks: Positive = honoured(1, windlass_only=True)
    """Number of parts in which the output of a row-parallel layer is all-reduced, each while the next is computed."""
    tp_sequence_norms: bool = honoured(False, windlass_only=True)
    """Shard hidden states along the sequence between tensor-parallel layers, which saves activation memory."""
    tensor_table: dict[Pattern, ShardingStyle] | None = honoured(None, windlass_only=True)
    """Sharding style (column, row, vocabulary, partial, replicated) of the modules whose full names match a regular
    expression. The last entry that matches is used. Entries override the model's own plan."""
    sp_mode: Literal["ulysses", "ring", "ulysses+ring"] = honoured("ulysses", windlass_only=True)
    """Way in which attention accesses the whole sequence. ulysses: all-to-all to whole sequences of some heads; ring:
    keys and values are passed around; ulysses+ring: both.
    """
    ulysses_degree: Positive | None = honoured(None, windlass_only=True)
    """ulysses+ring: number of neighbours along sp that exchange heads, while rings connect these groups; null: as many
    as the key heads can be divided among."""

    tiled_mlp: bool | Positive = honoured(False, windlass_only=True)
    """Compute MLPs for this many tokens at a time, and recompute them in the backward; true: as many tokens as the
    hidden size."""
    tiled_loss: bool | Positive = honoured(False, windlass_only=True)
    """Compute logits and their loss for this many tokens at a time if the model receives labels. The model's outputs
    then have no logits. true: 256 MiB of logits at a time."""
    recompute: bool = honoured(False, windlass_only=True)
    """Save only the inputs of each layer, and recompute the layer in the backward."""
    activation_tier: Literal["device", "cpu", "nvme"] = honoured("device", windlass_only=True)
    """Tier of the saved layer inputs until their backward."""

    def ulysses_size(self, sp_size: int) -> int | None:
        """Return the number of ranks along sp that exchange heads, or None if it depends on the model.

        The number of ranks of a ring is `sp_size` divided by the result.
        """
        if self.sp_mode == "ulysses+ring":
            return self.ulysses_degree
        return sp_size if self.sp_mode == "ulysses" else 1
