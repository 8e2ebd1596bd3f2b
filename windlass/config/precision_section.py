"""Sections for precision, and the table of dtypes that follows from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Annotated, Literal

from pydantic import Field

from windlass.config.config_section import NUMBER, ConfigSection, DtypeName, Names, Positive
from windlass.config.key_status import accepted, honoured, refused


class Fp16(ConfigSection):
    """Training with fp16 parameters, fp32 master weights and a loss scale."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Store parameters and compute in fp16."""
    auto_cast: bool = honoured(False)
    """Cast floating-point inputs of the model to fp16."""
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER] = honoured(0.0)
    """Static loss scale; 0 chooses dynamic scaling."""
    initial_scale_power: Annotated[int, Field(gt=0, le=126), NUMBER] = honoured(16)
    """Base-2 logarithm of the initial dynamic loss scale."""
    loss_scale_window: Positive = honoured(1000)
    """Number of steps without overflow after which the scale doubles."""
    hysteresis: Positive = honoured(2)
    """Number of overflows after which the scale is halved. Every step with an overflow is skipped."""
    consecutive_hysteresis: bool = honoured(False)
    """Restart the count of overflows after every step without one, so that only consecutive overflows count."""
    min_loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] = honoured(1.0)
    """Lower bound of the scale."""
    fp16_master_weights_and_grads: bool = honoured(False)
    """Keep master weights and accumulated gradients in fp16. The parameters serve as master weights if both are on the
    same tier. The optimizer computes in fp32 and keeps fp32 states; its updates are rounded to fp16."""


class Bf16(ConfigSection):
    """Training with bf16 parameters and fp32 master weights; no loss scale is needed."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Store parameters and compute in bf16."""
    immediate_grad_update: bool = accepted(
        False, "gradients always go into the accumulation buffer as they arrive, so there is nothing to choose"
    )
    check_grad_overflow: bool = accepted(
        True,
        "always on: a non-finite gradient raises an error before any weight changes; the check is part of the norm "
        "(with `deepspeed.initialize` the step is skipped, or applied at stages 1 and 2 if this is false)",
    )
    check_overflow: bool = refused(False, "retired: the name never worked; write check_grad_overflow")
    bf16_master_weights_and_grads: bool = honoured(False)
    """Keep master weights and accumulated gradients in bf16. The parameters serve as master weights if both are on the
    same tier. The optimizer computes in fp32 and keeps fp32 states, unless bf16_optimizer_states is true."""
    bf16_optimizer_states: bool = honoured(False)
    """Update the bf16 master weights in bf16, with bf16 states, as plain PyTorch updates a bf16 model; needs
    bf16_master_weights_and_grads."""


class TorchAutocast(ConfigSection):
    """`torch.autocast` around the forward; parameters keep their dtype."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Run the forward under `torch.autocast`."""
    dtype: DtypeName | None = honoured(None)
    """Autocast dtype; bf16 when absent."""
    lower_precision_safe_modules: Names | None = honoured(None)
    """Module classes by full name, such as `torch.nn.Linear`. Gradients of parameters that are directly in such a
    module are reduced in the autocast dtype, all others in communication_data_type. When absent, all gradients are
    reduced in communication_data_type. The operations that autocast runs in lower precision are torch's list in any
    case."""


class DataTypes(ConfigSection):
    """Dtypes that do not follow from the fp16 and bf16 sections."""

    grad_accum_dtype: DtypeName | None = honoured(None)
    """Dtype in which gradients of micro-batches are accumulated; when absent, that of the master weights (fp32 unless
    they are in 16 bits), at every stage."""
    param_dtype: DtypeName | None = honoured(None)
    """Dtype of the parameters; must agree with fp16.enabled and bf16.enabled."""
    buffer_dtype: DtypeName | None = honoured(None)
    """Dtype of the floating-point buffers of a model with fp16 or bf16 parameters. When absent, persistent buffers are
    cast to the dtype of the parameters, because a norm computes in one dtype, and other buffers keep theirs."""
    keep_in_fp32_modules: Literal["auto"] | Names = honoured("auto")
    """Buffers that stay fp32 in a model with fp16 or bf16 parameters: those whose names contain one of these patterns,
    in which `*` matches any characters. `auto`: the buffers that a transformers model lists. As in DeepSpeed,
    parameters are not affected."""


@dataclass(frozen=True)
class DtypeTable:
    """Dtypes of parameters, compute, gradients, master weights and states, by short name; the same at every stage."""

    param_dtype: str
    compute_dtype: str
    accumulation_dtype: str
    reduce_dtype: str
    master_dtype: str
    state_dtype: str

    def __str__(self) -> str:
        pairs = zip((field.name for field in fields(self)), astuple(self), strict=True)
        return ", ".join(f"{name} {dtype}" for name, dtype in pairs)
