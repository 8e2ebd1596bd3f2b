"""Precision sections, and the one table of dtypes that follows from them."""

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
    """Keep and compute parameters in fp16."""
    auto_cast: bool = honoured(False)
    """Cast floating-point inputs of the model to fp16."""
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER] = honoured(0.0)
    """Static loss scale; 0 chooses dynamic scaling."""
    initial_scale_power: Annotated[int, Field(gt=0, le=126), NUMBER] = honoured(16)
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: Positive = honoured(1000)
    """Steps without overflow after which the scale doubles."""
    hysteresis: Positive = honoured(2)
    """Overflows that are tolerated before the scale is halved."""
    consecutive_hysteresis: bool = honoured(False)
    """Refill the tolerated overflows after every good step, so that only overflows in a row count."""
    min_loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] = honoured(1.0)
    """The scale never falls below this."""
    fp16_master_weights_and_grads: bool = honoured(False)
    """Keep master weights and accumulated gradients in fp16: the parameters serve as master weights where both rest in
    the same memory. The optimizer computes in fp32 and keeps fp32 states; what it adds is rounded to fp16."""


class Bf16(ConfigSection):
    """Training with bf16 parameters and fp32 master weights; no loss scale is needed."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Keep and compute parameters in bf16."""
    immediate_grad_update: bool = accepted(
        False, "gradients always go into the accumulation buffer as they arrive, so there is nothing to choose"
    )
    check_grad_overflow: bool = accepted(
        True,
        "always on: a gradient that is not finite is an error before a weight changes (by way of "
        "`deepspeed.initialize` the step is skipped); the check rides in the norm",
    )
    check_overflow: bool = refused(False, "retired: the name never worked; write check_grad_overflow")
    bf16_master_weights_and_grads: bool = honoured(False)
    """Keep master weights and accumulated gradients in bf16: the parameters serve as master weights where both rest in
    the same memory. The optimizer computes in fp32 and keeps fp32 states, unless bf16_optimizer_states is true."""
    bf16_optimizer_states: bool = honoured(False)
    """Step the bf16 master weights themselves, with bf16 states, as plain PyTorch steps a bf16 model; needs
    bf16_master_weights_and_grads."""


class TorchAutocast(ConfigSection):
    """`torch.autocast` around the forward pass; parameters stay as they are."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Run the forward pass under `torch.autocast`."""
    dtype: DtypeName | None = honoured(None)
    """The autocast dtype; bf16 when absent."""
    lower_precision_safe_modules: Names | None = honoured(None)
    """Classes of modules by full name, such as `torch.nn.Linear`: gradients of their own parameters travel in the
    autocast dtype, all others in communication_data_type. When absent, all do. What autocast computes in fewer bits is
    torch's list of operations in any case."""


class DataTypes(ConfigSection):
    """Dtypes that do not follow from the fp16 and bf16 sections."""

    grad_accum_dtype: DtypeName | None = honoured(None)
    """Dtype in which micro-batch gradients are added up; fp32 when absent, at every stage."""
    param_dtype: DtypeName | None = honoured(None)
    """Dtype of the parameters; must agree with fp16.enabled and bf16.enabled."""
    buffer_dtype: DtypeName | None = honoured(None)
    """Dtype of floating-point buffers beside fp16 or bf16 parameters. When absent, those of the saved state are cast
    like parameters, since a norm computes in one dtype, and all others keep the dtype that they were made with."""
    keep_in_fp32_modules: Literal["auto"] | Names = honoured("auto")
    """Buffers that are fp32 beside fp16 or bf16 parameters: those whose names contain one of these patterns, in which
    `*` stands for any characters. `auto`: those that a model of transformers names. Parameters are not meant, as in
    DeepSpeed."""


@dataclass(frozen=True)
class DtypeTable:
    """The dtype of everything that has one, by short name; the same at every stage."""

    param_dtype: str
    compute_dtype: str
    accumulation_dtype: str
    reduce_dtype: str
    master_dtype: str
    state_dtype: str

    def __str__(self) -> str:
        pairs = zip((field.name for field in fields(self)), astuple(self), strict=True)
        return ", ".join(f"{name} {dtype}" for name, dtype in pairs)
