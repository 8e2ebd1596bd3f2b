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
    """Weight of the divergence of the distributions of tokens or classes, times `temperature` squared."""
    task: Weight = honoured(0.0, windlass_only=True)
    """Weight of the model's own loss."""
    hidden: Weight = honoured(0.0, windlass_only=True)
    """Weight of the squared difference of hidden states. Those of another width pass a trained matrix before."""
    attention: Weight = honoured(0.0, windlass_only=True)
    """Weight of the divergence of attention maps, of models with as many heads, loaded with
    `attn_implementation="eager"`."""
    temperature: Temperature = honoured(1.0, windlass_only=True)
    """Divisor of the logits of both models."""
    divergence: Literal["forward", "reverse"] = honoured("forward", windlass_only=True)
    """`forward`: KL(teacher, student), which covers all that the teacher expects; `reverse`: KL(student, teacher)."""
    tokens: Literal["all", "labelled"] = honoured("all", windlass_only=True)
    """Positions of a sequence that count: `all` that `attention_mask` has, or those whose next token has a label."""
    layers: Literal["uniform", "last"] | dict[str, str] = honoured("uniform", windlass_only=True)
    """Blocks that are compared. `uniform`: each with the teacher's at the same share of the depth, as TinyBERT; `last`:
    the last alone, as MiniLM; or pairs of numbers or names of modules, `{"0": "1", "norm": "norm"}`."""
    teacher: str | None = honoured(None, windlass_only=True)
    """Directory of the teacher that `windlass train` loads. A script passes its own to `Distillation`."""
    teacher_stage: Literal[0, 3] = honoured(3, windlass_only=True)
    """ZeRO stage of that teacher: 3 shards it over the ranks, 0 keeps it whole on each."""
    teacher_device: Literal["none", "cpu"] = honoured("none", windlass_only=True)
    """`cpu`: the shards of that teacher are in host memory."""
    cache: str | None = honoured(None, windlass_only=True)
    """Folder of the teacher's largest logits, which are computed once for each sequence. With a complete one no teacher
    is needed."""
    cache_top_k: Positive = honoured(64, windlass_only=True)
    """Logits of a position that the cache keeps; the others count as one."""
