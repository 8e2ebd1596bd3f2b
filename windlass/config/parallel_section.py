"""The `parallel` section: over which axes the ranks are spread, and how matrices and sequences are cut."""

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
        raise PydanticCustomError("cut", "Input should begin with {words}", {"words": ", ".join(SHARDING_STYLES)})
    return value


Rate = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Pattern = Annotated[str, AfterValidator(check_pattern)]
ShardingStyle = Annotated[str, AfterValidator(_check_sharding_style)]


class ParallelConfig(ConfigSection):
    """Ranks along each axis; the data ranks that are left cut what the ZeRO stage cuts.

    The world is pp x dp_replicate x dp_shard x ep x sp x tp, and ranks count along these axes like digits, tp fastest.
    """

    pp: Positive = honoured(1, windlass_only=True)
    """Stages of a pipeline, each with some of the layers. Only activations cross a cut, so it may lie between nodes."""
    dp_replicate: Positive = honoured(1, windlass_only=True)
    """Groups of data ranks with copies of all state; what is cut is cut inside a group (HSDP, MiCS)."""
    ep: Positive = honoured(1, windlass_only=True)
    """Data ranks over which the experts of each layer are spread; all else is reduced over them as over others."""
    expert_bias_update_rate: Rate = honoured(0.0, windlass_only=True)
    """How far a step moves the biases with which routers of transformers' mixtures balance experts without a loss
    (`e_score_correction_bias`), against each expert's load; DeepSeek-V3 took 0.001. 0: they stay."""
    sp: Positive = honoured(1, windlass_only=True)
    """Ranks that have different parts of the same sequences."""
    tp: Positive = honoured(1, windlass_only=True)
    """Ranks over which matrices are cut: inside a node, since they talk in every layer."""
    tp_overlap_chunks: Positive = honoured(1, windlass_only=True)
    """In so many parts the output of a row-parallel layer is reduced, each while the next is computed."""
    tp_sequence_norms: bool = honoured(False, windlass_only=True)
    """Between layers that are cut over tp hidden states are cut along the sequence: less is kept for backward."""
    tensor_table: dict[Pattern, ShardingStyle] | None = honoured(None, windlass_only=True)
    """By a regular expression for the whole name of a module: how it is cut (column, row, vocabulary, partial,
    replicated). The last line that fits counts, and goes before the model's own plan."""
    sp_mode: Literal["ulysses", "ring", "ulysses+ring"] = honoured("ulysses", windlass_only=True)
    """How attention sees the whole sequence: all-to-all to whole sequences of some heads, keys and values passed round,
    or both."""
    ulysses_degree: Positive | None = honoured(None, windlass_only=True)
    """ulysses+ring: how many neighbours along sp exchange heads, and rings join those groups; null: as many as the
    heads of keys can be dealt out to."""

    tiled_mlp: bool | Positive = honoured(False, windlass_only=True)
    """Compute MLPs for so many tokens at a time, and again in the backward; true: as many as a token has features."""
    tiled_loss: bool | Positive = honoured(False, windlass_only=True)
    """Compute logits and their loss for so many tokens at a time where the model is given labels, which leaves its
    outputs without logits; true: 256 MiB of logits."""
    recompute: bool = honoured(False, windlass_only=True)
    """Keep only the inputs of each layer, and compute the layer again in the backward."""
    activation_tier: Literal["device", "cpu", "nvme"] = honoured("device", windlass_only=True)
    """Where these inputs wait for their backward."""

    def ulysses_size(self, sp_size: int) -> int | None:
        """Of `sp` ranks along the axis of sequences, how many exchange heads (rings are `sp` divided by that long), or
        None where that is up to the model."""
        if self.sp_mode == "ulysses+ring":
            return self.ulysses_degree
        return sp_size if self.sp_mode == "ulysses" else 1
