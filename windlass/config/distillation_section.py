"""The `distillation` section: training against the outputs of a teacher."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from windlass.config.config_section import NUMBER, ConfigSection, Positive
from windlass.config.key_status import honoured

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]


class DistillationConfig(ConfigSection):
    """Loss against the outputs of a teacher, a frozen and usually larger model with the same vocabulary.

    The loss is the sum of the terms below, each times its weight.
    """

    logits: Weight = honoured(1.0, windlass_only=True)
    """Weight of the divergence between both models' distributions of tokens or classes. The divergence is also
    multiplied by `temperature` squared."""
    task: Weight = honoured(0.0, windlass_only=True)
    """Weight of the model's own loss."""
    hidden: Weight = honoured(0.0, windlass_only=True)
    """Weight of the squared difference of hidden states. If the widths differ, a trained matrix first maps the model's
    states to the teacher's width."""
    attention: Weight = honoured(0.0, windlass_only=True)
    """Weight of the divergence of attention maps. Both models need the same number of heads and
    `attn_implementation="eager"`."""
    temperature: Temperature = honoured(1.0, windlass_only=True)
    """Divisor of the logits of both models."""
    divergence: Literal["forward", "reverse"] = honoured("forward", windlass_only=True)
    """Direction of the divergence. `forward`: KL(teacher, student), so that the student covers all outputs that the
    teacher finds likely; `reverse`: KL(student, teacher)."""
    tokens: Literal["all", "labelled"] = honoured("all", windlass_only=True)
    """Positions of a sequence that the loss includes. `all`: all positions in `attention_mask`; `labelled`: positions
    whose next token has a label."""
    layers: Literal["uniform", "last"] | dict[str, str] = honoured("uniform", windlass_only=True)
    """Blocks whose hidden states or attention maps are compared. `uniform`: each block with the teacher's block at the
    same relative depth, as in TinyBERT; `last`: only the last blocks, as in MiniLM. An object gives, for numbers of
    blocks or names of modules of the model, those of the teacher: `{"0": "1", "norm": "norm"}`."""
    teacher: str | None = honoured(None, windlass_only=True)
    """Directory of the teacher that `windlass train` loads. A script passes its own teacher to `Distillation`."""
    teacher_stage: Literal[0, 3] = honoured(3, windlass_only=True)
    """ZeRO stage of the teacher that `windlass train` loads: 3 shards the teacher over the ranks, 0 keeps it in full on
    each rank."""
    teacher_device: Literal["none", "cpu"] = honoured("none", windlass_only=True)
    """Memory of the shards of the teacher that `windlass train` loads. `none`: the device; `cpu`: host memory."""
    cache: str | None = honoured(None, windlass_only=True)
    """Folder of the teacher's largest logits, which are computed once for each sequence. With a complete cache no
    teacher is needed."""
    cache_top_k: Positive = honoured(64, windlass_only=True)
    """Number of logits that the cache keeps for each position; all others are combined into one class."""
