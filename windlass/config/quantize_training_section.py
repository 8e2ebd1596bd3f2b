"""The `quantize_training` section: weights with fewer and fewer bits during training (MoQ)."""

from __future__ import annotations

from typing import Literal

from windlass.config.compression_section import Eigenvalue, MixedQuantize
from windlass.config.config_section import ConfigSection, Count, Positive
from windlass.config.key_status import accepted, honoured


class QuantizeBits(ConfigSection):
    """Bits of weights at the beginning and at the end."""

    start_bits: Positive = honoured(16)
    """Bits at the beginning."""
    target_bits: Positive = honoured(8)
    """Bits at the end: 1, 2 (ternary), or 3 to 16."""


class QuantizeSchedule(ConfigSection):
    """Steps at which the bits fall."""

    quantize_period: Positive = honoured(1000)
    """Number of steps with `start_bits`. Then the bits fall by one at a time, each time after twice as many steps as
    the time before."""
    schedule_offset: Count = honoured(1000)
    """Optimizer step from which weights are rounded."""


class QuantizeAlgorithm(ConfigSection):
    """Rule of rounding."""

    q_type: Literal["symmetric", "asymmetric"] = honoured("symmetric")
    """`symmetric` around 0, or `asymmetric` with a zero point; without effect at 1 and 2 bits."""
    rounding: Literal["nearest", "stochastic"] = honoured("nearest")
    """Rounding to the `nearest` value, or `stochastic`: up or down at random. Without effect at 1 and 2 bits."""


class QuantizeTraining(ConfigSection):
    """Mixture of quantization. The section's presence enables it, unless `enabled` is false."""

    enabled: bool = honoured(True)
    """Round weights in the forward; the optimizer keeps the unrounded ones."""
    quantize_bits: QuantizeBits = honoured(QuantizeBits)
    """Bits at the beginning and at the end."""
    quantize_schedule: QuantizeSchedule = honoured(QuantizeSchedule)
    """Steps at which the bits fall."""
    quantize_groups: Positive = honoured(1)
    """Number of slices of a flattened weight. Each slice has its own scale."""
    quantize_algo: QuantizeAlgorithm = honoured(QuantizeAlgorithm, aliases=("quantize-algo",))
    """Rule of rounding."""
    quantize_type: Literal["symmetric", "asymmetric"] | None = honoured(None)
    """Same as `quantize_algo.q_type`, in the spelling of DeepSpeed's tutorial."""
    fp16_mixed_quantize: MixedQuantize = honoured(MixedQuantize)
    """Gradual change from unrounded to rounded weights."""
    quantize_verbose: bool = accepted(False, "nothing is logged for each layer")
    quantizer_kernel: bool = accepted(False, "rounding is part of the forward on every device")
    eigenvalue: Eigenvalue | None = honoured(None)
    """Same keys as the top-level section `eigenvalue`, which is read if this one is absent or not enabled."""
